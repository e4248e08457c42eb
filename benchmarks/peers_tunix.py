"""Tunix, https://github.com/google/tunix, in the peers benchmark: a GRPO step, and decoding by its own sampler.

Settings: `remat`, a name of its RematConfig. Three faults of version 0.1.7 are mended here, none at a cost in speed;
without them it would compute something else, or nothing.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.generate import sampler
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout import base_rollout

from benchmarks import peers_host
from benchmarks.peers_host import Stopwatch, Turns, Work

NO_END = 5  # end token, counted from beyond the vocabulary: never drawn


def reward(completions: list[str], **_: object) -> list[float]:
    """Different words: cheap, and not the same for all."""
    return [len(set(completion.split())) / 10 for completion in completions]


def mend(rope_theta: float) -> None:
    """Its Llama ignores the configured rope_theta, and its remat breaks in the sampler's loop."""
    llama.apply_rope = functools.partial(llama.apply_rope, rope_theta=rope_theta)
    whole_layer = llama.DecoderLayer.__call__

    def call(self, x, positions, cache, mask):
        if cache is not None:  # remat saves nothing without gradients
            return self.block(x, positions, cache, mask)
        return whole_layer(self, x, positions, cache, mask)

    llama.DecoderLayer.__call__ = call


class Loaded:
    """The model, its tokenizer and a mesh of one device."""

    def __init__(self, directory: str, remat: str = "NONE") -> None:
        values = json.loads((Path(directory) / "config.json").read_text())
        self.vocab_size = values["vocab_size"]
        self.config = llama.ModelConfig(
            num_layers=values["num_hidden_layers"],
            vocab_size=self.vocab_size,
            embed_dim=values["hidden_size"],
            hidden_dim=values["intermediate_size"],
            num_heads=values["num_attention_heads"],
            head_dim=values.get("head_dim", values["hidden_size"] // values["num_attention_heads"]),
            num_kv_heads=values["num_key_value_heads"],
            rope_theta=values["rope_theta"],
            norm_eps=values["rms_norm_eps"],
            weight_tying=values["tie_word_embeddings"],
            remat_config=getattr(llama.RematConfig, remat),
        )
        mend(values["rope_theta"])
        self.mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        self.model = llama_params.create_model_from_safe_tensors(directory, self.config, self.mesh, dtype=jnp.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        # Its masks are `token != pad`: with this model's own pad, which is also its end, they would hide every end in
        # a prompt.
        self.tokenizer.pad_token = self.tokenizer.unk_token


def run(work: Work, turns: Turns) -> None:
    """What the work asks for."""
    work.check_prompts(AutoTokenizer.from_pretrained(work.model))
    {"step": steps, "decode": decode}[work.kind](work, turns)


def decode(work: Work, turns: Turns) -> None:
    """All completions of all prompts as one batch."""
    loaded = Loaded(work.model)
    config = loaded.config
    cache = sampler.CacheConfig(
        cache_size=work.prompt_length + work.max_tokens,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    generate = sampler.Sampler(loaded.model, loaded.tokenizer, cache)
    texts = [text for text in work.texts for _ in range(work.group_size)]
    calls = 0

    def seconds(max_tokens: int) -> float:
        nonlocal calls
        calls += 1  # without a seed of its own, every call draws the same
        started = time.perf_counter()
        with loaded.mesh:
            output = generate(
                texts,
                max_generation_steps=max_tokens,
                max_prompt_length=work.prompt_length,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                seed=calls,
                eos_tokens=[loaded.vocab_size + NO_END],
            )
        check_lengths(output.tokens, max_tokens)
        return time.perf_counter() - started

    while turns.begin():
        first = seconds(1)
        turns.end(first_s=first, all_s=seconds(work.max_tokens))


class OneStepATime(GRPOLearner):
    """Starts each step when the parent asks for it."""

    turns: Turns
    stopwatch: Stopwatch

    def _run_global_step(self, *arguments: Any, **keywords: Any) -> Any:
        if not self.turns.begin():
            raise StopIteration  # as when the data end
        started = time.perf_counter()
        result = super()._run_global_step(*arguments, **keywords)
        jax.block_until_ready(jax.tree.leaves(nnx.state(self.rl_cluster.actor_trainer.model)))
        generate = self.stopwatch.take("generate")
        self.turns.end(generate_s=generate, update_s=time.perf_counter() - started - generate)
        return result


def steps(work: Work, turns: Turns) -> None:
    """Steps of its learner, one at a time; the first one compiles."""
    loaded = Loaded(work.model, work.settings.get("remat", "NONE"))
    prompts = len(work.prompts)
    everywhere = {
        role: loaded.mesh for role in (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    }
    cluster = rl_cluster.RLCluster(
        actor=loaded.model,
        reference=None,
        tokenizer=loaded.tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=everywhere,
            rollout_engine="vanilla",
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-6),
                eval_every_n_steps=10**6,
                max_steps=1000,  # ended by the turns
                mini_batch_size=prompts,
                train_micro_batch_size=prompts,
                rollout_micro_batch_size=prompts,
                compute_logps_micro_batch_size=prompts,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=work.max_tokens,
                max_prompt_length=work.prompt_length,
                kv_cache_size=work.prompt_length + work.max_tokens,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                eos_tokens=[loaded.vocab_size + NO_END],
            ),
        ),
    )

    def finished(output: Any) -> Any:
        check_lengths(output.tokens, work.max_tokens)
        return output

    stopwatch = Stopwatch()
    stopwatch.watch(cluster, "generate", "generate", finish=finished)
    algorithm = GRPOConfig(num_generations=work.group_size, num_iterations=1, beta=0.0, epsilon=0.2)
    learner = OneStepATime(rl_cluster=cluster, algo_config=algorithm, reward_fns=reward)
    learner.turns, learner.stopwatch = turns, stopwatch
    with loaded.mesh:
        learner.train(itertools.repeat({"prompts": np.array(work.texts, dtype=object)}))


def check_lengths(completions: list[Any], max_tokens: int) -> None:
    """Raises RuntimeError where the work was less than asked for."""
    lengths = {len(tokens) for tokens in completions}
    if lengths != {max_tokens}:
        raise RuntimeError(f"completions of {sorted(lengths)} tokens instead of {max_tokens}")


if __name__ == "__main__":
    peers_host.serve(run, ("google-tunix", "jax", "flax"))
