"""The model as a Flax module, for those who come from Flax: same functions, same parameters, same bits."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from rl_posttrain.model import transformer


class Transformer(nn.Module):
    """`Transformer(cfg).init(key, tokens)["params"]` equals `transformer.init(key, cfg)`, bit for bit.

    `apply({"params": params}, tokens, ...)` gives float32 logits [B, T, V] of the true vocabulary.
    """

    cfg: transformer.ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        parents: Int[Array, "B T"] | None = None,
    ) -> Float32[Array, "B T V"]:
        """By default each row is one sequence: positions from 0, segment 1 throughout, no parents."""
        params = {name: self._parameter(name, node) for name, node in transformer.declare(self.cfg).items()}
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segments = jnp.ones_like(tokens) if segments is None else segments
        parents = jnp.full_like(tokens, -1) if parents is None else parents
        hidden = transformer.forward(params, self.cfg, tokens, positions, segments, parents)
        return transformer.logits(params, self.cfg, hidden)

    def _parameter(self, name: str, declared: Any) -> Any:
        def draw(key):
            # Flax hands out a key folded by a counter; the module's own key gives transformer.init's values.
            own: Any = self.scope.rngs.get("params") if self.scope is not None else None
            key = key if own is None else own.as_jax_rng()
            return transformer.init_tree(key, self.cfg, declared, f"/{name}")

        return self.param(name, draw)
