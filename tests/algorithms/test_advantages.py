import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rl_posttrain.algorithms.advantages import (
    ADVANTAGES,
    STEP_FORMS,
    asymmetric,
    component_advantages,
    group_advantages,
    step_advantages,
)

ALL = np.ones((1, 4), bool)
REWARDS = np.array([[1.0, 0.0, 0.0, 3.0]], np.float32)  # mean 1, population variance (0 + 1 + 1 + 4) / 4 = 1.5
HAND = {
    "mean": [0.0, -1.0, -1.0, 2.0],
    "mean_std": [0.0, -1 / 1.5**0.5, -1 / 1.5**0.5, 2 / 1.5**0.5],
    "leave_one_out": [0.0, -4 / 3, -4 / 3, 8 / 3],  # 3 - (1 + 0 + 0) / 3 = 8 / 3
}


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_hand_computed(kind):
    result = group_advantages(REWARDS, ALL, kind)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, [HAND[kind]], rtol=2e-6)


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.7, 1e6])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_give_exactly_zero(kind, reward, size):
    rewards = np.full((2, size), reward)
    assert (group_advantages(rewards, np.ones((2, size), bool), kind) == 0).all()


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("lost", [np.nan, np.inf, 100.0])
def test_a_lost_sample_gets_zero_and_does_not_move_the_others(kind, lost):
    rewards = np.insert(REWARDS, 2, lost, axis=1)
    valid = np.array([[True, True, not np.isfinite(lost), True, True]])  # what is not finite needs no flag
    result = group_advantages(rewards, valid, kind)
    assert result[0, 2] == 0
    np.testing.assert_array_equal(np.delete(result, 2, axis=1), group_advantages(REWARDS, ALL, kind))


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_fewer_than_two_valid_samples_give_zero(kind):
    valid = np.array([[True, False, False, False], [False] * 4])
    assert (group_advantages(np.vstack([REWARDS, REWARDS]), valid, kind) == 0).all()


