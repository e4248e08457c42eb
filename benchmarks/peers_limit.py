"""How fast decoding could be, in the peers benchmark: the matrix products of every decode step, and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks import median_seconds, peers_host
from benchmarks.peers_host import Turns, Work
from rl_posttrain.model import convert
from rl_posttrain.model.transformer import ModelConfig

REPEATS = 5


def run(work: Work, turns: Turns) -> None:
    """Answers as contenders do that decode: the first token costs nothing, each further one its products."""
    cfg = convert.model_config(work.model)
    while turns.begin():
        seconds = products_seconds(cfg, len(work.prompts) * work.group_size)
        turns.end(first_s=0.0, all_s=(work.max_tokens - 1) * seconds)


def products_seconds(cfg: ModelConfig, batch: int) -> float:
    """Seconds of one decode step's products, summed, each kind alone. Every layer's weights come from memory."""
    queries, cached = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    shapes = {
        "query": (cfg.embed_dim, queries),
        "key": (cfg.embed_dim, cached),
        "value": (cfg.embed_dim, cached),
        "output": (queries, cfg.embed_dim),
        "gate": (cfg.embed_dim, cfg.mlp_dim),
        "up": (cfg.embed_dim, cfg.mlp_dim),
        "down": (cfg.mlp_dim, cfg.embed_dim),
    }
    every_layer = jax.jit(lambda x, weights: [x @ weight for weight in weights])
    head = jax.jit(lambda x, table: x @ table.T)
    table, x = jnp.ones((cfg.padded_vocab_size, cfg.embed_dim)), jnp.ones((batch, cfg.embed_dim))
    total = median_seconds(lambda: head(x, table), REPEATS)
    for inputs, outputs in shapes.values():
        x, weights = jnp.ones((batch, inputs)), [jnp.ones((inputs, outputs)) for _ in range(cfg.num_layers)]
        total += median_seconds(lambda x=x, weights=weights: every_layer(x, weights), REPEATS)
    return total


if __name__ == "__main__":
    peers_host.serve(run, ("jax",))
