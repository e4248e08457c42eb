"""A decoder as pure functions over a nested dict of arrays: RMSNorm, rotary positions, grouped heads, SwiGLU.

`declare` is the one table of parameters; initial values, shardings, restore targets and name maps derive from
it. Layers are stacked on a leading axis and scanned. Parameters are float32; each function casts what it
uses to the compute dtype. `model.module.Transformer` is the same model as a Flax module.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from rl_posttrain.batch import Params
from rl_posttrain.model import attention, experts, logprobs, rope
from rl_posttrain.model.linear import linear
from rl_posttrain.model.rope import RopeScaling
from rl_posttrain.sharding.mesh import constrain

_AT_LEAST_ONE = (
    "vocab_size",
    "embed_dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_dim",
    "attention_block",
    "logprob_chunk",
    "vocab_multiple",
)


@jax.tree_util.register_static
@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides the shapes and the mathematics of the model. Hashable: static under jit.

    Raises:
      ValueError: a size below 1, an odd head width, or heads that kv heads do not divide.
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-6
    qk_norm: bool = False  # RMSNorm over each head of queries and keys, before rotation (Qwen3, Gemma 3)
    qkv_bias: bool = False  # Qwen2
    output_bias: bool = False  # of the attention's output projection
    tie_embeddings: bool = True  # the output table is the embedding
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the gate
    norm_plus_one: bool = False  # norms multiply by 1 + w (Gemma)
    post_norms: bool = False  # norms after attention and after the mlp, before the residual sum (Gemma 2)
    scale_embeddings: bool = False  # by sqrt(embed_dim), rounded to the compute dtype (Gemma)
    query_scale: float = 0.0  # of attention scores; 0: head_dim ** -0.5
    attention_softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: they stay (Gemma 2)
    logit_softcap: float = 0.0  # the same for logits, before the temperature
    window: int = 0  # sliding layers see only so many positions, themselves included; 0: all
    sliding: tuple[bool, ...] = ()  # which layers slide; empty: all of them, where there is a window
    local_rope_theta: float = 0.0  # of sliding layers, unscaled; 0: as the others (Gemma 3)
    num_experts: int = 0  # 0: one mlp; else so many, of width mlp_dim each (Mixtral, Qwen3-MoE)
    experts_per_token: int = 0
    normalise_experts: bool = True  # the weights of the chosen experts sum to 1
    experts: Literal["dense", "grouped"] = "dense"  # every expert on every token, or only the chosen ones
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "full", "dots"] = "none"  # what the backward pass recomputes, per layer
    attention: Literal["dense", "blockwise"] = "dense"
    attention_block: int = 512  # queries and keys per block of blockwise attention
    logprob_chunk: int = 256  # time steps whose logits exist at once
    vocab_multiple: int = 1  # tables are padded to this many rows or a multiple, for tensor sharding

    def __post_init__(self):
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: use at least 1")
        for name in ("rope_theta", "norm_epsilon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: use a number above 0")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary positions turn pairs, use an even width")
        for name in ("query_scale", "attention_softcap", "logit_softcap", "window", "local_rope_theta", "num_experts"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: use 0 (off) or a number above it")
        if self.sliding and (len(self.sliding) != self.num_layers or not self.window):
            raise ValueError(
                f"sliding names {len(self.sliding)} layers with window={self.window}: it needs a window and one entry "
                f"for each of {self.num_layers} layers"
            )
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token}: must be between 1 and num_experts={self.num_experts}"
            )
        if self.num_heads % self.num_kv_heads:
            legal = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}: use one of {legal}"
            )

    @property
    def slides(self) -> tuple[bool, ...]:
        """Whether each layer's attention is windowed."""
        return self.sliding or (bool(self.window),) * self.num_layers

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and output tables."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


