"""The rotary part of a Hugging Face config.json, in both spellings, to our fields and back.

Old: `rope_theta` and `rope_scaling` beside the sizes. New: one mapping `rope_parameters`, which may hold one mapping
for each type of layer. The numbers are those of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rl_posttrain.model.rope import RopeScaling

KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")
SLIDING, FULL = "sliding_attention", "full_attention"


class Rope(NamedTuple):
    """The rotation of one type of layer."""

    theta: float
    scaling: RopeScaling | None


def read_rope(config: dict[str, Any], default_theta: float, length: int) -> dict[str, Rope]:
    """Takes every rotary field out of `config`: the rotation of each type of layer.

    Args:
      config: config.json without null fields; it needs `max_position_embeddings` where a scaling rests on it.
      default_theta: of a config that names none.
      length: the longest sequence of the run, in tokens; "dynamic" and "longrope" depend on it. 0: not above that of
        pretraining.

    Raises:
      ValueError: an unknown type, a field that is missing or not understood, or spellings that contradict each other.
    """
    new, old = config.pop("rope_parameters", None), config.pop("rope_scaling", None)
    theta, partial = config.pop("rope_theta", default_theta), config.pop("partial_rotary_factor", 1.0)
    local = config.pop("rope_local_base_freq", None)  # Gemma 3's spelling of the sliding layers' theta
    limits = {name: config.get(name) for name in ("max_position_embeddings", "original_max_position_embeddings")}
    config.pop("original_max_position_embeddings", None)

    def one(section: Mapping[str, Any] | None) -> Rope:
        given = {"rope_theta": theta, "partial_rotary_factor": partial}
        given.update({key: value for key, value in (section or {}).items() if value is not None})
        return _read_section(given, limits, length)

    nested = bool(new) and (SLIDING in new or FULL in new)
    if nested:
        unknown = set(new) - {SLIDING, FULL}
        if unknown:
            raise ValueError(f"rope_parameters names {sorted(unknown)}: only {SLIDING} and {FULL} are understood")
        full = one(new.get(FULL))
        sliding = one({"rope_theta": theta if local is None else local, **(new.get(SLIDING) or {})})
    elif new and local is not None:
        raise ValueError(f"rope_parameters={new}: sliding layers turn otherwise here, name {SLIDING} and {FULL} in it")
    else:
        full = one(new if new is not None else old)
        sliding = full if local is None else Rope(float(local), None)
    if new is not None and old is not None and one(old) != full:
        raise ValueError(f"rope_scaling={old} contradicts rope_parameters={new}: keep one of them")
    return {FULL: full, SLIDING: sliding}


def _read_section(given: dict[str, Any], limits: Mapping[str, Any], length: int) -> Rope:
    """One mapping, in either spelling, with its theta."""
    written = dict(given)
    kinds = {given.pop(name) for name in ("rope_type", "type") if name in given} or {"default"}
    if len(kinds) > 1 or kinds.isdisjoint(("default", *KINDS)):
        raise ValueError(f"rope type {', '.join(sorted(map(str, kinds)))} is unknown: use one of default, {KINDS}")
    kind = kinds.pop()
    theta = float(given.pop("rope_theta"))
    partial = given.pop("partial_rotary_factor")
    if partial != 1:
        raise ValueError(f"partial_rotary_factor={partial}: only heads that are rotated whole (1.0) are supported")
    given.pop("finetuned", None)  # says where the weights come from
    if kind == "default":
        given.pop("factor", None)  # transformers reads none here
        scaling = None
    else:
        scaling = _read_scaling(kind, given, limits, length)
    if given:
        raise ValueError(f"rope fields {sorted(given)} of {written} are not understood with type {kind!r}")
    return Rope(theta, scaling)


def _read_scaling(kind: Any, given: dict[str, Any], limits: Mapping[str, Any], length: int) -> RopeScaling:
    def need(name: str) -> Any:
        if name not in given:
            raise ValueError(f"rope type {kind!r} needs {name}: it is missing in {given}")
        return given.pop(name)

    if kind == "linear":
        return RopeScaling(kind, float(need("factor")))
    longest = limits["max_position_embeddings"]
    if longest is None:
        raise ValueError(f"rope type {kind!r} needs max_position_embeddings: it is missing in config.json")
    if kind == "dynamic":
        given.pop("original_max_position_embeddings", None)  # transformers goes by max_position_embeddings here
        return RopeScaling(kind, float(need("factor")), longest, length=length)
    original = given.pop("original_max_position_embeddings", longest)
    original = limits["original_max_position_embeddings"] or original
    if kind == "llama3":
        return RopeScaling(
            kind,
            float(need("factor")),
            original,
            low_frequency_factor=float(need("low_freq_factor")),
            high_frequency_factor=float(need("high_freq_factor")),
        )
    factor = float(given.pop("factor", longest / original))
    sharper = float(given.pop("attention_factor", 0.0))
    if kind == "longrope":
        long, short = need("long_factor"), need("short_factor")
        divisors = tuple(float(divisor) for divisor in (long if length > original else short))
        return RopeScaling(kind, factor, original, length, attention_factor=sharper, divisors=divisors)
    mscale, all_dimensions = given.pop("mscale", 0), given.pop("mscale_all_dim", 0)
    if not sharper and mscale and all_dimensions and factor > 1:  # DeepSeek's spelling
        grown = lambda scale: 0.1 * scale * math.log(factor) + 1.0
        sharper = grown(mscale) / grown(all_dimensions)
    return RopeScaling(
        kind,
        factor,
        original,
        beta_fast=float(given.pop("beta_fast", 0) or 32),
        beta_slow=float(given.pop("beta_slow", 0) or 1),
        truncate=bool(given.pop("truncate", True)),
        attention_factor=sharper,
    )


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The old spelling, which every version of transformers reads. Short and long are this run's divisors alike."""
    if scaling is None:
        return None
    written: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn", "longrope"):
        written["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        written["low_freq_factor"] = scaling.low_frequency_factor
        written["high_freq_factor"] = scaling.high_frequency_factor
    if scaling.kind == "yarn":
        written.update(beta_fast=scaling.beta_fast, beta_slow=scaling.beta_slow, truncate=scaling.truncate)
    if scaling.kind == "longrope":
        written.update(short_factor=list(scaling.divisors), long_factor=list(scaling.divisors))
    if scaling.attention_factor:
        written["attention_factor"] = scaling.attention_factor
    return written
