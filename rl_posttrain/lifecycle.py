"""A run's life: prepare or resume its workdir, train, evaluate, save, report. The shell around `loop.train`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rl_posttrain import config as config_lib
from rl_posttrain import evaluation
from rl_posttrain.batch import TrainState
from rl_posttrain.config import ConfigError
from rl_posttrain.data.pipeline import make_iterator
from rl_posttrain.loop import Collected, Metrics, RunState, heldout_margins
from rl_posttrain.observability import alerts
from rl_posttrain.observability.metrics import MetricsWriter
from rl_posttrain.observability.progress import Progress, print_table
from rl_posttrain.services import Config, Services, parse
from rl_posttrain.storage import filesystem
from rl_posttrain.storage.checkpoints import restore_params
from rl_posttrain.storage.trajectories import record, truncate_after

GLANCE = ("loss/total", "reward/mean", "completion/length_mean", "evaluation/macro_accuracy", "tokens/per_s")
EXTENDABLE = ("grpo.steps",)  # keys that a resumed run may change: more steps on a finished run


def check_workdir(config: Config, workdir: str) -> str:
    """Checks that the run in `workdir`, if there is one, has this config.

    Returns:
      What people should know about going on with it; empty when there is nothing to say.

    Raises:
      ConfigError: it has another; names every differing key.
    """
    path = filesystem.join(workdir, "config.json")
    if not filesystem.exists(path):
        return ""
    try:  # a run of an older version lacks the fields that came since: it had their defaults
        saved = parse(json.loads(filesystem.read(path)))
    except ConfigError as error:
        raise ConfigError(f"{workdir} holds a run that this version cannot go on with: {error}") from error
    theirs = config_lib.flatten(config_lib.to_dict(saved))
    ours = config_lib.flatten(config_lib.to_dict(config))
    differing = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key) and key not in EXTENDABLE]
    if differing:
        listed = "; ".join(f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here" for key in differing)
        raise ConfigError(f"{workdir} holds a run with another config ({listed}): use another --workdir")
    if ours["grpo.steps"] != theirs["grpo.steps"] and config.update.schedule != "constant":
        return (
            f"grpo.steps was {theirs['grpo.steps']}, now {ours['grpo.steps']}: the {config.update.schedule} schedule "
            "is stretched from here on, so this run will differ from one with that many steps from the start"
        )
    return ""


def write_config(services: Services) -> None:
    """`config.json`: from here on the workdir is this run's. Written once the config has proved to work."""
    content = json.dumps(config_lib.to_dict(services.config), indent=1).encode()
    filesystem.write_atomic(filesystem.join(services.workdir, "config.json"), content)


def start(services: Services) -> RunState:
    """The state of a run that has not begun: seeded parameters, or those of `init_from`."""
    config = services.config
    if config.init_from is None:
        params = services.init_params()
    else:
        _, params = restore_params(checkpoints_of(config.init_from), services.abstract.params)
    return RunState(
        step=0,
        train=services.init_train_state(params),
        reference=jax.tree.map(jnp.copy, params) if config.keeps_reference else None,
        counters={name: config.sft.examples if config.sft.steps else 0 for name in config.tasks},
        examples=examples_iterator(config),
        pairs=pairs_iterator(services),
        evaluations=[],
        kl_coefficient=config.algorithm.kl_coefficient,
        entropy_coefficient=config.algorithm.entropy_coefficient,
    )


def checkpoints_of(source: str) -> str:
    """The checkpoint folder of a run's workdir; `source` itself where it is no workdir."""
    path = filesystem.join(source, "config.json")
    if not filesystem.exists(path):
        return source
    directory = json.loads(filesystem.read(path))["checkpoint"]["directory"]
    return directory or filesystem.join(source, "checkpoints")


def examples_iterator(config: Config) -> Any:
    """(domain, index) pairs of the supervised examples, resumable; None without a warm-up."""
    if not config.sft.steps:
        return None
    weights = {name: task.weight for name, task in config.tasks.items() if task.weight > 0}
    source = {name: [(name, i) for i in range(config.sft.examples)] for name in weights}
    return make_iterator(source, weights, batch_size=config.sft.batch_size, seed=config.seed)


def pairs_iterator(services: Services) -> Any:
    """Places of the preference pairs to train on, resumable; None without that stage."""
    config = services.config
    if not config.preference.steps:
        return None
    places = list(range(len(services.pairs[0])))
    return make_iterator(places, batch_size=config.preference.batch_size, seed=config.seed)


