"""A batch of groups: the prompt of a group is prefilled once, its samples decode together.

Shapes are bucketed, so that a run compiles a handful of programs: prompts are padded to a multiple of
`prompt_bucket` tokens and the batch to a fixed number of prompts. Padding never shows in a result, because masks come
from lengths and every draw has a key of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rl_posttrain.batch import Params
from rl_posttrain.data.tokenizer import Tokenizer
from rl_posttrain.model.cache import decode_step, empty_suffix, prefill, unstack_layers
from rl_posttrain.model.transformer import ModelConfig, embed, final_norm, logits
from rl_posttrain.rollout.sampling import Sampling, sample
from rl_posttrain.sharding.mesh import constrain
from rl_posttrain.types import Rollout, Task


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled in training (config section `rollout`)."""

    prompts_per_step: int = 32
    group_size: int = 8
    refill: int = 0  # at most so many more rounds a step, of fresh prompts for the groups whose rewards are equal
    temperature: float = 1.0
    max_tokens: int = 64  # completion tokens, the end token included
    prompt_bucket: int = 32  # prompts are padded to a multiple of this many tokens

    def __post_init__(self):
        for name in ("prompts_per_step", "max_tokens", "prompt_bucket"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.refill < 0:
            raise ValueError(f"refill={self.refill} must be at least 0 (0: groups without signal stay)")
        if self.group_size < 2:
            raise ValueError(f"group_size={self.group_size} gives no relative advantage: use at least 2")
        Sampling(self.temperature).check_for_training()


@partial(jax.jit, static_argnames=("model_cfg", "sampling", "width", "max_tokens", "end_ids"))
def decode_groups(
    params: Params,
    prompts: jax.Array,
    lengths: jax.Array,
    task_hashes: jax.Array,
    samples: jax.Array,
    key: jax.Array,
    *,
    model_cfg: ModelConfig,
    sampling: Sampling,
    width: int,
    max_tokens: int,
    end_ids: tuple[int, ...],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Prefills R prompts and decodes `width` samples of each, until all have ended or `max_tokens` are drawn.

    Args:
      prompts: int32 [R, S + 1], padded; lengths: int32 [R], true prompt lengths, 0 for an empty row.
      task_hashes: uint32 [R], samples: uint32 [W]; a draw depends on (key, task, sample, time) and the policy alone.

    Returns:
      tokens int32 [R, W, C], logprobs float32 [R, W, C] (at the sampling temperature), lengths int32 [R, W] (the end
      token included) and ended bool [R, W] (an end token was drawn).
    """
    rows = prompts.shape[0]
    prefix_lengths = jnp.maximum(lengths - 1, 0)
    prefix = prefill(params, model_cfg, constrain(prompts[:, :-1], "batch", None), prefix_lengths)
    last = jnp.take_along_axis(prompts, prefix_lengths[:, None], 1)
    keys = _sample_keys(key, task_hashes, samples)
    layers = unstack_layers(params, model_cfg)
    ends = jnp.asarray(end_ids, jnp.int32)

    def unfinished(carry):
        slot, _, done, *_ = carry
        return (slot < max_tokens) & ~done.all()

    def step(carry):
        slot, current, done, tokens, logprobs, counts, suffix = carry
        x = embed(params, model_cfg, current.reshape(-1, 1))
        x, suffix = decode_step(layers, model_cfg, x, prefix, suffix, slot)
        z = logits(params, model_cfg, final_norm(params, model_cfg, x)).reshape(rows, width, -1)
        uniform = jax.vmap(jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, slot))))(keys)
        drawn, logprob = sample(uniform, z, sampling)
        write = lambda to, value: lax.dynamic_update_slice(to, jnp.where(done, 0, value)[..., None], (0, 0, slot))
        ended = done | (drawn[..., None] == ends).any(-1)
        return slot + 1, drawn, ended, write(tokens, drawn), write(logprobs, logprob), counts + ~done, suffix

    shape = (rows, width, max_tokens)
    carry = (
        jnp.int32(0),
        jnp.broadcast_to(last, (rows, width)),
        jnp.broadcast_to(lengths[:, None] == 0, (rows, width)),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((rows, width), jnp.int32),
        empty_suffix(model_cfg, rows * width, max_tokens),
    )
    _, _, done, tokens, logprobs, counts, _ = lax.while_loop(unfinished, step, carry)
    return tokens, logprobs, counts, done


def _sample_keys(key: jax.Array, task_hashes: jax.Array, samples: jax.Array) -> jax.Array:
    """[R, W] keys: that of a task and a sample, whatever stands beside them."""
    task_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, task_hashes)
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(task_keys, samples)


def generate(
    params: Params,
    tasks: Sequence[Task],
    *,
    tokenizer: Tokenizer,
    model_cfg: ModelConfig,
    sampling: Sampling,
    width: int,
    max_tokens: int,
    prompt_bucket: int,
    rows: int,
    key: jax.Array,
    policy_version: int,
) -> list[list[Rollout]]:
    """Samples `width` completions of every task's prompt, `rows` prompts at a time.

    Returns:
      One list of rollouts per task, in order.
    """
    prompts = [tokenizer.prompt(task.prompt) for task in tasks]
    longest = max(len(prompt) for prompt in prompts)
    padded = -(-longest // prompt_bucket) * prompt_bucket
    groups: list[list[Rollout]] = []
    for start in range(0, len(tasks), rows):
        chunk = range(start, min(start + rows, len(tasks)))
        tokens = np.zeros((rows, padded), np.int32)
        lengths, hashes = np.zeros(rows, np.int32), np.zeros(rows, np.uint32)
        for row, i in enumerate(chunk):
            tokens[row, : len(prompts[i])] = prompts[i]
            lengths[row] = len(prompts[i])
            hashes[row] = zlib.crc32(tasks[i].id.encode())
        outputs = decode_groups(
            params,
            tokens,
            lengths,
            hashes,
            np.arange(width, dtype=np.uint32),
            key,
            model_cfg=model_cfg,
            sampling=sampling,
            width=width,
            max_tokens=max_tokens,
            end_ids=tokenizer.end_ids,
        )
        drawn, logprobs, counts, ended = map(np.asarray, jax.device_get(outputs))
        for row, i in enumerate(chunk):
            groups.append(
                [
                    _rollout(tasks[i], j, prompts[i], drawn[row, j], logprobs[row, j], counts[row, j], ended[row, j],
                             tokenizer, sampling, policy_version)
                    for j in range(width)
                ]
            )  # fmt: skip
    return groups


def _rollout(
    task: Task,
    sample_index: int,
    prompt: list[int],
    tokens: np.ndarray,
    logprobs: np.ndarray,
    count: int,
    ended: bool,
    tokenizer: Tokenizer,
    sampling: Sampling,
    policy_version: int,
) -> Rollout:
    completion = tokens[:count].tolist()
    return Rollout(
        task=task,
        sample=sample_index,
        prompt_tokens=tuple(prompt),
        completion_tokens=tuple(completion),
        behaviour_logprobs=tuple(logprobs[:count].tolist()),
        text=tokenizer.decode(completion[:-1] if ended else completion),
        finish_reason="stop" if ended else "length",
        temperature=sampling.temperature,
        policy_version=policy_version,
    )
