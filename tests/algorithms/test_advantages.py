import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rl_posttrain.algorithms.advantages import ADVANTAGES, group_advantages

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
