"""config.json in both spellings, out and in again; what is not understood is refused by name."""

import dataclasses
import json
import math

import jax
import pytest
from golden_models import FAMILIES, Golden

from rl_posttrain.model.hf_config import FAMILIES as ARCHITECTURES
from rl_posttrain.model.hf_config import core, read_config, write_config
from rl_posttrain.model.hf_names import stored
from rl_posttrain.model.presets import PRESETS
from rl_posttrain.model.rope import RopeScaling
from rl_posttrain.model.transformer import ModelConfig, declare, is_parameter

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}


def qwen3(**changes):
    return {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 2, **changes}


@pytest.mark.parametrize("name", FAMILIES)
def test_both_spellings_say_the_same_model(name):
    golden = Golden(name)
    old = read_config(golden.old_config, length=golden.run_length)
    assert read_config(golden.new_config, length=golden.run_length) == old


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_is_read_back(name):
    golden = Golden(name)
    cfg = read_config(golden.old_config, length=golden.run_length)
    run = dataclasses.replace(cfg, compute_dtype="bfloat16", remat="full", vocab_multiple=8)
    written = json.loads(json.dumps(write_config(run, length=64, dtype="bfloat16")))
    assert read_config(written, length=golden.run_length) == cfg
    assert written["architectures"] == golden.old_config["architectures"]
    assert written["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_source_keeps_its_fields(name):
    golden = Golden(name)
    cfg = read_config(golden.new_config, length=golden.run_length)
    written = write_config(cfg, golden.new_config, dtype="float16")
    assert written == {**golden.new_config, "dtype": "float16"}


def test_embeddings_trained_apart_are_untied_in_the_source():
    source = {**LLAMA, "tie_word_embeddings": True, "eos_token_id": 5}
    apart = dataclasses.replace(read_config(source), tie_embeddings=False)
    written = write_config(apart, source)
    assert written["tie_word_embeddings"] is False and written["eos_token_id"] == 5
    assert read_config(written) == apart


def test_a_source_of_another_model_is_refused():
    with pytest.raises(ValueError, match="another model: it differs in num_layers, rope_theta"):
        write_config(dataclasses.replace(read_config(LLAMA), num_layers=3, rope_theta=5.0), LLAMA)


def test_a_model_that_no_family_can_say_is_refused():
    odd = dataclasses.replace(read_config(LLAMA), post_norms=True)
    with pytest.raises(ValueError, match="no known architecture"):
        write_config(odd, length=64)
    with pytest.raises(ValueError, match="length=0"):
        write_config(read_config(LLAMA))


def test_core_resets_what_is_of_the_run_alone():
    cfg = read_config(LLAMA)
    run = dataclasses.replace(
        cfg, experts="grouped", attention="blockwise", attention_block=8, logprob_chunk=4, vocab_multiple=8
    )
    assert run != cfg and core(run) == cfg


def test_o08_head_width_is_read_and_never_derived():
    cfg = read_config(qwen3(head_dim=32))
    assert (cfg.embed_dim, cfg.num_heads, cfg.head_dim) == (64, 4, 32)
    table = stored(cfg)
    assert table["layers/query"].their_shape == (128, 64)
    assert table["layers/key"].their_shape == (64, 64)
    assert table["layers/output"].their_shape == (64, 128)
    assert table["layers/query_norm"].their_shape == (32,)
    assert read_config(qwen3()).head_dim == 128, "Qwen3's own default, not 64 / 4"
    assert read_config(LLAMA).head_dim == 16
    assert read_config({**LLAMA, "head_dim": None}).head_dim == 16


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ({"residual_multiplier": 0.22, "logits_scaling": 8}, "residual_multiplier=0.22, logits_scaling=8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"),
        (qwen3(layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (qwen3(layer_types=["full_attention"]), "each of 2 layers"),
        ({"architectures": ["Qwen2ForCausalLM"], "attention_bias": True}, "attention_bias=True"),
        ({"architectures": ["MixtralForCausalLM"], "router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"architectures": ["GemmaForCausalLM"], "hidden_act": "silu"}, "hidden_act='silu'"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ({"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes, named):
    config = {**LLAMA, "moe_intermediate_size": 8} if "Moe" in str(changes) else LLAMA
    with pytest.raises(ValueError, match=named):
        read_config({**config, **changes})


def test_harmless_fields_and_nulls_pass():
    harmless = {"torch_dtype": "bfloat16", "use_cache": False, "initializer_range": 0.5, "eos_token_id": [1, 2]}
    harmless |= {"quantization_config": None, "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1}
    assert read_config({**LLAMA, **harmless}) == read_config(LLAMA)


def test_left_out_fields_mean_what_transformers_means():
    mistral = read_config({**LLAMA, "architectures": ["MistralForCausalLM"], "num_attention_heads": 8})
    assert read_config({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 4
    assert mistral.window == 4096 and mistral.num_kv_heads == 8 and not mistral.tie_embeddings
    no_window = read_config({**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None,
                             "num_key_value_heads": 2})  # fmt: skip
    assert no_window.window == 0
    gemma2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 3}
    cfg = read_config(gemma2)
    assert (cfg.attention_softcap, cfg.logit_softcap, cfg.window) == (50.0, 30.0, 4096)
    assert cfg.sliding == (True, False, True) and cfg.tie_embeddings and cfg.head_dim == 256
    assert read_config({**gemma2, "attn_logit_softcapping": None}).attention_softcap == 0.0


def test_qwen_windows():
    qwen2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "sliding_window": 8}
    assert read_config(qwen2).window == 0, "off unless use_sliding_window"
    upper = {**qwen2, "use_sliding_window": True, "max_window_layers": 1}
    assert read_config(upper).window == 8 and read_config(upper).sliding == (False, True)
    assert read_config({**upper, "max_window_layers": 2}).window == 0
    assert read_config({**upper, "max_window_layers": 0}).sliding == ()
    named = {**upper, "layer_types": ["sliding_attention", "full_attention"]}
    assert read_config(named).sliding == (True, False)


def test_the_text_half_of_a_picture_model():
    # As published: the text config leaves out all that Gemma 3 has by default.
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "vision_config": {"hidden_size": 1152},
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    cfg = read_config(config)
    assert cfg == PRESETS["gemma-3-4b"]
    written = write_config(cfg, config)
    assert written["architectures"] == ["Gemma3ForCausalLM"] and read_config(written) == cfg


PUBLISHED = {
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_the_presets(name):
    assert read_config(PUBLISHED[name]) == PRESETS[name]


# As the model cards and safetensors headers on the hub count them.
COUNTS = {
    "smollm2-135m": 134_515_008,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
}


@pytest.mark.parametrize("name", COUNTS)
def test_presets_have_the_published_number_of_parameters(name):
    leaves = jax.tree.leaves(declare(PRESETS[name]), is_leaf=is_parameter)
    assert sum(math.prod(leaf.shape) for leaf in leaves) == COUNTS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_written_as_a_config(name):
    cfg = PRESETS[name]
    assert isinstance(cfg, ModelConfig)
    assert read_config(write_config(cfg, length=4096)) == cfg


def test_every_architecture_has_a_golden_model():
    assert {Golden(name).old_config["architectures"][0] for name in FAMILIES} == set(ARCHITECTURES)


def test_sliding_layers_of_their_own_scaling_are_refused():
    gemma3 = Golden("gemma3").new_config
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    parameters = {**gemma3["rope_parameters"], "sliding_attention": scaled}
    with pytest.raises(ValueError, match="sliding layers may not be scaled"):
        read_config({**gemma3, "rope_parameters": parameters})
    with pytest.raises(ValueError, match="name sliding_attention and full_attention"):
        read_config({**gemma3, "rope_parameters": scaled})
    assert read_config(gemma3).rope_scaling == RopeScaling("linear", 8.0)
