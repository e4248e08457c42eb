"""Checkpoints with Orbax: atomic, asynchronous, and restorable on another number of devices.

A checkpoint has three items. `params` stands alone, so that rollout workers and exports restore it without
the optimizer; `state` is every other array of the run; `cursor` is JSON (data position, mixture, controller).
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from rl_posttrain.batch import Params
from rl_posttrain.storage import filesystem

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointConfig:
    """How often to save, and what to keep."""

    every: int = 100  # loop steps between checkpoints
    keep: int = 2  # the latest ones; 2 leaves one to fall back to when the last is damaged
    keep_best: bool = True  # also the one with the highest held-out macro accuracy
    directory: str | None = None  # URL; None is `checkpoints` in the workdir

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every} is not a number of steps: use at least 1")
        if self.keep < 1:
            raise ValueError(f"keep={self.keep} would delete the only checkpoint: use at least 1")


class CheckpointError(OSError):
    """A checkpoint could not be written or read. `errno` is `errno.ENOSPC` when there is no space left."""

    def __str__(self) -> str:
        return str(self.strerror)  # the message, without "[Errno 28]" before it


class Checkpoints:
    """The checkpoints of one run. In a multi-process run every process makes the same calls in order."""

    def __init__(self, directory: str | os.PathLike[str], config: CheckpointConfig) -> None:
        """`directory`: local path, relative or not, or URL; created when absent. Remains of a save that was
        killed are swept away."""
        self.directory = filesystem.join(directory)
        self._retention = _Retention(config)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._retention,
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._retention.scores.update(_scores(self._manager))
        self._broken: set[int] = set()  # steps that failed to restore
        self._origin: int | None = None  # the step that this run continues from

    def save(
        self, step: int, params: Params, state: Any, cursor: Mapping[str, Any], score: float | None = None
    ) -> None:
        """Starts to save `step`; returns once the arrays are copied, so that they may be donated at once.

        A step that is already saved is left as it is. The first save after a restore removes the checkpoints
        that the restored run does not continue: the damaged ones, and those later than the restored step.

        Args:
          step: loop steps done.
          params: pytree of arrays.
          state: pytree of arrays, PRNG keys (`jax.random.key`) included.
          cursor: JSON data.
          score: held-out macro accuracy, the higher the better, or None.

        Raises:
          CheckpointError: this save, or the one before it, could not be written. Earlier ones are intact.
          ValueError: `score` is not finite, `cursor` is not JSON, or a tree has no arrays.
        """
        for name, tree in (("params", params), ("state", state)):
            if not jax.tree.leaves(tree):
                raise ValueError(f"{name}={tree!r} has no arrays, which Orbax cannot store: pass at least one")
        if score is not None and not math.isfinite(score):
            raise ValueError(f"score={score} cannot be ranked: pass None when there is no held-out result")
        try:
            json.dumps(cursor, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the cursor of step {step} is not JSON data: {error}") from error
        self.wait()
        self._drop_abandoned()
        if step in self._manager.all_steps():
            return
        arguments = ocp.args.Composite(
            params=ocp.args.StandardSave(params),
            state=ocp.args.StandardSave(state),
            cursor=ocp.args.JsonSave(dict(cursor)),
            score=ocp.args.JsonSave({"score": score}),
        )
        if score is not None:
            self._retention.scores[step] = score
        try:
            self._manager.save(step, args=arguments, force=True)
        except Exception as error:
            raise self._save_error(error) from error

    def latest(self) -> int | None:
        """The last step that is wholly written; waits for a save under way."""
        self.wait()
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step with the highest score, the later one of equals; None when none has a score."""
        self.wait()
        return _best(self._retention.scores, self._manager.all_steps())

    def restore(
        self, abstract_params: Any, abstract_state: Any, step: int | None = None
    ) -> tuple[int, Params, Any, dict[str, Any]] | None:
        """The latest checkpoint that is whole, or `step`: (step, params, state, cursor). None without any.

        Args:
          abstract_params, abstract_state: trees of `jax.ShapeDtypeStruct` with the shardings wanted; these
            may be of another mesh than the one that saved.

        Raises:
          CheckpointError: no checkpoint can be restored; the message has each step's reason.
        """
        self.wait()
        targets = {
            "params": ocp.args.StandardRestore(abstract_params),
            "state": ocp.args.StandardRestore(abstract_state),
            "cursor": ocp.args.JsonRestore(),
        }
        found = _restore(self._manager, targets, step)
        if found is None:
            return None
        self._origin, items, broken = found
        self._broken |= broken
        return self._origin, items["params"], items["state"], items["cursor"]

    def wait(self) -> None:
        """Blocks until the save under way is written. Raises CheckpointError when it could not be."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._save_error(error) from error

    def close(self) -> None:
        """Waits for the save under way and ends the background threads."""
        self.wait()
        self._manager.close()

    def _drop_abandoned(self) -> None:
        if self._origin is None:
            return
        for step in list(self._manager.all_steps()):
            if step > self._origin or step in self._broken:
                logger.warning(
                    "removing checkpoint %d of %s: the run continues from %d",
                    step,
                    self.directory,
                    self._origin,
                )
                self._manager.delete(step)
                self._retention.scores.pop(step, None)
        self._origin = None

    def _save_error(self, error: Exception) -> CheckpointError:
        """What to tell people about a failed save, with the cause out of the storage library's words."""
        self._manager.reload()  # its list already lacks what the failed save would have replaced
        last = self._manager.latest_step()
        kept = "there is no earlier checkpoint" if last is None else f"the checkpoint of step {last} is intact"
        text = str(error)
        if "No space left" not in text and getattr(error, "errno", None) != errno.ENOSPC:
            return CheckpointError(errno.EIO, f"could not write a checkpoint to {self.directory}: {text}; {kept}")
        free = ""
        if filesystem.is_local(self.directory):
            free = f" ({shutil.disk_usage(self.directory).free / 2**20:.0f} MiB free)"
        return CheckpointError(
            errno.ENOSPC,
            f"no space left for a checkpoint in {self.directory}{free}; {kept}; free some space, lower "
            "checkpoint.keep, or set checkpoint.directory elsewhere, and start the run again",
        )


