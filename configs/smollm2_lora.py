"""The same as smollm2_grpo.py with adapters: 4.9 M of 134.5 M parameters are trained, saved and exported.

    python -m experiments.run --config configs/smollm2_lora.py --workdir runs/smollm2-lora
    python -m experiments.export runs/smollm2-lora --out models/smollm2-arithmetic            merged
    python -m experiments.export runs/smollm2-lora --out models/smollm2-adapter --adapter     in PEFT's format

`--config.lora.base=int8` keeps the frozen model in 8 bits; what that costs: docs/performance.md.
"""

from ml_collections import ConfigDict

from configs import smollm2_grpo


def get_config() -> ConfigDict:
    config = smollm2_grpo.get_config().unlock()
    config.lora = dict(rank=16, alpha=32.0)
    config["update"].learning_rate = 2e-4
    return config.lock()
