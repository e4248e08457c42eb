"""GGUF files to model directories, on tiny files that the package `gguf` writes. The real one: test_smollm2.py."""

import json

import numpy as np
import pytest
from golden_models import Golden
from safetensors.numpy import load_file

from rl_posttrain.data.huggingface import HuggingFaceTokenizer
from rl_posttrain.model import convert
from rl_posttrain.model.gguf import convert_gguf

gguf = pytest.importorskip("gguf", reason="needs pip install gguf")

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# 96 tokens: special ones, some characters as byte-level BPE spells them, two merges, and fillers.
TOKENS = [*SPECIAL, *"0123456789abcdefghijklmnopqrstuvwxyzĠĊ", "ab", "Ġa"]
TOKENS += [f"filler{i}" for i in range(96 - len(TOKENS))]


def theirs(name):
    if ".layers." not in name:
        return {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}.get(name, "output")
    _, _, layer, module = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[module]}"


def interleaved(rows, heads):
    """As llama.cpp's converter orders rows of queries and keys: the halves of each head in turn."""
    outputs, inputs = rows.shape
    return rows.reshape(heads, 2, outputs // heads // 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


def write(path, name="llama", *, architecture="llama", kind=None, metadata=None, drop=(), extra=(), tokenizer="smollm"):
    """A golden model as llama.cpp would hold it; `kind` quantises its matrices."""
    golden, writer = Golden(name), gguf.GGUFWriter(path, architecture)
    config = golden.old_config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10_000.0))
    for key, value in (metadata or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    weights = {name: values for name, values in golden.weights().items() if theirs(name) not in drop}
    for tensor, values in [*weights.items(), *extra]:
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(tensor.split(".")[-2])
        values = interleaved(values, config[heads]) if heads else values
        quantised = kind is not None and values.ndim == 2
        data = gguf.quants.quantize(values, kind) if quantised else values
        writer.add_tensor(f"{theirs(tensor)}.weight", data, raw_dtype=kind if quantised else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_float_weights_come_back_exactly_in_their_own_order(tmp_path):
    golden = Golden("llama")
    kinds = convert_gguf(write(tmp_path / "tiny.gguf"), tmp_path / "out")
    assert kinds == "F32 (21 tensors)"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == golden.shapes.keys()
    for name, values in golden.weights().items():
        np.testing.assert_array_equal(tensors[name], values, err_msg=name)
    cfg = convert.model_config(tmp_path / "out")
    assert cfg == convert.model_config(golden.write(tmp_path / "golden"))
    assert not cfg.tie_embeddings
    assert cfg.norm_epsilon == 1e-5  # the file holds 9.99999974738e-06


def test_a_file_without_an_output_table_is_tied(tmp_path):
    convert_gguf(write(tmp_path / "tiny.gguf", "llama_tied"), tmp_path / "out", shard_bytes=100_000)
    cfg = convert.model_config(tmp_path / "out")
    assert cfg.tie_embeddings and cfg.rope_theta == 100_000.0 and cfg.num_kv_heads == 1
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    params = convert.load_params(tmp_path / "out", cfg)
    np.testing.assert_array_equal(params["embed"], Golden("llama_tied").weights()["model.embed_tokens.weight"])


@pytest.mark.parametrize(("kind", "step"), [("Q8_0", 1 / 127), ("Q4_1", 1 / 7.5), ("Q4_0", 1 / 7)])
def test_quantised_weights_hold_the_values_of_the_quantised_model(kind, step, tmp_path):
    file = write(tmp_path / "tiny.gguf", kind=getattr(gguf.GGMLQuantizationType, kind))
    kinds = convert_gguf(file, tmp_path / "out")
    assert kinds == f"{kind} (16 tensors), F32 (5 tensors)"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, values in Golden("llama").weights().items():
        if values.ndim == 1:
            np.testing.assert_array_equal(tensors[name], values)
            continue
        blocks = values.reshape(-1, 32)  # of 32 weights with one scale
        error = np.abs(tensors[name].reshape(-1, 32) - blocks).max(1)
        assert 0 < error.max() and (error <= 1.01 * step * np.abs(blocks).max(1)).all(), name


def test_bfloat16_rounds(tmp_path):
    import ml_dtypes

    convert_gguf(write(tmp_path / "tiny.gguf"), tmp_path / "out", "bfloat16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, values in Golden("llama").weights().items():
        np.testing.assert_array_equal(tensors[name], values.astype(ml_dtypes.bfloat16))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_tokenizer_comes_with_it(tmp_path):
    convert_gguf(write(tmp_path / "tiny.gguf"), tmp_path / "out")
    tokenizer = HuggingFaceTokenizer(tmp_path / "out")
    assert tokenizer.vocab_size == 96 and tokenizer.end_ids == (2,) and tokenizer.pad_id == 2
    assert [TOKENS[i] for i in tokenizer.encode("ab 12")] == ["ab", "Ġ", "1", "2"]  # digits stand alone
    assert [TOKENS[i] for i in tokenizer.encode("b ab")] == ["b", "Ġ", "ab"]
    assert tokenizer.decode(tokenizer.encode("cab 90 a")) == "cab 90 a"
    assert tokenizer.render([{"role": "a", "content": "b"}]) == "<|im_start|>a\nb<|im_end|>\n"
    assert tokenizer.encode("<|im_end|>") != [2]  # in a text it is no end
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 2


EXTRA = [("model.layers.1.self_attn.q_proj.weight", np.zeros((64, 64), np.float32))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "tiny.gguf holds architecture 'qwen2': only llama"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope scaling 'yarn'"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "llama.rope.dimension_count=8 differs .* head width 16"),
        ({"metadata": {"llama.attention.value_length": 32}}, "value_length=32 differs"),
        ({"drop": ["blk.1.ffn_up"]}, "missing or surplus: .'blk.1.ffn_up.weight'"),
        ({"extra": [("model.layers.2.mlp.up_proj.weight", EXTRA[0][1])]}, "surplus: .'blk.2.ffn_up.weight'"),
        ({"tokenizer": "llama-bpe"}, "tokenizer .'gpt2', 'llama-bpe'. is not converted"),
        ({"drop": ["blk.1.attn_q"], "extra": [(EXTRA[0][0], np.zeros((32, 64), np.float32))]}, r"attn_q.* \(32, 64\)"),
    ],
    ids=["family", "scaling", "partial", "values", "missing", "surplus", "tokenizer", "shape"],
)
def test_what_is_not_understood_is_refused(options, message, tmp_path):
    file = write(tmp_path / "tiny.gguf", **options)
    with pytest.raises(ValueError, match=message):
        convert_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()  # a directory without it is seen to be unfinished


def test_missing_cut_and_other_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere.gguf is missing"):
        convert_gguf(tmp_path / "nowhere.gguf", tmp_path / "out")
    whole = write(tmp_path / "tiny.gguf").read_bytes()
    for kept in (len(whole) - 1024, len(whole) // 2, 2000, 4, 0):
        (tmp_path / "cut.gguf").write_bytes(whole[:kept])
        with pytest.raises(ValueError, match="cut.gguf is cut short, damaged or no GGUF"):
            convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")
    (tmp_path / "cut.gguf").write_bytes(b"PK" + whole[2:])
    with pytest.raises(ValueError, match="cut.gguf is cut short, damaged or no GGUF"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    with pytest.raises(ValueError, match="out holds weights already"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
