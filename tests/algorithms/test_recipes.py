"""Every recipe and variant on packed rows: against NumPy, finite differences, and itself in other layouts."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.algorithms import BESIDE, RECIPES, flags
from experiments import cli
from rl_posttrain import config as config_lib
from rl_posttrain import services
from rl_posttrain.algorithms import grpo
from rl_posttrain.algorithms.grpo import AlgorithmConfig
from rl_posttrain.algorithms.losses import sample_weights
from rl_posttrain.data.packing import Sample, Tree, pack, unpack

STALE = dict(proximal="step_start")
KL = dict(kl_coefficient=0.5)
VARIANTS = {
    **{name: dict(recipe) for name, recipe in RECIPES.items()},
    "dual_clip": dict(dual_clip=1.5),
    "turn": dict(ratio="turn"),
    "gspo_token": dict(ratio="sequence_token", clip_low=0.1, clip_high=0.1),
    "gspo_wide": dict(ratio="sequence", clip_low=0.1, clip_high=0.1),
    "cispo_sequence": dict(ratio="sequence", surrogate="cispo"),
    "decoupled_importance": dict(**STALE, correction="importance"),
    "sequence_mask": dict(**STALE, correction="sequence_mask", correction_low=0.9, correction_high=1.2),
    "stale_reinforce": dict(surrogate="reinforce", correction="masked", correction_low=0.8, correction_high=1.2),
    "stale_gspo": dict(**STALE, ratio="sequence", correction="truncated", correction_high=1.1),
    "kl_k2": dict(**KL, kl="k2"),
    "kl_k3_corrected": dict(**KL, kl="k3_corrected"),
    "entropy_bonus": dict(entropy_coefficient=0.1),
}
CONFIGS = {name: config_lib.build(AlgorithmConfig, values) for name, values in VARIANTS.items()}
LENGTHS = (3, 1, 8, 5, 6, 2, 7, 4)  # of 8 completions, 2 for each of 4 prompts


@dataclass(frozen=True)
class Completion:
    """One sample; arrays have one entry per token, NaN or infinite where it is not trained."""

    trained: np.ndarray
    weight: float
    advantage: float
    logprobs: np.ndarray
    behaviour: np.ndarray
    reference: np.ndarray
    proximal: np.ndarray


@functools.cache
def completions(kind="token_mean", constant=None, wild=np.nan, seed=0) -> tuple[Completion, ...]:
    """Eight samples with the weights of an aggregation. The longer ones hold observations; all of seed 0 are alike
    but for the weights."""
    rng = np.random.default_rng(seed)
    masks = [np.array([length < 5 or i not in (2, 3) for i in range(length)]) for length in LENGTHS]
    if seed:
        masks = [np.append(rng.random(length) < 0.6, True) for length in rng.integers(0, 8, 8)]
    weights = sample_weights(np.array([m.sum() for m in masks]), np.ones(8, bool), kind, constant)
    made = []
    for mask, weight in zip(masks, weights):
        behaviour = rng.uniform(-3, -0.5, len(mask))
        near = lambda: np.where(mask, behaviour + rng.normal(0, 0.3, len(mask)), wild)  # noqa: B023
        advantage = float(rng.normal())
        made.append(Completion(mask, float(weight), advantage, near(), np.where(mask, behaviour, wild), near(), near()))
    return tuple(made)


def weighed(cfg: AlgorithmConfig, **other):
    return completions(cfg.aggregation, cfg.constant_length, **other)


def packed(samples, order=range(8), row_length=80, rows=None):
    """(batch, logprobs, placements): the samples in this order, two for a prompt, in rows of this length."""
    trees, others = [], {name: [] for name in ("logprobs", "behaviour", "reference", "proximal")}
    for first in range(0, len(order), 2):
        pair = [samples[i] for i in order[first : first + 2]]
        made = [Sample(np.full(len(s.trained), 5), s.weight * s.trained, s.advantage) for s in pair]
        trees.append(Tree((5, 6, 7), tuple(made)))
        for name, values in others.items():
            values.append([getattr(s, name) for s in pair])
    batch, placements = pack(trees, row_length, rows=rows)
    fields = {}
    for name, values in others.items():
        array = np.zeros(batch.tokens.shape, np.float32)
        for place in placements:
            array[place.row, place.start : place.start + place.length] = values[place.tree][place.sample]
        fields[name] = jnp.asarray(array)
    logprobs = fields.pop("logprobs")
    filled = batch.replace(**{f"{name}_logprobs": values for name, values in fields.items()})
    return jax.tree.map(jnp.asarray, filled), logprobs, placements


def evaluate(cfg, batch, logprobs):
    """(loss, metrics, gradient by the logprobs)."""
    count = jnp.asarray(30.0)
    batch = batch.replace(entropy_coefficient=jnp.full(batch.tokens.shape, cfg.entropy_coefficient, jnp.float32))

    def total(x):
        return grpo.loss(x, jnp.ones(x.shape), batch, cfg, count)

    (scalar, metrics), gradient = jax.value_and_grad(total, has_aux=True)(logprobs)
    return float(scalar), {name: float(value) for name, value in metrics.items()}, np.asarray(gradient)


def measure(cfg, samples, order=range(8), **layout):
    """(loss, metrics, gradients of each sample in the original order)."""
    batch, logprobs, placements = packed(samples, order, **layout)
    scalar, metrics, gradient = evaluate(cfg, batch, logprobs)
    by_sample = [part for tree in unpack(gradient, placements) for part in tree]
    return scalar, metrics, [by_sample[list(order).index(i)] for i in range(8)]


@functools.cache
def measured(name):
    """All samples in one row."""
    return measure(CONFIGS[name], weighed(CONFIGS[name]))


# ---- the formulas once more, sample by sample, in float64 NumPy ----


def runs(mask):
    """Indices of trained tokens, by turn."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return [np.arange(a, b) for a, b in zip(edges[::2], edges[1::2])]


