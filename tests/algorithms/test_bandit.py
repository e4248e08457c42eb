"""A bandit with a known optimum: maximising E[r] - beta KL(policy || reference) gives reference * exp(r / beta).

Each step sees every action, weighed by the probability with which the behaviour policy draws it, so that what is
tested is the expected update, without noise. Every action is a sample of one token.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain.algorithms import grpo
from rl_posttrain.algorithms.grpo import AlgorithmConfig
from rl_posttrain.algorithms.kl import KL_VALUES
from rl_posttrain.batch import Batch
from rl_posttrain.data.packing import DTYPES

REWARDS = np.array([1.0, 0.0, 0.5, -0.5, 0.8])
REFERENCE = np.array([0.1, 0.4, 0.2, 0.25, 0.05])
BETA = 0.5
OPTIMUM = REFERENCE * np.exp(REWARDS / BETA) / (REFERENCE * np.exp(REWARDS / BETA)).sum()
SEGMENTS = jnp.arange(1, 6)[None]  # every action is a sample of its own
STEPS, RATE = 600, 1.0


@partial(jax.jit, static_argnames=("index", "stale"))
def solve(index, stale=None):
    """The policy after gradient descent on the loss, from the reference on. `stale` fixes the behaviour policy."""
    cfg = CONFIGS[index]
    reference = jnp.log(jnp.asarray(REFERENCE, jnp.float32))[None]
    zeros = {name: jnp.zeros((1, 5), dtype) for name, dtype in DTYPES.items()}

    def step(_, logits):
        now = jax.nn.log_softmax(logits)
        behaviour = now if stale is None else jnp.log(jnp.asarray(stale, jnp.float32))[None]
        worth = jnp.asarray(REWARDS, jnp.float32)[None]
        if cfg.kl_in == "reward":
            worth -= cfg.kl_coefficient * KL_VALUES[cfg.kl](now, reference)
        batch = Batch(**zeros).replace(
            segments=SEGMENTS,
            loss_weight=jnp.exp(behaviour),
            advantages=worth - (jnp.exp(now) * worth).sum(),
            behaviour_logprobs=behaviour,
            reference_logprobs=reference,
            proximal_logprobs=now,
            entropy_coefficient=jnp.full((1, 5), cfg.entropy_coefficient),
        )
        weights = jnp.where(batch.advantages < 0, cfg.negative_weight, 1.0)
        batch = batch.replace(advantages=weights * batch.advantages)

        def value(x):
            log_p = jax.nn.log_softmax(x)
            entropy = -(jnp.exp(log_p) * log_p).sum(axis=1, keepdims=True)
            return grpo.loss(log_p, jnp.broadcast_to(entropy, (1, 5)), batch, cfg, jnp.float32(5))[0]

        return logits - RATE * jax.grad(value)(logits)

    return jax.nn.softmax(jax.lax.fori_loop(0, STEPS, step, reference))[0]


CORRECTED = dict(proximal="step_start", correction="importance")
TRUNCATED = dict(proximal="step_start", correction="truncated", correction_high=1.2)
PENALISED = dict(kl_in="reward", kl="k1")
CONFIGS = {
    name: AlgorithmConfig(**{"kl_coefficient": BETA, "kl": "k2", **values})
    for name, values in {
        "clip, k2": {},
        "dual clip, k3 corrected": dict(dual_clip=3.0, kl="k3_corrected"),
        "sequence, k1 in the reward": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4, **PENALISED),
        "sequence by token, k2": dict(ratio="sequence_token"),
        "turn, k2": dict(ratio="turn"),
        "cispo, k2": dict(surrogate="cispo", clip_low=1.0, clip_high=4.0),
        "soft gate, k2": dict(surrogate="soft_gate"),
        "reinforce, k1 in the reward": dict(surrogate="reinforce", **PENALISED),
        "k3": dict(kl="k3"),
        "entropy": dict(kl_coefficient=0.0, kl="k3", entropy_coefficient=BETA),
        "entropy, k2": dict(kl_coefficient=BETA / 2, entropy_coefficient=BETA / 2),
        "asymmetric": dict(negative_weight=0.5),
        "stale, corrected": dict(kl="k3_corrected", **CORRECTED),
        "stale, cispo, corrected": dict(kl="k3_corrected", surrogate="cispo", **CORRECTED),
        "stale, reinforce, corrected": dict(surrogate="reinforce", correction="importance", kl="k3_corrected"),
        "stale, not corrected": dict(surrogate="reinforce", kl="k3_corrected"),
        "stale, truncated": dict(kl="k3_corrected", **TRUNCATED),
        "stale, truncated, seldom": dict(kl="k3_corrected", **{**TRUNCATED, "correction_high": 100.0}),
    }.items()
}
ELSEWHERE = ("stale", "k3", "entropy", "asymmetric")
ON_POLICY = [name for name in CONFIGS if not name.startswith(ELSEWHERE)]
STALE = (0.2, 0.2, 0.2, 0.2, 0.2)


def distance(policy, optimum=OPTIMUM):
    """Total variation."""
    return 0.5 * np.abs(np.asarray(policy) - optimum).sum()


def test_the_reference_is_not_the_optimum():
    assert distance(REFERENCE) > 0.4


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_every_variant_converges_to_the_optimum(name):
    assert distance(solve(name)) < 1e-3


def test_an_entropy_bonus_converges_to_the_optimum_under_it():
    """Beside a KL term of the same strength, the reference counts for half as much."""
    for name, prior in (("entropy", np.ones(5)), ("entropy, k2", np.sqrt(REFERENCE))):
        optimum = prior * np.exp(REWARDS / BETA)
        assert distance(solve(name), optimum / optimum.sum()) < 1e-3
        assert distance(solve(name)) > 0.1


def test_asymmetric_weights_bias():
    """Where the negative advantages pull half as hard, less of the reference is given up for what is better."""
    assert distance(solve("asymmetric")) > 0.02


def test_k3_in_the_loss_ends_where_its_gradient_says():
    """That of KL(reference || policy): the optimum is `beta * reference / (c - r)`, with c > max r to sum to 1."""
    low, high = REWARDS.max() + 1e-9, REWARDS.max() + 10
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (BETA * REFERENCE / (middle - REWARDS)).sum() > 1 else (low, middle)
    policy = solve("k3")
    assert distance(policy, BETA * REFERENCE / (high - REWARDS)) < 1e-3
    assert distance(policy) > 0.02  # not the optimum under KL(policy || reference)


@pytest.mark.parametrize("name", ["stale, corrected", "stale, cispo, corrected", "stale, reinforce, corrected"])
def test_with_stale_data_a_correction_converges_to_the_optimum(name):
    assert distance(solve(name, STALE)) < 1e-3


def test_without_a_correction_or_with_a_truncated_one_stale_data_bias():
    """With the penalty in the reward they would not: at the optimum its advantages are all 0, whatever weighs them."""
    assert distance(solve("stale, not corrected", STALE)) > 0.02
    assert distance(solve("stale, truncated", STALE)) > 0.02
    assert distance(solve("stale, truncated, seldom", STALE)) < 1e-3  # a bound that is never hit is no bias
