"""Collecting a step's groups: which are sampled again, and what is kept of them. Without a model."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain import loop, services
from rl_posttrain.batch import TrainState
from rl_posttrain.config import ConfigError
from rl_posttrain.loop import RunState, Sampled
from rl_posttrain.types import Rollout, Task, Verdict

DOMAINS = ("strings/sort", "strings/reverse")
CONFIG = {
    "model": dict(embed_dim=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8),
    "tokenizer": dict(kind="byte"),
    "tasks": {name: {} for name in DOMAINS},
    "rollout": dict(prompts_per_step=4, group_size=2, max_tokens=8),
    "grpo": dict(row_length=32),
    "seed": 5,
}


def groups_of(tasks, width):
    make = lambda task, sample: Rollout(
        task, sample, (5, 6), (7,) * (1 + sample), (-1.0,) * (1 + sample), "", "stop", 1.0, 0
    )
    return [[make(task, sample) for sample in range(width)] for task in tasks]


def collect(monkeypatch, telling, refill, counters=None, **sections):
    """(collected, services, counters, rounds): rounds are the (tasks, key) of each call of `generate`.

    `telling` says of (domain, index) whether the first of the two answers is right and the second is wrong; else
    both are wrong.
    """
    values = {**CONFIG, **sections}
    values["rollout"] = {**CONFIG["rollout"], "refill": refill}
    config = services.parse(values)
    rounds = []

    def generate(params, tasks, *, width, rows, key, **_):
        assert len(tasks) <= rows
        rounds.append(([(task.domain, task.index) for task in tasks], jax.random.key_data(key).tolist()))
        return groups_of(tasks, width)

    def verify(domains, rollouts):
        right = [r.sample == 0 and telling(r.task.domain, r.task.index) for r in rollouts]
        return [Verdict("pass" if passed else "wrong") for passed in right]

    monkeypatch.setattr(loop, "generate", generate)
    monkeypatch.setattr(loop, "verify", verify)
    make = lambda name: lambda seed, split, indices: [Task(name, split, index, "") for index in indices]
    made = SimpleNamespace(
        config=config,
        policy=lambda params: params,
        tokenizer=None,
        domains={name: SimpleNamespace(make=make(name)) for name in DOMAINS},
        place=lambda batch: batch,
        rows_multiple=lambda section: 1,
        score=lambda params, batch: (jnp.full(batch.tokens.shape, -2.0), None),
    )
    state = RunState(3, TrainState(0, {}, ()), {}, counters or {}, None, None, [], config.algorithm.kl_coefficient, 0.0)
    return loop.collect(made, state), made, state.counters, rounds


def names(collected, places):
    return [(collected.groups[i][0].task.domain, collected.groups[i][0].task.index) for i in places]


def drawn(index_from):
    """Whether a domain's prompts from this index on have signal."""
    return lambda domain, index: index >= index_from[domain]


def test_groups_without_signal_give_their_place_to_fresh_prompts_of_their_domain(monkeypatch):
    # Each domain is drawn twice in the first round. Of `sort`, 0 and 1 say nothing and nor do the first two fresh ones.
    telling = drawn({"strings/sort": 4, "strings/reverse": 1})
    collected, _, counters, rounds = collect(monkeypatch, telling, refill=5)
    first, (second, _), (third, _) = rounds[0][0], rounds[1], rounds[2]
    assert len(rounds) == 3  # it stops as soon as every group has signal
    assert sorted(first) == sorted((name, i) for name in DOMAINS for i in (0, 1))
    assert sorted(second) == [("strings/reverse", 2), ("strings/sort", 2), ("strings/sort", 3)]
    assert sorted(third) == [("strings/sort", 4), ("strings/sort", 5)]
    assert counters == {"strings/sort": 6, "strings/reverse": 3}
    kept = names(collected, collected.kept)
    assert [name for name, _ in kept] == [name for name, _ in first]  # place by place the same domain
    assert sorted(kept) == [("strings/reverse", 1), ("strings/reverse", 2), ("strings/sort", 4), ("strings/sort", 5)]
    assert collected.metrics == {
        "rollout/refills": 2, "rollout/uninformative_fraction": 5 / 9, "rollout/unfilled_fraction": 0
    }  # fmt: skip
    np.testing.assert_allclose(collected.advantages[collected.kept], [[1, -1]] * 4, rtol=1e-5)
    assert not np.delete(collected.advantages, collected.kept, axis=0).any()
    assert names(collected, range(9)) == [*first, *second, *third]  # all of it is stored