def restore_params(
    directory: str | os.PathLike[str], abstract_params: Any, step: int | Literal["best"] | None = None
) -> tuple[int, Params]:
    """(step, params) of a run's latest whole checkpoint, of `step`, or of the "best" scored. Writes nothing.

    Raises:
      CheckpointError: there is no such checkpoint, or it cannot be restored.
    """
    path = filesystem.join(directory)
    if not filesystem.exists(path):
        raise CheckpointError(errno.ENOENT, f"there is no checkpoint directory {path}")
    options = ocp.CheckpointManagerOptions(read_only=True, save_interval_steps=0, create=False)
    manager = ocp.CheckpointManager(path, options=options)
    try:
        if step == "best":
            step = _best(_scores(manager), manager.all_steps())
            if step is None:
                raise CheckpointError(errno.ENOENT, f"no checkpoint in {path} has a score: use step=None")
        found = _restore(manager, {"params": ocp.args.StandardRestore(abstract_params)}, step)
        if found is None:
            raise CheckpointError(errno.ENOENT, f"there is no checkpoint in {path}")
        return found[0], found[1]["params"]
    finally:
        manager.close()


@dataclass
class _Retention:
    """Orbax's preservation policy: the latest few, and the best scored one."""

    config: CheckpointConfig
    scores: dict[int, float] = field(default_factory=dict)  # by step; those without a score are absent

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """One answer per checkpoint, which come in order of steps."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = set(steps[-self.config.keep :])
        if self.config.keep_best:
            kept.add(_best(self.scores, steps))
        return [step in kept for step in steps]


def _scores(manager: ocp.CheckpointManager) -> dict[int, float]:
    """Step to score, of those that have one. A damaged checkpoint must not block the others."""
    scores = {}
    for step in manager.all_steps():
        try:
            item = manager.restore(step, args=ocp.args.Composite(score=ocp.args.JsonRestore()))
        except Exception as error:  # Orbax has no common class for what a damaged file raises
            logger.warning("the score of checkpoint %d in %s cannot be read: %s", step, manager.directory, error)
            continue
        if item["score"]["score"] is not None:
            scores[step] = float(item["score"]["score"])
    return scores


def _best(scores: Mapping[int, float], steps: Sequence[int]) -> int | None:
    """The step with the highest score, the later one of equals."""
    return max((step for step in steps if step in scores), key=lambda step: (scores[step], step), default=None)


def _restore(
    manager: ocp.CheckpointManager, targets: dict[str, Any], step: int | None
) -> tuple[int, Any, set[int]] | None:
    """(step, items, steps that failed) of `step`, or of the latest that restores. None without any."""
    known = sorted(manager.all_steps(), reverse=True)
    if step is not None and step not in known:
        raise CheckpointError(errno.ENOENT, f"no checkpoint of step {step} in {manager.directory}; has {known}")
    failures: dict[int, str] = {}
    for candidate in known if step is None else [step]:
        items = None
        try:
            items = manager.restore(candidate, args=ocp.args.Composite(**targets))
        except Exception as error:  # Orbax has no common class for what a damaged file raises
            failures[candidate] = f"{type(error).__name__}: {error}"
        if _everywhere(items is not None):
            return candidate, items, set(failures)
        failures.setdefault(candidate, "failed on another process")
        logger.warning(
            "checkpoint %d in %s does not restore, trying the one before: %s",
            candidate,
            manager.directory,
            failures[candidate],
        )
    if failures:
        reasons = "; ".join(
            f"steps {[step for step, text in failures.items() if text == reason]}: {reason}"
            for reason in dict.fromkeys(failures.values())
        )
        raise CheckpointError(
            errno.EIO,
            f"no checkpoint in {manager.directory} restores. Either all are damaged, or the model or "
            f"optimizer differs from the one that was saved. {reasons}",
        )
    return None


def _everywhere(success: bool) -> bool:
    """Whether all processes succeeded: they must agree on the step that they continue from."""
    if jax.process_count() == 1:
        return success
    return bool(multihost_utils.process_allgather(jax.numpy.asarray(success)).all())
