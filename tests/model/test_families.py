"""Logits of a tiny model of every family and every RoPE type against transformers' (`tests/golden/make.py`).

In float32 to 1e-4 (measured: 2e-5, of logits up to 24). In bfloat16 both sides round differently: the bounds are 0.4
against transformers' own bfloat16 and 1.5 times its distance from float32; a rounded router may choose other experts,
so there the median of the distances is bounded instead.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import FAMILIES, Golden

from rl_posttrain.model import cache, convert, transformer
from rl_posttrain.sharding import mesh as mesh_lib
from rl_posttrain.sharding.mesh import MeshConfig

SLIDING = ("mistral", "qwen2_sliding", "gemma2", "gemma3")


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request, tmp_path_factory):
    golden = Golden(request.param)
    directory = golden.write(tmp_path_factory.mktemp(request.param))
    cfg = convert.model_config(directory, length=golden.run_length)
    return golden, cfg, convert.load_params(directory, cfg)


def forward(params, cfg, tokens, positions, segments):
    hidden = transformer.forward(
        params, cfg, jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segments), jnp.full(tokens.shape, -1)
    )
    return transformer.logits(params, cfg, hidden)


run = jax.jit(forward, static_argnums=1)


def right_padded(golden):
    positions = np.broadcast_to(np.arange(golden.tokens.shape[1]), golden.tokens.shape)
    return golden.tokens, positions, (positions < golden.lengths[:, None]).astype(np.int32)


def test_padded_on_the_right_and_on_the_left(loaded):
    golden, cfg, params = loaded
    tokens, positions, segments = right_padded(golden)
    got = run(params, cfg, tokens, positions, segments)
    shift = lambda x: np.stack([np.roll(row, row.size - n) for row, n in zip(x, golden.lengths)])
    left = run(params, cfg, shift(tokens), shift(positions) * shift(segments), shift(segments))
    for row, (length, expected) in enumerate(zip(golden.lengths, golden.logits)):
        np.testing.assert_allclose(got[row, :length], expected, atol=1e-4)
        np.testing.assert_allclose(left[row, -length:], expected, atol=1e-4)


def test_unpadded_and_blockwise(loaded):
    golden, cfg, params = loaded
    blockwise = dataclasses.replace(cfg, attention="blockwise", attention_block=16)
    tokens = golden.tokens[1:, : golden.lengths[1]]
    positions = np.arange(tokens.shape[1])[None]
    for variant in (cfg, blockwise):
        got = run(params, variant, tokens, positions, np.ones_like(tokens))
        np.testing.assert_allclose(got[0], golden.logits[1], atol=1e-4)


def test_through_the_cache(loaded):
    golden, cfg, params = loaded
    S = 11  # tokens of the prefix, above the windows' 8; the others are decoded one by one
    step = jax.jit(cache.decode_step, static_argnums=1)
    prefix = jax.jit(cache.prefill, static_argnums=1)(
        params, cfg, jnp.asarray(np.pad(golden.tokens[:, :S], [(0, 0), (0, 5)])), jnp.full(2, S)
    )
    layers = cache.unstack_layers(params, cfg)
    suffix = cache.empty_suffix(cfg, 2, golden.tokens.shape[1] - S)
    output = jax.jit(lambda p, x: transformer.logits(p, cfg, transformer.final_norm(p, cfg, x)))
    for t in range(S, int(golden.lengths[1])):
        x = transformer.embed(params, cfg, jnp.asarray(golden.tokens[:, t : t + 1]))
        x, suffix = step(layers, cfg, x, prefix, suffix, jnp.int32(t - S))
        got = output(params, x)[:, 0]
        np.testing.assert_allclose(got, [expected[t] for expected in golden.logits], atol=1e-4)


def test_bfloat16_is_as_close_as_transformers_own(loaded):
    golden, cfg, params = loaded
    got = run(params, dataclasses.replace(cfg, compute_dtype="bfloat16"), *right_padded(golden))
    valid = np.concatenate([got[row, :length] for row, length in enumerate(golden.lengths)])
    exact, theirs = np.concatenate(golden.logits), np.concatenate(golden.logits_bfloat16)
    measure = np.median if cfg.num_experts else np.max
    assert measure(np.abs(valid - theirs)) < 0.4
    assert measure(np.abs(valid - exact)) < 1.5 * measure(np.abs(theirs - exact))


@pytest.mark.parametrize("name", SLIDING)
def test_goldens_are_longer_than_the_window(name, tmp_path):
    golden = Golden(name)
    directory = golden.write(tmp_path)
    cfg = convert.model_config(directory)
    assert 0 < cfg.window < golden.lengths[1]
    everything = dataclasses.replace(cfg, window=0, sliding=(), local_rope_theta=0.0)
    got = run(convert.load_params(directory, cfg), everything, *right_padded(golden))
    assert np.abs(got[0, : golden.lengths[0]] - golden.logits[0]).max() > 0.05


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 4, "tensor": 2}])
def test_every_layout_loads_to_the_same_logits(name, sizes, tmp_path):
    golden = Golden(name)
    directory = golden.write(tmp_path)
    cfg = convert.model_config(directory)
    mesh = mesh_lib.make_mesh(MeshConfig(**sizes))
    with jax.set_mesh(mesh):
        params = convert.load_params(directory, cfg, mesh)
        shardings = mesh_lib.shardings(transformer.declare(cfg), mesh)
        same = jax.tree.map(
            lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim), params, shardings
        )
        assert all(jax.tree.leaves(same))
        got = jax.jit(forward, static_argnums=1)(params, cfg, *right_padded(golden))
    for row, (length, expected) in enumerate(zip(golden.lengths, golden.logits)):
        np.testing.assert_allclose(got[row, :length], expected, atol=1e-4)


def test_o08_a_head_width_of_its_own():
    golden = Golden("qwen3")
    assert golden.shapes["model.layers.0.self_attn.q_proj.weight"] == [128, 64]
    assert golden.shapes["model.layers.0.self_attn.q_norm.weight"] == [32]
    # Its logits are compared above, with those of the other families.


def test_o09_gemma_scales_norms_and_activation(tmp_path):
    golden = Golden("gemma")
    cfg = dataclasses.replace(convert.model_config(golden.write(tmp_path)), compute_dtype="bfloat16")
    params = convert.load_params(tmp_path, cfg)
    # sqrt(3072) = 55.4256 rounds to 55.5 in bfloat16.
    wide = dataclasses.replace(cfg, embed_dim=3072)
    one = transformer.embed({"embed": jnp.ones((1, 3072))}, wide, jnp.zeros((1,), jnp.int32))
    assert one.dtype == jnp.bfloat16 and float(one[0, 0]) == 55.5
    # 1 + w is formed in float32: in bfloat16, 1 + 2 ** -9 would be 1.
    x = jnp.full((1, 64), 256.0, jnp.bfloat16)
    widened = transformer.rms_norm(x, jnp.full(64, 2.0**-7), 1e-6, plus_one=True)
    assert float(widened[0, 0]) == 1 + 2**-7
    assert cfg.activation == "gelu_tanh" and cfg.tie_embeddings
    # The tied output table is not scaled: only the inputs are.
    hidden = jnp.ones((1, 1, 64), jnp.float32)
    plain = dataclasses.replace(cfg, compute_dtype="float32")
    np.testing.assert_allclose(
        transformer.logits(params, plain, hidden)[0, 0], np.asarray(params["embed"]).sum(-1), rtol=1e-4, atol=1e-4
    )


@pytest.mark.peers
@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_reloads_in_transformers_to_the_same_logits(name, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    golden = Golden(name)
    directory = golden.write(tmp_path / "in")
    cfg = convert.model_config(directory, length=golden.run_length)
    params = convert.load_params(directory, cfg)
    for source in (None, directory):
        out = tmp_path / f"out-{source is None}"
        convert.save_model(out, params, cfg, source=source, length=64, shard_bytes=100_000)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            out, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        with torch.no_grad():
            got = model(torch.from_numpy(golden.tokens[:1]).long()).logits[0].numpy()
        np.testing.assert_allclose(got, golden.logits[0], atol=1e-4)