class Parameter(NamedTuple):
    """Declaration of one array."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical axis of each dimension, for `sharding.mesh.RULES`
    initialiser: Literal["normal", "ones", "zeros"]
    std: float = 0.0  # of "normal"


def declare(cfg: ModelConfig) -> dict[str, Any]:
    """The parameters: a nested dict of `Parameter`, in the structure of the arrays."""
    L, D, F = cfg.num_layers, cfg.embed_dim, cfg.mlp_dim
    N, K, H = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    deep = (2 * L) ** -0.5  # keeps the residual stream, a sum of 2 L branches, at the width of one

    def matrix(shape: tuple[int, ...], axes: tuple[str | None, ...], fan_in: int, scale: float = 1.0):
        return Parameter((L, *shape), (None, *axes), "normal", scale * fan_in**-0.5)

    norm = "zeros" if cfg.norm_plus_one else "ones"
    layers = {
        "attention_norm": Parameter((L, D), (None, None), norm),
        "query": matrix((D, N, H), ("embed", "heads", None), D),
        "key": matrix((D, K, H), ("embed", "kv_heads", None), D),
        "value": matrix((D, K, H), ("embed", "kv_heads", None), D),
        "output": matrix((N, H, D), ("heads", None, "embed"), N * H, deep),
        "mlp_norm": Parameter((L, D), (None, None), norm),
    }
    # Experts are one more leading axis.
    many, split = ((cfg.num_experts,), ("expert",)) if cfg.num_experts else ((), ())
    layers["gate"] = matrix((*many, D, F), (*split, "embed", "mlp"), D)
    layers["up"] = matrix((*many, D, F), (*split, "embed", "mlp"), D)
    layers["down"] = matrix((*many, F, D), (*split, "mlp", "embed"), F, deep)
    if cfg.num_experts:
        layers["router"] = matrix((D, cfg.num_experts), (None, None), D)
    if cfg.post_norms:
        layers["attention_post_norm"] = Parameter((L, D), (None, None), norm)
        layers["mlp_post_norm"] = Parameter((L, D), (None, None), norm)
    if cfg.output_bias:
        layers["output_bias"] = Parameter((L, D), (None, None), "zeros")
    if cfg.qkv_bias:
        layers["query_bias"] = Parameter((L, N, H), (None, "heads", None), "zeros")
        layers["key_bias"] = Parameter((L, K, H), (None, "kv_heads", None), "zeros")
        layers["value_bias"] = Parameter((L, K, H), (None, "kv_heads", None), "zeros")
    if cfg.qk_norm:
        layers["query_norm"] = Parameter((L, H), (None, None), norm)
        layers["key_norm"] = Parameter((L, H), (None, None), norm)
    table = Parameter((cfg.padded_vocab_size, D), ("vocab", None), "normal", D**-0.5)
    declared: dict[str, Any] = {
        "embed": table,
        "layers": layers,
        "final_norm": Parameter((D,), (None,), norm),
    }
    if not cfg.tie_embeddings:
        declared["head"] = table
    return declared


def is_parameter(node: Any) -> bool:
    """For `jax.tree.map(..., is_leaf=is_parameter)`: a `Parameter` is a tuple, hence a tree, itself."""
    return isinstance(node, Parameter)


def init(key: Array, cfg: ModelConfig) -> Params:
    """Initial values, float32. Each depends on the key, its own path and its shape, on no other parameter."""
    return init_tree(key, cfg, declare(cfg))


def init_tree(key: Array, cfg: ModelConfig, declared: Any, path: str = "") -> Params:
    """Initial values of part of the declaration, whose place in the whole is `path`."""
    if not is_parameter(declared):
        return {name: init_tree(key, cfg, node, f"{path}/{name}") for name, node in declared.items()}
    shape = declared.shape
    if declared.initialiser != "normal":
        return jnp.full(shape, 1.0 if declared.initialiser == "ones" else 0.0, jnp.float32)
    key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    if "vocab" not in declared.axes:
        return declared.std * jax.random.normal(key, shape, jnp.float32)
    # Only true rows are drawn, so that padding the table does not change them. The padding is 0.
    true = tuple(cfg.vocab_size if axis == "vocab" else n for n, axis in zip(shape, declared.axes, strict=True))
    drawn = declared.std * jax.random.normal(key, true, jnp.float32)
    return jnp.pad(drawn, [(0, n - m) for n, m in zip(shape, true, strict=True)])


class Span(NamedTuple):
    """What a layer's attention sees, and how it turns. Stacked: one more leading axis, of the layers."""

    turn: Any  # float32 [H / 2], radians per position
    window: Any  # int32: positions that are visible; EVERYTHING in layers that do not slide


EVERYTHING = 1 << 30


def spans(cfg: ModelConfig) -> Span:
    """The spans of all layers, stacked."""
    turns = {False: rope.frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)}
    turns[True] = rope.frequencies(cfg.head_dim, cfg.local_rope_theta) if cfg.local_rope_theta else turns[False]
    window = [cfg.window if slides else EVERYTHING for slides in cfg.slides]
    return Span(np.stack([turns[slides] for slides in cfg.slides]), np.array(window, np.int32))


def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], epsilon: float, plus_one: bool = False
) -> Float[Array, "*B D"]:
    """`x / rms(x) * scale` over the last axis, in float32, returned in the dtype of x.

    Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467. With `plus_one` the factor is `1 + scale`.
    """
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return (wide * inverse * (1 + scale if plus_one else scale)).astype(x.dtype)


def _norm(x: Array, w: Params, name: str, cfg: ModelConfig) -> Array:
    return rms_norm(x, w[name], cfg.norm_epsilon, cfg.norm_plus_one)


