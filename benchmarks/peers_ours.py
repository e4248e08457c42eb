"""Ours in the peers benchmark: a GRPO step, decoding, and an import, each in a process of its own.

Settings are overrides of the run's config, {"model.remat": "full"}.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from benchmarks import peers_host
from benchmarks.peers_host import Turns, Work
from experiments import cli
from rl_posttrain import config as config_lib
from rl_posttrain import services
from rl_posttrain.algorithms.advantages import group_advantages
from rl_posttrain.algorithms.losses import sample_weights
from rl_posttrain.batch import Batch
from rl_posttrain.data.packing import Sample, Tree, pack
from rl_posttrain.data.tokenizer import make_tokenizer
from rl_posttrain.model.transformer import ModelConfig
from rl_posttrain.rollout.generate import decode_groups
from rl_posttrain.rollout.sampling import Sampling
from rl_posttrain.services import Config
from rl_posttrain.sharding import mesh as mesh_lib

ROW_MULTIPLE = 8


def run(work: Work, turns: Turns) -> None:
    """What the work asks for."""
    cli.use_compilation_cache()
    {"step": steps, "decode": decode, "import": import_model}[work.kind](work, turns)


def configure(work: Work) -> Config:
    """The run's config: a row holds one whole group, everything else as it is by default or as the settings say."""
    group = work.prompt_length - 1 + work.group_size * (work.max_tokens + 1)
    values = {
        "pretrained": work.model,
        "tasks": {"strings/reverse": {}},  # a config needs one; prompts come as ids
        "rollout": {
            "prompts_per_step": len(work.prompts),
            "group_size": work.group_size,
            "max_tokens": work.max_tokens,
        },
        "update": {"learning_rate": 1e-6},
        "grpo": {"steps": 1000, "row_length": -(-group // ROW_MULTIPLE) * ROW_MULTIPLE},
    }
    return services.parse(config_lib.apply_overrides(values, work.settings))


class Rollouts:
    """Completions of the work's prompts by `decode_groups`."""

    def __init__(self, work: Work, cfg: ModelConfig) -> None:
        prompts = np.array(work.prompts, np.int32)
        rows = len(prompts)
        self._arrays = (
            prompts,
            np.full(rows, work.prompt_length, np.int32),
            np.arange(rows, dtype=np.uint32),
            np.arange(work.group_size, dtype=np.uint32),
        )
        self._settings: dict[str, Any] = dict(model_cfg=cfg, sampling=Sampling(1.0), width=work.group_size, end_ids=())
        self._calls = 0

    def sample(self, params: Any, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and behaviour log-probabilities, both [R, W, max_tokens], on the host."""
        self._calls += 1
        key = jax.random.key(self._calls)
        outputs = decode_groups(params, *self._arrays, key, max_tokens=max_tokens, **self._settings)
        tokens, logprobs, counts, _ = map(np.asarray, jax.device_get(outputs))
        if (counts != max_tokens).any():
            raise RuntimeError(f"completions of {np.unique(counts)} tokens instead of {max_tokens}")
        return tokens, logprobs


def steps(work: Work, turns: Turns) -> None:
    """Steps as the loop takes them, without tasks and verifiers; the first one compiles."""
    config = configure(work)
    mesh = mesh_lib.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        built = services.compiled(config, mesh)
        state = built["init_train_state"](built["init_params"]())
        rollouts = Rollouts(work, config.model)
        while turns.begin():
            started = time.perf_counter()
            tokens, logprobs = rollouts.sample(built["policy"](state.params), work.max_tokens)
            sampled = time.perf_counter()
            batch = packed(work, config, tokens, logprobs, built["rows_multiple"](config.update))
            state, metrics = built["grpo_update"](state, built["place"](batch))
            metrics = jax.device_get(metrics)
            check_update(metrics, config)
            turns.end(generate_s=sampled - started, update_s=time.perf_counter() - sampled)


def packed(work: Work, config: Config, tokens: np.ndarray, logprobs: np.ndarray, rows_multiple: int) -> Batch:
    """Rewards, advantages and rows. A reward is the number of different tokens: cheap, and not the same for all."""
    rewards = np.array([[len(set(completion)) / 10 for completion in group] for group in tokens.tolist()])
    valid = np.ones(rewards.shape, bool)
    advantages = group_advantages(rewards, valid, config.algorithm.advantage)
    lengths = np.full(rewards.size, work.max_tokens)
    weights = sample_weights(lengths, valid.ravel(), config.algorithm.aggregation).reshape(rewards.shape)
    trees = [
        Tree(
            prompt,
            tuple(
                Sample(tokens[i, j], np.full(work.max_tokens, weights[i, j]), advantages[i, j], logprobs[i, j])
                for j in range(work.group_size)
            ),
        )
        for i, prompt in enumerate(work.prompts)
    ]
    return pack(trees, config.grpo.row_length, rows_multiple)[0]


def check_update(metrics: dict[str, Any], config: Config) -> None:
    """Raises RuntimeError unless the update trained, and met the policy that had sampled."""
    mismatch, skipped = float(metrics["policy/log_ratio_max"]), float(metrics["update/skipped"])
    if skipped or not mismatch <= config.grpo.mismatch_alarm:
        raise RuntimeError(f"the update is not what was asked for: {skipped=}, log ratio {mismatch}")


def decode(work: Work, turns: Turns) -> None:
    """All completions of all prompts together."""
    config = configure(work)
    mesh = mesh_lib.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        params = services.whole_model(config, mesh)
        rollouts = Rollouts(work, config.model)

        def seconds(max_tokens: int) -> float:
            started = time.perf_counter()
            rollouts.sample(params, max_tokens)
            return time.perf_counter() - started

        while turns.begin():
            turns.end(first_s=seconds(1), all_s=seconds(work.max_tokens))


def import_model(work: Work, turns: Turns) -> None:
    """From a directory to a policy that is ready to sample: config, tokenizer and weights on the device."""
    while turns.begin():
        config = configure(work)
        mesh = mesh_lib.make_mesh(config.mesh)
        with jax.set_mesh(mesh):
            make_tokenizer(config.tokenizer)
            jax.block_until_ready(services.whole_model(config, mesh))
        turns.end()


if __name__ == "__main__":
    peers_host.serve(run, ("jax", "flax"))