@settings(deadline=None)
@given(
    arrays(np.float64, (3, 5), elements=st.sampled_from([0.0, 0.25, 0.5, 1.0, -2.0])),
    arrays(np.bool_, (3, 5)),
    st.permutations(range(5)),
    st.sampled_from(sorted(ADVANTAGES)),
)
def test_groups_are_centred_and_samples_keep_their_advantage_when_permuted(rewards, valid, order, kind):
    result = group_advantages(rewards, valid, kind)
    np.testing.assert_allclose(result.sum(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(group_advantages(rewards[:, order], valid[:, order], kind), result[:, order], atol=1e-6)
    alone = np.vstack([group_advantages(rewards[i : i + 1], valid[i : i + 1], kind) for i in range(3)])
    np.testing.assert_array_equal(alone, result)  # groups do not see each other


def test_leave_one_out_is_each_reward_less_the_mean_of_the_others():
    rewards = np.random.default_rng(0).normal(size=(4, 6))
    result = group_advantages(rewards, np.ones((4, 6), bool), "leave_one_out")
    others = np.array([[np.delete(row, i).mean() for i in range(6)] for row in rewards])
    np.testing.assert_allclose(result, rewards - others, rtol=1e-5, atol=1e-6)


def test_device_arrays_are_accepted():
    result = group_advantages(jnp.asarray(REWARDS), jnp.isfinite(REWARDS), "mean")
    assert isinstance(result, np.ndarray)
    np.testing.assert_array_equal(result, [HAND["mean"]])


# ---- over the whole step ----

TWO = np.array([[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 0.0, 0.0]])  # centred: 0 -1 -1 2 and 1 1 -1 -1; mean square 10 / 8


def test_step_mean_hand_computed():
    result = group_advantages(TWO, np.ones((2, 4), bool), "step_mean")
    np.testing.assert_allclose(result, TWO - 1.0)
    equal = np.ones((2, 4))
    assert (group_advantages(equal, equal > 0, "step_mean") == 0).all()


def test_a_scale_divides_by_the_deviation_over_the_step_or_the_domain():
    everyone = np.ones((2, 4), bool)
    centred = np.array([[0, -1, -1, 2], [1, 1, -1, -1]])
    step = group_advantages(TWO, everyone, "mean", "step")
    np.testing.assert_allclose(step, centred / centred.std(), rtol=1e-5)
    domain = group_advantages(TWO, everyone, "mean", "domain", ["a", "b"])
    np.testing.assert_allclose(domain, [centred[0] / 1.5**0.5, centred[1]], rtol=1e-5)
    np.testing.assert_allclose(group_advantages(TWO, everyone, "mean", "domain", ["a", "a"]), step)


def test_reinforce_pp_is_the_reward_standardised_over_the_step():
    result = group_advantages(TWO, np.ones((2, 4), bool), "step_mean", "step")
    np.testing.assert_allclose(result, (TWO - TWO.mean()) / TWO.std(), rtol=1e-5)


@pytest.mark.parametrize("kind", ["mean", "leave_one_out", "step_mean"])
@pytest.mark.parametrize("scale", ["step", "domain"])
def test_lost_samples_and_lone_ones_do_not_move_the_scale(kind, scale):
    everyone, names = np.ones((2, 4), bool), ["a", "a"]
    expected = group_advantages(TWO, everyone, kind, scale, names)
    padded = np.insert(TWO, 1, np.nan, axis=1)
    result = group_advantages(padded, np.isfinite(padded), kind, scale, names)
    assert (result[:, 1] == 0).all()
    np.testing.assert_array_equal(np.delete(result, 1, axis=1), expected)
    if kind != "step_mean":  # there a lone sample has the whole step to be compared with
        lone = np.vstack([TWO, [[5.0, np.nan, np.nan, np.nan]]])
        result = group_advantages(lone, np.isfinite(lone), kind, scale, [*names, "a"])
        np.testing.assert_array_equal(result, np.vstack([expected, np.zeros((1, 4))]))


@pytest.mark.parametrize("scale", ["step", "domain"])
def test_a_domain_without_signal_stays_exactly_zero(scale):
    rewards = np.array([[0.1, 0.1, 0.1], [0.0, 1.0, 0.0]])
    result = group_advantages(rewards, np.ones((2, 3), bool), "mean", scale, ["a", "b"])
    assert (result[0] == 0).all() and (result[1] != 0).all()


def test_what_is_unknown_or_missing_is_refused():
    for kind, scale, domains, message in (
        ("median", "none", None, "median"),
        ("mean", "batch", None, "batch"),
        ("mean", "domain", None, "domains=None"),
        ("mean", "domain", ["a"], "2 prompts"),
    ):
        with pytest.raises(Exception, match=message):
            group_advantages(TWO, np.ones((2, 4), bool), kind, scale, domains)


# ---- several rewards ----


def test_components_are_normalised_before_they_are_weighed():
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(3, 5, 2)) * [1.0, 1000.0]
    standard = (rewards - rewards.mean(axis=1, keepdims=True)) / rewards.std(axis=1, keepdims=True)
    total = standard @ [0.7, 0.3]
    everyone = np.ones((3, 5), bool)
    unscaled = component_advantages(rewards, everyone, np.array([0.7, 0.3]), scale="none")
    np.testing.assert_allclose(unscaled, total, rtol=1e-4, atol=1e-5)
    scaled = component_advantages(rewards, everyone, np.array([0.7, 0.3]))
    np.testing.assert_allclose(scaled, total / total.std(), rtol=1e-4, atol=1e-5)


def test_samples_with_the_same_sum_of_rewards_stay_apart():
    rewards = np.array([[[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]])
    assert (group_advantages(rewards.sum(2), ALL, "mean_std") == 0).all()
    apart = component_advantages(rewards, ALL, np.array([2.0, 1.0]))
    assert apart[0, 0] > 0 > apart[0, 1]


def test_equal_components_give_exactly_zero_and_lost_samples_leave_the_group():
    rewards = np.random.default_rng(0).normal(size=(2, 4, 3))
    everyone, weights = np.ones((2, 4), bool), np.ones(3)
    constant = np.full((2, 4, 1), 0.1)
    np.testing.assert_array_equal(
        component_advantages(np.concatenate([rewards, constant], 2), everyone, np.ones(4)),
        component_advantages(rewards, everyone, weights),
    )
    lost = np.insert(rewards, 1, 5.0, axis=1)
    lost[:, 1, 2] = np.nan
    result = component_advantages(lost, np.ones((2, 5), bool), weights)
    assert (result[:, 1] == 0).all()
    np.testing.assert_array_equal(np.delete(result, 1, axis=1), component_advantages(rewards, everyone, weights))


# ---- steps of reasoning ----

STEPS = np.array([[[1.0, 0.0, 2.0], [1.0, 3.0, np.nan]]])  # 3 and 2 steps; mean 1.4, mean square about it 1.04
PRESENT = np.array([[[True, True, True], [True, True, False]]])


def test_step_advantages_hand_computed():
    normal = np.array([[-0.4, -1.4, 0.6], [-0.4, 1.6, 0.0]]) / 1.04**0.5
    togo = [[normal[0].sum(), normal[0, 1:].sum(), normal[0, 2]], [normal[1].sum(), normal[1, 1], 0]]
    np.testing.assert_allclose(step_advantages(STEPS, PRESENT, "sum"), [togo], rtol=1e-5, atol=1e-6)
    # Least from each step on: 0 0 2 and 1 3; the least of each sample's sibling: 1 and 0.
    np.testing.assert_allclose(step_advantages(STEPS, PRESENT, "min"), [[[-1, -1, 1], [1, 3, 0]]], rtol=1e-6)


def test_a_bad_step_is_paid_for_by_good_ones_in_sum_form_alone():
    rewards = np.array([[[0.0, 5.0, 5.0], [1.0, 1.0, 1.0]]])
    present = np.ones((1, 2, 3), bool)
    assert np.argmax(step_advantages(rewards, present, "sum")[0, :, 0]) == 0
    assert np.argmax(step_advantages(rewards, present, "min")[0, :, 0]) == 1


@pytest.mark.parametrize("form", STEP_FORMS)
def test_equal_steps_and_lone_samples_give_exactly_zero(form):
    assert (step_advantages(np.full((2, 3, 4), 0.1), np.ones((2, 3, 4), bool), form) == 0).all()
    assert (step_advantages(STEPS[:, :1], PRESENT[:, :1], form) == 0).all()


@pytest.mark.parametrize("form", STEP_FORMS)
def test_a_sample_with_a_lost_step_or_none_leaves_its_group(form):
    lost = np.concatenate([STEPS, [[[1.0, np.nan, 9.0], [7.0, 7.0, 7.0]]]], axis=1)
    present = np.concatenate([PRESENT, [[[True, True, True], [False, False, False]]]], axis=1)
    result = step_advantages(lost, present, form)
    assert (result[:, 2:] == 0).all()
    np.testing.assert_array_equal(result[:, :2], step_advantages(STEPS, PRESENT, form))


@settings(deadline=None)
@given(st.integers(0, 999), st.sampled_from(sorted(STEP_FORMS)))
def test_step_advantages_are_the_papers_sums_and_minima(seed, form):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 5, (2, 3))
    rewards = rng.normal(size=(2, 3, 4))
    result = step_advantages(rewards, np.arange(4) < counts[..., None], form)
    for group in range(2):
        samples = [rewards[group, s, : counts[group, s]] for s in range(3)]
        steps = np.concatenate(samples)
        for s, own in enumerate(samples):
            siblings = [other.min() for i, other in enumerate(samples) if i != s]
            for k in range(len(own)):
                normal = (own[k:] - steps.mean()) / steps.std()
                expected = normal.sum() if form == "sum" else own[k:].min() - np.mean(siblings)
                assert result[group, s, k] == pytest.approx(expected, rel=1e-4, abs=1e-5)
            assert (result[group, s, len(own) :] == 0).all()


def test_an_unknown_form_is_refused():
    with pytest.raises(Exception, match="product"):
        step_advantages(STEPS, PRESENT, "product")


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0, 10.0])
def test_negative_advantages_are_weighed_and_the_others_stay(weight):
    advantages = group_advantages(REWARDS, ALL, "mean")
    weighed = asymmetric(advantages, weight)
    np.testing.assert_array_equal(weighed, np.array([[0.0, -weight, -weight, 2.0]], np.float32))
    assert weighed.dtype == np.float32 and not np.signbit(weighed[weighed == 0]).any()
