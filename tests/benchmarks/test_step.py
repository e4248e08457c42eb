"""The step benchmark: counted work against counting by hand, and a whole run on a tiny config."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import decode_cache, roofline, step
from rl_posttrain import services
from rl_posttrain.data.packing import Sample, Tree, pack
from rl_posttrain.loop import Collected
from rl_posttrain.model.transformer import ModelConfig, declare, forward, init, is_parameter, logits

CFG = ModelConfig(vocab_size=10, embed_dim=4, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=2, mlp_dim=8)
LAYER = 144  # 2 * 4*2*2 (query, output) + 2 * 4*1*2 (key, value) + 3 * 4*8 (mlp)


def test_layer_parameters_are_the_declared_matrices():
    declared = jax.tree.leaves(declare(CFG)["layers"], is_leaf=is_parameter)
    matrices = [parameter.shape for parameter in declared if parameter.initialiser == "normal"]
    assert roofline.layer_parameters(CFG) == LAYER == sum(int(np.prod(shape[1:])) for shape in matrices)


def test_forward_flops_by_hand_and_by_the_compiler():
    # 5 tokens through 3 layers, 2 of them through the table of 10 x 4, 7 pairs in 2 heads of width 2.
    assert roofline.forward_flops(CFG, 5, 2, 7) == 2 * (3 * LAYER * 5 + 10 * 4 * 2) + 3 * 2 * 7 * (2 * 2 + 2 * 2)

    cfg = ModelConfig(
        vocab_size=64, embed_dim=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=256
    )  # one layer: the compiler counts the body of a loop once
    ids = jnp.zeros((2, 32), jnp.int32)

    def scores(params):
        return logits(params, cfg, forward(params, cfg, ids, ids, ids + 1, ids - 1))

    analysis = jax.jit(scores).lower(init(jax.random.key(0), cfg)).compile().cost_analysis()
    ours = roofline.forward_flops(cfg, ids.size, ids.size, 2 * 32 * 32)  # dense attention takes every pair
    assert analysis is not None
    assert ours < analysis["flops"] < 1.1 * ours  # the rest: norms, rotation, softmax


def test_update_work_counts_only_visible_pairs():
    # A prompt of 4 (segment of 3) and completions of 2 and 1 (segments of 3 and 2), in a row of 16.
    tree = Tree([3, 4, 5, 2], (Sample([6, 1], [0.5, 0.5]), Sample([1], [0.5])))
    batch, _ = pack([tree], 16, rows=2)
    prompt_pairs, child_pairs = 1 + 2 + 3, (4 + 5 + 6) + (4 + 5)
    work = roofline.update_work(CFG, batch, micro_batches=2, parameters=1000, replicas=4)
    assert work.flops == 3 * roofline.forward_flops(CFG, 8, 8, prompt_pairs + child_pairs)
    assert work.bytes == 4 * (2 * (2 * 4000 + 8000) + 28000)


def test_prefill_and_decode_work_token_by_token():
    prefixes, completions = np.array([3, 5]), np.array([[2, 4], [1, 1]])
    work = roofline.prefill_work(CFG, prefixes, replicas=1)
    assert work.flops == roofline.forward_flops(CFG, 8, 0, 6 + 15)
    entry = 2 * 3 * 1 * 2
    assert work.bytes == 4 * (3 * LAYER + 8 * entry)

    pairs = reads = 0
    for prefix, group in zip(prefixes, completions):
        for t in range(max(group)):
            reads += prefix  # once for the whole group
            for length in group:
                if t < length:
                    pairs += prefix + t + 1
                    reads += t + 1
    work = roofline.decode_work(CFG, prefixes, completions, replicas=2)
    assert work.flops == roofline.forward_flops(CFG, 8, 8, pairs)
    assert work.bytes == 4 * (2 * 4 * (3 * LAYER + 10 * 4) + entry * (reads + 8))


def test_the_tighter_limit_bounds_the_time():
    limits = roofline.Limits(flops_per_s=100.0, read_bytes_per_s=10.0, increment_bytes_per_s=20.0)
    compute, memory = roofline.Work(400.0, 40.0), roofline.Work(100.0, 40.0)
    assert (compute.bound_s(limits), compute.bound_by(limits)) == (4.0, "compute")
    assert (memory.bound_s(limits), memory.bound_by(limits)) == (2.0, "memory")


def _program(loop):
    return SimpleNamespace(as_text=lambda: f"%body (p: (s32[])) -> (s32[]) {{\n{loop}\n}}\n\nwhile(x), body=%body\n")


def test_copies_of_a_cache_are_found():
    update = "%a = f32[2,3]{1,0} dynamic-update-slice(%p, %u, %z)"
    copy, transpose = "%c = f32[2,3]{1,0} copy(%a)", "%t = f32[2,3]{0,1} transpose(%a), dimensions={0,1}"
    other = "%d = f32[2,4]{1,0} copy(%b)"
    assert decode_cache.count_copies(_program(f"{update}\n{other}"), (2, 3)) == 0
    assert decode_cache.count_copies(_program(f"{update}\n{copy}\n{transpose}"), (2, 3)) == 2
    with pytest.raises(RuntimeError, match="no compiled loop"):
        decode_cache.count_copies(_program(other), (2, 3))


def test_a_tiny_run_publishes_consistent_figures(capsys, monkeypatch):
    monkeypatch.setattr(step, "RIGHT_ANSWERS", 4)
    monkeypatch.setattr(step, "REPEATS", 1)
    config = services.parse(
        dict(
            tokenizer=dict(kind="character", alphabet="abcdefghijklmnopqrstuvwxyz0123456789 :*+"),
            model=dict(embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=16),
            mesh=dict(data=-1),
            tasks={"strings/reverse": {}, "code/linear": {}},
            rollout=dict(prompts_per_step=16, group_size=2, max_tokens=6, prompt_bucket=32),
            algorithm=dict(kl_coefficient=0.1),
            sft=dict(steps=2, batch_size=8, examples=16, row_length=64),
            grpo=dict(steps=3, row_length=128),
        )
    )
    returned = step.measure(config, steps=2, matrix_size=32, array_bytes=2**12)
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    figures = result["figures"]
    assert (result["benchmark"], figures) == ("step", returned)
    assert result["machine"]["device_count"] == jax.device_count()

    assert figures["first_step_compilations_count"] > 0
    assert figures["steady_compilations_count"] == 0
    assert sum(figures[f"{phase}_time_share"] for phase in ("rollout", "verify", "update")) == pytest.approx(1, abs=0.1)
    assert 16 * 2 <= figures["completion_tokens_count"] <= 16 * 2 * 6
    assert figures["update_trained_tokens_per_s"] < figures["update_processed_tokens_per_s"]
    # Per device: two of the 16 prompts, two samples, two heads of width 8, 6 slots, keys and values, 2 layers.
    devices = jax.device_count()
    assert figures["decode_cache_bytes"] == 4 * (16 // devices) * 2 * 2 * 8 * 6 * 2 * 2
    assert figures["decode_cache_copies_count"] == 0
    assert figures["parameters_count"] == 43 * 16 + 2 * (2 * 16 + 4 * 16 * 16 + 3 * 16 * 16) + 16
    # Limits of matrices this small say nothing about a machine: here the shares are only numbers above 0.
    for name in ("decode_roofline_share", "update_roofline_share", "limit_flops_per_s", "limit_read_bytes_per_s"):
        assert figures[name] > 0
    for name in ("verify_strings_reverse_per_s", "verify_code_linear_per_s", "stacked_over_in_place_time_ratio"):
        assert figures[name] > 0
    assert figures["sft_step_s"] * figures["sft_trained_tokens_per_s"] >= 8  # a batch of 8 examples
    assert figures["peak_memory_bytes"] > 2**20
    assert "compiled in the first step" in "\n".join(lines)


def test_new_shapes_are_named_when_a_later_step_compiles(capsys):
    nothing = Collected([], [], np.zeros((0, 2)), None, np.zeros((0, 2)), {}, np.arange(0), {})
    make = lambda compilations, *shapes: step.Taken(
        seconds=dict(rollout=1.0, verify=1.0, update=2.0), collected=nothing, completions=8, completion_tokens=16,
        trained_tokens=16, processed_tokens=32, positions=64, compilations=compilations, shapes=frozenset(shapes),
    )  # fmt: skip
    taken = [make(5, "rows 4 x 16"), make(0, "rows 4 x 16"), make(2, "rows 8 x 16")]
    figures = step.step_figures(taken) | {"peak_memory_bytes": 1e9}
    assert (figures["steady_compilations_count"], figures["update_time_share"], figures["row_use_share"]) == (
        2,
        0.5,
        0.5,
    )
    assert (figures["verify_completions_per_s"], figures["update_processed_tokens_per_s"]) == (8.0, 16.0)
    step.show_steps(taken, figures)
    assert "step 3 compiled 2: rows 8 x 16" in capsys.readouterr().out
