"""Weights of the tiny models behind the golden logits: drawn from a frozen generator, so that no file holds them."""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np


def draw(shapes: Mapping[str, Sequence[int]], ones: bool) -> dict[str, np.ndarray]:
    """Float32 values by name. `ones`: norms lie around 1 (else around 0, for families that add 1)."""
    drawn = {}
    for name, shape in shapes.items():
        # RandomState's streams never change, unlike those of the newer Generator.
        values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape))
        if "norm" in name:
            values = ones + 0.2 * values
        elif len(shape) == 1:
            values = 0.3 * values
        elif "embed" in name or "lm_head" in name:
            values = 0.3 * values
        else:
            values = values / np.sqrt(shape[-1])
        drawn[name] = values.astype(np.float32)
    return drawn
