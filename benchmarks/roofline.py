"""How fast a machine could go, measured, and how much work a model asks for, counted.

The roofline (Williams et al. 2009, https://doi.org/10.1145/1498765.1498785) bounds a program from below: it takes at
least `max(operations / peak rate, bytes / bandwidth)`. Both peaks are measured here through JAX, so that the bound is
what this machine gives today, not what a data sheet promises. Work is what the mathematics needs: padding, values
computed twice and intermediate results that travel through memory are not in it; they are what keeps a program away
from its bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import median_seconds
from rl_posttrain.batch import Batch
from rl_posttrain.model.attention import visible
from rl_posttrain.model.transformer import ModelConfig


@dataclass(frozen=True)
class Limits:
    """What all devices of a mesh reach together."""

    flops_per_s: float  # matrix product in the compute dtype
    read_bytes_per_s: float  # sum of a big float32 array
    increment_bytes_per_s: float  # x + 1 in place (donated): reading and writing, both counted

    @property
    def bytes_per_s(self) -> float:
        """The better of the two patterns: neither may bound what the other shows to be possible."""
        return max(self.read_bytes_per_s, self.increment_bytes_per_s)


@dataclass(frozen=True)
class Work:
    """What a computation cannot do without."""

    flops: float
    bytes: float

    def bound_s(self, limits: Limits) -> float:
        """Least seconds on a machine with these limits."""
        return max(self.flops / limits.flops_per_s, self.bytes / limits.bytes_per_s)

    def bound_by(self, limits: Limits) -> Literal["compute", "memory"]:
        """Which of the two limits is the tighter one."""
        return "compute" if self.flops / limits.flops_per_s > self.bytes / limits.bytes_per_s else "memory"


def measure(mesh: Mesh, dtype: str, *, size: int, array_bytes: int, repeats: int) -> Limits:
    """Measures the limits with every device of the mesh at work at once.

    Args:
      dtype: of the matrix product, at JAX's default precision.
      size: rows of the square matrices, one product a device.
      array_bytes: of the array that each device reads; several times the last-level cache, or the cache is measured.
    """
    spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    count = mesh.size
    key = jax.random.key(0)
    square = jax.jit(lambda: jax.random.normal(key, (count, size, size)).astype(dtype), out_shardings=spread)()
    product = jax.jit(lambda x: jnp.einsum("dij,djk->dik", x, x), out_shardings=spread)
    flops = 2 * count * size**3 / median_seconds(lambda: product(square), repeats)

    ones = jax.jit(lambda: jnp.ones((count, array_bytes // 4), jnp.float32), out_shardings=spread)()
    total = jax.jit(lambda x: x.sum(1), out_shardings=spread)
    read = ones.nbytes / median_seconds(lambda: total(ones), repeats)

    held = [ones]
    increment = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=spread)

    def increment_in_place() -> jax.Array:
        held.append(increment(held.pop()))
        return held[0]

    moved = 2 * held[0].nbytes / median_seconds(increment_in_place, repeats)
    return Limits(flops, read, moved)


def layer_parameters(cfg: ModelConfig) -> int:
    """Matrix parameters of one layer: query and output D N H each, key and value D K H each, mlp 3 D F."""
    D, N, K, H, F = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.mlp_dim
    return 2 * D * N * H + 2 * D * K * H + 3 * D * F


def forward_flops(cfg: ModelConfig, tokens: int, outputs: int, pairs: int) -> float:
    """`2 (L p tokens + V D outputs) + 4 L N H pairs`, with p of `layer_parameters`.

    Args:
      tokens: positions that go through the layers.
      outputs: positions whose logits are computed.
      pairs: (query, visible key) pairs; each costs 2 H operations a head for its score and 2 H for its value.
    """
    matrices = cfg.num_layers * layer_parameters(cfg) * tokens + cfg.vocab_size * cfg.embed_dim * outputs
    return 2.0 * matrices + 4.0 * cfg.num_layers * cfg.num_heads * cfg.head_dim * pairs


def update_work(cfg: ModelConfig, batch: Batch, micro_batches: int, parameters: int, replicas: int) -> Work:
    """One optimizer step on a packed batch.

    Operations: 3 x `forward_flops` over positions that are no padding, the backward pass being two forward ones.
    Bytes, with P parameters and c bytes in the compute dtype: each micro-batch reads the weights twice (2 c P) and adds
    to the gradients (2 * 4 P); AdamW reads weights, gradients and two moments and writes all but the gradients
    (7 * 4 P). Every replica of the weights does all of that.

    Args:
      parameters: P, all of the model's.
      replicas: copies of the parameters on the mesh, one per shard of the batch.
    """
    positions, segments, parents = map(jnp.asarray, (batch.positions, batch.segments, batch.parents))
    pairs = 0
    for row in range(len(positions)):  # one at a time: all masks at once are [B, T, T]
        one = slice(row, row + 1)
        pairs += int(visible(positions[one], segments[one], parents[one]).sum())
    tokens = int((batch.segments > 0).sum())
    weights = jnp.dtype(cfg.compute_dtype).itemsize * parameters
    moved = micro_batches * (2 * weights + 2 * 4 * parameters) + 7 * 4 * parameters
    return Work(3 * forward_flops(cfg, tokens, tokens, pairs), float(moved * replicas))


def prefill_work(cfg: ModelConfig, prefixes: np.ndarray, replicas: int) -> Work:
    """All prompts but for their last tokens: no logits; weights read once, `2 L K H` numbers a token written."""
    lengths = prefixes.astype(np.int64)
    pairs = int((lengths * (lengths + 1) // 2).sum())
    flops = forward_flops(cfg, int(lengths.sum()), 0, pairs)
    read = cfg.num_layers * layer_parameters(cfg) * replicas
    return Work(flops, _itemsize(cfg) * float(read + _cached(cfg) * int(lengths.sum())))


def decode_work(cfg: ModelConfig, prefixes: np.ndarray, completions: np.ndarray, replicas: int) -> Work:
    """All tokens of all completions, groups in step.

    With prefix lengths s_i and completion lengths n_ij, a sample's t-th token sees s_i + t keys. Operations:
    `forward_flops` over the tokens drawn, with `n_ij s_i + n_ij (n_ij + 1) / 2` pairs. Bytes: the weights `L p + V D`
    once a time step, of which there are max n_ij; the prefix cache once a time step for the whole group,
    `s_i max_j n_ij` entries; each sample's own cache up to its slot, `n_ij (n_ij + 1) / 2` entries read and n_ij
    written. An entry is `2 L K H` numbers.

    Args:
      prefixes: s_i, int [R].
      completions: n_ij, int [R, W].
    """
    s, n = prefixes.astype(np.int64), completions.astype(np.int64)
    own = int((n * (n + 1) // 2).sum())
    flops = forward_flops(cfg, int(n.sum()), int(n.sum()), int((n * s[:, None]).sum()) + own)
    weights = cfg.num_layers * layer_parameters(cfg) + cfg.vocab_size * cfg.embed_dim
    entries = int((s * n.max(1)).sum()) + own + int(n.sum())
    moved = int(n.max()) * weights * replicas + _cached(cfg) * entries
    return Work(flops, _itemsize(cfg) * float(moved))


def _cached(cfg: ModelConfig) -> int:
    """Numbers that one token leaves in the caches."""
    return 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim


def _itemsize(cfg: ModelConfig) -> int:
    return jnp.dtype(cfg.compute_dtype).itemsize