def save(services: Services, state: RunState, score: float | None) -> None:
    """Flushes the trajectories and starts to write a checkpoint of the whole state."""
    services.trajectories.flush(state.step)
    arrays = {
        "opt_state": state.train.opt_state,
        "train_step": state.train.step,
        "reference": state.reference or {},
    }
    cursor = {
        "counters": state.counters,
        "examples": state.examples.get_state() if state.examples is not None else None,
        "pairs": state.pairs.get_state() if state.pairs is not None else None,
        "evaluations": state.evaluations,
        "kl_coefficient": state.kl_coefficient,
        "entropy_coefficient": state.entropy_coefficient,
    }
    services.checkpoints.save(state.step, state.train.params, arrays, cursor, score)


def resume(services: Services) -> RunState | None:
    """The state of the latest whole checkpoint; None when there is none.

    Raises:
      ConfigError: the config ends the run before that checkpoint's step.
    """
    abstract = services.abstract
    with_reference = services.config.keeps_reference
    restored = services.checkpoints.restore(
        abstract.params,
        {
            "opt_state": abstract.opt_state,
            "train_step": abstract.step,
            "reference": abstract.params if with_reference else {},
        },
    )
    if restored is None:
        return None
    step, params, arrays, cursor = restored
    if step > services.config.total_steps:
        raise ConfigError(
            f"{services.workdir} is at step {step} already, and grpo.steps={services.config.grpo.steps} would end it "
            f"after {services.config.total_steps}: use at least {step - services.config.grpo_start}, or another workdir"
        )
    examples = examples_iterator(services.config)
    if examples is not None:
        examples.set_state(cursor["examples"])
    pairs = pairs_iterator(services)
    if pairs is not None:
        pairs.set_state(cursor["pairs"])
    return RunState(
        step=step,
        train=TrainState(step=arrays["train_step"], params=params, opt_state=arrays["opt_state"]),
        reference=arrays["reference"] if with_reference else None,
        counters=cursor["counters"],
        examples=examples,
        pairs=pairs,
        evaluations=[row for row in cursor["evaluations"] if row["metric"] != "accuracy_change"],
        # A checkpoint of an older version has none: there the coefficients never moved.
        kl_coefficient=cursor.get("kl_coefficient", services.config.algorithm.kl_coefficient),
        entropy_coefficient=cursor.get("entropy_coefficient", services.config.algorithm.entropy_coefficient),
    )


def rewind(services: Services, state: RunState) -> None:
    """Drops what was written after the step that the run continues from, so that every step shows once."""
    truncate_after(services.trajectories.directory, state.step)
    alerts.truncate_after(services.workdir, state.step)
    write_evaluations(services, state)


def evaluate(services: Services, state: RunState, stage: str) -> list[evaluation.Row]:
    """Evaluates the policy, adds the rows to the state and rewrites `evaluation.json`."""
    config = services.config
    outcomes = evaluation.evaluate(
        services.policy(state.train.params),
        services.domains,
        config.evaluation,
        tokenizer=services.tokenizer,
        model_cfg=config.model,
        max_tokens=config.rollout.max_tokens,
        prompt_bucket=config.rollout.prompt_bucket,
        seed=config.seed,
        policy_version=int(state.train.step),
    )
    rows = evaluation.rows(outcomes, stage, state.step)
    if stage == "preference":
        rows.append(evaluation.pair_row(heldout_margins(services, state), state.step))
    state.evaluations += rows
    write_evaluations(services, state)
    return rows


def write_evaluations(services: Services, state: RunState) -> None:
    """`evaluation.json`: every row so far."""
    content = json.dumps(state.evaluations, indent=1).encode()
    filesystem.write_atomic(filesystem.join(services.workdir, "evaluation.json"), content)


def evaluation_due(config: Config, step: int) -> bool:
    """At the end of each stage, and every so often."""
    return step in (config.sft.steps, config.grpo_start, config.total_steps) or step % config.evaluation.every == 0


def finish(services: Services, state: RunState) -> None:
    """Compares the last held-out accuracies with those before GRPO, prompt by prompt."""
    config = services.config
    at = lambda step: [row for row in state.evaluations if row["step"] == step and row["metric"] == "accuracy"]
    if not at(config.total_steps):  # a run that was shortened to the step where it stood
        evaluate(services, state, "grpo")
    if config.grpo.steps:
        state.evaluations += evaluation.changes(at(config.grpo_start), at(config.total_steps))
        write_evaluations(services, state)


