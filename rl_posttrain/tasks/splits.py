"""Which prompt belongs to which split, and how a task is drawn. Standard library only.

A prompt's split is a property of its text, not of the seed or index that drew it: no choice of seeds can put
a held-out prompt into training. Every draw is a pure function of (seed, domain, split, index, attempt).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from rl_posttrain.types import Split, Task

HELDOUT_FRACTION = 0.25
ATTEMPTS = 256  # at a quarter of the prompts held out, missing the split this often by chance is below 1e-31
_SPLIT_KEY = b"rl_posttrain/split/1"


class PromptSpaceError(ValueError):
    """A domain has too few prompts for what was asked."""


@dataclass(frozen=True)
class Item:
    """What a generator makes of one random stream, before it has a place in a split."""

    prompt: str
    demonstration: str | None
    reference: dict[str, Any] = field(default_factory=dict)


def split_of(prompt: str) -> Split:
    """A fixed quarter of all texts is "heldout", by keyed BLAKE2b of the UTF-8 bytes."""
    digest = blake2b(prompt.encode(), digest_size=8, key=_SPLIT_KEY).digest()
    return "heldout" if int.from_bytes(digest, "big") < HELDOUT_FRACTION * 2**64 else "train"


def derive(*parts: int | str, bits: int = 64) -> int:
    """Below 2**bits, from a path of names and numbers. The same in every process, unlike `hash`."""
    digest = blake2b(digest_size=16)
    for part in parts:
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(4, "big") + text)  # length first: ("a", "bc") differs from ("ab", "c")
    return int.from_bytes(digest.digest(), "big") >> (128 - bits)


def find(draw: Callable[[int], Item | None], split: Split, name: str) -> Item:
    """The first of `draw(0), draw(1), ...` whose prompt is in `split`. None, a draw that failed, is skipped.

    Raises:
      PromptSpaceError: none of ATTEMPTS draws was.
    """
    item = None
    for attempt in range(ATTEMPTS):
        item = draw(attempt)
        if item is not None and split_of(item.prompt) == split:
            return item
    raise PromptSpaceError(
        f"{name}: none of {ATTEMPTS} draws gave a prompt of split {split!r}, the last was "
        f"{item.prompt if item else None!r}: the options leave too few different prompts; widen them"
    )


def procedural(
    name: str, generate: Callable[[random.Random], Item]
) -> Callable[[int, Split, Sequence[int]], list[Task]]:
    """`Domain.make` for a generator that only needs a random stream."""

    def make(seed: int, split: Split, indices: Sequence[int]) -> list[Task]:
        def task(index: int) -> Task:
            item = find(
                lambda attempt: generate(random.Random(derive(seed, name, split, index, attempt))),
                split,
                name,
            )
            return Task(name, split, index, item.prompt, item.demonstration, item.reference)

        return [task(index) for index in indices]

    return make