def reference_ratio(cfg, distance, frozen, sample):
    """By token. `frozen` is the distance with no gradient: what finite differences must not move."""
    everything = np.flatnonzero(sample.trained)
    out = np.ones(len(distance))
    if cfg.ratio == "sequence_token":
        out[everything] = np.exp(frozen[everything].mean() + distance[everything] - frozen[everything])
        return out
    spans = {"token": [[t] for t in everything], "turn": runs(sample.trained), "sequence": [everything]}
    for span in spans[cfg.ratio]:
        out[span] = np.exp(distance[span].mean())
    return out


def reference_correction(cfg, sample, frozen_logprobs):
    policy = sample.proximal if cfg.proximal == "step_start" else frozen_logprobs
    weight, low, high = np.exp(policy - sample.behaviour), cfg.correction_low, cfg.correction_high
    match cfg.correction:
        case "none":
            return np.ones(len(weight))
        case "truncated":
            return np.minimum(weight, high)
        case "masked":
            return np.where((weight < low) | (weight > high), 0, weight)
        case "sequence_mask":
            mean = np.exp(np.log(weight[sample.trained]).mean())
            return weight * (low <= mean <= high)
    return weight


def reference_surrogate(cfg, ratio, frozen_ratio, logprob, advantage):
    bounded = lambda x: min(max(x, 1 - cfg.clip_low), 1 + cfg.clip_high)
    match cfg.surrogate:
        case "clip":
            value = min(ratio * advantage, bounded(ratio) * advantage)
            return max(value, cfg.dual_clip * advantage) if cfg.dual_clip and advantage < 0 else value
        case "cispo":
            return bounded(frozen_ratio) * advantage * logprob
        case "soft_gate":
            tau = cfg.gate_positive if advantage > 0 else cfg.gate_negative
            return 4 / tau / (1 + np.exp(-tau * (ratio - 1))) * advantage
    return advantage * logprob


