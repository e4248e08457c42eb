"""Adapters in PEFT's layout: files there and back, case O11, refusals, and the package `peft` itself (peers)."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from golden_models import Golden

from rl_posttrain.model import convert, lora, peft, transformer
from rl_posttrain.model.lora import LoraConfig
from rl_posttrain.model.transformer import ModelConfig
from rl_posttrain.sharding import mesh as mesh_lib
from rl_posttrain.sharding.mesh import MeshConfig

CFG = ModelConfig(
    vocab_size=40, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24, qkv_bias=True
)
EXPERTS = dataclasses.replace(CFG, qkv_bias=False, num_experts=4, experts_per_token=2)
ALL = ("query", "key", "value", "output", "gate", "up", "down")
TOKENS = np.random.RandomState(0).randint(0, 40, (2, 9))


@jax.jit
def _forward(params):
    row = (jnp.broadcast_to(jnp.arange(9), (2, 9)), jnp.ones((2, 9), jnp.int32), jnp.full((2, 9), -1))
    return transformer.logits(params, CFG, transformer.forward(params, CFG, jnp.asarray(TOKENS), *row))


@pytest.fixture(scope="module")
def params():
    return jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), CFG)


def trained(cfg, config, size=0.2):
    """Adapters as after some training: neither matrix is 0."""
    random = np.random.RandomState(1)
    shapes = jax.eval_shape(lambda: lora.init_adapters(jax.random.key(1), cfg, config))
    return jax.tree.map(lambda leaf: jnp.asarray(size * random.standard_normal(leaf.shape), jnp.float32), shapes)


def edit_config(directory, **changes):
    path = directory / "adapter_config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


def edit_tensors(directory, change):
    path = directory / "adapter_model.safetensors"
    safetensors.numpy.save_file(change(safetensors.numpy.load_file(path)), path)


@pytest.mark.parametrize("rslora", [False, True])
def test_o11_a_reloaded_adapter_is_the_same_function(params, rslora, tmp_path):
    config = LoraConfig(rank=8, alpha=32.0, rslora=rslora, dropout=0.1)
    adapters = trained(CFG, config)
    before = _forward(lora.attach(params, adapters, config))
    peft.save_adapters(tmp_path, adapters, CFG, config, base="models/base")
    found = peft.read_config(tmp_path, CFG)
    assert found == dataclasses.replace(config, targets=ALL)
    assert found.scale == (32 / 8**0.5 if rslora else 4.0)
    reloaded = peft.load_adapters(tmp_path, CFG, found)
    np.testing.assert_allclose(_forward(lora.attach(params, reloaded, found)), before, atol=1e-6)
    np.testing.assert_allclose(_forward(lora.merge(params, reloaded, found)), before, atol=1e-5)
    assert float(jnp.abs(before - _forward(params)).max()) > 0.1  # the adapters do something


def test_arrays_come_back_exactly(tmp_path):
    config = LoraConfig(rank=3, targets=("query", "o*", "down"))
    adapters = trained(CFG, config)
    peft.save_adapters(tmp_path, adapters, CFG, config)
    reloaded = peft.load_adapters(tmp_path, CFG, peft.read_config(tmp_path, CFG))
    assert jax.tree.structure(reloaded) == jax.tree.structure(adapters)
    jax.tree.map(np.testing.assert_array_equal, reloaded, adapters)


def test_names_shapes_and_config_are_those_of_peft(tmp_path):
    """https://huggingface.co/docs/peft/developer_guides/checkpoint"""
    config = LoraConfig(rank=3, alpha=6.0, rslora=True, dropout=0.25)
    adapters = trained(CFG, config)
    peft.save_adapters(tmp_path, adapters, CFG, config, base="somebody/base")
    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    D, QUERIES, KEYS, F, R = 16, 32, 16, 24, 3
    sizes = {
        "self_attn.q_proj": (QUERIES, D),
        "self_attn.k_proj": (KEYS, D),
        "self_attn.v_proj": (KEYS, D),
        "self_attn.o_proj": (D, QUERIES),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    expected = {}
    for layer in range(2):
        for module, (outputs, inputs) in sizes.items():
            place = f"base_model.model.model.layers.{layer}.{module}"
            expected |= {f"{place}.lora_A.weight": (R, inputs), f"{place}.lora_B.weight": (outputs, R)}
    assert {name: values.shape for name, values in tensors.items()} == expected
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somebody/base",
        "r": 3,
        "lora_alpha": 6,
        "use_rslora": True,
        "lora_dropout": 0.25,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    # Head 1 of the queries is rows 8 to 16; the output reads head 1 from columns 8 to 16.
    place = "base_model.model.model.layers.1.self_attn"
    b, a = adapters["layers"]["query_b"][1, :, 1], adapters["layers"]["output_a"][1, 1]
    np.testing.assert_array_equal(tensors[f"{place}.q_proj.lora_B.weight"][8:16], b.T)
    np.testing.assert_array_equal(tensors[f"{place}.o_proj.lora_A.weight"][:, 8:16], a.T)


def test_loading_on_a_mesh_shards_by_the_rules(tmp_path):
    config = LoraConfig(rank=2, targets=ALL)
    adapters = trained(CFG, config)
    peft.save_adapters(tmp_path, adapters, CFG, config)
    mesh = mesh_lib.make_mesh(MeshConfig(fsdp=4, tensor=2))
    loaded = peft.load_adapters(tmp_path, CFG, config, mesh)
    jax.tree.map(np.testing.assert_array_equal, loaded, adapters)
    wanted = mesh_lib.shardings(lora.declare_adapters(CFG, config), mesh)
    same = jax.tree.map(lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim), loaded, wanted)
    assert all(jax.tree.leaves(same))
    assert loaded["layers"]["query_b"].addressable_shards[0].data.shape == (2, 2, 2, 8)  # 4 heads, tensor=2


