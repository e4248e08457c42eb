"""Prompts and their completions become packed rows: the only row format of every trainer.

A tree is a prompt with the completions that continue it. The prompt is computed once, for all of them:

    tokens     p0 p1 | p2 a0 a1 | p2 b0 b1 b2 | pad      prompt p0 p1 p2, completions a0 a1 and b0 b1 b2
    labels     p1 p2 | a0 a1  0 | b0 b1 b2  0 |  0       the token that each position predicts
    positions   0  1 |  2  3  4 |  2  3  4  5 |  0
    segments    1  1 |  2  2  2 |  3  3  3  3 |  0       a completion sees itself and its parent
    parents    -1 -1 |  1  1  1 |  1  1  1  1 | -1

Each completion repeats the last prompt token, so that every label stands beside the position that predicts
it, and keeps its own last token, whose label is untrained, so that the end has a hidden state for a value.
Completions of a prompt of one token name a parent too, which no token is in: siblings are known by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_posttrain.batch import Batch

NO_PARENT = -1
DTYPES = {
    "tokens": np.int32,
    "labels": np.int32,
    "positions": np.int32,
    "segments": np.int32,
    "parents": np.int32,
    "loss_weight": np.float32,
    "advantages": np.float32,
    "behaviour_logprobs": np.float32,
    "reference_logprobs": np.float32,
    "proximal_logprobs": np.float32,
    "entropy_coefficient": np.float32,
    "temperature": np.float32,
    "policy_version": np.int32,
}
PADDING = {"parents": NO_PARENT, "temperature": 1.0}  # every other field is 0 on padding


@dataclass(frozen=True)
class Sample:
    """One completion, with everything that its training needs. Sequences have one entry per completion token.

    Raises:
      ValueError: lengths differ, a weight is negative, or a number is not finite.
    """

    tokens: Sequence[int] | np.ndarray  # as they were sampled; the end included when there was one
    weights: Sequence[float] | np.ndarray  # in the loss, >= 0; 0 is not trained (observations, infra failures)
    advantage: float = 0.0
    behaviour_logprobs: Sequence[float] | np.ndarray | None = None  # at `temperature`; None is zeros (no policy)
    temperature: float = 1.0
    policy_version: int = 0

    def __post_init__(self) -> None:
        lengths = {"tokens": len(self.tokens), "weights": len(self.weights)}
        numbers = [np.asarray(self.weights, np.float64), np.asarray([self.advantage, self.temperature])]
        if self.behaviour_logprobs is not None:
            lengths["behaviour_logprobs"] = len(self.behaviour_logprobs)
            numbers.append(np.asarray(self.behaviour_logprobs, np.float64))
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a sample needs one entry per completion token everywhere; lengths: {lengths}")
        if not all(np.isfinite(x).all() for x in numbers):
            raise ValueError("a sample's weights, advantage, temperature and logprobs must be finite")
        if (numbers[0] < 0).any() or self.temperature <= 0:
            raise ValueError(f"weights must be >= 0 and temperature={self.temperature} above 0")


@dataclass(frozen=True)
class Tree:
    """One prompt and the completions that continue it.

    Attributes:
      whole: its samples share a row, as a loss of pairs needs it; a tree too long for a row is then refused.

    Raises:
      ValueError: the prompt is empty (nothing predicts the first token), or there is no sample.
    """

    prompt: Sequence[int] | np.ndarray
    samples: tuple[Sample, ...]
    whole: bool = False

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise ValueError("a prompt needs at least one token, such as the separator, to predict from")
        if not self.samples:
            raise ValueError("a tree needs at least one sample: leave a tree without samples out")


@dataclass(frozen=True)
class Placement:
    """Where `trees[tree].samples[sample]` went: its labels are `labels[row, start : start + length]`."""

    tree: int
    sample: int
    row: int
    start: int
    length: int  # completion tokens


@dataclass(frozen=True)
class _Block:
    """Samples of one tree that share one copy of the prompt in one row."""

    tree: int
    samples: tuple[int, ...]
    size: int  # positions, the prompt's included


def pack(
    trees: Sequence[Tree], row_length: int, rows_multiple: int = 1, rows: int | None = None
) -> tuple[Batch, list[Placement]]:
    """Packs trees into rows of `row_length` tokens, by first-fit decreasing: dense and deterministic.

    A segment never splits. A group stays in one row when it fits one; a larger one is spread over several
    rows, with the prompt in each, unless it must stay whole. Rows are filled up with empty ones to `rows` if
    given, otherwise to `rows_multiple` times a power of two, so that few shapes are ever compiled.

    Args:
      trees: prompts with their samples.
      row_length: T, positions per row.
      rows_multiple: what B must be a multiple of: devices along the batch times micro-batches.
      rows: B exactly, for a loop that compiles one shape.

    Returns:
      The batch, NumPy fields [B, T], and one placement per sample, in order of (tree, sample).

    Raises:
      ValueError: a sample and its prompt, or a whole tree, exceed a row, or the trees need more than `rows` rows.
    """
    if row_length < 1 or rows_multiple < 1:
        raise ValueError(f"{row_length=} and {rows_multiple=} must be at least 1")
    if rows is not None and (rows < 1 or rows % rows_multiple):
        raise ValueError(f"{rows=} must be a positive multiple of {rows_multiple=}")
    blocks = [block for i, tree in enumerate(trees) for block in _blocks(i, tree, row_length)]
    placed = _first_fit_decreasing([block.size for block in blocks], row_length)
    needed = max((row + 1 for row, _ in placed), default=0)
    if rows is not None and needed > rows:
        raise ValueError(
            f"{len(trees)} trees need {needed} rows of {row_length} tokens, and {rows=}: "
            f"use at least that many rows, longer rows, or fewer trees a step"
        )
    fields = _empty(rows if rows is not None else bucket(needed, rows_multiple), row_length)
    next_segment = np.ones(len(fields["tokens"]), np.int64)
    placements: list[Placement] = []
    for block, (row, start) in zip(blocks, placed, strict=True):
        view = {name: field[row] for name, field in fields.items()}
        segment = int(next_segment[row])
        next_segment[row] += 1 + len(block.samples)
        placements += _write_block(view, trees[block.tree], block, row, start, segment)
    placements.sort(key=lambda placement: (placement.tree, placement.sample))
    return Batch(**fields), placements


def unpack(values: Any, placements: Sequence[Placement]) -> list[list[np.ndarray]]:
    """Reads per-token values, such as logprobs, back per sample: `unpack(...)[tree][sample]` is [completion].

    Args:
      values: [B, T], in the layout of the batch that `pack` returned with these placements.
    """
    values = np.asarray(values)
    trees: list[list[np.ndarray]] = [[] for _ in range(max((p.tree + 1 for p in placements), default=0))]
    for placement in sorted(placements, key=lambda p: (p.tree, p.sample)):
        trees[placement.tree].append(values[placement.row, placement.start : placement.start + placement.length])
    return trees


def bucket(rows: int, multiple: int) -> int:
    """The least `multiple` times a power of two that is at least `rows`, and never 0."""
    size = multiple
    while size < rows:
        size *= 2
    return size


def positions(tree: Tree) -> int:
    """Positions that the tree takes up in one row: the prompt once, less its last token, which each sample repeats."""
    return len(tree.prompt) - 1 + sum(len(sample.tokens) + 1 for sample in tree.samples)


def untrained_samples(trees: Sequence[Tree]) -> int:
    """How many samples train nothing (no token, or every weight 0): a number for the log, never a silence."""
    return sum(not np.any(sample.weights) for tree in trees for sample in tree.samples)


def _blocks(index: int, tree: Tree, row_length: int) -> list[_Block]:
    """The whole group if it fits a row, else as few parts as first-fit decreasing finds."""
    prefix = len(tree.prompt) - 1
    sizes = [len(sample.tokens) + 1 for sample in tree.samples]
    if prefix + max(sizes) > row_length:
        raise ValueError(
            f"tree {index}: a prompt of {len(tree.prompt)} tokens and a completion of {max(sizes) - 1} need "
            f"{prefix + max(sizes)} positions, and {row_length=}: use longer rows, or shorter prompts or "
            "completions"
        )
    if tree.whole and positions(tree) > row_length:
        raise ValueError(
            f"tree {index}: a prompt of {len(tree.prompt)} tokens and completions of {[n - 1 for n in sizes]} need "
            f"{positions(tree)} positions in one row, and {row_length=}: use longer rows, or leave it out"
        )
    parts: dict[int, list[int]] = {}
    for sample, (part, _) in enumerate(_first_fit_decreasing(sizes, row_length - prefix)):
        parts.setdefault(part, []).append(sample)
    return [_Block(index, tuple(part), prefix + sum(sizes[s] for s in part)) for _, part in sorted(parts.items())]


def _first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """(bin, offset) of each item: largest first, each into the first bin with room; ties in given order."""
    places = [(0, 0)] * len(sizes)
    used: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fitting = (i for i, filled in enumerate(used) if filled + sizes[item] <= capacity)
        chosen = next(fitting, len(used))
        if chosen == len(used):
            used.append(0)
        places[item] = (chosen, used[chosen])
        used[chosen] += sizes[item]
    return places


def _empty(rows: int, row_length: int) -> dict[str, Any]:
    shape = (rows, row_length)
    return {name: np.full(shape, PADDING.get(name, 0), dtype) for name, dtype in DTYPES.items()}


def _write_block(
    fields: dict[str, np.ndarray], tree: Tree, block: _Block, row: int, start: int, segment: int
) -> list[Placement]:
    """Writes the prompt and the samples of one block into a row's fields [T]."""
    prompt = np.asarray(tree.prompt, np.int32)
    prefix = len(prompt) - 1
    head = slice(start, start + prefix)
    fields["tokens"][head] = prompt[:-1]
    fields["labels"][head] = prompt[1:]
    fields["positions"][head] = np.arange(prefix)
    fields["segments"][head] = segment
    placements = []
    offset = start + prefix
    for child, index in enumerate(block.samples, start=1):
        sample = tree.samples[index]
        length = len(sample.tokens)
        span, trained = slice(offset, offset + length + 1), slice(offset, offset + length)
        fields["tokens"][span] = np.concatenate([prompt[-1:], np.asarray(sample.tokens, np.int32)])
        fields["labels"][trained] = sample.tokens
        fields["positions"][span] = prefix + np.arange(length + 1)
        fields["segments"][span] = segment + child
        fields["parents"][span] = segment
        fields["loss_weight"][trained] = sample.weights
        fields["advantages"][trained] = sample.advantage
        if sample.behaviour_logprobs is not None:
            fields["behaviour_logprobs"][trained] = sample.behaviour_logprobs
        fields["temperature"][span] = sample.temperature
        fields["policy_version"][span] = sample.policy_version
        placements.append(Placement(block.tree, index, row, offset, length))
        offset += length + 1
    return placements