def reference_kl(cfg, logprob, reference, behaviour):
    if not (cfg.kl_coefficient and cfg.kl_in == "loss"):
        return 0.0
    d = logprob - reference
    k3 = np.exp(-d) - 1 + d
    return {"k2": d**2 / 2, "k3": k3, "k3_corrected": np.exp(logprob - behaviour) * k3}[cfg.kl]


def reference_loss(cfg, sample, logprobs):
    """Of one sample at these logprobs and an entropy of 1; what is detached keeps the sample's own."""
    older = sample.proximal if cfg.proximal == "step_start" else sample.behaviour
    still = reference_ratio(cfg, sample.logprobs - older, sample.logprobs - older, sample)
    ratios = reference_ratio(cfg, logprobs - older, sample.logprobs - older, sample)
    correction = reference_correction(cfg, sample, sample.logprobs)
    total = 0.0
    for t in np.flatnonzero(sample.trained):
        objective = reference_surrogate(cfg, ratios[t], still[t], logprobs[t], sample.advantage)
        kl = reference_kl(cfg, logprobs[t], sample.reference[t], sample.behaviour[t])
        total += sample.weight * (cfg.kl_coefficient * kl - correction[t] * objective - cfg.entropy_coefficient)
    return total


@pytest.mark.parametrize("name", CONFIGS)
def test_value_and_gradient_are_the_formulas_in_float64(name):
    cfg = CONFIGS[name]
    samples = weighed(cfg)
    scalar, _, gradients = measured(name)
    assert scalar == pytest.approx(sum(reference_loss(cfg, s, s.logprobs) for s in samples), rel=1e-5, abs=1e-7)
    for index, sample in enumerate(samples):
        for t in range(len(sample.trained)):
            if not sample.trained[t]:
                assert gradients[index][t] == 0  # whatever stands there: NaN does
                continue
            step = np.eye(len(sample.trained))[t] * 1e-6
            up, down = (reference_loss(cfg, sample, sample.logprobs + sign * step) for sign in (1, -1))
            assert gradients[index][t] == pytest.approx((up - down) / 2e-6, rel=2e-4, abs=1e-7), (index, t)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(CONFIGS)), st.integers(1, 10**6))
