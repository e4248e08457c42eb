"""The packed-tree mask by hand, `dense` against NumPy, `blockwise` against it, and memory linear in T."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_posttrain.model.attention import attend, live_blocks, visible


def tree_rows(T, seed, rows=2):
    """Rows of several groups: prompt segments with children of random lengths, then padding."""
    rng = np.random.default_rng(seed)
    positions, segments, parents = np.zeros((3, rows, T), "int32")
    parents -= 1
    for row in range(rows):
        at, segment, end = 0, 0, T - rng.integers(1, 4)
        while at < end:
            prompt = segment = segment + 1
            length = min(rng.integers(1, T // 3), end - at)
            positions[row, at : at + length] = np.arange(length)
            segments[row, at : at + length] = prompt
            at += length
            for _ in range(rng.integers(0, 4)):
                segment += 1
                stop = min(at + rng.integers(1, T // 4), end)
                positions[row, at:stop] = length + np.arange(stop - at)
                segments[row, at:stop] = segment
                parents[row, at:stop] = prompt
                at = stop
    return jnp.asarray(positions), jnp.asarray(segments), jnp.asarray(parents)


def random_qkv(T, heads, kv_heads, seed=0, rows=2, width=8):
    rng = np.random.default_rng(seed)
    draw = lambda n: jnp.asarray(rng.normal(size=(rows, T, n, width)), jnp.float32)
    return draw(heads), draw(kv_heads), draw(kv_heads)


def error(got, expected):
    """Largest error relative to the largest entry; small ones, such as 0 but for rounding, count absolutely."""
    return max(
        float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1.0))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    )


def test_mask_of_a_small_tree_by_hand():
    # Prompt "ab" (segment 1), children "cd" (2) and "e" (3) of it, another sequence "f" (4), one padding.
    segments = jnp.array([[1, 1, 2, 2, 3, 4, 0]])
    parents = jnp.array([[-1, -1, 1, 1, 1, -1, -1]])
    positions = jnp.array([[0, 1, 2, 3, 2, 0, 0]])
    expected = """
        1......
        11.....
        111....
        1111...
        11..1..
        .....1.
        ......."""
    got = visible(positions, segments, parents)[0]
    assert ["".join(".1"[int(x)] for x in row) for row in got] == expected.split()
    narrow = visible(positions, segments, parents, window=2)[0]
    assert ["".join(".1"[int(x)] for x in row) for row in narrow][2:5] == [".11....", "..11...", ".1..1.."]


def test_mask_follows_positions_not_slots():
    order = np.random.default_rng(3).permutation(24)
    row = [np.asarray(x) for x in tree_rows(24, seed=3)]
    plain = np.asarray(visible(*map(jnp.asarray, row)))
    shuffled = np.asarray(visible(*(jnp.asarray(x[:, order]) for x in row)))
    np.testing.assert_array_equal(shuffled, plain[:, order][:, :, order])


def naive_attention(q, k, v, mask):
    """float64, one query at a time."""
    q, k, v = (np.asarray(x, "float64") for x in (q, k, v))
    out = np.zeros_like(q)
    share = q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(*q.shape[:3]):
        seen = np.flatnonzero(mask[b, t])
        if len(seen):
            scores = k[b, seen, n // share] @ q[b, t, n] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights @ v[b, seen, n // share] / weights.sum()
    return out


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_values_equal_the_definition(impl):
    row = tree_rows(23, seed=0)
    q, k, v = random_qkv(23, heads=4, kv_heads=2)
    for window in (0, 5):
        expected = naive_attention(q, k, v, np.asarray(visible(*row, window)))
        run = jax.jit(partial(attend, impl=impl, block=8, window=window))
        got = run(q, k, v, *row)
        assert error(got, jnp.asarray(expected, jnp.float32)) < 2e-6


# (heads, kv heads, T, block, window): grouped heads, one kv head, T that the block does not divide, a block
# of one, a block longer than the row.
CASES = [
    (4, 2, 32, 8, 0),
    (4, 1, 29, 8, 0),
    (2, 2, 31, 7, 6),
    (6, 2, 24, 32, 0),
]
SLOW_CASES = [
    (heads, kv_heads, T, block, window)
    for heads, kv_heads in ((4, 4), (6, 3), (8, 1))
    for T in (1, 17, 64)
    for block in (1, 16)
    for window in (0, 1, 9)
]


def compare_with_dense(heads, kv_heads, T, block, window, seed):
    row = tree_rows(T, seed) if T > 8 else (jnp.zeros((2, T), int), jnp.ones((2, T), int), -jnp.ones((2, T), int))
    q, k, v = random_qkv(T, heads, kv_heads, seed)
    weight = jnp.asarray(np.random.default_rng(seed).normal(size=q.shape), jnp.float32)

    @jax.jit
    def both(q, k, v):
        def values(impl):
            run = lambda q, k, v: attend(q, k, v, *row, impl=impl, block=block, window=window)
            out, pull = jax.vjp(run, q, k, v)
            return out, pull(weight)

        return values("blockwise"), values("dense")

    got, expected = both(q, k, v)
    assert error(got, expected) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_blockwise_equals_dense_in_values_and_gradients(case):
    compare_with_dense(*case, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES)
def test_blockwise_equals_dense_everywhere(case):
    for seed in range(2):
        compare_with_dense(*case, seed=seed)


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_padding_gives_zero_and_finite_gradients(impl):
    T = 20
    segments = jnp.array([[0] * T, [0] * 3 + [1] * (T - 6) + [0] * 3])
    positions = jnp.broadcast_to(jnp.arange(T), (2, T))
    parents = jnp.full((2, T), -1)

    def total(q, k, v):
        out = attend(q, k, v, positions, segments, parents, impl=impl, block=4)
        return jnp.where((segments > 0)[..., None, None], out, 0).sum(), out

    gradients, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*random_qkv(T, 2, 1))
    hidden = np.asarray(segments == 0)
    assert not np.asarray(out)[hidden].any()
    for gradient in gradients:
        assert np.isfinite(np.asarray(gradient)).all()
        assert not np.asarray(gradient)[hidden].any()


def test_extreme_scores_stay_finite():
    row = tree_rows(32, seed=5)
    q, k, v = random_qkv(32, 2, 2)
    loss = lambda q, impl: attend(q * 30, k * 30, v, *row, impl=impl, block=8).sum()
    results = jax.jit(lambda q: [jax.value_and_grad(loss)(q, impl) for impl in ("dense", "blockwise")])(q)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(results))
    # Scores reach several thousand here, which float32 resolves to 0.0005.
    assert error(results[1], results[0]) < 5e-3


def test_bfloat16_stays_near_float32():
    row = tree_rows(32, seed=2)
    q, k, v = random_qkv(32, 4, 2)
    exact = attend(q, k, v, *row)
    for impl in ("dense", "blockwise"):
        got = attend(*(x.astype(jnp.bfloat16) for x in (q, k, v)), *row, impl=impl, block=8)
        assert got.dtype == jnp.bfloat16
        assert error(got.astype(jnp.float32), exact) < 0.02


@pytest.mark.parametrize("window", [0, 3])
def test_dead_blocks_never_hide_a_visible_key(window):
    for seed in range(30):
        T, block = 48, 4
        row = [np.asarray(x) for x in tree_rows(T, seed)]
        if seed % 2:  # any layout is legal: shuffled slots give wide, overlapping bounds
            order = np.random.default_rng(seed).permutation(T)
            row = [x[:, order] for x in row]
        row = [jnp.asarray(x) for x in row]
        mask = np.asarray(visible(*row, window)).any(0)
        needed = mask.reshape(T // block, block, T // block, block).any((1, 3))
        assert not (needed & ~np.asarray(live_blocks(*row, window, block))).any()


def test_blocks_that_cannot_matter_are_dead():
    # Blocks of 4: a prompt (2 blocks), three children (1 each), another prompt (2), half a block of a third
    # sequence and half of padding, a block of padding.
    children = [(segment, 1, 4, 8) for segment in (2, 3, 4)]
    pieces = [(1, -1, 8, 0), *children, (5, -1, 8, 0), (6, -1, 2, 0), (0, -1, 6, 0)]
    segments = jnp.array([[segment for segment, _, length, _ in pieces for _ in range(length)]])
    parents = jnp.array([[parent for _, parent, length, _ in pieces for _ in range(length)]])
    positions = jnp.array([[start + i for _, _, length, start in pieces for i in range(length)]])
    expected = """
        1........
        11.......
        111......
        11.1.....
        11..1....
        .....1...
        .....11..
        .......1.
        ........."""
    got = live_blocks(positions, segments, parents, 0, 4)
    assert ["".join(".1"[int(x)] for x in row) for row in got] == expected.split()


def gradient_memory(T, impl="blockwise", scan=True, remat=True):
    """Temporary bytes of the gradient through three attention layers."""
    heads, kv_heads, width = 4, 2, 16

    def layer(x, w, row):
        q = (x @ w).reshape(1, T, heads, width)
        out = attend(q, q[:, :, :kv_heads], 2 * q[:, :, :kv_heads], *row, impl=impl, block=128)
        return x + out.reshape(x.shape)

    def total(weights, x, *row):
        step = lambda x, w: (layer(x, w, row), None)
        step = jax.checkpoint(step) if remat else step
        if scan:
            return jax.lax.scan(step, x, weights)[0].sum()
        for w in weights:
            x, _ = step(x, w)
        return x.sum()

    shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)
    row = [shape(1, T, dtype=jnp.int32)] * 3
    lowered = jax.jit(jax.grad(total)).lower(shape(3, 64, 64), shape(1, T, 64), *row)
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("remat", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradient_memory_through_a_scan_is_linear_in_length(remat):
    # Without the barrier in the forward pass, masks are hoisted out of the scan and kept: the values stay
    # right, and memory grows fourfold per doubling (26, 93, 346 MiB where this gives 4, 7, 13).
    short, long = (gradient_memory(T, remat=remat) for T in (1024, 4096))
    assert long < 2.3**2 * short  # two doublings
    assert short < 1.5 * gradient_memory(1024, scan=False, remat=remat)
    # Three layers' mask blocks would take 48 MiB as booleans over all pairs, 192 MiB in float32.
    assert long < 32 * 2**20


def test_refusals_state_the_remedy():
    row = tree_rows(16, seed=0)
    q, k, v = random_qkv(16, 4, 3)
    with pytest.raises(ValueError, match="4 heads cannot share 3 kv heads"):
        attend(q, k, v, *row)
    q, k, v = random_qkv(16, 4, 2)
    with pytest.raises(ValueError, match="block=0"):
        attend(q, k, v, *row, impl="blockwise", block=0)


def test_shapes_are_checked_under_pytest():
    q, k, v = random_qkv(16, 4, 2)
    with pytest.raises(Exception, match="(?i)type-check"):
        attend(q, k[:, :8], v, *tree_rows(16, seed=0))
