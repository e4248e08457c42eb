"""Model directories in and out: identical arrays, what is written, case O10, refusals by name, layouts and memory.

That logits equal transformers', also of exports, stands in test_families.py.
"""

import dataclasses
import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from golden_models import FAMILIES, Golden, draw
from safetensors.numpy import load_file, save_file

from rl_posttrain.model import convert, hf_files, transformer
from rl_posttrain.sharding import mesh as mesh_lib
from rl_posttrain.sharding.mesh import MeshConfig

INDEX = "model.safetensors.index.json"


def written(directory):
    """Every tensor of a directory, with its file."""
    return {name: (file.name, values) for file in directory.glob("*.safetensors") for name, values in load(file)}


def load(file):
    return load_file(file).items()


def edit(directory, change, file="model.safetensors"):
    """Rewrites a file's tensors."""
    save_file(change(load_file(directory / file)), directory / file)


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.fixture
def llama(tmp_path):
    """(directory, config, parameters) of a tiny model whose output table is its own."""
    directory = Golden("llama").write(tmp_path / "llama")
    cfg = convert.model_config(directory)
    return directory, cfg, convert.load_params(directory, cfg)


@pytest.fixture
def tied(tmp_path):
    directory = Golden("llama_tied").write(tmp_path / "tied")
    return directory, convert.model_config(directory)


# ---- in and out ----


QUICK = ("llama_bias", "gemma3", "mixtral", "qwen3_moe")  # every kind of tensor is in one of them


def quick(names):
    """As parameters: the others are slow."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", quick(FAMILIES))
def test_an_export_holds_the_same_tensors_and_loads_to_the_same_arrays(name, tmp_path):
    golden = Golden(name)
    directory = golden.write(tmp_path / "in")
    cfg = convert.model_config(directory, length=golden.run_length)
    params = convert.load_params(directory, cfg)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        lambda parameter: parameter.shape, transformer.declare(cfg), is_leaf=transformer.is_parameter
    )
    for source, shard_bytes in ((directory, 10**9), (None, 60_000)):
        out = tmp_path / f"out-{shard_bytes}"
        convert.save_model(out, params, cfg, source=source, length=64, shard_bytes=shard_bytes)
        assert (out / INDEX).exists() == (source is None)
        tensors = written(out)
        weights = golden.weights()
        assert tensors.keys() == weights.keys()
        for tensor, values in weights.items():
            np.testing.assert_array_equal(tensors[tensor][1], values)
        assert convert.model_config(out, length=golden.run_length) == cfg
        assert_same(convert.load_params(out, cfg), params)


def test_layers_are_stacked_and_heads_are_an_axis(llama):
    """D 64, 4 heads of 16, 2 for keys: head 1 of layer 1's queries is rows 16 to 32 of their matrix."""
    directory, _, params = llama
    tensors = load_file(directory / "model.safetensors")
    place = "model.layers.1.self_attn"
    assert params["layers"]["query"].shape == (2, 64, 4, 16)
    np.testing.assert_array_equal(params["layers"]["query"][1, :, 1], tensors[f"{place}.q_proj.weight"][16:32].T)
    np.testing.assert_array_equal(params["layers"]["output"][1, 3], tensors[f"{place}.o_proj.weight"][:, 48:].T)
    np.testing.assert_array_equal(params["layers"]["down"][0], tensors["model.layers.0.mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])


def test_an_exported_directory_has_config_index_and_what_stood_beside(llama, tmp_path):
    directory, cfg, params = llama
    edit_json(directory / "config.json", eos_token_id=7, transformers_version="4.99")
    beside = {"tokenizer.json": "{}", "generation_config.json": '{"eos_token_id": [7, 8]}', "LICENSE": "free"}
    for name, text in (beside | {"notes.txt": "private", "optimizer.bin": "large"}).items():
        (directory / name).write_text(text)
    out = tmp_path / "out"
    convert.save_model(out, params, cfg, source=directory, dtype="bfloat16", shard_bytes=100_000)
    config = json.loads((out / "config.json").read_text())
    source = json.loads((directory / "config.json").read_text())
    assert config == {**source, "torch_dtype": "bfloat16"}
    shards = sorted(file.name for file in out.glob("*.safetensors"))
    assert shards == [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    assert {file.name for file in out.iterdir()} == {*shards, INDEX, "config.json", *beside}
    assert {name: (out / name).read_text() for name in beside} == beside
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o644}
    index = json.loads((out / INDEX).read_text())
    tensors = written(out)
    assert index["weight_map"] == {name: file for name, (file, _) in tensors.items()}
    assert index["metadata"]["total_size"] == sum(values.nbytes for _, values in tensors.values())
    assert {values.dtype for _, values in tensors.values()} == {jnp.dtype("bfloat16")}
    with safetensors.safe_open(out / shards[0], "np") as opened:
        assert opened.metadata() == {"format": "pt"}  # which transformers asks for
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert_same(convert.load_params(out, cfg), rounded)


@pytest.mark.parametrize("stored", [np.float16, jnp.bfloat16, np.float64])
def test_weights_of_other_types_load_as_float32(llama, stored):
    directory, cfg, params = llama
    edit(directory, lambda tensors: {name: values.astype(stored) for name, values in tensors.items()})
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(stored).astype(np.float32), params)
    loaded = convert.load_params(directory, cfg)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype("float32")}
    assert_same(loaded, rounded)