def test_values_are_the_formulas_on_any_batch(name, seed):
    samples = weighed(CONFIGS[name], seed=seed)
    scalar, _, gradients = measure(CONFIGS[name], samples, rows=1)
    expected = sum(reference_loss(CONFIGS[name], s, s.logprobs) for s in samples)
    assert scalar == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert all((gradient[~s.trained] == 0).all() for s, gradient in zip(samples, gradients, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_layout_changes_nothing(name):
    cfg = CONFIGS[name]
    scalar, metrics, gradients = measured(name)
    # From all in one row to one sample a row, turned round, with empty rows, and infinities in place of NaN.
    order, layout = (6, 7, 0, 1, 5, 4, 3, 2), dict(row_length=16, rows=16)
    other, other_metrics, other_gradients = measure(cfg, weighed(cfg, wild=np.inf), order, **layout)
    assert other == pytest.approx(scalar, rel=1e-5, abs=1e-8)
    assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)
    for one, two in zip(gradients, other_gradients, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", CONFIGS)
def test_micro_batches_add_up(name):
    cfg = CONFIGS[name]
    scalar, metrics, gradients = measured(name)
    batch, logprobs, placements = packed(weighed(cfg), row_length=16, rows=16)
    parts = [evaluate(cfg, jax.tree.map(lambda x: x[i::2], batch), logprobs[i::2]) for i in (0, 1)]  # noqa: B023
    assert scalar == pytest.approx(parts[0][0] + parts[1][0], rel=1e-5, abs=1e-8)
    for key, value in metrics.items():
        combine = max if key.endswith("_max") else sum
        assert value == pytest.approx(combine(part[1][key] for part in parts), rel=1e-5, abs=1e-7), key
    together = np.stack([parts[0][2], parts[1][2]], axis=1).reshape(batch.tokens.shape)
    for one, two in zip(gradients, (x for tree in unpack(together, placements) for x in tree), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", CONFIGS)
def test_at_an_unchanged_policy_every_recipe_is_reinforce(name):
    cfg = CONFIGS[name]
    same = tuple(replace(s, logprobs=s.behaviour, reference=s.behaviour, proximal=s.behaviour) for s in weighed(cfg))
    _, metrics, gradients = measure(cfg, same)
    trained = sum(int(s.trained.sum()) for s in same)
    assert metrics["policy/ratio_mean"] == pytest.approx(trained / 30, rel=1e-6)  # 1 a token
    assert metrics["policy/log_ratio_max"] == metrics["loss/kl"] == metrics.get("policy/kl", 0) == 0
    assert all(value == 0 for key, value in metrics.items() if key.endswith("_fraction"))
    for sample, gradient in zip(same, gradients, strict=True):
        np.testing.assert_allclose(gradient, -sample.weight * sample.advantage * sample.trained, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", CONFIGS)
def test_bounds_are_reported_as_fractions_of_tokens(name):
    cfg = CONFIGS[name]
    _, metrics, _ = measured(name)
    reported = {key.removeprefix("policy/") for key in metrics if key.endswith("_fraction")}
    expected = {"clip_low_fraction", "clip_high_fraction"} if cfg.surrogate in ("clip", "cispo") else set()
    expected |= {"dual_clip_fraction"} if cfg.dual_clip else set()
    expected |= {f"correction_{side}_fraction" for side in ("low", "high") if getattr(cfg, f"correction_{side}")}
    assert reported == expected
    assert all(0 <= metrics[f"policy/{key}"] <= 1 for key in reported)


def test_o04_a_sequence_objective_is_not_multiplied_by_its_length():
    cfg = CONFIGS["gspo"]
    weights = sample_weights(np.array([2, 8]), np.ones(2, bool), cfg.aggregation)
    for layout in (dict(row_length=80), dict(row_length=16, rows=16)):
        samples = [Sample((5,) * n, np.full(n, w), a) for n, w, a in zip((2, 8), weights, (1.0, -1.0))]
        batch = jax.tree.map(jnp.asarray, pack([Tree((5,), tuple(samples))], **layout)[0])
        scalar, _, gradient = evaluate(cfg, batch, batch.behaviour_logprobs)
        assert scalar == pytest.approx(0, abs=1e-7)
        sums = [gradient[batch.loss_weight == np.float32(w)].sum() for w in weights]
        np.testing.assert_allclose(sums, [-0.5, 0.5], rtol=1e-6)  # each sample pulls as hard as the other


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_on_the_command_line_is_the_recipe(name):
    """On top of the quickstart, which all of them fit."""
    rest, overrides = cli.split_overrides(flags(name).split())
    quickstart = cli.load_config_file(str(Path(__file__).resolve().parents[2] / "configs" / "quickstart.py"))
    config = services.parse(config_lib.apply_overrides(quickstart, overrides))
    assert not rest and config.algorithm == CONFIGS[name]
    flat = config_lib.flatten(config_lib.to_dict(config))
    before = config_lib.flatten(config_lib.to_dict(services.parse(quickstart)))
    beside = {key: value for key, value in flat.items() if key in BESIDE.get(name, {})}
    assert beside == BESIDE.get(name, {})
    changed = {key for key in flat.keys() | before.keys() if flat.get(key) != before.get(key)}
    assert {key for key in changed if not key.startswith("algorithm.")} <= beside.keys()


def test_what_stands_beside_belongs_to_a_recipe():
    assert BESIDE.keys() <= RECIPES.keys()
