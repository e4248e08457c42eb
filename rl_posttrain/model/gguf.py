"""llama.cpp's GGUF files to a model directory in Hugging Face's layout: dequantised weights, and the tokenizer.

The values are those of the quantised model. What llama.cpp reorders (rows of queries and keys, for its interleaved
rotation) is put back. Needs the extra [gguf].
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from rl_posttrain.model.hf_config import read_config
from rl_posttrain.model.hf_files import refuse_weights, write_json, write_weights
from rl_posttrain.model.hf_names import stored

# Our path -> llama.cpp's name.
_NAMES = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "layers/attention_norm": "blk.{layer}.attn_norm.weight",
    "layers/query": "blk.{layer}.attn_q.weight",
    "layers/key": "blk.{layer}.attn_k.weight",
    "layers/value": "blk.{layer}.attn_v.weight",
    "layers/output": "blk.{layer}.attn_output.weight",
    "layers/mlp_norm": "blk.{layer}.ffn_norm.weight",
    "layers/gate": "blk.{layer}.ffn_gate.weight",
    "layers/up": "blk.{layer}.ffn_up.weight",
    "layers/down": "blk.{layer}.ffn_down.weight",
}
_CONTROL, _USER_DEFINED = 3, 4  # kinds of token


def convert_gguf(
    file: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    dtype: Literal["float32", "bfloat16"] = "float32",
    shard_bytes: int = 2_000_000_000,
) -> str:
    """Writes the model of a GGUF file as a directory that transformers and `convert.load_params` read.

    Args:
      dtype: of the stored weights. float32 holds the dequantised values exactly, bfloat16 rounds them.
      shard_bytes: the largest file of weights.

    Returns:
      How the weights were quantised, for people: "Q4_1 (210 tensors), F32 (61 tensors)".

    Raises:
      ImportError: the package `gguf` is not installed.
      ValueError: the file is missing or damaged, or holds a model or tokenizer that is not supported.
    """
    from gguf.quants import dequantize

    target = Path(directory)
    refuse_weights(target)
    reader = _open(Path(file))
    field = _fields(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(Path(file), field, tied=_NAMES["head"] not in tensors) | {"torch_dtype": dtype}
    cfg = read_config(config)
    pieces = {}  # llama.cpp's name -> (Hugging Face's name, shape, heads whose rows were reordered)
    for path, entry in stored(cfg).items():
        heads = {"layers/query": cfg.num_heads, "layers/key": cfg.num_kv_heads}.get(path, 0)
        for layer in range(max(1, entry.layers)):
            pieces[_NAMES[path].format(layer=layer)] = (entry.name(layer), entry.their_shape, heads)
    if different := sorted(pieces.keys() ^ tensors.keys()):
        raise ValueError(
            f"{file}: the metadata asks for other tensors than the file holds; missing or surplus: {different[:6]}"
        )

    def piece(name: str) -> Iterator[tuple[str, np.ndarray]]:
        theirs, shape, heads = pieces[name]
        values = np.asarray(dequantize(tensors[name].data, tensors[name].tensor_type), np.float32)
        found = tuple(int(length) for length in reversed(tensors[name].shape))  # the fastest axis comes first there
        if found != shape:
            raise ValueError(f"{file}: {name} has shape {found}; the metadata asks for {shape}")
        values = values.reshape(shape)
        yield theirs, np.ascontiguousarray(_in_halves(values, heads) if heads else values).astype(jnp.dtype(dtype))

    target.mkdir(parents=True, exist_ok=True)
    width = np.dtype(jnp.dtype(dtype)).itemsize
    sizes = {name: math.prod(shape) * width for name, (_, shape, _) in pieces.items()}
    write_weights(target, sizes, piece, shard_bytes)
    _write_tokenizer(Path(file), field, target)
    ids = {f"{name}_token_id": config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    write_json(target / "generation_config.json", ids)
    write_json(target / "config.json", config)
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    return ", ".join(f"{kind} ({count} tensors)" for kind, count in kinds.most_common())


def _open(file: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError("reading GGUF files needs the package gguf: pip install 'rl_posttrain[gguf]'") from error
    if not file.is_file():
        raise ValueError(f"{file} is missing: give the path of a GGUF file")
    try:
        return gguf.GGUFReader(file)
    except (ValueError, IndexError, OverflowError) as error:  # it reads a cut file as far as it goes
        raise ValueError(f"{file} is cut short, damaged or no GGUF file ({error}): fetch it again") from error


def _fields(reader: Any) -> Callable[..., Any]:
    missing = object()

    def field(name: str, default: Any = missing) -> Any:
        if name in reader.fields:
            return reader.fields[name].contents()
        if default is missing:
            raise ValueError(f"the GGUF file has no metadata {name}: it cannot be converted")
        return default

    return field


def _config(file: Path, field: Callable[..., Any], tied: bool) -> dict[str, Any]:
    """The config.json that the metadata says."""
    kind = field("general.architecture")
    if kind != "llama":
        raise ValueError(f"{file} holds architecture {kind!r}: only llama is supported; use the safetensors instead")
    scaling = field("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"{file}: rope scaling {scaling!r} is not read from GGUF; use the safetensors instead")
    hidden, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    head_dim = field("llama.attention.key_length", hidden // heads)
    for name in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if field(name, head_dim) != head_dim:
            raise ValueError(f"{file}: {name}={field(name)} differs from the head width {head_dim}: not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": field("llama.feed_forward_length"),
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "max_position_embeddings": field("llama.context_length"),
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(field("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(field("llama.rope.freq_base", 10_000.0)),
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        **{f"{name}_token_id": field(f"tokenizer.ggml.{key}_token_id", None) for name, key in _SPECIAL.items()},
    }


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}  # theirs -> llama.cpp's


def _decimal(single: float) -> float:
    """The decimal number that was stored in single precision: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(single)))


def _in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [N * H, D] whose rotated pairs are neighbours, with the pairs' first halves before their second ones."""
    outputs, inputs = rows.shape
    return rows.reshape(heads, outputs // heads // 2, 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


def _write_tokenizer(file: Path, field: Callable[..., Any], target: Path) -> None:
    """tokenizer.json and tokenizer_config.json, for byte-level BPE that splits digits, as SmolLM's does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre", None))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"{file}: tokenizer {kind} is not converted, only ('gpt2', 'smollm'); use the safetensors")
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))  # type: ignore[arg-type]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    special = [token for token, kind in zip(tokens, kinds) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if backend.get_vocab_size() != len(tokens):
        raise ValueError(f"{file}: its vocabulary of {len(tokens)} names {backend.get_vocab_size()} different tokens")
    backend.save(str(target / "tokenizer.json"))
    (target / "tokenizer.json").chmod(0o644)
    settings: dict[str, Any] = {}
    for name, key in {**_SPECIAL, "unk": "unknown"}.items():
        i = field(f"tokenizer.ggml.{key}_token_id", None)
        if i is not None:
            settings[f"{name}_token"] = tokens[i]
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": field("llama.context_length"),
    }
    template = field("tokenizer.chat_template", None)
    if template is not None:
        settings["chat_template"] = template
    write_json(target / "tokenizer_config.json", settings)
