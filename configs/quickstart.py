"""A policy learns on a CPU, from an empty folder: a short supervised warm-up, then GRPO on sandboxed verdicts.

python -m experiments.run --config configs/quickstart.py --workdir runs/quickstart
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0
    config.tokenizer = dict(kind="character", alphabet=" abcdefghijklmnopqrstuvwxyz0123456789=:+-*,>x[]()")
    config.model = dict(embed_dim=160, num_layers=4, num_heads=5, num_kv_heads=5, head_dim=32, mlp_dim=448)
    config.mesh = dict(data=-1)
    config.tasks = {
        "strings/reverse": dict(weight=1.0),
    }
    config.rollout = dict(prompts_per_step=32, group_size=8, temperature=1.0, max_tokens=16, prompt_bucket=32)
    config.sft = dict(steps=200, batch_size=64, examples=4096, row_length=128)
    config.grpo = dict(steps=300)
    return config.lock()
