"""Decoding by transformers' `generate`, in the peers benchmark: the process of that contender."""

from __future__ import annotations

import os
import time

import torch
from transformers import AutoModelForCausalLM

from benchmarks import peers_host
from benchmarks.peers_host import Turns, Work


def run(work: Work, turns: Turns) -> None:
    """All completions of all prompts as one batch, with the default cache and attention."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    prompts = torch.tensor(work.prompts).repeat_interleave(work.group_size, dim=0)

    def seconds(max_tokens: int) -> float:
        started = time.perf_counter()
        with torch.no_grad():
            output = model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
        expected = (len(prompts), work.prompt_length + max_tokens)
        if output.shape != expected:
            raise RuntimeError(f"output of shape {tuple(output.shape)} instead of {expected}")
        return time.perf_counter() - started

    while turns.begin():
        first = seconds(1)
        turns.end(first_s=first, all_s=seconds(work.max_tokens))


if __name__ == "__main__":
    peers_host.serve(run, ("transformers", "torch"))
