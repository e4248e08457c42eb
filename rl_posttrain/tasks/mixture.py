"""Which domains the prompts of a step come from: pure functions of (seed, step), plain dicts for state."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import accumulate

from rl_posttrain.tasks.splits import derive


def draw(seed: int, step: int, weights: Mapping[str, float], count: int) -> list[str]:
    """`count` domains for one step, in random order.

    Systematic resampling (Kitagawa 1996): domain d appears floor or ceil of count * w_d / sum(w) times, and
    that many on average over steps. Independent draws would add their own noise to the mixture.

    Args:
      weights: at least 0, not all 0; need not sum to 1. The order of the mapping does not matter.

    Raises:
      ValueError: for weights or a count out of range.
    """
    if count < 1:
        raise ValueError(f"count={count}: a step needs at least one prompt")
    if bad := {name: w for name, w in weights.items() if not (math.isfinite(w) and w >= 0)}:
        raise ValueError(f"weights {bad}: must be finite and at least 0")
    total = math.fsum(weights.values())
    if total <= 0:
        raise ValueError(f"weights {dict(weights)}: at least one must be above 0")
    rng = random.Random(derive("mixture", seed, step))
    # In random order, so that which neighbours share a rounding is not always the same.
    names = sorted(name for name, weight in weights.items() if weight > 0)
    rng.shuffle(names)
    edges = list(accumulate(weights[name] * count / total for name in names))
    offset, drawn, place = rng.random(), [], 0
    for i in range(count):
        while place < len(names) - 1 and edges[place] <= i + offset:
            place += 1
        drawn.append(names[place])
    rng.shuffle(drawn)
    return drawn


def assign(draws: Sequence[str], counters: Mapping[str, int]) -> tuple[list[tuple[str, int]], dict[str, int]]:
    """Gives each drawn domain its next task index.

    Args:
      counters: the next unused index of each domain; a domain that is missing starts at 0.

    Returns:
      [(domain, index), ...] in the order of `draws`, and the new counters; the old ones are unchanged.
    """
    counters = dict(counters)
    assigned = []
    for name in draws:
        index = counters.get(name, 0)
        assigned.append((name, index))
        counters[name] = index + 1
    return assigned, counters