def test_padded_rows_are_zero_in_and_cut_out(llama, tmp_path):
    directory, cfg, params = llama
    padded = dataclasses.replace(cfg, vocab_multiple=50)  # 96 rows of the vocabulary become 100
    loaded = convert.load_params(directory, padded)
    for name in ("embed", "head"):
        assert loaded[name].shape == (100, 64)
        np.testing.assert_array_equal(loaded[name], jnp.pad(params[name], [(0, 4), (0, 0)]))
    trained = {**loaded, "embed": loaded["embed"].at[96:].set(1.0)}
    convert.save_model(tmp_path / "out", trained, padded, source=directory)
    assert written(tmp_path / "out")["model.embed_tokens.weight"][1].shape == (96, 64)
    assert_same(convert.load_params(tmp_path / "out", cfg), params)


# ---- tied embeddings ----


def test_tied_stays_tied(tied, tmp_path):
    directory, cfg = tied
    params = convert.load_params(directory, cfg)
    assert cfg.tie_embeddings and "head" not in params
    convert.save_model(tmp_path / "out", params, cfg, source=directory)
    assert "lm_head.weight" not in written(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_embeddings_that_were_trained_apart_are_untied(tied, tmp_path):
    directory, cfg = tied
    apart = dataclasses.replace(cfg, tie_embeddings=False)
    params = convert.load_params(directory, apart)
    np.testing.assert_array_equal(params["head"], params["embed"])
    params["head"] = params["head"] + 1
    for source in (directory, None):
        out = tmp_path / f"out-{source is None}"
        convert.save_model(out, params, apart, source=source, length=64)
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
        np.testing.assert_array_equal(written(out)["lm_head.weight"][1], params["head"])
        assert convert.model_config(out) == apart
        assert_same(convert.load_params(out, apart), params)


def test_a_tied_model_may_store_its_table_twice_if_both_are_one(tied):
    directory, cfg = tied
    params = convert.load_params(directory, cfg)
    edit(directory, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"]})
    assert_same(convert.load_params(directory, cfg), params)
    edit(directory, lambda t: {**t, "lm_head.weight": t["lm_head.weight"] + np.eye(96, 64, dtype=np.float32)})
    with pytest.raises(ValueError, match="lm_head.weight in model.safetensors differs from model.embed_tokens.weight"):
        convert.load_params(directory, cfg)


def test_a_table_of_its_own_that_is_missing_is_not_made_up(llama):
    directory, cfg, _ = llama
    edit(directory, lambda t: {name: values for name, values in t.items() if name != "lm_head.weight"})
    with pytest.raises(ValueError, match="lack: lm_head.weight"):
        convert.load_params(directory, cfg)


# ---- what is not whole ----


def test_o10_a_missing_or_cut_shard_is_named(llama, tmp_path):
    directory, cfg, params = llama
    out = tmp_path / "out"
    convert.save_model(out, params, cfg, source=directory, shard_bytes=125_000)
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) == 3
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(4 * np.prod(shape) for shape in Golden("llama").shapes.values())
    whole = {shard: shard.read_bytes() for shard in shards}
    shards[1].unlink()
    first = next(name for name, file in index["weight_map"].items() if file == shards[1].name)
    with pytest.raises(ValueError, match=f"{shards[1].name} is missing: .* places .* such as {first}"):
        convert.load_params(out, cfg)
    shards[1].write_bytes(whole[shards[1]])
    for cut in (len(whole[shards[2]]) - 1024, 100, 0):  # the last tensor, the header, everything
        shards[2].write_bytes(whole[shards[2]][:cut])
        with pytest.raises(ValueError, match=f"{shards[2].name}, which holds .* is cut short or damaged"):
            convert.load_params(out, cfg)
    shards[2].write_bytes(whole[shards[2]])
    assert_same(convert.load_params(out, cfg), params)


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {n: v for n, v in t.items() if n != QUERY}, f"model.safetensors lack: {QUERY}"),
        (lambda t: {**t, "model.layers.2.mlp.up_proj.weight": t[QUERY]}, "layers.2.mlp.up_proj.weight in model.safe"),
        (lambda t: {**t, QUERY.replace("weight", "bias"): np.zeros(64, np.float32)}, "q_proj.bias in model.safe"),
        (lambda t: {**t, QUERY: t[QUERY][:32]}, rf"model.safetensors: {QUERY} has shape \(32, 64\).* \(64, 64\)"),
        (lambda t: {**t, QUERY: t[QUERY].astype(np.int8)}, f"model.safetensors: {QUERY} is stored as I8"),
    ],
    ids=["missing", "surplus-layer", "surplus-bias", "shape", "type"],
)
def test_wrong_tensors_are_named_with_their_file(llama, change, message):
    directory, cfg, _ = llama
    edit(directory, change)
    with pytest.raises(ValueError, match=message):
        convert.load_params(directory, cfg)


