"""One optimizer step: gradients over micro-batches, clipping, the optimizer. The only algorithm that knows the model.

`update` is pure; the caller jits it at the edge, with `state` donated and its shardings given.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from rl_posttrain.algorithms import optimizers
from rl_posttrain.batch import Batch, Params, TrainState
from rl_posttrain.model import heads, transformer
from rl_posttrain.model.linear import INPUT_AXES
from rl_posttrain.model.transformer import ModelConfig
from rl_posttrain.sharding.mesh import constrain

Metrics = dict[str, Array]
# outputs(params, batch, model_cfg=...) -> what the loss is of: `score`, or `score_rewards`
Outputs = Callable[..., tuple[Array, ...]]
# loss(*outputs, batch, token_count=...) -> (scalar, metrics): `sft.loss`, or `grpo.loss` given a cfg
Loss = Callable[..., tuple[Array, Metrics]]
# assemble(trained, step) -> the model's parameters: `lora.attach` beside a frozen base, or the identity
Assemble = Callable[[Params, Array], Params]

# What the learning rate is multiplied with, from progress 0 (after the warm-up) to 1 (the last step's end).
DECAYS: dict[str, Callable[[Array], Array]] = {
    "constant": jnp.ones_like,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
}


@dataclass(frozen=True)
class UpdateConfig:
    """The optimizer, on gradients clipped by their global norm.

    "adamw" is https://arxiv.org/abs/1711.05101, "adafactor" and "muon" are in `optimizers`; all decay weights apart
    from the gradient. Muon moves the layers' matrices, and Adam, with `b1`, `b2` and `epsilon`, the rest.

    Raises:
      ValueError: a value out of range, or one without effect.
    """

    optimizer: Literal["adamw", "adafactor", "muon"] = "adamw"
    learning_rate: float = 1e-6  # after the warm-up
    # What it is multiplied with for parameters whose path matches: {"embed": 0.1, "layers/*_norm": 0.0}; 0 freezes.
    rates: dict[str, float] = field(default_factory=dict)
    warmup_steps: int = 0  # optimizer steps over which the learning rate rises linearly
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    final_learning_rate_fraction: float = 0.0  # what cosine and linear end at, as a share of learning_rate
    weight_decay: float = 0.0  # of matrices; never of norms, biases and the embedding
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    gradient_clip: float = 1.0  # largest global norm; inf clips nothing
    micro_batches: int = 1  # parts of a batch whose activations exist at once; the result is the same

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate={self.learning_rate} must be above 0")
        if self.warmup_steps < 0 or self.micro_batches < 1:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} must be at least 0, micro_batches={self.micro_batches} at least 1"
            )
        if not 0 <= self.final_learning_rate_fraction <= 1:
            raise ValueError(f"final_learning_rate_fraction={self.final_learning_rate_fraction} must be in [0, 1]")
        if self.schedule == "constant" and self.final_learning_rate_fraction:
            raise ValueError(
                f"final_learning_rate_fraction={self.final_learning_rate_fraction} has no effect with "
                "schedule='constant': use 'cosine' or 'linear', or leave it out"
            )
        if not (0 <= self.b1 < 1 and 0 <= self.b2 < 1):
            raise ValueError(f"b1={self.b1} and b2={self.b2} must be in [0, 1)")
        if not (0 < self.epsilon < math.inf and 0 <= self.weight_decay < math.inf and self.gradient_clip > 0):
            raise ValueError(
                f"epsilon={self.epsilon} and gradient_clip={self.gradient_clip} must be above 0, "
                f"weight_decay={self.weight_decay} at least 0"
            )
        for pattern, rate in self.rates.items():
            if not 0 <= rate < math.inf:
                raise ValueError(f"rates: {pattern!r} is {rate}, and must be at least 0 (0: frozen)")
        if self.optimizer == "adafactor":
            for name in ("b1", "b2", "epsilon"):
                if getattr(self, name) != getattr(UpdateConfig, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)} has no effect with optimizer='adafactor': leave it out, or use "
                        "'adamw' or 'muon'"
                    )


def schedule(cfg: UpdateConfig, total_steps: int) -> optax.Schedule:
    """The learning rate of optimizer step 0, 1, ...: a linear rise, then `cfg.schedule` until `total_steps`.

    No step is wasted at 0: the rise begins at `learning_rate / warmup_steps`.

    Raises:
      ValueError: the warm-up is longer than the run.
    """
    if total_steps < max(cfg.warmup_steps, 1):
        raise ValueError(f"{total_steps=} must be at least 1 and warmup_steps={cfg.warmup_steps}: shorten the warm-up")
    decay_steps = max(total_steps - cfg.warmup_steps, 1)
    floor = cfg.final_learning_rate_fraction

    def learning_rate(step: Any) -> Array:
        step = jnp.asarray(step, jnp.float32)
        rise = jnp.minimum((step + 1) / max(cfg.warmup_steps, 1), 1.0)
        progress = jnp.clip((step - cfg.warmup_steps) / decay_steps, 0.0, 1.0)
        return cfg.learning_rate * rise * (floor + (1.0 - floor) * DECAYS[cfg.schedule](progress))

    return learning_rate


class ClipState(NamedTuple):
    """What clipping did in the last step."""

    clipped: Array  # float32 scalar: 1 if the gradient was scaled down


class RateState(NamedTuple):
    """Where the schedule stands."""

    steps: Array  # int32 scalar: steps taken
    learning_rate: Array  # float32 scalar: of the last step


def make_optimizer(cfg: UpdateConfig, total_steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, `cfg.optimizer`, decoupled weight decay, the learning rate of the schedule, `cfg.rates`.

    Its `init` raises ValueError when a pattern of `cfg.rates` matches no parameter, or two match the same.
    """
    adam = optimizers.adam(cfg.b1, cfg.b2, cfg.epsilon)
    choices = {"adamw": adam, "adafactor": optimizers.adafactor(), "muon": optimizers.muon(matrix_axes, adam)}
    return optax.chain(
        _clip(cfg.gradient_clip),
        choices[cfg.optimizer],
        optax.add_decayed_weights(cfg.weight_decay, mask=decayed),
        _scale_by_rate(schedule(cfg, total_steps), cfg.rates),
    )


