"""Questions with a final answer, from files: one JSON object a line with "question" and "answer", as GSM8K has them.

The expected answer is `answers.final_answer` of "answer", which may hold the whole solution ("... #### 18"). A
completion is right when its final answer is the same number, or the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from rl_posttrain.config import ConfigError, build
from rl_posttrain.tasks.answers import final_answer, same
from rl_posttrain.tasks.registry import Domain, Tools, register, require_member
from rl_posttrain.tasks.splits import derive
from rl_posttrain.types import Split, Task, Verdict

CALCULATION = re.compile(r"<<.*?>>")  # GSM8K's notes for a calculator


@dataclass(frozen=True)
class Files:
    """Where the questions are.

    Attributes:
      train: a jsonl file to train on.
      heldout: another to evaluate on. No question may stand in both.
    """

    train: str
    heldout: str


@register("math", ("jsonl",))
def load(name: str, options: dict[str, Any], tools: Tools) -> Domain:
    """See `registry.load`. Reads both files.

    Raises:
      ConfigError: a file is missing or empty, a line is not a question with an answer, or a question is in both.
    """
    require_member(name, ("jsonl",))
    files = build(Files, options, name)
    rows: dict[Split, list[tuple[str, str]]] = {"train": _read(files.train), "heldout": _read(files.heldout)}
    shared = {question for question, _ in rows["train"]} & {question for question, _ in rows["heldout"]}
    if shared:
        raise ConfigError(
            f"{name}: {len(shared)} questions are in both {files.train} and {files.heldout}, such as "
            f"{min(shared)[:80]!r}: take them out of one"
        )

    def make(seed: int, split: Split, indices: Sequence[int]) -> list[Task]:
        known = rows[split]
        tasks = []
        for index in indices:
            epoch, place = divmod(index, len(known))
            question, answer = known[_shuffled(seed, name, split, epoch, len(known))[place]]
            tasks.append(
                Task(
                    name,
                    split,
                    index,
                    question,
                    CALCULATION.sub("", answer),
                    {"answer": final_answer(answer)},
                )
            )
        return tasks

    def score(tasks: Sequence[Task], texts: Sequence[str]) -> list[Verdict]:
        return [_score(task, text) for task, text in zip(tasks, texts, strict=True)]

    return Domain(name, make, score)


def _score(task: Task, text: str) -> Verdict:
    answer = final_answer(text)
    if answer is None:
        return Verdict("malformed", detail="no answer: neither a box, nor an answer tag, nor a number")
    right = same(answer, task.reference["answer"])
    return Verdict("pass" if right else "wrong", detail=f"answered {answer[:80]!r}")


def _read(path: str) -> list[tuple[str, str]]:
    """(question, answer) of each line; a question that comes twice counts once."""
    if not Path(path).is_file():
        raise ConfigError(f"{path}: there is no such file; name a jsonl file with questions and answers")
    found: dict[str, str] = {}
    with open(path, encoding="utf-8") as lines:
        for count, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                question, answer = row["question"], row["answer"]
                expected = final_answer(answer)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f'{path}, line {count}: must be an object with the texts "question" and "answer" ({error!r})'
                ) from error
            if not isinstance(question, str) or expected is None:
                raise ConfigError(f"{path}, line {count}: the answer {answer[:80]!r} holds no final answer")
            found.setdefault(question, answer)
    if not found:
        raise ConfigError(f"{path} holds no questions")
    return list(found.items())


@lru_cache(maxsize=8)
def _shuffled(seed: int, name: str, split: str, epoch: int, count: int) -> list[int]:
    """The order of an epoch; the held-out one has but one order, whatever the seed."""
    order = list(range(count))
    Random(derive(0 if split == "heldout" else seed, name, split, epoch)).shuffle(order)
    return order
