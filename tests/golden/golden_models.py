"""The tiny models behind `family_*.npz`: weights from a frozen generator, so that no file holds them, and directories.

`make.py` draws the same weights for transformers.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).resolve().parent
FAMILIES = sorted(path.stem.removeprefix("family_") for path in GOLDEN.glob("family_*.npz"))


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


class Golden:
    """What transformers computed for one tiny model."""

    def __init__(self, name: str) -> None:
        with np.load(GOLDEN / f"family_{name}.npz") as file:
            arrays = {key: file[key] for key in file.files}
        self.tokens, self.lengths = arrays["tokens"], arrays["lengths"]
        first = int(self.lengths[0])
        self.logits = (arrays["logits"][:first], arrays["logits"][first:])  # of each row, [length, V]
        wide = (arrays["logits_bfloat16"].astype(np.uint32) << 16).view(np.float32)
        self.logits_bfloat16 = (wide[:first], wide[first:])
        self.old_config: dict[str, Any] = json.loads(str(arrays["old_config"]))
        self.new_config: dict[str, Any] = json.loads(str(arrays["new_config"]))
        self.shapes: dict[str, list[int]] = json.loads(str(arrays["shapes"]))
        # What RoPE of some types depends on; the padded batch had the length of its longest row.
        self.run_length = first

    def weights(self) -> dict[str, np.ndarray]:
        return draw(self.shapes, "gemma" not in self.old_config["model_type"])

    def write(self, directory: Path) -> Path:
        """The model as it would be published, in the old spelling."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.weights(), directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(self.old_config))
        return directory