def matrix_axes(path: tuple[Any, ...], array: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Which axes of a parameter are its input's and its output's; None for what is none of the layers' matrices.

    The axes before them are of layers and experts. An adapter of rank r is two matrices: [in, r] and [r, out].
    """
    name = optimizers.name_of(path).rpartition("/")[2]
    whole, side = (name[:-2], name[-2:]) if name.endswith(("_a", "_b")) else (name, "")
    if whole not in INPUT_AXES:
        return None
    inputs = 1 if side == "_b" else INPUT_AXES[whole]
    outputs = 2 if whole in ("query", "key", "value") and side != "_a" else 1
    axes = tuple(range(array.ndim))
    return axes[-inputs - outputs : -outputs], axes[-outputs:]


def decayed(params: Params) -> Any:
    """True for the parameters that weight decay pulls to 0: not norms, whose neutral value is 1, not biases,
    and not the embedding, whose rows for rare tokens would decay without a gradient to hold them."""

    def of_matrix(path: tuple[Any, ...], _: Any) -> bool:
        name = str(getattr(path[-1], "key", path[-1]))
        return not (name.endswith(("norm", "bias")) or name == "embed")

    return jax.tree_util.tree_map_with_path(of_matrix, params)


def _clip(maximum: float) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, ClipState]:
        norm = optax.tree.norm(updates)
        scale = jnp.minimum(1.0, maximum / norm)
        return jax.tree.map(lambda g: g * scale, updates), ClipState((norm > maximum).astype(jnp.float32))

    return optax.GradientTransformation(lambda params: ClipState(jnp.zeros(())), update)


def _scale_by_rate(learning_rate: optax.Schedule, rates: Mapping[str, float]) -> optax.GradientTransformation:
    def init(params: Params) -> RateState:
        optimizers.check_rates(rates, params)
        return RateState(jnp.zeros((), jnp.int32), jnp.zeros(()))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, RateState]:
        rate = jnp.asarray(learning_rate(state.steps))
        scaled = lambda path, u: -rate * optimizers.rate_of(rates, path) * u
        return jax.tree_util.tree_map_with_path(scaled, updates), RateState(state.steps + 1, rate)

    return optax.GradientTransformation(init, update)


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Step 0 with these parameters."""
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))


def state_shardings(
    params: Callable[[], Params], optimizer: optax.GradientTransformation, shardings: Any, replicated: Any
) -> TrainState:
    """A train state's shardings: moments lie as their parameters, what has another shape on every device.

    Args:
      params: makes parameters, of which only shapes are used.
      shardings: of the parameters.
    """

    def place(moment: Any, parameter: Any, sharding: Any) -> Any:
        if masked(moment):  # another optimizer's parameter
            return moment
        return sharding if moment.shape == parameter.shape else replicated

    masked = lambda node: isinstance(node, optax.MaskedNode)
    abstract = jax.eval_shape(lambda: init_state(params(), optimizer))
    moments = optax.tree_map_params(
        optimizer,
        place,
        abstract.opt_state,
        abstract.params,
        shardings,
        transform_non_params=lambda _: replicated,
        is_leaf=masked,
    )
    return abstract.replace(step=replicated, params=shardings, opt_state=moments)


def score(params: Params, batch: Batch, *, model_cfg: ModelConfig) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probabilities of `batch.labels` and entropies (nats) at `batch.temperature`, float32."""
    hidden = transformer.forward(params, model_cfg, batch.tokens, batch.positions, batch.segments, batch.parents)
    return transformer.token_logprobs(params, model_cfg, hidden, batch.labels, batch.temperature)


def score_rewards(params: Params, batch: Batch, *, model_cfg: ModelConfig) -> tuple[Float[Array, "B T"]]:
    """The reward head's number at each position, float32; for `reward_model.loss`."""
    hidden = transformer.forward(params, model_cfg, batch.tokens, batch.positions, batch.segments, batch.parents)
    return (heads.values(params, hidden),)


