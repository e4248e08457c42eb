"""A policy learns on a CPU, from an empty folder: a short supervised warm-up, then GRPO on sandboxed verdicts.

    python -m experiments.run --config configs/quickstart.py --workdir runs/quickstart

A character model of 1.05 M parameters. The warm-up stops early, where the policy is right now and then; GRPO takes it
from there. Ten domains: own string puzzles, reasoning-gym in its confined worker, and programs run in the
sandbox. What to expect: docs/results/quickstart/README.md, with three seeds.
"""

from ml_collections import ConfigDict

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0
    config.tokenizer = dict(kind="character", alphabet=LETTERS + LETTERS.upper() + "0123456789 ,:>+-*()[]")
    # Prompts are short: a small rope_theta lets every rotation tell neighbours apart.
    config.model = dict(
        embed_dim=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        mlp_dim=512,
        qk_norm=True,
        rope_theta=100.0,
        remat="full",
    )
    config.mesh = dict(data=-1)
    config.tasks = {
        "strings/reverse": dict(options=dict(min_length=3, max_length=6, letters=10)),
        "strings/sort": dict(options=dict(min_length=3, max_length=6, letters=10)),
        "strings/interleave": dict(options=dict(min_length=2, max_length=4, letters=10)),
        "strings/remove": dict(options=dict(min_length=3, max_length=6, letters=6)),
        "strings/expand": dict(options=dict(min_runs=2, max_runs=3, letters=10)),
        "strings/dedupe": dict(options=dict(min_runs=2, max_runs=4, letters=10)),
        "reasoning/spell_backward": dict(options=dict(tag="spell", config=dict(min_word_len=3, max_word_len=5))),
        "reasoning/palindrome_generation": dict(options=dict(tag="pal", config=dict(min_length=3, max_length=5))),
        "code/arithmetic": dict(options=dict(max_number=12)),
        "code/slices": dict(options=dict(max_parts=1, letters=10)),
    }
    # Stopped early and without a decay: what is left to learn is GRPO's.
    config.sft = dict(
        steps=240, batch_size=80, examples=8192, row_length=64, update=dict(learning_rate=1.5e-3, warmup_steps=20)
    )
    config.rollout = dict(prompts_per_step=50, group_size=8, temperature=1.0, max_tokens=14, prompt_bucket=32)
    config.grpo = dict(steps=180, row_length=96)
    config.update = dict(learning_rate=3e-4, warmup_steps=10, schedule="linear", final_learning_rate_fraction=0.1)
    config.evaluation = dict(items=256, every=60)
    config.checkpoint = dict(every=120)
    return config.lock()