def embed(params: Params, cfg: ModelConfig, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    """Embedding of each token, in the compute dtype."""
    x = params["embed"][tokens].astype(cfg.compute_dtype)
    return x * jnp.asarray(cfg.embed_dim**0.5, x.dtype) if cfg.scale_embeddings else x


def project_qkv(
    x: Float[Array, "B T D"], w: Params, cfg: ModelConfig, positions: Int[Array, "B T"], span: Span
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Queries, keys and values of one layer: norm, projection, bias, per-head norm, rotation.

    Args:
      w: one layer's weights, `params["layers"]` without the leading axis.
    """
    x = _norm(x, w, "attention_norm", cfg)
    q, k, v = (linear(x, w, name, "BTD,DNH->BTNH") for name in ("query", "key", "value"))
    if cfg.qkv_bias:
        q, k, v = (y + w[f"{name}_bias"].astype(x.dtype) for name, y in (("query", q), ("key", k), ("value", v)))
    if cfg.qk_norm:
        q, k = _norm(q, w, "query_norm", cfg), _norm(k, w, "key_norm", cfg)
    factor = rope.attention_factor(cfg.rope_scaling)
    q, k = rope.rotate(q, positions, span.turn, factor), rope.rotate(k, positions, span.turn, factor)
    return (
        constrain(q, "batch", None, "heads", None),
        constrain(k, "batch", None, "kv_heads", None),
        constrain(v, "batch", None, "kv_heads", None),
    )


def score_scale(cfg: ModelConfig) -> float:
    """What the products of queries and keys are multiplied by."""
    return cfg.query_scale or cfg.head_dim**-0.5


def attend(
    q: Array,
    k: Array,
    v: Array,
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    parents: Int[Array, "B T"],
    cfg: ModelConfig,
    span: Span,
) -> Float[Array, "B T N H"]:
    """`attention.attend` as the config says."""
    return attention.attend(
        q,
        k,
        v,
        positions,
        segments,
        parents,
        window=span.window if cfg.window else 0,
        scale=score_scale(cfg),
        softcap=cfg.attention_softcap,
        impl=cfg.attention,
        block=cfg.attention_block,
    )


def finish_block(
    x: Float[Array, "B T D"], attended: Float[Array, "B T N H"], w: Params, cfg: ModelConfig
) -> Float[Array, "B T D"]:
    """What follows attention in one layer: output projection, residual, gated mlp or experts, residual.

    Gated mlp: Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """
    branch = linear(attended, w, "output", "BTNH,NHD->BTD")
    if cfg.output_bias:
        branch += w["output_bias"].astype(x.dtype)
    x = x + (_norm(branch, w, "attention_post_norm", cfg) if cfg.post_norms else branch)
    normed = _norm(x, w, "mlp_norm", cfg)
    activation = jax.nn.silu if cfg.activation == "silu" else partial(jax.nn.gelu, approximate=True)
    if cfg.num_experts:
        branch = experts.mix(normed, w, cfg, activation)
    else:
        gate, up = linear(normed, w, "gate", "BTD,DF->BTF"), linear(normed, w, "up", "BTD,DF->BTF")
        middle = constrain(activation(gate) * up, "batch", None, "mlp")
        branch = linear(middle, w, "down", "BTF,FD->BTD")
    x = x + (_norm(branch, w, "mlp_post_norm", cfg) if cfg.post_norms else branch)
    return constrain(x, "batch", None, None)


def final_norm(params: Params, cfg: ModelConfig, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """The norm between the last layer and the output table."""
    return _norm(x, params, "final_norm", cfg)


def forward(
    params: Params,
    cfg: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    parents: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
    """Hidden states after the final norm, in the compute dtype, of packed rows (see `batch.Batch`)."""

    def layer(x, inputs):
        w, span = inputs
        q, k, v = project_qkv(x, w, cfg, positions, span)
        attended = attend(q, k, v, positions, segments, parents, cfg, span)
        return finish_block(x, attended, w, cfg), None

    x = constrain(embed(params, cfg, tokens), "batch", None, None)
    x, _ = jax.lax.scan(_remat(layer, cfg.remat), x, (params["layers"], spans(cfg)))
    return final_norm(params, cfg, x)


def _remat(layer: Any, policy: str) -> Any:
    """The layer under a policy of what its backward pass recomputes.

    "none" keeps every intermediate, "full" only the layer's input, "dots" also the projections' results.
    """
    if policy == "none":
        return layer
    # Within a scan nothing can merge the recomputation with the forward pass, so no barrier is needed there.
    checkpoint = partial(jax.checkpoint, prevent_cse=False)
    if policy == "full":
        return checkpoint(layer)
    return checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


def output_table(params: Params, cfg: ModelConfig) -> Float[Array, "V D"]:
    """The table whose rows score the next token; V is padded to `vocab_multiple`."""
    return params["embed"] if cfg.tie_embeddings else params["head"]


def logits(params: Params, cfg: ModelConfig, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
    """Scores of the true vocabulary. For few positions, as in decode; losses use `token_logprobs`."""
    table = output_table(params, cfg).astype(hidden.dtype)
    scores = jnp.einsum("...D,VD->...V", hidden, table, preferred_element_type=jnp.float32)
    return attention.cap(scores[..., : cfg.vocab_size], cfg.logit_softcap)


def token_logprobs(
    params: Params,
    cfg: ModelConfig,
    hidden: Float[Array, "B T D"],
    labels: Int[Array, "B T"],
    temperature: Float[Array, "B T"],
) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"]]:
    """Log-probability of each label and entropy (nats) of each distribution, at its temperature."""
    return logprobs.chunked_logprobs(
        hidden,
        output_table(params, cfg),
        labels,
        temperature,
        vocab_size=cfg.vocab_size,
        chunk=cfg.logprob_chunk,
        softcap=cfg.logit_softcap,
    )
