"""A two-minute cut of the quickstart: the whole loop on real verdicts, and the reward rises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
CUT = {
    "sft.steps": 180,
    "grpo.steps": 40,
    "rollout.prompts_per_step": 40,
    "evaluation.items": 64,
    "evaluation.every": 1000,
    "checkpoint.every": 1000,
}


@pytest.mark.slow  # the gate runs the whole quickstart
def test_the_reward_rises_in_a_cut_of_the_quickstart(tmp_path):
    command = [sys.executable, "-m", "experiments.run", "--config", "configs/quickstart.py", "--workdir", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax")}
    overrides = [f"--config.{key}={value}" for key, value in CUT.items()]
    done = subprocess.run([*command, *overrides], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines if line["stage"] == "grpo"]
    losses = [line["loss/total"] for line in lines if line["stage"] == "sft"]
    assert len(rewards) == CUT["grpo.steps"] and len(losses) == CUT["sft.steps"]
    assert np.mean(losses[-20:]) < 0.6 * np.mean(losses[:20])
    first, last = np.mean(rewards[:10]), np.mean(rewards[-10:])
    assert last > first + 0.03, (first, last)
    mismatch = max(line["policy/mismatch"] for line in lines if line["stage"] == "grpo")
    assert mismatch < 1e-4  # the trainer recomputes what the sampler recorded
    assert not (tmp_path / "alerts.jsonl").exists()
    report = (tmp_path / "report.html").read_text()
    assert "code/" in report and "<svg" in report
