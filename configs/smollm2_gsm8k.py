"""GRPO on grade-school mathematics: SmolLM2-135M-Instruct on GSM8K, from two jsonl files.

    python -m experiments.run --config configs/smollm2_gsm8k.py --workdir runs/smollm2-gsm8k \
        --config.tasks.math/jsonl.options.train=data/gsm8k/train.jsonl \
        --config.tasks.math/jsonl.options.heldout=data/gsm8k/test.jsonl

Each line is an object with "question" and "answer" (https://github.com/openai/grade-school-math). The supervised
warm-up teaches the form of the worked solutions, and GRPO goes on from there. A model of this size answers few of
these questions, and a step takes minutes on a CPU: the config is for an accelerator, or for a larger model by
`--config.pretrained=DIRECTORY`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0
    config.pretrained = "models/smollm2-135m"
    config.tasks = {
        "math/jsonl": dict(options=dict(train="data/gsm8k/train.jsonl", heldout="data/gsm8k/test.jsonl")),
    }
    config.model = dict(remat="full")
    config.sft = dict(
        steps=100,
        batch_size=32,
        row_length=512,
        update=dict(learning_rate=2e-5, warmup_steps=10, schedule="cosine", micro_batches=4),
    )
    config.rollout = dict(prompts_per_step=16, group_size=8, temperature=1.0, max_tokens=256, prompt_bucket=64)
    config.grpo = dict(steps=200, row_length=1024)
    config.update = dict(learning_rate=5e-6, warmup_steps=10, micro_batches=4)
    config.evaluation = dict(items=256, every=50, rows=64)
    return config.lock()
