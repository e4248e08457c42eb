"""Hugging Face's config.json to a `ModelConfig` and back, for the decoder families that are known here.

Nothing is guessed: an architecture that is not in `FAMILIES`, or a field that may change the numbers and is not
understood, is refused by name. Fields that are left out mean what transformers' config classes mean by that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_posttrain.model.hf_rope import FULL, SLIDING, read_rope, write_scaling
from rl_posttrain.model.transformer import ModelConfig

# Theirs -> ours.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_dim",
}

# Ours that say how a run computes, and leave the mathematics and the checkpoint alone.
OF_THE_RUN = (
    "experts",
    "compute_dtype",
    "remat",
    "attention",
    "attention_block",
    "logprob_chunk",
    "vocab_multiple",
)

# Fields that change no number of the forward pass here: names, other outputs, losses, initial values, text handling.
HARMLESS = frozenset(
    """
    architectures model_type _name_or_path name_or_path transformers_version torch_dtype dtype auto_map use_cache
    initializer_range max_position_embeddings bos_token_id eos_token_id pad_token_id decoder_start_token_id
    sep_token_id cls_token_id unk_token_id forced_bos_token_id forced_eos_token_id suppress_tokens
    begin_suppress_tokens task_specific_params id2label label2id num_labels problem_type finetuning_task
    tokenizer_class prefix return_dict return_dict_in_generate output_attentions output_hidden_states output_scores
    output_router_logits router_aux_loss_coef torchscript use_bfloat16 tf_legacy_loss is_decoder cache_implementation
    _attn_implementation attn_implementation _attn_implementation_autoset _commit_hash is_llama_config
    transformers.js_config unsloth_fixed unsloth_version max_length min_length do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values
    exponential_decay_length_penalty model_max_length gradient_checkpointing _sliding_window_pattern
    """.split()
)

# Fields that may be there, and the only values that are computed here.
ONLY: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0,),
    "hidden_dropout": (0,),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_bidirectional_attention": (False,),
    "router_jitter_noise": (0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({},),
}


@dataclass(frozen=True)
class Family:
    """What an architecture implies, and which fields its config.json has."""

    model_type: str
    implied: Mapping[str, Any] = field(default_factory=dict)  # of ModelConfig
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that config.json leaves out
    theta: float = 10_000.0  # where config.json names none
    bias: bool = False  # whether attention_bias is a field, for queries, keys, values and output alike
    # "all": every layer where there is a window; "upper": from max_window_layers on; "turns": all but every n-th
    window: Literal["none", "all", "upper", "turns"] = "none"
    every: int = 0  # the n of "turns"
    mlp: str = "intermediate_size"  # the field of the width of an mlp or an expert
    expert_fields: Mapping[str, str] = field(default_factory=dict)  # theirs -> ours
    gemma: bool = False  # its names of the activation, of soft caps and of the scale of scores


_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32}
_GEMMA = {"norm_plus_one": True, "scale_embeddings": True, "activation": "gelu_tanh"}
_GEMMA2 = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", bias=True),
    "MistralForCausalLM": Family("mistral", defaults={"sliding_window": 4096, "num_key_value_heads": 8}, window="all"),
    "Qwen2ForCausalLM": Family("qwen2", {"qkv_bias": True}, _QWEN, window="upper"),
    "Qwen3ForCausalLM": Family("qwen3", {"qk_norm": True}, {**_QWEN, "head_dim": 128}, bias=True, window="upper"),
    "GemmaForCausalLM": Family(
        "gemma", _GEMMA, {"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True}, bias=True
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        {**_GEMMA, "post_norms": True},
        {**_GEMMA2, "num_key_value_heads": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        bias=True,
        window="turns",
        every=2,
        gemma=True,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        {**_GEMMA, "post_norms": True, "qk_norm": True},
        # The published text configs leave out even these.
        {
            **_GEMMA2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262_208,
            "rope_local_base_freq": 10_000.0,
        },
        theta=1_000_000.0,
        bias=True,
        window="turns",
        every=6,
        gemma=True,
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2},
        theta=1_000_000.0,
        window="all",
        expert_fields={"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"},
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        {"qk_norm": True},
        {**_QWEN, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False},
        bias=True,
        window="all",
        mlp="moe_intermediate_size",
        expert_fields={
            "num_experts": "num_experts",
            "num_experts_per_tok": "experts_per_token",
            "norm_topk_prob": "normalise_experts",
        },
    ),
}
# Checkpoints that hold such a model beside a picture encoder: its text half is read from `text_config`.
WITH_PICTURES = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}


def architecture(config: Mapping[str, Any]) -> str:
    """The name in `FAMILIES` of the (text) model of a config.json.

    Raises:
      ValueError: none, or one that is not known here.
    """
    named = config.get("architectures") or []
    if not named:  # as in text_config
        named = [name for name, family in FAMILIES.items() if family.model_type == config.get("model_type")]
    if len(named) != 1 or (found := WITH_PICTURES.get(named[0], named[0])) not in FAMILIES:
        known = ", ".join((*FAMILIES, *WITH_PICTURES))
        raise ValueError(
            f"architectures={config.get('architectures')}, model_type={config.get('model_type')!r} is not supported: "
            f"use one of {known}"
        )
    return found


def read_config(config: Mapping[str, Any], *, length: int = 0) -> ModelConfig:
    """The model that a config.json describes, in float32 and with our defaults of how to run it.

    Args:
      config: the parsed file.
      length: the longest sequence of the run, in tokens. RoPE of type "dynamic" and "longrope" depends on it, and
        trainer and sampler must agree; 0: not above the length of pretraining.

    Raises:
      ValueError: an architecture, a RoPE type, a value or a field that is not supported, by name.
    """
    name = architecture(config)
    family = FAMILIES[name]
    left = _text_fields(config, name)
    if "num_experts" in family.expert_fields and "num_local_experts" in left:  # what transformers 5 writes
        left["num_experts"] = left.pop("num_local_experts")
    for key, value in family.defaults.items():
        left.setdefault(key, value)
    values: dict[str, Any] = dict(family.implied)
    _read_sizes(left, family, values)
    values["norm_epsilon"] = float(left.pop("rms_norm_eps", 1e-6))
    values["tie_embeddings"] = bool(left.pop("tie_word_embeddings", False))
    if left.pop("attention_bias", False):
        if not family.bias:
            raise ValueError(f"attention_bias=True: {name} has no such field in transformers")
        values.update(qkv_bias=True, output_bias=True)
    _read_activation(left, name, family)
    _read_window(left, family, values)
    values.update(_read_scores(left, family, values))
    _read_rotation(left, family, values, length)
    for theirs, ours in family.expert_fields.items():
        values[ours] = left.pop(theirs)
    _refuse_rest(left)
    return ModelConfig(**values)


def _text_fields(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of the language model; null ones are absent, but for those whose null means something."""
    if (config.get("architectures") or [name])[0] in WITH_PICTURES:
        config = config.get("text_config") or {}
    kept = ("num_key_value_heads", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    return {key: value for key, value in config.items() if value is not None or key in kept}


def _read_sizes(left: dict[str, Any], family: Family, values: dict[str, Any]) -> None:
    for theirs, ours in SIZES.items():
        if theirs == "num_key_value_heads" and left.get(theirs) is None:
            left[theirs] = values["num_heads"]
        if theirs == "head_dim" and theirs not in left:
            left[theirs] = values["embed_dim"] // values["num_heads"]
        value = left.pop(theirs, None)
        if theirs == "intermediate_size" and family.mlp != theirs:  # that one is of layers without experts: refused
            theirs, value = family.mlp, left.pop(family.mlp, None)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{theirs}={value!r} in config.json: must be a whole number")
        values[ours] = value


def _read_activation(left: dict[str, Any], name: str, family: Family) -> None:
    field_name, legal = ("hidden_act", ("silu",))
    if family.implied.get("activation") == "gelu_tanh":
        # Early Gemma files say "gelu" and mean the tanh form; only the first Gemma has hidden_act at all.
        field_name, legal = ("hidden_activation", ("gelu_pytorch_tanh",))
        old = left.pop("hidden_act", "gelu")
        if not family.gemma and old not in ("gelu", "gelu_pytorch_tanh"):
            raise ValueError(f"hidden_act={old!r}: {name} is computed with gelu_pytorch_tanh alone")
    value = left.pop(field_name, legal[0])
    if value not in legal:
        raise ValueError(f"{field_name}={value!r}: {name} is computed with {legal[0]} alone")


def _read_window(left: dict[str, Any], family: Family, values: dict[str, Any]) -> None:
    if family.window == "none":
        return
    window = left.pop("sliding_window", None) or 0
    if not left.pop("use_sliding_window", True):
        window = 0
    L = values["num_layers"]
    first, every = left.pop("max_window_layers", 0), left.pop("sliding_window_pattern", None) or family.every
    slides = [True] * L
    if family.window == "upper":
        slides = [i >= first for i in range(L)]
    if family.window == "turns":
        slides = [(i + 1) % every > 0 for i in range(L)]
    named = left.pop("layer_types", None) if family.window != "all" else None
    if named is not None:
        unknown = sorted(set(named) - {SLIDING, FULL})
        if unknown or len(named) != L:
            raise ValueError(f"layer_types={named}: needs {SLIDING} or {FULL} for each of {L} layers")
        slides = [kind == SLIDING for kind in named]
    if window and any(slides):
        values["window"] = window
        values["sliding"] = () if all(slides) else tuple(slides)


def _read_scores(left: dict[str, Any], family: Family, values: dict[str, Any]) -> dict[str, float]:
    if not family.gemma:
        return {}
    scalar = left.pop("query_pre_attn_scalar")
    return {
        "query_scale": 0.0 if scalar == values["head_dim"] else scalar**-0.5,
        "attention_softcap": float(left.pop("attn_logit_softcapping", None) or 0),
        "logit_softcap": float(left.pop("final_logit_softcapping", None) or 0),
    }


def _read_rotation(left: dict[str, Any], family: Family, values: dict[str, Any], length: int) -> None:
    ropes = read_rope(left, family.theta, length)
    full, sliding = ropes[FULL], ropes[SLIDING]
    if not values.get("window"):
        sliding = full
    elif not values.get("sliding"):  # every layer slides
        full = sliding
    sharper = full.scaling is not None and full.scaling.kind in ("yarn", "longrope")  # there is one factor for all
    if sliding != full and (sliding.scaling is not None or sharper):
        raise ValueError(
            f"sliding layers turn by {sliding} and the others by {full}: beside a theta of their own, sliding layers "
            "may not be scaled, and the others only by linear, dynamic or llama3"
        )
    values.update(rope_theta=full.theta, rope_scaling=full.scaling)
    if sliding != full:
        values["local_rope_theta"] = sliding.theta


def _refuse_rest(left: Mapping[str, Any]) -> None:
    for name, legal in ONLY.items():
        if name in left and left[name] not in legal:
            raise ValueError(f"{name}={left[name]!r} in config.json is not supported: only {legal[0]!r} is")
    known = HARMLESS | set(ONLY)
    unknown = [f"{name}={value!r}" for name, value in left.items() if name not in known and value is not None]
    if unknown:
        raise ValueError(
            f"config.json has fields that are not understood: {', '.join(unknown)}. They may change what the model "
            "computes; if they do not, take them out of the file"
        )


def core(cfg: ModelConfig) -> ModelConfig:
    """The same model with our defaults of how to run it: what a config.json can say."""
    ours = {f.name: f.default for f in dataclasses.fields(ModelConfig) if f.name in OF_THE_RUN}
    return dataclasses.replace(cfg, **ours)


def write_config(
    cfg: ModelConfig, source: Mapping[str, Any] | None = None, *, length: int = 0, dtype: str = "float32"
) -> dict[str, Any]:
    """A config.json from which `read_config` reads the same model, in float32.

    Args:
      source: the config.json that the model came from, all of whose other fields are kept. Without it, the first of
        `FAMILIES` that can say `cfg` is taken.
      length: without a source, the longest sequence that the model is meant for, in tokens.
      dtype: of the stored weights.

    Raises:
      ValueError: no family can say it, or `source` describes another model.
    """
    run_length = cfg.rope_scaling.length if cfg.rope_scaling else 0
    wanted = core(cfg)
    if source is not None:
        written = _from_source(source)
        written["tie_word_embeddings"] = cfg.tie_embeddings
        if (found := read_config(written, length=run_length)) != wanted:
            different = [f.name for f in dataclasses.fields(cfg) if getattr(found, f.name) != getattr(wanted, f.name)]
            raise ValueError(f"the source's config.json describes another model: it differs in {', '.join(different)}")
        written["dtype" if "dtype" in written else "torch_dtype"] = dtype
        return written
    if length < 1:
        raise ValueError(f"length={length}: without a source, give the longest sequence of the model, in tokens")
    for name, family in FAMILIES.items():
        written = _written(cfg, name, family, length) | {"torch_dtype": dtype}
        try:
            found = read_config(written, length=run_length)
        except ValueError:
            continue  # this family lacks the fields; the next may have them
        if found == wanted:
            return written
    raise ValueError(f"no known architecture can say this model: {wanted}")


def _from_source(source: Mapping[str, Any]) -> dict[str, Any]:
    name = architecture(source)
    if (source.get("architectures") or [name])[0] not in WITH_PICTURES:
        return dict(source)
    outside = {key: source[key] for key in ("eos_token_id", "bos_token_id", "pad_token_id") if key in source}
    return {**outside, **source["text_config"], "architectures": [name], "model_type": FAMILIES[name].model_type}


def _written(cfg: ModelConfig, name: str, family: Family, length: int) -> dict[str, Any]:
    values = {theirs: getattr(cfg, ours) for theirs, ours in (SIZES | dict(family.expert_fields)).items()}
    if cfg.rope_scaling and cfg.rope_scaling.kind == "dynamic":
        length = cfg.rope_scaling.original_length  # which this type reads from there
    values |= {"architectures": [name], "model_type": family.model_type, "max_position_embeddings": length}
    values[family.mlp] = cfg.mlp_dim
    values |= {"rms_norm_eps": cfg.norm_epsilon, "tie_word_embeddings": cfg.tie_embeddings}
    values |= {"rope_theta": cfg.rope_theta, "rope_scaling": write_scaling(cfg.rope_scaling)}
    if family.bias:
        values["attention_bias"] = cfg.output_bias
    if family.window != "none":
        values["sliding_window"] = cfg.window or None
    if family.window == "upper" or name == "Qwen3MoeForCausalLM":
        values["use_sliding_window"] = cfg.window > 0
    if family.window in ("upper", "turns"):
        values["layer_types"] = [SLIDING if slides else FULL for slides in cfg.slides]
    gelu = cfg.activation == "gelu_tanh"
    values["hidden_activation" if family.gemma else "hidden_act"] = "gelu_pytorch_tanh" if gelu else "silu"
    if family.gemma:
        scalar = cfg.query_scale**-2 if cfg.query_scale else cfg.head_dim
        values["query_pre_attn_scalar"] = round(scalar) if abs(scalar - round(scalar)) < 1e-9 * scalar else scalar
        values["attn_logit_softcapping"] = cfg.attention_softcap or None
        values["final_logit_softcapping"] = cfg.logit_softcap or None
    if name == "Gemma3ForCausalLM":
        values["rope_local_base_freq"] = cfg.local_rope_theta or cfg.rope_theta
    return values
