"""GRPO's learning rate on the quickstart, three seeds each; the first is the quickstart's own.

    python -m experiments.sweep --config configs/quickstart.py --sweep configs/sweeps/learning_rate.py \\
        --workdir runs/learning_rate

Nine runs. A first look takes less: `--config.grpo.steps=20 --config.evaluation.items=64`.
"""

from typing import Any


def get_sweep() -> dict[str, Any]:
    return dict(
        grid={"update.learning_rate": [3e-4, 1e-4, 1e-3]},
        seeds=[0, 1, 2],
    )
