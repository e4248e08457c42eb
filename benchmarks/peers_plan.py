"""What the peers benchmark measures: the work, the contenders, and the arithmetic of the figures."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers

from benchmarks.peers_host import Work

MEMORY_LIMIT_BYTES = 20e9  # a contender that needs more is stopped
WORDS = (
    "the a of and to in is was it for on with as his that he at by from her she they one all there when we who will "
    "more no if out so what up said about than its into them can only other new some could time these two may then do"
).split()
Figures = dict[str, float]


@dataclass(frozen=True)
class Contender:
    """One process of a measurement."""

    name: str
    module: str = "peers_ours"  # in `benchmarks`
    environment: str | None = None  # a name in `peers_processes.PINS`; None: this one
    settings: dict[str, Any] = field(default_factory=dict)
    warm_ups: int = 1
    rounds: int = 3
    fresh: bool = False  # a new process for each round


@dataclass(frozen=True)
class Measurement:
    """The same work for several contenders."""

    name: str
    kind: str  # of `Work`
    turns: tuple[tuple[Contender, ...], ...]  # those of one tuple are alive together and take turns
    prompts: int = 4
    prompt_length: int = 64
    group_size: int = 8
    max_tokens: int = 64

    def work(self, model: str) -> Work:
        """For a contender without settings."""
        prompts, texts = make_prompts(model, self.prompts, self.prompt_length)
        return Work(self.kind, model, prompts, texts, self.group_size, self.max_tokens, MEMORY_LIMIT_BYTES, {})


OURS = Contender("ours")
TRL = Contender("trl", "peers_trl", "torch")
TRL_BF16 = replace(TRL, name="trl_bf16", settings={"bf16": True})
TUNIX = Contender("tunix", "peers_tunix", "tunix")
TRANSFORMERS = Contender("transformers", "peers_transformers", "torch")
LIMIT = Contender("limit", "peers_limit")
LONG_PEERS = tuple(
    replace(peer, name=name, settings=settings, warm_ups=0, rounds=1)  # minutes each, and nothing to warm up
    for name, peer, settings in (
        ("trl_one_pass", TRL, {}),
        ("trl_checkpointing", TRL, {"gradient_checkpointing": True}),
        ("trl_one_at_a_time", TRL, {"micro_batch": 1}),
        ("tunix_remat", TUNIX, {"remat": "DECODER"}),  # it cannot divide a group
    )
)
MEASUREMENTS = (
    Measurement("step", "step", ((OURS, TRL), (TRL_BF16,), (TUNIX,))),  # all together need more than 24 GB
    Measurement("long", "step", ((OURS,), *((peer,) for peer in LONG_PEERS)), 1, 2048, 8, 32),
    Measurement("decode", "decode", ((OURS, TRANSFORMERS, TUNIX, LIMIT),)),
    Measurement("import", "import", ((replace(OURS, fresh=True),),)),
)
_LONG = ("long", ("ours", *(peer.name for peer in LONG_PEERS)))
# What each figure is made of: a measurement and contenders.
NEEDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "generation_vs_trl": ("step", ("ours", "trl")),
    "generation_vs_tunix": ("step", ("ours", "tunix")),
    "update_vs_trl": ("step", ("ours", "trl")),
    "update_vs_tunix": ("step", ("ours", "tunix")),
    "update_vs_trl_bf16": ("step", ("ours", "trl_bf16")),
    "step_memory_vs_trl": ("step", ("ours", "trl")),
    "long_prompt_speedup": _LONG,
    "long_prompt_memory_ratio": _LONG,
    "decode_vs_transformers": ("decode", ("ours", "transformers")),
    "decode_vs_tunix": ("decode", ("ours", "tunix")),
    "decode_fraction_of_limit": ("decode", ("ours", "limit")),
    "import_s": ("import", ("ours",)),
    "import_memory_ratio": ("import", ("ours",)),
}
DEFAULT = tuple(name for name in NEEDS if name != "decode_vs_tunix")


def make_prompts(model: str, count: int, length: int) -> tuple[list[list[int]], list[str]]:
    """Different prompts of exactly `length` tokens, the same at every call: ids, and texts that encode to them.

    They begin with the model's start token, as some peers would put one before them.

    Raises:
      ValueError: no drawn text encodes to its ids.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(model, "tokenizer.json")))
    start = json.loads(Path(model, "tokenizer_config.json").read_text())["bos_token"]
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    draw = random.Random(0)
    prompts, texts = [], []
    for _ in range(10 * count):
        ids = encode(f"{start} {' '.join(draw.choices(WORDS, k=length))}")[:length]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if len(ids) == length and encode(text) == ids:
            prompts.append(ids)
            texts.append(text)
        if len(prompts) == count:
            return prompts, texts
    raise ValueError(f"{model}: {len(prompts)} of {count} prompts of {length} tokens encode to their own ids")


@dataclass
class Result:
    """What a contender measured, or why it did not."""

    samples: list[dict[str, float]] = field(default_factory=list)  # without those that warmed up
    versions: dict[str, str] = field(default_factory=dict)
    error: str = ""

    def median(self, key: str) -> float:
        """Of the samples."""
        return statistics.median(sample[key] for sample in self.samples)

    @property
    def peak_bytes(self) -> float:
        """Most resident memory of a process, its start included."""
        return max(sample["peak_bytes"] for sample in self.samples)


def parts(measurement: Measurement, result: Result) -> Figures:
    """Medians and peak of one contender that finished, by the end of their names."""
    values = {"peak_bytes": result.peak_bytes, "other_cores": result.median("other_cores")}
    if measurement.kind == "decode":
        # Without the call that draws one token: its prefill is no decode step.
        steps = measurement.prompts * measurement.group_size * (measurement.max_tokens - 1)
        values["tokens_per_s"] = steps / (result.median("all_s") - result.median("first_s"))
    elif measurement.kind == "step":
        values |= {f"{name}_s": result.median(f"{name}_s") for name in ("wall", "generate", "update")}
    else:
        values["wall_s"] = result.median("wall_s")
    return values


def ratios(measurement: Measurement, results: Mapping[str, Result], weight_bytes: int) -> Figures:
    """The figures of `NEEDS` that the contenders which finished allow. Above 1 is better but for memory and seconds.

    Args:
      weight_bytes: of the model's weights, for the import.
    """
    done = {name: parts(measurement, result) for name, result in results.items() if not result.error}
    ours = done.pop("ours", None)
    if ours is None:
        return {}
    figures: Figures = {}
    if measurement.name == "step":
        for name, theirs in done.items():
            figures[f"generation_vs_{name}"] = theirs["generate_s"] / ours["generate_s"]
            figures[f"update_vs_{name}"] = theirs["update_s"] / ours["update_s"]
            figures[f"step_memory_vs_{name}"] = ours["peak_bytes"] / theirs["peak_bytes"]
    elif measurement.name == "long" and done:
        fastest = min(theirs["wall_s"] for theirs in done.values())
        leanest = min(theirs["peak_bytes"] for theirs in done.values())
        figures["long_prompt_speedup"] = fastest / ours["wall_s"]
        figures["long_prompt_memory_ratio"] = ours["peak_bytes"] / leanest
    elif measurement.name == "decode":
        for name, theirs in done.items():
            figure = "decode_fraction_of_limit" if name == "limit" else f"decode_vs_{name}"
            figures[figure] = ours["tokens_per_s"] / theirs["tokens_per_s"]
    elif measurement.name == "import":
        figures["import_s"] = ours["wall_s"]
        figures["import_memory_ratio"] = ours["peak_bytes"] / weight_bytes
    return figures