def update(
    state: TrainState,
    batch: Batch,
    *,
    model_cfg: ModelConfig,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    outputs: Outputs | None = None,
    micro_batches: int = 1,
    declared: Any = None,
    assemble: Assemble = lambda trained, step: trained,
) -> tuple[TrainState, Metrics]:
    """One optimizer step on a batch.

    A step with nothing to train on (every `loss_weight` 0), or whose gradient is not finite, leaves the whole
    state as it was, step count, moments and schedule included, and says so in `update/skipped` and
    `update/nonfinite`.

    Args:
      batch: rows of the whole step; B must be divisible by `micro_batches`.
      loss: `(*outputs, batch, token_count=...) -> (scalar, metrics)`, all of it additive over rows;
        metrics named `*_max` (>= 0) combine by maximum instead.
      optimizer: of `make_optimizer`, or any other.
      outputs: computes what the loss is of from the model's parameters and a part of the batch; `score` if left out.
      declared: the table of `state.params`, where that is not the whole model.
      assemble: makes the model's parameters of `state.params`, which alone are trained.

    Returns:
      The next state, and the loss's metrics with `update/...`: scalars, float32.

    Raises:
      ValueError: B is not divisible by `micro_batches`.
    """
    tokens = jnp.sum(batch.loss_weight > 0).astype(jnp.float32)

    def objective(trained: Params, part: Batch) -> tuple[Array, Metrics]:
        computed = (outputs or score)(assemble(trained, state.step), part, model_cfg=model_cfg)
        return loss(*computed, part, token_count=jnp.maximum(tokens, 1.0))

    declared = transformer.declare(model_cfg) if declared is None else declared
    gradients, metrics = _accumulate(state.params, batch, objective, declared, parts=micro_batches)
    norm = optax.tree.norm(gradients)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    proposed = TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)
    finite = jnp.isfinite(norm)
    accepted = finite & (tokens > 0)
    following = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), proposed, state)
    metrics |= {
        "update/gradient_norm": norm,
        "update/update_norm": jnp.where(accepted, optax.tree.norm(updates), 0.0),
        "update/tokens": tokens,
        "update/skipped": jnp.logical_not(accepted).astype(jnp.float32),
        "update/nonfinite": jnp.logical_not(finite).astype(jnp.float32),
    }
    for name in ("clipped", "learning_rate"):  # only optimizers of `make_optimizer` tell
        value = optax.tree.get(opt_state, name)
        if value is not None:
            metrics[f"update/{name}"] = value
    return following, metrics


def _accumulate(
    params: Params,
    batch: Batch,
    objective: Callable[[Params, Batch], tuple[Array, Metrics]],
    declared: Any,
    *,
    parts: int,
) -> tuple[Params, Metrics]:
    """Gradients and metrics of the batch, summed over `parts` micro-batches in float32."""
    rows = batch.tokens.shape[0]
    if rows % parts:
        raise ValueError(f"{rows} rows do not divide into micro_batches={parts}: pack to a multiple of it")

    def split(x: Array) -> Array:
        # Every parts-th row: each device keeps its own rows, where contiguous parts would move them.
        return constrain(x.reshape(rows // parts, parts, -1).swapaxes(0, 1), None, "batch", None)

    def gradients_of(part: Batch) -> tuple[Params, Metrics]:
        (_, metrics), gradients = jax.value_and_grad(objective, has_aux=True)(params, part)
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        return _like_parameters(gradients, declared), metrics

    def add(total: tuple[Params, Metrics], part: Batch) -> tuple[tuple[Params, Metrics], None]:
        gradients, metrics = gradients_of(part)
        combined = {name: _combine(name, total[1][name], value) for name, value in metrics.items()}
        return (jax.tree.map(jnp.add, total[0], gradients), combined), None

    split_batch = jax.tree.map(split, batch)
    shapes = jax.eval_shape(gradients_of, jax.tree.map(lambda x: x[0], split_batch))
    gradients, metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (gradients, metrics), _ = jax.lax.scan(add, (_like_parameters(gradients, declared), metrics), split_batch)
    return gradients, metrics


def _combine(name: str, first: Array, second: Array) -> Array:
    return jnp.maximum(first, second) if name.endswith("_max") else first + second


def _like_parameters(gradients: Params, declared: Any) -> Params:
    """Lays gradients out as the parameters, so that a sum over micro-batches is never replicated."""
    is_parameter = transformer.is_parameter
    return jax.tree.map(
        lambda parameter, gradient: constrain(gradient, *parameter.axes),
        declared,
        gradients,
        is_leaf=is_parameter,
    )