@dataclass
class Recorder:
    """What happens after every step: evaluate, log, save, stop."""

    services: Services
    writer: MetricsWriter
    progress: Progress
    stop: Callable[[], bool]  # asked after every step; True saves and ends the run, to be resumed
    profile: tuple[int, int] | None = None  # steps [first, last] to trace for TensorBoard
    tracing: bool = False

    def begin(self, state: RunState) -> None:
        """The baseline before the first step."""
        if state.step == 0 and not state.evaluations:
            rows = evaluate(self.services, state, "baseline")
            self.writer.write(0, "baseline", _evaluation_scalars(rows))
        self._trace(state.step, ending=False)

    def after(self, state: RunState, stage: str, metrics: Metrics, collected: Collected | None) -> bool:
        """Returns whether to go on."""
        config, score = self.services.config, None
        if evaluation_due(config, state.step):
            rows = evaluate(self.services, state, stage)
            score = evaluation.macro(rows)
            metrics = {**metrics, **_evaluation_scalars(rows)}
        if collected is not None:
            self._keep(state.step, collected)
            self._check_mismatch(state.step, metrics)
        self.writer.write(state.step, stage, metrics, *_pictures(collected))
        self.progress.update(state.step, stage, {name: metrics[name] for name in GLANCE if name in metrics})
        done = state.step == config.total_steps
        stopping = self.stop() and not done
        self._trace(state.step, ending=stopping or done)
        if stopping or done or state.step % config.checkpoint.every == 0:
            save(self.services, state, score)
        return not stopping

    def _keep(self, step: int, collected: Collected) -> None:
        for group, verdicts, rewards, advantages in zip(
            collected.groups, collected.verdicts, collected.rewards, collected.advantages
        ):
            rows = [
                record(rollout, verdict, float(value) if np.isfinite(value) else None, float(advantage), step)
                for rollout, verdict, value, advantage in zip(group, verdicts, rewards, advantages)
            ]
            self.services.trajectories.append(step, rows)

    def _check_mismatch(self, step: int, metrics: Metrics) -> None:
        limit = self.services.config.grpo.mismatch_alarm
        if not metrics["policy/mismatch"] <= limit:
            alert = alerts.Alert(
                step,
                "logprob_mismatch",
                f"trainer and sampler disagree on a token's logprob by {metrics['policy/mismatch']:.3g} at an "
                f"unchanged policy (limit {limit:g}): ratios and clipping mean nothing until they agree",
                figures={"mismatch": metrics["policy/mismatch"], "limit": limit},
            )
            alerts.append(self.services.workdir, alert)

    def _trace(self, step: int, ending: bool) -> None:
        """Starts or ends the profile after `step`; a run that ends or is resumed within it has a part of it."""
        if self.profile is None:
            return
        first, last = self.profile
        if self.tracing and (ending or step >= last):
            jax.profiler.stop_trace()
            self.tracing = False
        elif not self.tracing and not ending and first - 1 <= step < last:
            jax.profiler.start_trace(os.path.join(self.services.workdir, "tensorboard"))
            self.tracing = True


def _evaluation_scalars(rows: list[evaluation.Row]) -> Metrics:
    return {f"evaluation/{row['domain']}_{row['metric']}": row["value"] for row in rows}


def _pictures(collected: Collected | None) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Histograms and sample texts of a step, for TensorBoard."""
    if collected is None:
        return {}, {}
    lengths = [float(len(rollout.completion_tokens)) for group in collected.groups for rollout in group]
    rewards = collected.rewards[np.isfinite(collected.rewards)].tolist()
    first = {}
    for group, verdicts in zip(collected.groups, collected.verdicts):
        line = f"{group[0].task.prompt}  ->  {group[0].text}  [{verdicts[0].status}]"
        first.setdefault(f"sample/{group[0].task.domain}", line)
    return {"completion/length": lengths, "reward": rewards}, first


def print_summary(config: Config, evaluations: list[evaluation.Row]) -> None:
    """Held-out accuracy per domain: before training, after each stage, with the paired change since GRPO began."""
    at = lambda step, metric: {r["domain"]: r for r in evaluations if r["step"] == step and r["metric"] == metric}
    ends = {"start": 0, "after SFT": config.sft.steps}
    ends |= {"after pairs": config.grpo_start} if config.preference.steps else {}
    before = [at(step, "accuracy") for step in ends.values()]
    final, change = at(config.total_steps, "accuracy"), at(config.total_steps, "accuracy_change")
    percent = lambda row: f"{100 * row['value']:.1f}"
    rows = []
    for name, row in final.items():
        interval = f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
        moved = change.get(name)
        text = f"{100 * moved['value']:+.1f} [{100 * moved['low']:+.1f}, {100 * moved['high']:+.1f}]" if moved else ""
        rows.append([name, *(percent(then[name]) for then in before), percent(row), interval, text, str(row["n"])])
    columns = ["domain", *ends, "after GRPO", "95% interval", "change, paired", "items"]
    print_table("Held-out accuracy, percent", columns, rows)
