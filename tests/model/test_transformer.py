"""The forward pass against independent float64 NumPy, and packed trees against separate sequences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain.model import transformer
from rl_posttrain.model.transformer import ModelConfig, Parameter, declare, forward, init, token_logprobs

SMALL = ModelConfig(vocab_size=37, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24)
FULL = dataclasses.replace(SMALL, qk_norm=True, qkv_bias=True, tie_embeddings=False, rope_theta=500.0, vocab_multiple=8)


def random_params(cfg, seed=0):
    """Every parameter random, so that none (norm scales, biases) is hidden by its initial value."""
    rng = np.random.default_rng(seed)
    params = init(jax.random.key(seed), cfg)
    return jax.tree.map(lambda x: x + jnp.asarray(0.2 * rng.normal(size=x.shape), jnp.float32), params)


def plain_row(tokens):
    shape = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    return positions, jnp.ones(shape, int), jnp.full(shape, -1)


def numpy_logits(params, cfg, tokens):
    """One causal sequence at a time, float64, from the formulas."""
    p = jax.tree.map(lambda x: np.asarray(x, "float64"), params)

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_epsilon) * scale

    def turn(x):  # [T, heads, H]
        half = cfg.head_dim // 2
        angle = np.arange(len(x))[:, None] * cfg.rope_theta ** (-np.arange(half) / half)
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
        return np.concatenate([z.real, z.imag], -1)

    def attention(q, k, v):
        out = np.zeros_like(q)
        for t in range(len(q)):
            for n in range(cfg.num_heads):
                kv = n // (cfg.num_heads // cfg.num_kv_heads)
                scores = k[: t + 1, kv] @ q[t, n] / np.sqrt(cfg.head_dim)
                weights = np.exp(scores - scores.max())
                out[t, n] = weights @ v[: t + 1, kv] / weights.sum()
        return out

    rows = []
    for row in np.asarray(tokens):
        x = p["embed"][row]
        for layer in range(cfg.num_layers):
            w = {name: value[layer] for name, value in p["layers"].items()}
            y = norm(x, w["attention_norm"])
            q, k, v = (np.tensordot(y, w[name], 1) for name in ("query", "key", "value"))
            if cfg.qkv_bias:
                q, k, v = q + w["query_bias"], k + w["key_bias"], v + w["value_bias"]
            if cfg.qk_norm:
                q, k = norm(q, w["query_norm"]), norm(k, w["key_norm"])
            x = x + np.tensordot(attention(turn(q), turn(k), v), w["output"], 2)
            y = norm(x, w["mlp_norm"])
            gate = y @ w["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (y @ w["up"])) @ w["down"]
        table = p["embed"] if cfg.tie_embeddings else p["head"]
        rows.append(norm(x, p["final_norm"]) @ table[: cfg.vocab_size].T)
    return np.stack(rows)


@pytest.mark.parametrize("cfg", [SMALL, FULL], ids=["small", "full"])
@pytest.mark.parametrize("attention", ["dense", "blockwise"])
def test_logits_equal_numpy(cfg, attention):
    cfg = dataclasses.replace(cfg, attention=attention, attention_block=4)
    params = random_params(cfg)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, cfg.vocab_size, (2, 9)))
    run = jax.jit(lambda p, t: transformer.logits(p, cfg, forward(p, cfg, t, *plain_row(t))))
    expected = numpy_logits(params, cfg, tokens)
    got = run(params, tokens)
    assert got.shape == (2, 9, cfg.vocab_size) and got.dtype == jnp.float32
    assert np.abs(got - expected).max() / np.abs(expected).max() < 1e-5


def groups():
    """Two prompts, with two completions of unequal lengths and with one."""
    rng = np.random.default_rng(7)
    draw = lambda n: rng.integers(0, SMALL.vocab_size, n).tolist()
    return [(draw(6), [draw(n) for n in (4, 1)]), (draw(3), [draw(2)])]


def tree_row(padding):
    """Both groups in one row: prompt[:-1], then prompt[-1] and the completion for each child."""
    tokens, labels, positions, segments, parents, weights = ([] for _ in range(6))
    segment = 0

    def add(ids, next_ids, start, parent, weight):
        nonlocal segment
        segment += 1
        tokens.extend(ids)
        labels.extend(next_ids)
        positions.extend(range(start, start + len(ids)))
        segments.extend([segment] * len(ids))
        parents.extend([parent] * len(ids))
        weights.extend(weight)
        return segment

    rng = np.random.default_rng(8)
    for prompt, completions in groups():
        prefix = add(prompt[:-1], prompt[1:], 0, -1, [0.0] * (len(prompt) - 1))
        for completion in completions:
            weight = rng.normal(size=len(completion)).tolist()
            add([prompt[-1], *completion], [*completion, 0], len(prompt) - 1, prefix, [*weight, 0.0])
    for values, filler in (
        (tokens, 0),
        (labels, 0),
        (positions, 0),
        (segments, 0),
        (parents, -1),
        (weights, 0),
    ):
        values.extend([filler] * padding)
    as_ids = (jnp.asarray(x)[None] for x in (tokens, labels, positions, segments, parents))
    return *as_ids, jnp.asarray(weights, jnp.float32)[None]


def naive_loss(params, cfg):
    """Every completion with its own copy of the prompt, unpadded; no packing anywhere."""
    rng = np.random.default_rng(8)
    total = 0.0
    for prompt, completions in groups():
        for completion in completions:
            weight = jnp.asarray(rng.normal(size=len(completion)), jnp.float32)
            tokens = jnp.asarray([prompt + completion])
            hidden = forward(params, cfg, tokens[:, :-1], *plain_row(tokens[:, :-1]))
            temperature = jnp.full(hidden.shape[:2], 0.8)
            logprobs, entropy = token_logprobs(params, cfg, hidden, tokens[:, 1:], temperature)
            total += (weight * (logprobs + 0.1 * entropy)[0, len(prompt) - 1 :]).sum()
    return total


def tree_loss(params, cfg, padding):
    tokens, labels, positions, segments, parents, weights = tree_row(padding)
    hidden = forward(params, cfg, tokens, positions, segments, parents)
    logprobs, entropy = token_logprobs(params, cfg, hidden, labels, jnp.full(tokens.shape, 0.8))
    return (weights * (logprobs + 0.1 * entropy)).sum()


def relative_errors(got, expected):
    return jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), got, expected)


def test_a_packed_tree_equals_separate_sequences_in_loss_and_gradients():
    params = random_params(FULL)
    expected = jax.jit(jax.value_and_grad(lambda p: naive_loss(p, FULL)))(params)
    blockwise = dataclasses.replace(FULL, attention="blockwise", attention_block=8, logprob_chunk=8, remat="full")
    for cfg, padding in ((FULL, 0), (FULL, 11), (blockwise, 5)):
        got = jax.jit(jax.value_and_grad(lambda p, c=cfg, n=padding: tree_loss(p, c, n)))(params)
        errors = jax.tree.leaves(relative_errors(got, expected))
        assert max(errors) < 1e-5, errors


def test_remat_changes_memory_and_not_gradients():
    results, memory = {}, {}
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, SMALL.vocab_size, (2, 64)))
    for remat in ("none", "dots", "full"):
        cfg = dataclasses.replace(SMALL, num_layers=6, mlp_dim=256, remat=remat)
        params = random_params(cfg)
        loss = lambda p, cfg=cfg: forward(p, cfg, tokens, *plain_row(tokens)).sum()
        program = jax.jit(jax.value_and_grad(loss)).lower(params).compile()
        results[remat] = program(params)
        memory[remat] = program.memory_analysis().temp_size_in_bytes
    for remat in ("dots", "full"):
        assert max(jax.tree.leaves(relative_errors(results[remat], results["none"]))) < 1e-5
    assert memory["full"] < memory["dots"] < memory["none"]


def test_bfloat16_computes_in_bfloat16_and_scores_in_float32():
    cfg = dataclasses.replace(FULL, compute_dtype="bfloat16")
    params = random_params(FULL)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, FULL.vocab_size, (2, 9)))
    hidden = forward(params, cfg, tokens, *plain_row(tokens))
    assert hidden.dtype == jnp.bfloat16
    exact = forward(params, FULL, tokens, *plain_row(tokens))
    assert float(jnp.abs(hidden.astype(jnp.float32) - exact).max() / jnp.abs(exact).max()) < 0.05
    logprobs, _ = token_logprobs(params, cfg, hidden, tokens, jnp.ones(tokens.shape))
    logits = transformer.logits(params, cfg, hidden)
    assert logits.dtype == logprobs.dtype == jnp.float32
    # Decode scores tokens from `logits`, training through chunks: the same products, the same numbers.
    decoded = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(logprobs, decoded, atol=1e-5)
    gradients = jax.grad(lambda p: forward(p, cfg, tokens, *plain_row(tokens)).astype(jnp.float32).sum())(params)
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


def test_declaration_and_arrays_have_one_structure():
    for cfg in (SMALL, FULL):
        declared = jax.tree.leaves(declare(cfg), is_leaf=transformer.is_parameter)
        params = init(jax.random.key(0), cfg)
        assert jax.tree.structure(params) == jax.tree.structure(
            jax.tree.map(lambda _: 0, declare(cfg), is_leaf=transformer.is_parameter)
        )
        for parameter, array in zip(declared, jax.tree.leaves(params), strict=True):
            assert isinstance(parameter, Parameter) and len(parameter.axes) == len(parameter.shape)
            assert array.shape == parameter.shape and array.dtype == jnp.float32
    assert "head" not in declare(SMALL) and declare(FULL)["head"].shape == (40, 16)


def test_each_parameter_depends_on_its_own_name_alone():
    plain, full = (init(jax.random.key(3), cfg) for cfg in (SMALL, FULL))
    np.testing.assert_array_equal(plain["layers"]["query"], full["layers"]["query"])
    np.testing.assert_array_equal(plain["embed"], full["embed"][:37])  # padding the table changes no true row
    assert not np.asarray(full["embed"][37:]).any()
    drawn = [np.ravel(x)[:64] / x.std() for x in jax.tree.leaves(full) if x.std() > 0]
    assert len(drawn) == 9
    for i, one in enumerate(drawn):  # two names never share their random numbers
        assert all(abs(np.corrcoef(one, other)[0, 1]) < 0.9 for other in drawn[:i])
    other = init(jax.random.key(4), SMALL)
    assert (np.asarray(plain["embed"]) != np.asarray(other["embed"])).any()


def test_initial_scales_keep_activations_near_one():
    cfg = dataclasses.replace(SMALL, vocab_size=512, embed_dim=64, num_layers=4, head_dim=16, mlp_dim=256)
    params = init(jax.random.key(0), cfg)
    assert abs(float(params["layers"]["gate"].std()) - 64**-0.5) < 0.005
    assert abs(float(params["layers"]["down"].std()) - 256**-0.5 / 8**0.5) < 0.001
    assert set(np.unique(params["final_norm"])) == {1.0}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 512, (4, 32)))
    scores = transformer.logits(params, cfg, forward(params, cfg, tokens, *plain_row(tokens)))
    # Logits of unit variance put the first loss near log V + 1/2.
    loss = -jnp.take_along_axis(jax.nn.log_softmax(scores), jnp.roll(tokens, -1, 1)[..., None], -1).mean()
    assert np.log(512) < loss < np.log(512) + 1


def test_config_is_static_under_jit():
    run = jax.jit(init)  # no static_argnums: the config is a node without leaves
    first = run(jax.random.key(0), SMALL)
    assert jax.tree.leaves(SMALL) == [] and hash(SMALL) == hash(dataclasses.replace(SMALL))
    np.testing.assert_allclose(first["embed"], init(jax.random.key(0), SMALL)["embed"], rtol=1e-6)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_kv_heads": 3}, r"num_kv_heads=3 does not divide num_heads=4: use one of \[1, 2, 4\]"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"num_layers": 0}, "num_layers=0: use at least 1"),
        ({"vocab_multiple": 0}, "vocab_multiple=0"),
        ({"norm_epsilon": 0.0}, "norm_epsilon=0.0"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
    ],
)
def test_config_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_every_annotated_shape_is_checked_under_pytest():
    params = init(jax.random.key(0), SMALL)
    tokens = jnp.zeros((2, 4), int)
    with pytest.raises(Exception, match="(?i)type-check"):
        forward(params, SMALL, tokens, *plain_row(jnp.zeros((2, 5), int)))
