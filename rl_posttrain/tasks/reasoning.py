"""Domains of reasoning-gym. The library lives in one confined worker process and is never imported here.

Its scorers differ in quality: see reasoning_catalogue.py for what is refused and why. A completion is right
only when the scorer gives it full marks; hangs are killed and count as timeouts of that completion.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_posttrain.config import ConfigError, build
from rl_posttrain.tasks.answers import last_number
from rl_posttrain.tasks.reasoning_catalogue import BLOCKED, COMPARED_EXACTLY, USABLE
from rl_posttrain.tasks.reasoning_process import Worker, WorkerError, WorkerRefusal, WorkerTimeout
from rl_posttrain.tasks.registry import Domain, Tools, register, require_member
from rl_posttrain.tasks.splits import PromptSpaceError
from rl_posttrain.types import Split, Task, Verdict

MAKE_S = 120.0  # per item: knight_swap takes 0.4 s on average and has a long tail
SCORE_S = 5.0  # per text: scorers take under a millisecond, the slowest 40 ms
TEXT_LIMIT = 8192  # characters; the longest answers have about 500


@dataclass(frozen=True)
class Options:
    """Options of every reasoning domain.

    Attributes:
      config: passed to the generator, e.g. {"min_word_len": 3}; its own defaults otherwise.
      tag: None asks the question in full. A short text replaces the generator's fixed wording, which a small
        model cannot read: "spell" turns "Spell this word backward (...): sun" into "spell sun".
      answer: what of a completion is judged: all of it, or the last number in it, for models that answer in sentences.
    """

    config: dict[str, Any] = field(default_factory=dict)
    tag: str | None = None
    answer: Literal["text", "number"] = "text"

    def __post_init__(self) -> None:
        for key in ("seed", "size"):
            if key in self.config:
                raise ValueError(f"config.{key}={self.config[key]!r}: is set by the run; remove it")
        if self.tag is not None and (not self.tag.strip() or len(self.tag) > 32):
            raise ValueError(f"tag={self.tag!r}: must have 1 to 32 characters; leave it out for full questions")
        try:
            json.dumps(self.config)
        except TypeError as error:
            raise ValueError(f"config={self.config!r}: must be plain JSON values ({error})") from None


@register("reasoning", USABLE)
def load(name: str, options: dict[str, Any], tools: Tools) -> Domain:
    """See `registry.load`. Starts the worker, so that a config the generator refuses fails here.

    Raises:
      WorkerError: the worker cannot start.
    """
    member = name.partition("/")[2]
    if member in BLOCKED:
        raise ConfigError(f"domain {name!r} cannot be used as a reward: {BLOCKED[member]}")
    require_member(name, USABLE)
    settings = build(Options, options, name)
    if tools.confine is None:
        raise ConfigError(
            f"domain {name!r}: needs Tools.confine, since reasoning-gym runs confined; "
            "pass sandbox.bubblewrap.confined_command"
        )
    worker = tools.helpers.setdefault("reasoning", Worker(tools.confine))
    exact = member in COMPARED_EXACTLY
    request = {"dataset": member, "config": settings.config, "tag": settings.tag, "exact": exact}
    try:
        worker.ask({**request, "op": "check"}, MAKE_S)
    except WorkerRefusal as error:
        raise ConfigError(f"{name}.config={settings.config!r}: the generator refuses it: {error}") from error

    def make(seed: int, split: Split, indices: Sequence[int]) -> list[Task]:
        tasks = []
        for index in indices:
            try:
                item = worker.ask({**request, "op": "make", "seed": seed, "split": split, "index": index}, MAKE_S)
            except WorkerRefusal as error:
                if error.kind == PromptSpaceError.__name__:
                    raise PromptSpaceError(error.message) from None
                raise
            tasks.append(Task(name, split, index, item["prompt"], item["demonstration"], item["reference"]))
        return tasks

    def score(tasks: Sequence[Task], texts: Sequence[str]) -> list[Verdict]:
        known: dict[tuple[int, int, str], Verdict] = {}  # samples of a group often agree
        verdicts = []
        for task, text in zip(tasks, texts, strict=True):
            key = (task.reference["dataset_seed"], task.reference["item"], text)
            if key not in known:
                answer = text.strip() if settings.answer == "text" else _bare_number(text)
                known[key] = Verdict("malformed", detail="no number in it")
                if answer is not None:
                    known[key] = _score(worker, request, task, answer)
            verdicts.append(known[key])
        return verdicts

    return Domain(name, make, score)


def _score(worker: Worker, request: dict[str, Any], task: Task, text: str) -> Verdict:
    if len(text) > TEXT_LIMIT:
        return Verdict("malformed", detail=f"{len(text)} characters; an answer has at most {TEXT_LIMIT}")
    if request["exact"]:
        right = _words(text) == _words(task.reference["answer"])
        return Verdict("pass") if right else Verdict("wrong")
    question = {**request, "op": "score", "reference": task.reference, "text": text}
    for last in (False, True):  # a crash may be the machine's fault once
        with worker.lock:
            try:
                worker.ask(question, MAKE_S)
            except WorkerError as error:
                return Verdict("infra_error", detail=str(error))
            try:
                reply = worker.reply(SCORE_S)
            except WorkerTimeout as error:
                return Verdict("timeout", detail=str(error))
            except WorkerError as error:
                if last:
                    return Verdict("error", detail=f"the scorer died on this text twice: {error}")
                continue
            return Verdict("pass" if reply["right"] else "wrong", detail=reply["detail"])
    raise AssertionError("unreachable: the second round returns")


def _bare_number(text: str) -> str | None:
    """The last number, without the commas of its thousands."""
    found = last_number(text)
    return None if found is None else found.replace(",", "")


def _words(text: str) -> list[list[str]]:
    """Lines of words: matrices compare whatever the spacing."""
    return [line.split() for line in text.strip().splitlines()]
