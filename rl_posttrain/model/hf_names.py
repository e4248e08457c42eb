"""One table of what our parameters are called in Hugging Face checkpoints, and how they lie there.

A linear layer is stored as [outputs, inputs]; ours are [inputs..., outputs...] with heads as an axis of their own.
Layers and experts, which we stack, are tensors of their own there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from rl_posttrain.model.transformer import ModelConfig, declare, is_parameter

# Ours -> their name, and how many leading axes of one layer's (and expert's) array are a matrix's inputs.
# 0: a vector, flattened; None: stored as it is.
_TABLE: Mapping[str, tuple[str, int | None]] = {
    "embed": ("model.embed_tokens.weight", None),
    "final_norm": ("model.norm.weight", None),
    "head": ("lm_head.weight", None),
    "layers/attention_norm": ("input_layernorm.weight", None),
    "layers/query": ("self_attn.q_proj.weight", 1),
    "layers/key": ("self_attn.k_proj.weight", 1),
    "layers/value": ("self_attn.v_proj.weight", 1),
    "layers/output": ("self_attn.o_proj.weight", 2),
    "layers/query_bias": ("self_attn.q_proj.bias", 0),
    "layers/key_bias": ("self_attn.k_proj.bias", 0),
    "layers/value_bias": ("self_attn.v_proj.bias", 0),
    "layers/output_bias": ("self_attn.o_proj.bias", 0),
    "layers/query_norm": ("self_attn.q_norm.weight", None),
    "layers/key_norm": ("self_attn.k_norm.weight", None),
    "layers/mlp_norm": ("post_attention_layernorm.weight", None),
    "layers/gate": ("mlp.gate_proj.weight", 1),
    "layers/up": ("mlp.up_proj.weight", 1),
    "layers/down": ("mlp.down_proj.weight", 1),
    "layers/router": ("mlp.gate.weight", 1),
}
_POST_NORMS: Mapping[str, tuple[str, int | None]] = {  # Gemma 2 and 3
    "layers/attention_post_norm": ("post_attention_layernorm.weight", None),
    "layers/mlp_norm": ("pre_feedforward_layernorm.weight", None),
    "layers/mlp_post_norm": ("post_feedforward_layernorm.weight", None),
}
_QWEN_EXPERTS: Mapping[str, tuple[str, int | None]] = {
    f"layers/{ours}": (f"mlp.experts.{{expert}}.{ours}_proj.weight", 1) for ours in ("gate", "up", "down")
}
_MIXTRAL_EXPERTS: Mapping[str, tuple[str, int | None]] = {
    f"layers/{ours}": (f"block_sparse_moe.experts.{{expert}}.{theirs}.weight", 1)
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
} | {"layers/router": ("block_sparse_moe.gate.weight", 1)}


@dataclass(frozen=True)
class Stored:
    """How one of our arrays lies in a checkpoint."""

    template: str  # their name, with {layer} and {expert}
    inputs: int | None  # see _TABLE
    layers: int  # 0: not stacked
    experts: int  # 0: not stacked
    shape: tuple[int, ...]  # of one layer's (and expert's) array of ours, padded rows included
    rows: int  # of the first axis that are stored; the others are padding

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Of each tensor."""
        if self.inputs is None:
            return (self.rows, *self.shape[1:])
        inputs, outputs = math.prod(self.shape[: self.inputs]), math.prod(self.shape[self.inputs :])
        return (outputs, inputs) if self.inputs else (outputs,)

    def name(self, layer: int = 0, expert: int = 0) -> str:
        """Their name of one tensor."""
        return self.template.format(layer=layer, expert=expert)

    def names(self) -> Iterator[str]:
        """Of all the tensors that our array is made of."""
        for layer in range(max(1, self.layers)):
            for expert in range(max(1, self.experts)):
                yield self.name(layer, expert)


def stored(cfg: ModelConfig) -> dict[str, Stored]:
    """Every parameter of `declare(cfg)`, by its path ("layers/query"), as it lies in a checkpoint."""
    table = dict(_TABLE)
    if cfg.post_norms:
        table |= _POST_NORMS
    if cfg.num_experts:  # of the two families with experts, Qwen's is the one with norms of queries and keys
        table |= _QWEN_EXPERTS if cfg.qk_norm else _MIXTRAL_EXPERTS
    found = {}
    for path, parameter in by_path(declare(cfg), is_parameter):
        template, inputs = table[path]
        stacked = path.startswith("layers/")
        lead = stacked + ("expert" in parameter.axes)
        shape = parameter.shape[lead:]
        found[path] = Stored(
            template=f"model.layers.{{layer}}.{template}" if stacked else template,
            inputs=inputs,
            layers=parameter.shape[0] if stacked else 0,
            experts=parameter.shape[1] if "expert" in parameter.axes else 0,
            shape=shape,
            rows=cfg.vocab_size if parameter.axes[0] == "vocab" else shape[0],
        )
    return found


def by_path(tree: Any, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """(path, leaf) of a nested dict, the path's keys joined by slashes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [("/".join(str(key.key) for key in path), leaf) for path, leaf in leaves]