def test_an_index_at_odds_with_its_files_is_refused(llama, tmp_path):
    directory, cfg, params = llama
    out = tmp_path / "out"
    convert.save_model(out, params, cfg, source=directory, shard_bytes=125_000)
    weight_map = json.loads((out / INDEX).read_text())["weight_map"]
    edit_json(out / INDEX, weight_map={**weight_map, QUERY: weight_map["model.norm.weight"]})
    with pytest.raises(ValueError, match=f"does not hold what {INDEX} says: .*{QUERY}"):
        convert.load_params(out, cfg)
    edit_json(out / INDEX, weight_map={})
    with pytest.raises(ValueError, match="has no weight_map"):
        convert.load_params(out, cfg)


def test_files_that_are_not_there_or_no_json_are_named(llama):
    directory, cfg, _ = llama
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds neither model.safetensors nor .*convert pytorch_model.bin"):
        convert.load_params(directory, cfg)
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is damaged"):
        convert.model_config(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json is missing"):
        convert.model_config(directory)


def test_old_rotation_buffers_are_passed_over(llama):
    directory, cfg, params = llama
    edit(directory, lambda t: {**t, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    assert_same(convert.load_params(directory, cfg), params)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_half_of_a_picture_model_is_loaded_and_exported_alone(prefix, tmp_path):
    golden = Golden("gemma3")
    directory = golden.write(tmp_path / "text")
    cfg = convert.model_config(directory)
    params = convert.load_params(directory, cfg)
    outside = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": {}}
    (directory / "config.json").write_text(json.dumps({**outside, "text_config": golden.old_config}))
    tower = {f"{part}.weight": np.ones(3, np.float32) for part in ("vision_tower.a", "multi_modal_projector.b")}
    edit(directory, lambda t: tower | {prefix + name.removeprefix("model."): values for name, values in t.items()})
    assert convert.model_config(directory) == cfg
    assert_same(convert.load_params(directory, cfg), params)
    convert.save_model(tmp_path / "out", params, cfg, source=directory)
    assert written(tmp_path / "out").keys() == golden.shapes.keys()
    assert_same(convert.load_params(tmp_path / "out", convert.model_config(tmp_path / "out")), params)


def test_exports_do_not_mix(llama, tmp_path):
    directory, cfg, params = llama
    with pytest.raises(ValueError, match="holds weights already"):
        convert.save_model(directory, params, cfg, source=directory)
    other = Golden("llama_tied").write(tmp_path / "other")
    with pytest.raises(ValueError, match="another model: it differs in .*rope_theta"):
        convert.save_model(tmp_path / "out", params, cfg, source=other)
    with pytest.raises(ValueError, match="length=0"):
        convert.save_model(tmp_path / "out", params, cfg)
    assert not (tmp_path / "out").exists()


# ---- layouts ----


@pytest.mark.parametrize("name", ["llama_bias", *(pytest.param(n, marks=pytest.mark.slow) for n in QUICK[1:])])
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["fsdp", "all"])
def test_shards_are_those_of_the_whole(name, sizes, tmp_path):
    directory = Golden(name).write(tmp_path)
    cfg = convert.model_config(directory)
    whole = convert.load_params(directory, cfg)
    mesh = mesh_lib.make_mesh(MeshConfig(**sizes))
    loaded = convert.load_params(directory, cfg, mesh)
    wanted = mesh_lib.shardings(transformer.declare(cfg), mesh)

    def check(leaf, expected, sharding):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(expected)[shard.index])

    jax.tree.map(check, loaded, whole, wanted)
    assert (
        loaded["layers"]["query"].addressable_shards[0].data.size * (8 if "data" not in sizes else 4)
        == whole["layers"]["query"].size
    )
    convert.save_model(tmp_path / "out", loaded, cfg, source=directory, shard_bytes=60_000)
    assert_same(convert.load_params(tmp_path / "out", cfg), whole)  # sharded arrays are exported whole


@pytest.mark.parametrize("name", quick(["llama_yarn", "gemma2", "mixtral"]))
def test_all_axes_at_once_give_the_same_logits(name, tmp_path):
    golden = Golden(name)
    directory = golden.write(tmp_path)
    cfg = convert.model_config(directory, length=golden.run_length)
    mesh = mesh_lib.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    tokens = jnp.repeat(golden.tokens[:1], 4, 0)
    row = (jnp.broadcast_to(jnp.arange(40), (4, 40)), jnp.ones_like(tokens), jnp.full_like(tokens, -1))
    with jax.set_mesh(mesh):
        params = convert.load_params(directory, cfg, mesh)
        run = jax.jit(lambda p: transformer.logits(p, cfg, transformer.forward(p, cfg, tokens, *row)))
        got = run(params)
    np.testing.assert_allclose(got, np.broadcast_to(golden.logits[0], got.shape), atol=1e-4)


def test_a_mesh_that_does_not_divide_the_model_is_refused(llama):
    directory, cfg, _ = llama
    with pytest.raises(ValueError, match="num_heads=4 is not divisible by tensor=8"):
        convert.load_params(directory, cfg, mesh_lib.make_mesh(MeshConfig(tensor=8)))


# ---- memory of the host ----


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_fsdp_reads_each_byte_once_and_a_part_of_a_tensor_at_a_time(name, tmp_path, monkeypatch):
    golden = Golden(name)
    directory = golden.write(tmp_path)
    cfg = convert.model_config(directory)
    reads: dict[str, list[int]] = {}
    read = hf_files.Checkpoint.read

    def counted(self, tensor, index):
        part = read(self, tensor, index)
        reads.setdefault(tensor, []).append(part.size)
        return part

    monkeypatch.setattr(hf_files.Checkpoint, "read", counted)
    convert.load_params(directory, cfg, mesh_lib.make_mesh(MeshConfig(fsdp=8)))
    sizes = {tensor: int(np.prod(shape)) for tensor, shape in golden.shapes.items()}
    assert {tensor: sum(parts) for tensor, parts in reads.items()} == sizes
    split = [tensor for tensor in sizes if "_proj" in tensor]  # what fsdp splits; the others are on every device
    assert len(split) >= 14 and all(max(reads[tensor]) * 8 == sizes[tensor] for tensor in split)


CHILD = """
    import sys
    import jax
    from rl_posttrain.model import convert
    from rl_posttrain.sharding import mesh as mesh_lib
    from rl_posttrain.sharding.mesh import MeshConfig

    def status(field):
        lines = open("/proc/self/status").read().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

    mesh = mesh_lib.make_mesh(MeshConfig(fsdp=8))
    small, large = sys.argv[1:]
    load = lambda directory: convert.load_params(directory, convert.model_config(directory), mesh)
    jax.block_until_ready(load(small))  # what the libraries themselves need
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    params = jax.block_until_ready(load(large))
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    print(status("VmHWM") - before, held, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


def test_the_host_holds_less_than_a_copy_beside_the_arrays(tmp_path):
    """200 MB on eight devices. Beside the arrays there are pages of the mapped file and a tensor: 87 MB, measured."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads the peak of memory from /proc")
    golden = Golden("llama")
    small = golden.write(tmp_path / "small")
    config = {**golden.old_config, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4}
    names = {**golden.shapes}
    for name in golden.shapes:
        if ".layers.0." in name:
            names |= {name.replace(".0.", f".{layer}."): golden.shapes[name] for layer in range(2, 4)}
    wide = {64: 1024, 32: 512, 96: 3072}
    is_table = lambda name: "embed" in name or "lm_head" in name
    shapes = {
        name: [96, 1024] if is_table(name) else [wide[length] for length in shape] for name, shape in names.items()
    }
    large = tmp_path / "large"
    large.mkdir()
    save_file({name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()}, large / "model.safetensors")
    (large / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(small), str(large)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    (large / "model.safetensors").unlink()  # pytest would keep it
    assert done.returncode == 0, done.stderr
    grown, held, model = map(int, done.stdout.split())
    assert model > 200e6
    assert grown > 0.9 * held  # the measurement sees the arrays
    assert grown - held < 0.75 * model, f"{grown - held:,} bytes beside {held:,} of arrays"


@pytest.mark.peers
def test_embeddings_that_were_trained_apart_reload_in_transformers(tied, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    directory, cfg = tied
    apart = dataclasses.replace(cfg, tie_embeddings=False, vocab_multiple=50)
    params = convert.load_params(directory, apart)
    drawn = draw({"lm_head.weight": (96, 64)}, ones=True)["lm_head.weight"]
    params["head"] = jnp.pad(jnp.asarray(drawn), [(0, 4), (0, 0)])
    convert.save_model(tmp_path / "out", params, apart, source=directory, shard_bytes=100_000)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = Golden("llama_tied").tokens[:1]
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens).long()).logits[0].numpy()
    row = (jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens), jnp.full_like(tokens, -1))
    hidden = transformer.forward(params, apart, jnp.asarray(tokens), *row)
    ours = transformer.logits(params, apart, hidden)[0, :, :96]
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