def test_rounds_are_bounded_and_what_is_left_counts_in_the_denominators(monkeypatch):
    telling = lambda domain, index: domain == "strings/sort" and index == 0
    collected, made, counters, rounds = collect(monkeypatch, telling, refill=2)
    assert [len(tasks) for tasks, _ in rounds] == [4, 3, 3]
    assert sum(counters.values()) == 10
    assert collected.metrics == {
        "rollout/refills": 2, "rollout/uninformative_fraction": 0.9, "rollout/unfilled_fraction": 0.75
    }  # fmt: skip
    assert collected.kept.tolist() == [0, 1, 2, 3]  # the groups of the first round stay
    (batch,) = loop.grpo_batches(made, collected)
    assert (batch.loss_weight > 0).sum() == 3  # tokens of the one group with signal
    np.testing.assert_allclose(batch.loss_weight[batch.loss_weight > 0], 1 / 12)  # over those of all four


@pytest.mark.parametrize(("refill", "telling", "expected"), [(0, lambda *_: False, 1), (3, lambda *_: True, 1)])
def test_no_round_is_taken_that_is_not_allowed_or_not_needed(monkeypatch, refill, telling, expected):
    collected, _, counters, rounds = collect(monkeypatch, telling, refill)
    assert len(rounds) == expected and sum(counters.values()) == 4
    assert collected.metrics["rollout/refills"] == 0


def test_draws_are_a_function_of_seed_step_and_round(monkeypatch):
    first, second = (collect(monkeypatch, lambda *_: False, refill=2)[3] for _ in range(2))
    assert first == second
    start = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), loop.SAMPLING), 3)
    keys = [start, jax.random.fold_in(start, 1), jax.random.fold_in(start, 2)]
    assert [key for _, key in first] == [jax.random.key_data(key).tolist() for key in keys]
    later = collect(monkeypatch, lambda *_: False, refill=2, counters={"strings/sort": 100})[3]
    assert [name for name, _ in later[1][0]] == [name for name, _ in first[1][0]]
    assert [index for name, index in later[1][0] if name == "strings/sort"] == [102, 103]


def test_the_kl_penalty_is_taken_off_what_is_kept(monkeypatch):
    telling = drawn({"strings/sort": 1, "strings/reverse": 2})
    penalty = dict(advantage="mean", kl="k1", kl_in="reward", kl_coefficient=0.1)
    collected, *_ = collect(monkeypatch, telling, refill=3, algorithm=penalty)
    np.testing.assert_allclose(collected.kl, [[1.0, 2.0]] * 4)  # a nat a token
    np.testing.assert_allclose(collected.advantages[collected.kept], [[0.55, -0.55]] * 4, rtol=1e-5)


def test_a_group_is_informative_when_two_known_rewards_differ():
    rewards = np.array([[1, 1, 1], [1, 0, 1], [np.nan, 1, 1], [np.nan, 0, 1], [np.nan, np.nan, 1], [np.nan] * 3])
    assert Sampled([], [], rewards).informative.tolist() == [False, True, False, True, False, False]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": dict(refill=-1)}, "refill=-1 must be at least 0"),
        ({"rollout": dict(refill=2, max_tokens=8), "algorithm": dict(advantage="step_mean")}, "refill=2: .* use 0"),
        (
            {"rollout": dict(max_tokens=8), "rewards": dict(overlong_buffer=9, overlong_penalty=0.5)},
            "overlong_buffer=9 exceeds rollout.max_tokens=8",
        ),
    ],
)
def test_sections_that_do_not_fit_are_refused(sections, message):
    with pytest.raises(ConfigError, match=message):
        services.parse({**CONFIG, **sections})
