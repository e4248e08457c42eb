"""A GRPO step by TRL, https://github.com/huggingface/trl, in the peers benchmark: the process of that contender.

Settings: `bf16` (autocast; TRL's default precision), `gradient_checkpointing`, `micro_batch` (completions per pass).
"""

from __future__ import annotations

import os
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks import peers_host
from benchmarks.peers_host import Stopwatch, Turns, Work


def reward(completions: list[str], **_: object) -> list[float]:
    """Different words: cheap, and not the same for all."""
    return [len(set(completion.split())) / 10 for completion in completions]


class TakeTurns(TrainerCallback):
    """Starts each step when the parent asks for it. The step begins with fetching its data."""

    def __init__(self, turns: Turns, stopwatch: Stopwatch, max_tokens: int) -> None:
        self._turns, self._stopwatch, self._max_tokens = turns, stopwatch, max_tokens

    def on_train_begin(self, args, state, control, **_):
        control.should_training_stop = not self._wait()

    def on_step_end(self, args, state, control, **_):
        # Generation, rewards and reference log-probabilities are one call of the trainer's; the rest is the update.
        self._turns.end(
            generate_s=self._stopwatch.take("generate"),
            update_s=time.perf_counter() - self._started - self._stopwatch.take("collect"),
        )
        control.should_training_stop = not self._wait()

    def on_log(self, args, state, control, logs=None, **_):
        length = (logs or {}).get("completions/mean_length", self._max_tokens)
        if length != self._max_tokens:
            raise RuntimeError(f"completions of {length} tokens on average instead of {self._max_tokens}")

    def _wait(self) -> bool:
        asked = self._turns.begin()
        self._started = time.perf_counter()
        return asked


def run(work: Work, turns: Turns) -> None:
    """Steps of the trainer, one at a time."""
    torch.set_num_threads(os.cpu_count() or 1)
    completions = len(work.prompts) * work.group_size
    micro_batch = work.settings.get("micro_batch", completions)
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    work.check_prompts(tokenizer)
    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=completions // micro_batch,
            steps_per_generation=completions // micro_batch,
            num_generations=work.group_size,
            max_completion_length=work.max_tokens,
            generation_kwargs={"min_new_tokens": work.max_tokens},
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            bf16=work.settings.get("bf16", False),
            gradient_checkpointing=work.settings.get("gradient_checkpointing", False),
            model_init_kwargs={"dtype": "float32"},
            max_steps=1000,  # ended by the turns
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=False,
        )
        trainer = GRPOTrainer(
            model=work.model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": work.texts * 8}),
            processing_class=tokenizer,
            callbacks=[TakeTurns(turns, stopwatch, work.max_tokens)],
        )
        stopwatch.watch(trainer.model, "generate", "generate")
        stopwatch.watch(trainer, "_generate_and_score_completions", "collect")
        trainer.train()


if __name__ == "__main__":
    peers_host.serve(run, ("trl", "torch", "transformers", "accelerate"))
