"""Decoding with a shared prefix against the plain model, one sample at a time."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain.batch import Batch
from rl_posttrain.data import trees
from rl_posttrain.data.packing import pack, unpack
from rl_posttrain.data.tokenizer import CharacterTokenizer
from rl_posttrain.model.cache import empty_suffix, merge
from rl_posttrain.model.transformer import ModelConfig, forward, init, logits, token_logprobs
from rl_posttrain.rollout.generate import decode_groups, generate
from rl_posttrain.rollout.sampling import Sampling
from rl_posttrain.types import Task

TOKENIZER = CharacterTokenizer("abcdefgh ")
BASE = dict(vocab_size=12, embed_dim=32, num_layers=2, num_heads=4, head_dim=8, mlp_dim=64)
CONFIGS = {
    "plain": ModelConfig(**BASE, num_kv_heads=4),
    "grouped": ModelConfig(**BASE, num_kv_heads=2, qk_norm=True, qkv_bias=True, tie_embeddings=False, vocab_multiple=8),
}  # fmt: skip
TASKS = [Task("test/echo", "train", i, prompt) for i, prompt in enumerate(["abc", "h", "", "hgfedcba abc"])]


def _generate(params, cfg, tasks=TASKS, rows=4, bucket=8, width=3, temperature=1.3, seed=7, max_tokens=9):
    return generate(
        params, tasks, tokenizer=TOKENIZER, model_cfg=cfg, sampling=Sampling(temperature), width=width,
        max_tokens=max_tokens, prompt_bucket=bucket, rows=rows, key=jax.random.key(seed), policy_version=5,
    )  # fmt: skip


def _naive_logprobs(params, cfg, rollout):
    """Logprob of each completion token from a plain forward pass over prompt + completion, in one row."""
    ids = jnp.asarray([*rollout.prompt_tokens, *rollout.completion_tokens])[None]
    positions = jnp.arange(ids.shape[1])[None]
    hidden = forward(params, cfg, ids, positions, jnp.ones_like(ids), jnp.full_like(ids, -1))
    scores = jax.nn.log_softmax(logits(params, cfg, hidden)[0] / rollout.temperature, -1)
    start = len(rollout.prompt_tokens)
    return np.array([scores[start + i - 1, token] for i, token in enumerate(rollout.completion_tokens)])


@pytest.mark.parametrize("name", CONFIGS)
def test_decode_with_a_shared_prefix_equals_one_row_at_a_time(name):
    cfg = CONFIGS[name]
    params = init(jax.random.key(0), cfg)
    for group in _generate(params, cfg):
        assert len({rollout.completion_tokens for rollout in group}) > 1  # samples differ
        for rollout in group:
            naive = _naive_logprobs(params, cfg, rollout)
            np.testing.assert_allclose(rollout.behaviour_logprobs, naive, atol=2e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_o12_the_trainer_recomputes_every_recorded_logprob(temperature):
    cfg = CONFIGS["grouped"]
    params = init(jax.random.key(1), cfg)
    groups = _generate(params, cfg, temperature=temperature)
    ones = np.ones((len(groups), 3), np.float32)
    batch, placements = pack(trees.from_groups(groups, ones, ones), row_length=32)
    batch = Batch(**{name: jnp.asarray(getattr(batch, name)) for name in Batch.__dataclass_fields__})
    hidden = forward(params, cfg, batch.tokens, batch.positions, batch.segments, batch.parents)
    recomputed, _ = token_logprobs(params, cfg, hidden, batch.labels, batch.temperature)
    trained = np.asarray(batch.loss_weight) > 0
    difference = np.abs(np.asarray(recomputed) - np.asarray(batch.behaviour_logprobs))[trained]
    assert difference.max() < 1e-4
    np.testing.assert_allclose(np.exp(difference), 1.0, atol=1e-4)  # the ratio at an unchanged policy
    by_sample = unpack(np.asarray(recomputed), placements)
    for group, values in zip(groups, by_sample):
        for rollout, logprobs in zip(group, values):
            np.testing.assert_allclose(logprobs, rollout.behaviour_logprobs, atol=1e-4)


def test_a_draw_depends_on_the_task_and_sample_alone():
    cfg = CONFIGS["plain"]
    params = init(jax.random.key(2), cfg)
    together = _generate(params, cfg)
    for order, rows, bucket, width in [
        ([3, 1, 0, 2], 4, 8, 3),
        ([0, 1, 2, 3], 2, 16, 3),
        ([2, 0, 3, 1], 3, 4, 5),
    ]:
        other = _generate(params, cfg, [TASKS[i] for i in order], rows, bucket, width)
        for i, group in zip(order, other):
            assert [r.completion_tokens for r in group[:3]] == [r.completion_tokens for r in together[i]]
    assert [r.completion_tokens for r in _generate(params, cfg, seed=8)[0]] != [
        r.completion_tokens for r in together[0]
    ]


def test_ends_and_lengths_come_from_the_tokens_that_were_drawn():
    cfg = CONFIGS["plain"]
    groups = _generate(init(jax.random.key(3), cfg), cfg, width=16, temperature=2.0)
    rollouts = [rollout for group in groups for rollout in group]
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        ended = rollout.finish_reason == "stop"
        assert (rollout.completion_tokens[-1] in TOKENIZER.end_ids) == ended
        assert not set(rollout.completion_tokens[:-1]) & set(TOKENIZER.end_ids)
        assert ended or len(rollout.completion_tokens) == 9
        assert len(rollout.behaviour_logprobs) == len(rollout.completion_tokens)
        assert rollout.policy_version == 5


def test_several_end_ids_each_end_a_completion():
    cfg = CONFIGS["plain"]
    params = init(jax.random.key(4), cfg)
    outputs = decode_groups(
        params, jnp.array([[3, 4, 5, 2]]), jnp.array([4]), jnp.zeros(1, jnp.uint32), jnp.arange(32, dtype=jnp.uint32),
        jax.random.key(0), model_cfg=cfg, sampling=Sampling(2.0), width=32, max_tokens=8, end_ids=(1, 7, 9),
    )  # fmt: skip
    tokens, _, counts, ended = map(np.asarray, outputs)
    lasts = {int(tokens[0, j, counts[0, j] - 1]) for j in range(32) if ended[0, j]}
    assert lasts == {1, 7, 9}


def _loop_bodies(text):
    return sorted(set(re.findall(r"body=%?([\w.\-]+)", text)))


@pytest.mark.parametrize(("rows", "width"), [(4, 8), (32, 1), (1, 32)])
def test_decode_does_not_copy_the_cache(rows, width):
    """Of all arrays of a cache's size that the compiled loop writes, each is updated in place, never copied."""
    cfg = CONFIGS["plain"]
    params = init(jax.random.key(5), cfg)
    length = 64
    compiled = decode_groups.lower(
        params, jnp.zeros((rows, 16), jnp.int32), jnp.full(rows, 9), jnp.zeros(rows, jnp.uint32),
        jnp.arange(width, dtype=jnp.uint32), jax.random.key(0), model_cfg=cfg, sampling=Sampling(), width=width,
        max_tokens=length, end_ids=(1,),
    ).compile()  # fmt: skip
    shape = empty_suffix(cfg, rows * width, length).keys[0].shape
    name = f"f32[{','.join(map(str, shape))}]"
    text = compiled.as_text()
    loops = [text[(start := text.index(f"%{body} (")) : text.index("\n}", start)] for body in _loop_bodies(text)]
    (loop,) = [loop for loop in loops if name in loop]  # the one loop that carries the caches
    copies = [line for line in loop.splitlines() if re.search(rf"= {re.escape(name)}\S* (copy|transpose)\(", line)]
    assert not copies, copies
    cache_bytes = 2 * cfg.num_layers * int(np.prod(shape)) * 4
    # One set of caches lives in the loop; a second one would mean that each token writes a new copy.
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * cache_bytes


def test_merging_an_empty_part_changes_nothing():
    out, lse = jnp.array([[1.0, -2.0]]), jnp.array([0.3])
    empty, nothing = jnp.full((1, 2), 99.0), jnp.full(1, -1e30)
    np.testing.assert_array_equal(merge(out, lse, empty, nothing), out)
    np.testing.assert_array_equal(merge(empty, nothing, out, lse), out)
    assert np.isfinite(merge(empty, nothing, empty, nothing)).all()