def test_adapters_in_bfloat16_and_without_the_fields_that_have_defaults(tmp_path):
    config = LoraConfig(rank=8, alpha=8.0, targets=("value",))
    adapters = trained(CFG, config)
    peft.save_adapters(tmp_path, adapters, CFG, config)
    edit_config(tmp_path, r=..., lora_alpha=..., use_rslora=..., lora_dropout=..., bias=..., fan_in_fan_out=...)
    edit_tensors(tmp_path, lambda t: {name: values.astype(jnp.bfloat16) for name, values in t.items()})
    found = peft.read_config(tmp_path, CFG)
    assert found == config
    loaded = peft.load_adapters(tmp_path, CFG, found)["layers"]["value_a"]
    assert loaded.dtype == jnp.float32
    np.testing.assert_array_equal(loaded, adapters["layers"]["value_a"].astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'.*'LORA'"),
        ({"peft_type": ...}, "peft_type=None"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"use_dora": True}, "use_dora=True"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4}"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.'lm_head'."),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"some_new_method": {"of": "next year"}}, "some_new_method"),
        ({"r": 0}, "r=0"),
        ({"r": 2.5}, "r=2.5"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(changes, message, tmp_path):
    peft.save_adapters(tmp_path, trained(CFG, LoraConfig(rank=2)), CFG, LoraConfig(rank=2))
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"adapter_config.json.*{message}"):
        peft.read_config(tmp_path, CFG)


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ({}, {"rank": 4}, "lora.rank=4, .* says 2"),
        ({}, {"alpha": 8.0}, "lora.alpha=8.0, .* says 16.0"),
        ({"use_rslora": True}, {}, "lora.rslora=False, .* says True"),
        ({}, {"targets": ("query", "value")}, "'query', 'value'.* holds .*'down'"),
    ],
)
def test_a_run_must_agree_with_its_adapter(theirs, ours, message, tmp_path):
    config = LoraConfig(rank=2)
    peft.save_adapters(tmp_path, trained(CFG, config), CFG, config)
    edit_config(tmp_path, **theirs)
    with pytest.raises(ValueError, match=message):
        peft.load_adapters(tmp_path, CFG, dataclasses.replace(config, **ours))


NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {n: v for n, v in t.items() if n != NAME}, f"lacks {NAME}"),
        (lambda t: {**t, "base_model.model.lm_head.lora_A.weight": t[NAME]}, "no adapters of this model: .*lm_head"),
        (lambda t: {**t, NAME: t[NAME].T.copy()}, r"layers.1.self_attn.q_proj.lora_A.weight has shape \(16, 2\)"),
        (lambda t: {**t, NAME: t[NAME].astype(np.int8)}, "q_proj.lora_A.weight is stored as I8"),
        (lambda t: {n.replace("base_model.", ""): v for n, v in t.items()}, "holds no adapter of query"),
    ],
    ids=["missing", "surplus", "shape", "type", "prefix"],
)
def test_wrong_tensors_are_named(change, message, tmp_path):
    config = LoraConfig(rank=2)
    peft.save_adapters(tmp_path, trained(CFG, config), CFG, config)
    edit_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        peft.load_adapters(tmp_path, CFG, config)


def test_missing_and_damaged_files_are_named(tmp_path):
    config = LoraConfig(rank=2)
    with pytest.raises(ValueError, match="adapter_config.json is missing"):
        peft.load_adapters(tmp_path, CFG, config)
    peft.save_adapters(tmp_path, trained(CFG, config), CFG, config)
    with pytest.raises(ValueError, match="holds an adapter already"):
        peft.save_adapters(tmp_path, trained(CFG, config), CFG, config)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(ValueError, match="adapter_model.safetensors is cut short"):
        peft.load_adapters(tmp_path, CFG, config)
    file.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match="adapter_model.safetensors is missing: convert adapter_model.bin"):
        peft.load_adapters(tmp_path, CFG, config)


def test_experts_are_refused_by_name_and_their_attention_is_not(tmp_path):
    config = LoraConfig(rank=2)
    with pytest.raises(ValueError, match="adapters of experts .gate, up, down."):
        peft.save_adapters(tmp_path, trained(EXPERTS, config), EXPERTS, config)
    config = LoraConfig(rank=2, targets=("query", "value"))
    adapters = trained(EXPERTS, config)
    peft.save_adapters(tmp_path, adapters, EXPERTS, config)
    assert peft.read_config(tmp_path, EXPERTS) == config
    jax.tree.map(np.testing.assert_array_equal, peft.load_adapters(tmp_path, EXPERTS, config), adapters)


def test_an_adapter_without_a_rank_is_refused():
    with pytest.raises(ValueError, match="adapter='models/adapter' has no effect with rank=0"):
        LoraConfig(adapter="models/adapter")


@pytest.mark.peers
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_the_package_peft_computes_the_same_both_ways(name, rslora, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    package = pytest.importorskip("peft")
    golden = Golden(name)
    directory = golden.write(tmp_path / "base")
    cfg = convert.model_config(directory)
    config = LoraConfig(rank=4, alpha=12.0, rslora=rslora)
    base, tokens = convert.load_params(directory, cfg), golden.tokens[:1]
    row = (np.arange(tokens.shape[1])[None], np.ones_like(tokens), np.full_like(tokens, -1))

    def ours(adapters, lora_config):
        attached = lora.attach(base, adapters, lora_config)
        hidden = transformer.forward(attached, cfg, jnp.asarray(tokens), *map(jnp.asarray, row))
        return transformer.logits(attached, cfg, hidden)[0]

    def fresh():
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(directory, dtype=torch.float32, attn_implementation="eager")

    def theirs(model):
        with torch.no_grad():
            return model.eval()(torch.from_numpy(tokens).long()).logits[0].numpy()

    adapters = trained(cfg, config, size=0.1)
    peft.save_adapters(tmp_path / "out", adapters, cfg, config, base=str(directory))
    loaded = theirs(package.PeftModel.from_pretrained(fresh(), tmp_path / "out"))
    assert np.abs(loaded - golden.logits[0]).max() > 0.1
    np.testing.assert_allclose(ours(adapters, config), loaded, atol=1e-4)

    settings = package.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=rslora,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = package.get_peft_model(fresh(), settings)
    expected = theirs(model)
    model.save_pretrained(tmp_path / "theirs")
    found = peft.read_config(tmp_path / "theirs", cfg)
    assert found == LoraConfig(4, 6.0, rslora, 0.0, ("query", "value", "down"))
    np.testing.assert_allclose(ours(peft.load_adapters(tmp_path / "theirs", cfg, found), found), expected, atol=1e-4)
