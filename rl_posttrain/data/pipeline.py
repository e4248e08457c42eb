"""Resumable input: a grain pipeline that visits every item once an epoch, each epoch in another order.

The whole state of an iterator is a small JSON value. The order is a function of (seed, epoch), never of a
generator that advances, so that a run which stops after any step and resumes reads what it would have read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np

Source = Sequence[Any] | grain.sources.RandomAccessDataSource[Any]  # random access to items, such as a list


def make_iterator(
    source: Source | Mapping[str, Source],
    weights: Mapping[str, float] | None = None,
    *,
    batch_size: int,
    seed: int,
    epochs: int | None = None,
) -> grain.DatasetIterator:
    """An iterator over lists of items, with `get_state()` and `set_state(state)`; the state is JSON data.

    Batches straddle epochs, so every step is full: with 3 items and a batch of 8, a batch holds some items
    more than once. With `epochs`, each item comes exactly that often, and the last batch may be short; it is
    never dropped. Items are handed over as they are.

    Args:
      source: items, or several named sources to draw from in the proportions of `weights`.
      weights: a positive number per named source; equal ones if left out.
      batch_size: items per list.
      seed: of the order, any integer >= 0.
      epochs: passes over the source; None repeats for ever. A mixture always repeats: its sources have
        epochs of their own.

    Raises:
      ValueError: an empty source (there is nothing to train on), or arguments that contradict each other.
    """
    if batch_size < 1 or seed < 0 or (epochs is not None and epochs < 1):
        raise ValueError(f"{batch_size=} and {epochs=} must be at least 1, {seed=} at least 0")
    if isinstance(source, Mapping):
        if epochs is not None:
            raise ValueError(f"{epochs=} has no meaning for a mixture, whose sources differ in length: leave it out")
        dataset = _mixture(source, weights, seed)
    elif weights is not None:
        raise ValueError(f"{weights=} needs several sources: give a mapping of name to source")
    else:
        dataset = _repeated(source, "source", seed, 0, epochs)
    batches = dataset.batch(batch_size, drop_remainder=False, batch_fn=list)
    # No read-ahead threads: making an item is cheap, and a bad one fails in the step that asked for it.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(batches.to_iter_dataset(options))


def _mixture(sources: Mapping[str, Source], weights: Mapping[str, float] | None, seed: int) -> grain.MapDataset:
    weights = {name: 1.0 for name in sources} if weights is None else weights
    if not sources or set(weights) != set(sources):
        raise ValueError(f"weights for {sorted(weights)} and sources {sorted(sources)} must have the same names")
    bad = {name: weight for name, weight in weights.items() if not (math.isfinite(weight) and weight > 0)}
    if bad:
        raise ValueError(f"weights {bad} must be positive: leave out a source that should not be drawn")
    names = sorted(sources)  # the order of a mapping must not change what is drawn
    datasets = [_repeated(sources[name], name, seed, i, None) for i, name in enumerate(names)]
    return grain.MapDataset.mix(datasets, [weights[name] for name in names])


def _repeated(source: Source, name: str, seed: int, stream: int, epochs: int | None) -> grain.MapDataset:
    if len(source) == 0:
        raise ValueError(f"source {name!r} has no items: there is nothing to train on")
    # grain shuffles epoch e with seed + e, so neighbouring seeds would share orders: scatter them first.
    scattered = int(np.random.SeedSequence((seed, stream)).generate_state(1, np.uint32)[0])
    return grain.MapDataset.source(source).shuffle(scattered).repeat(epochs)
