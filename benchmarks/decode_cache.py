"""The decode loop's caches: does a compiled program copy them, and what does the usual way to write the loop cost?

`model.cache.decode_step` writes one slot of every cache in place. The naive alternative here is the loop that most
code bases scan: layers stacked, each layer's cache an input of the scan and its advanced cache a stacked output, so
that every token writes all caches anew.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import interleaved_seconds
from rl_posttrain.batch import Params
from rl_posttrain.model.cache import (
    PrefixCache,
    SuffixCache,
    decode_step,
    empty_suffix,
    prefill,
    unstack_layers,
)
from rl_posttrain.model.transformer import ModelConfig, embed, final_norm, logits
from rl_posttrain.sharding.mesh import shards


def layer_cache_shape(cfg: ModelConfig, rows: int, width: int, length: int) -> tuple[int, ...]:
    """Shape of one layer's suffix keys on one device of the current mesh."""
    kv_heads = cfg.num_kv_heads // shards("kv_heads", cfg.num_kv_heads)
    return (rows * width // shards("batch", rows * width), kv_heads, length, cfg.head_dim)


def cache_bytes(cfg: ModelConfig, rows: int, width: int, length: int) -> int:
    """Bytes of all layers' suffix keys and values on one device."""
    size = jnp.dtype(cfg.compute_dtype).itemsize
    return 2 * cfg.num_layers * size * math.prod(layer_cache_shape(cfg, rows, width, length))


def count_copies(compiled: Any, shape: tuple[int, ...]) -> int:
    """How many copies or transposes of an array of `shape` stand in the compiled loops that carry such arrays.

    Raises:
      RuntimeError: no loop carries one, so that 0 would say nothing.
    """
    text = compiled.as_text()
    array = r"\w+\[" + ",".join(map(str, shape)) + r"\]"
    bodies = [
        text[(start := text.index(f"%{body} (")) : text.index("\n}", start)]
        for body in sorted(set(re.findall(r"body=%?([\w.\-]+)", text)))
    ]
    loops = [body for body in bodies if re.search(array, body)]
    if not loops:
        raise RuntimeError(f"no compiled loop holds an array of shape {shape}: the decode loop has changed")
    return sum(len(re.findall(rf"= {array}\S* (?:copy|transpose)\(", loop)) for loop in loops)


def temporary_bytes(compiled: Any) -> int:
    """What a compiled program needs beside its arguments and results, per device.

    Raises:
      RuntimeError: the backend does not say.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError(f"the {jax.default_backend()} backend does not tell what memory a program needs")
    return memory.temp_size_in_bytes


@partial(jax.jit, static_argnames=("cfg", "width", "steps", "stacked"))
def greedy(
    params: Params,
    prompts: jax.Array,
    lengths: jax.Array,
    *,
    cfg: ModelConfig,
    width: int,
    steps: int,
    stacked: bool,
) -> jax.Array:
    """Decodes `steps` most likely tokens, whatever they are, for `width` equal samples of each prompt.

    Args:
      prompts: int32 [R, S + 1], padded; lengths: int32 [R], at least 1.
      stacked: the naive loop; otherwise the library's.

    Returns:
      tokens: int32 [R, W, steps].
    """
    rows = prompts.shape[0]
    prefix = prefill(params, cfg, prompts[:, :-1], lengths - 1)
    last = jnp.take_along_axis(prompts, lengths[:, None] - 1, 1)
    advance = _stacked_step(params, cfg, prefix) if stacked else _in_place_step(params, cfg, prefix)

    def step(slot, carry):
        current, tokens, caches = carry
        x, caches = advance(embed(params, cfg, current.reshape(-1, 1)), caches, slot)
        z = logits(params, cfg, final_norm(params, cfg, x)).reshape(rows, width, -1)
        drawn = jnp.argmax(z, -1).astype(jnp.int32)
        return drawn, lax.dynamic_update_slice(tokens, drawn[..., None], (0, 0, slot)), caches

    empty = empty_suffix(cfg, rows * width, steps)
    caches = (jnp.stack(empty.keys), jnp.stack(empty.values)) if stacked else empty
    start = (jnp.broadcast_to(last, (rows, width)), jnp.zeros((rows, width, steps), jnp.int32), caches)
    return lax.fori_loop(0, steps, step, start)[1]


def compare(
    params: Params,
    prompts: np.ndarray,
    lengths: np.ndarray,
    cfg: ModelConfig,
    width: int,
    steps: int,
    repeats: int,
) -> dict[str, float]:
    """Figures of `greedy` with the library's loop ("in_place") and the naive one ("stacked"), and their ratios.

    Raises:
      RuntimeError: the two loops do not say the same.
    """
    variants = {"in_place": False, "stacked": True}
    settings: dict[str, Any] = dict(cfg=cfg, width=width, steps=steps)
    calls = {
        name: partial(lambda flag: greedy(params, prompts, lengths, **settings, stacked=flag), stacked)
        for name, stacked in variants.items()
    }
    tokens = {name: np.asarray(call()) for name, call in calls.items()}
    agreeing = float((tokens["in_place"] == tokens["stacked"]).mean())
    if agreeing < 0.99:  # where two tokens tie, rounding may decide either way
        raise RuntimeError(f"only {agreeing:.1%} of the naive loop's tokens are those of decode_step")
    result = {f"{name}_decode_s": value for name, value in interleaved_seconds(calls, repeats).items()}
    for name, stacked in variants.items():
        compiled = greedy.lower(params, prompts, lengths, **settings, stacked=stacked).compile()
        result[f"{name}_temporary_bytes"] = temporary_bytes(compiled)
    for figure, unit in (("decode_s", "time"), ("temporary_bytes", "temporary")):
        ratio = result[f"stacked_{figure}"] / result[f"in_place_{figure}"]
        result[f"stacked_over_in_place_{unit}_ratio"] = ratio
    return result


def _in_place_step(params: Params, cfg: ModelConfig, prefix: PrefixCache) -> Any:
    layers = unstack_layers(params, cfg)
    return lambda x, caches, slot: decode_step(layers, cfg, x, prefix, caches, slot)


def _stacked_step(params: Params, cfg: ModelConfig, prefix: PrefixCache) -> Any:
    """One token through a scan over layers. Caches: (keys, values), each [L, M, K, C, H]."""
    prefix_keys, prefix_values = jnp.stack(prefix.keys), jnp.stack(prefix.values)

    def advance(x, caches, slot):
        def layer(x, inputs):
            weights, shared_keys, shared_values, keys, values = inputs
            shared = PrefixCache((shared_keys,), (shared_values,), prefix.lengths)
            x, own = decode_step([weights], cfg, x, shared, SuffixCache((keys,), (values,)), slot)
            return x, (own.keys[0], own.values[0])

        return lax.scan(layer, x, (params["layers"], prefix_keys, prefix_values, *caches))

    return advance
