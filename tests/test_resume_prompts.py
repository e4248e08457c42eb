"""O25: a run that is stopped and resumed consumes the prompts of the unbroken one. All arithmetic is left out."""

import json
import zlib

import jax
import jax.numpy as jnp
import pytest

from experiments import cli
from experiments import run as run_command
from rl_posttrain import loop, services
from rl_posttrain.batch import TrainState
from rl_posttrain.config import ConfigError
from rl_posttrain.observability import lines
from rl_posttrain.storage import trajectories
from rl_posttrain.types import Rollout, Verdict

CONFIG = {
    "tokenizer": {"kind": "byte"},
    "model": dict(embed_dim=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=16),
    "mesh": {"data": -1},
    "tasks": {"strings/reverse": {}},
    "rollout": dict(prompts_per_step=4, group_size=2),
    "sft": dict(steps=8, batch_size=4, examples=10),
    "grpo": dict(steps=3),
    "evaluation": dict(every=4, items=3),
    "checkpoint": dict(every=100),
}


class StopAfter:
    """In place of the signals: asks for an end after so many steps."""

    steps = 0

    def __enter__(self):
        self.asked = 0
        return self

    def __exit__(self, *_):
        return None

    @property
    def requested(self) -> bool:
        self.asked += 1
        return self.asked >= self.steps


def sampled(params, tasks, *, width, policy_version, **_):
    """Completions that depend on the task, the sample and the policy's version, as real ones do."""
    del params

    def completion(task, sample):
        number = zlib.crc32(f"{task.id} {sample} {policy_version}".encode())
        prompt, tokens = (5, 6, 2), (3 + number % 9, 1)
        return Rollout(task, sample, prompt, tokens, (-1.0, -2.0), "a", "stop", 1.0, policy_version)

    return [[completion(task, sample) for sample in range(width)] for task in tasks]


def counted(metrics):
    return lambda state, batch: (state.replace(step=state.step + 1), {**metrics, "loss/total": batch.tokens.sum()})


def without_arithmetic(config, mesh):
    """In place of `services.compiled`."""
    del config
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    fresh = lambda params: TrainState(step=jnp.int32(0), params=params, opt_state=())
    params = lambda: {"w": jax.device_put(jnp.zeros(2), everywhere)}
    abstract = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
    return {
        "init_params": params,
        "policy": lambda trained: trained,
        "abstract": jax.tree.map(abstract, fresh(params())),
        "init_train_state": fresh,
        "sft_update": counted({}),
        "preference_update": counted({}),
        "grpo_update": counted({"policy/log_ratio_max": 0.0}),
        "score": None,
        "place": lambda batch: batch,
        "rows_multiple": lambda section: 1,
    }


@pytest.fixture
def consumed(monkeypatch) -> list[list[tuple[str, int]]]:
    """The (domain, index) pairs of each step, as they are asked for."""
    log = []
    original = loop.make_tasks

    def make_tasks(built, assigned):
        log.append(list(assigned))
        return original(built, assigned)

    monkeypatch.setattr(loop, "make_tasks", make_tasks)
    monkeypatch.setattr(loop, "generate", sampled)
    monkeypatch.setattr("rl_posttrain.evaluation.generate", sampled)
    monkeypatch.setattr("rl_posttrain.observability.report.render", lambda workdir: workdir)
    monkeypatch.setattr(services, "compiled", without_arithmetic)
    monkeypatch.setattr(run_command, "Interrupts", StopAfter)
    return log


def test_o25_a_run_stopped_after_each_step_in_turn_consumes_the_same_prompts(consumed, tmp_path):
    """10 examples: three epochs, a batch that straddles into the fourth, then prompts nobody has trained on."""
    config = services.parse(CONFIG)
    StopAfter.steps = config.total_steps + 1
    assert run_command.run(config, str(tmp_path / "whole")) == 0
    whole = [list(step) for step in consumed]
    assert len(whole) == config.total_steps
    examples = [index for step in whole[:8] for _, index in step]
    epochs = [examples[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3  # each in an order of its own
    assert [index for step in whole[8:] for _, index in step] == list(range(10, 22))
    for stop in range(1, config.total_steps):
        consumed.clear()
        workdir = tmp_path / f"stopped after {stop}"
        StopAfter.steps = stop
        assert run_command.run(config, str(workdir)) == cli.PREEMPTED
        assert len(consumed) == stop
        StopAfter.steps = config.total_steps
        assert run_command.run(config, str(workdir)) == 0
        assert consumed == whole, f"stopped after step {stop}"
        assert [entry["step"] for entry in lines.read(workdir / "metrics.jsonl")] == list(range(12))
        stored = [trajectories.read(folder / "trajectories") for folder in (workdir, tmp_path / "whole")]
        assert stored[0].num_rows == 3 * 4 * 2 and stored[0].equals(stored[1])


def test_a_run_can_be_shortened_to_where_it_stands_and_no_further(consumed, tmp_path):
    """What is missing then is the last evaluation, which the comparison with the warm-up needs."""
    workdir = tmp_path / "run"
    StopAfter.steps = 9
    assert run_command.run(services.parse(CONFIG), str(workdir)) == cli.PREEMPTED
    with pytest.raises(ConfigError, match="is at step 9 already, and grpo.steps=0 .* use at least 1"):
        run_command.run(services.parse({**CONFIG, "grpo": {"steps": 0}}), str(workdir))
    assert len(consumed) == 9 and json.loads((workdir / "config.json").read_text())["grpo"]["steps"] == 3
    assert run_command.run(services.parse({**CONFIG, "grpo": {"steps": 1}}), str(workdir)) == 0
    rows = json.loads((workdir / "evaluation.json").read_text())
    last = [(row["stage"], row["metric"]) for row in rows if row["step"] == 9 and row["domain"] == "macro"]
    assert last == [("grpo", "accuracy"), ("grpo", "accuracy_change")]
    assert len(consumed) == 9  # nothing was trained


def test_a_run_that_refills_its_groups_resumes_with_the_same_prompts(consumed, monkeypatch, tmp_path):
    """Whether a group has signal depends on its task, so that the rounds of a step differ in length."""
    passes = lambda rollout: rollout.sample == 0 and zlib.crc32(rollout.task.id.encode()) % 3 == 0
    verdict = lambda rollout: Verdict("pass" if passes(rollout) else "wrong")
    monkeypatch.setattr(loop, "verify", lambda domains, rollouts: [verdict(rollout) for rollout in rollouts])
    config = services.parse({**CONFIG, "rollout": {**CONFIG["rollout"], "refill": 2}})
    StopAfter.steps = config.total_steps + 1
    assert run_command.run(config, str(tmp_path / "whole")) == 0
    whole = [list(drawn) for drawn in consumed]
    assert len({len(drawn) for drawn in whole[8:]}) > 1 and len(whole) > config.total_steps + 3
    for stop in (9, 10):
        consumed.clear()
        workdir = tmp_path / f"stopped after {stop}"
        StopAfter.steps = stop
        assert run_command.run(config, str(workdir)) == cli.PREEMPTED
        StopAfter.steps = config.total_steps
        assert run_command.run(config, str(workdir)) == 0
        assert consumed == whole, f"stopped after step {stop}"
        stored = [trajectories.read(folder / "trajectories") for folder in (workdir, tmp_path / "whole")]
        assert stored[0].num_rows == 2 * sum(map(len, whole[8:])) and stored[0].equals(stored[1])
