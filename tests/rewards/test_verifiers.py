"""Rollouts reach the verifier of their own domain, in order; cut-off ones reach none."""

import pytest

from rl_posttrain.rewards.verifiers import verify
from rl_posttrain.tasks import Domain, Tools, load
from rl_posttrain.types import Rollout, Task, Verdict


def rollout(task: Task, text: str, finish_reason="stop", sample=0) -> Rollout:
    return Rollout(task, sample, (1, 2), (3,), (-0.5,), text, finish_reason, 1.0, 0)


def echoing(name: str, calls: list) -> Domain:
    def score(tasks, texts):
        calls.append((name, [task.index for task in tasks], list(texts)))
        return [Verdict("wrong", detail=f"{name} {text}") for text in texts]

    return Domain(name, lambda seed, split, indices: [], score)


def test_order_is_kept_and_each_domain_is_asked_once():
    calls = []
    domains = {name: echoing(name, calls) for name in ("d/a", "d/b", "d/unused")}
    tasks = [Task(name, "train", i, "") for i, name in enumerate(["d/b", "d/a", "d/b", "d/a", "d/b"])]
    found = verify(domains, [rollout(task, f"t{task.index}") for task in tasks])
    assert [verdict.detail for verdict in found] == ["d/b t0", "d/a t1", "d/b t2", "d/a t3", "d/b t4"]
    assert calls == [("d/b", [0, 2, 4], ["t0", "t2", "t4"]), ("d/a", [1, 3], ["t1", "t3"])]


def test_a_cut_off_completion_never_passes():
    domain = load("strings/reverse", {}, Tools())
    (task,) = domain.make(0, "train", [0])
    found = verify(
        {"strings/reverse": domain},
        [rollout(task, task.demonstration, reason) for reason in ("length", "stop", "length")],
    )
    assert [verdict.status for verdict in found] == ["malformed", "pass", "malformed"]
    assert found[0].detail == "truncated" and found[0].fraction == 0.0


def test_no_verifier_sees_what_was_cut_off():
    calls = []
    verify({"d/a": echoing("d/a", calls)}, [rollout(Task("d/a", "train", 0, ""), "x", "length")])
    assert calls == []


def test_an_unknown_domain_is_refused():
    with pytest.raises(KeyError, match=r"d/x.*\['d/a'\]"):
        verify({"d/a": echoing("d/a", [])}, [rollout(Task("d/x", "train", 0, ""), "x", "length")])


def test_a_verifier_that_loses_a_verdict_is_noticed():
    lossy = Domain("d/a", lambda seed, split, indices: [], lambda tasks, texts: [Verdict("pass")])
    with pytest.raises(ValueError):
        verify({"d/a": lossy}, [rollout(Task("d/a", "train", i, ""), "x") for i in range(2)])


def test_nothing_to_verify():
    assert verify({}, []) == []
