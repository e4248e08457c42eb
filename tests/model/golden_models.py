"""The tiny models behind `tests/golden/family_*.npz`, written out as directories."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FAMILIES = sorted(path.stem.removeprefix("family_") for path in GOLDEN.glob("family_*.npz"))

_spec: Any = importlib.util.spec_from_file_location("golden_weights", GOLDEN / "weights.py")
_weights = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_weights)


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
        return _weights.draw(self.shapes, "gemma" not in self.old_config["model_type"])

    def write(self, directory: Path) -> Path:
        """The model as it would be published, in the old spelling."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.weights(), directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(self.old_config))
        return directory
