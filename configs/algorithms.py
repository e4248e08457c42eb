"""Published policy-gradient recipes, each as the `algorithm` section of a config. docs/algorithms.md has the table.

In a config file: `config.algorithm = RECIPES["gspo"]`. On the command line:

    python -m experiments.run --config configs/quickstart.py --workdir runs/gspo $(python -m configs.algorithms gspo)

Every choice is spelt, defaults included, so that a recipe does not change with them. What a recipe asks of other
sections is in `BESIDE`, or said beside it; the command line has both.
"""

import sys
from typing import Any

_CLIP = dict(ratio="token", surrogate="clip", clip_low=0.2, clip_high=0.2)

RECIPES: dict[str, dict[str, Any]] = {
    # DeepSeekMath, https://arxiv.org/abs/2402.03300.
    "grpo": dict(
        advantage="mean_std", aggregation="sequence_mean", **_CLIP, kl="k3", kl_in="loss", kl_coefficient=0.04
    ),
    # https://arxiv.org/abs/2503.20783: no division by deviation or length. Set constant_length to rollout.max_tokens.
    "dr_grpo": dict(advantage="mean", aggregation="constant_length", constant_length=1024, **_CLIP),
    # https://arxiv.org/abs/2503.14476: token mean, clip-higher, no KL; dynamic sampling and overlong punishment are in
    # `BESIDE`.
    "dapo": dict(
        advantage="mean_std", aggregation="token_mean", ratio="token", surrogate="clip", clip_low=0.2, clip_high=0.28
    ),
    # https://arxiv.org/abs/2507.18071. The bounds are of a geometric mean over the sample, hence so close to 1.
    "gspo": dict(
        advantage="mean_std",
        aggregation="sequence_mean",
        ratio="sequence",
        surrogate="clip",
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    # MiniMax-M1, https://arxiv.org/abs/2506.13585: no lower bound, and an upper one that the paper tunes; here 5.
    "cispo": dict(
        advantage="mean_std", aggregation="token_mean", ratio="token", surrogate="cispo", clip_low=1.0, clip_high=4.0
    ),
    # https://arxiv.org/abs/2402.14740: REINFORCE on whole completions, so a sum over tokens. Takes grpo.epochs=1 and
    # grpo.mini_batches=1: nothing corrects for a policy that has moved.
    "rloo": dict(
        advantage="leave_one_out",
        aggregation="constant_length",
        constant_length=1,
        surrogate="reinforce",
        kl="k1",
        kl_in="reward",
        kl_coefficient=0.03,
    ),
    # https://arxiv.org/abs/2501.03262: one baseline and one deviation for the whole step.
    "reinforce_pp": dict(
        advantage="step_mean",
        advantage_scale="step",
        aggregation="token_mean",
        **_CLIP,
        kl="k1",
        kl_in="reward",
        kl_coefficient=0.01,
    ),
    # Same paper, for several samples a prompt: the group's mean as the baseline, and the KL in the loss.
    "reinforce_pp_baseline": dict(
        advantage="mean",
        advantage_scale="step",
        aggregation="token_mean",
        **_CLIP,
        kl="k2",
        kl_in="loss",
        kl_coefficient=0.01,
    ),
    # https://arxiv.org/abs/2511.20347
    "sapo": dict(
        advantage="mean_std",
        aggregation="sequence_mean",
        ratio="token",
        surrogate="soft_gate",
        gate_positive=1.0,
        gate_negative=1.05,
    ),
    # IcePop, https://arxiv.org/abs/2510.18855: GRPO without the tokens on which sampler and trainer disagree.
    "icepop": dict(
        advantage="mean_std",
        aggregation="token_mean",
        **_CLIP,
        proximal="step_start",
        correction="masked",
        correction_low=0.5,
        correction_high=5.0,
    ),
    # Decoupled PPO, https://arxiv.org/abs/2505.24298, for stale samples; the weight bounded as in IMPALA's V-trace.
    "decoupled": dict(
        advantage="mean_std",
        aggregation="token_mean",
        **_CLIP,
        proximal="step_start",
        correction="truncated",
        correction_high=2.0,
    ),
}


# What a recipe sets outside the section `algorithm`, by dotted key.
BESIDE: dict[str, dict[str, Any]] = {
    # The paper refills without a bound. Its buffer is a fifth of the longest completion allowed, 4096 of 20480 tokens:
    # set overlong_buffer to that share of rollout.max_tokens; 3 is the quickstart's.
    "dapo": {
        "rollout.refill": 3,
        "rewards.correct": 1.0,
        "rewards.wrong": -1.0,
        "rewards.malformed": -1.0,
        "rewards.truncated": "malformed",
        "rewards.overlong_buffer": 3,
        "rewards.overlong_penalty": 1.0,
    },
}


def flags(name: str) -> str:
    """The recipe as options of `python -m experiments.run`."""
    settings = {f"algorithm.{key}": value for key, value in RECIPES[name].items()} | BESIDE.get(name, {})
    return " ".join(f"--config.{key}={value}" for key, value in settings.items())


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in RECIPES:
        sys.exit(f"usage: python -m configs.algorithms RECIPE, one of {', '.join(RECIPES)}")
    print(flags(sys.argv[1]))
