"""Adapters in PEFT's layout, in and out: adapter_config.json and adapter_model.safetensors.

A weight W [outputs, inputs] has there `lora_A` [R, inputs] and `lora_B` [outputs, R], and computes
`W x + scale * B A x` with our scale (`LoraConfig.scale`). Only adapters of linear layers are known: what changes the
function otherwise (DoRA, ranks of single layers, trained biases or tables, a base changed by PiSSA) is refused by
name. https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from rl_posttrain.batch import Params
from rl_posttrain.model.hf_files import DTYPES, read_json, write_json
from rl_posttrain.model.hf_names import Stored, stored
from rl_posttrain.model.linear import INPUT_AXES
from rl_posttrain.model.lora import LoraConfig, declare_adapters
from rl_posttrain.model.transformer import ModelConfig
from rl_posttrain.sharding import mesh as mesh_lib

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

# Fields that leave the function alone: names, where layers are looked for, and initial values of A.
_HARMLESS = frozenset(
    """
    task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules
    exclude_modules layers_pattern megatron_core loftq_config eva_config qalora_group_size runtime_config
    """.split()
)
# Fields that may be there, and the only values that are computed here.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # the others change the base
}


def read_config(directory: str | os.PathLike[str], cfg: ModelConfig) -> LoraConfig:
    """The adapters in a directory; the targets are those whose tensors are there.

    Raises:
      ValueError: a file is missing or damaged, or says something that is not supported.
    """
    path = Path(directory) / CONFIG
    left: dict[str, Any] = {"peft_type": None, **read_json(path)}
    left = {key: value for key, value in left.items() if key not in _HARMLESS}
    for name, legal in _ONLY.items():
        if (value := left.pop(name, legal[0])) not in legal:
            raise ValueError(f"{path}: {name}={value!r} is not supported: only {', '.join(map(repr, legal))}")
    rank, alpha = left.pop("r", 8), left.pop("lora_alpha", 8)  # PEFT's own defaults
    rslora, dropout = left.pop("use_rslora", False), left.pop("lora_dropout", 0.0)
    unknown = [f"{name}={value!r}" for name, value in left.items() if value]  # an empty value is "not used"
    if unknown:
        raise ValueError(f"{path} has fields that are not supported: {', '.join(unknown)}")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{path}: r={rank!r} must be a whole number of at least 1")
    _, shapes = _open(Path(directory))
    known = {name: entry for name, entry in _linear(cfg).items() if not entry.experts}
    found = tuple(ours for ours, entry in known.items() if any(name in shapes for name in _names(entry, "A")))
    if not found:
        raise ValueError(f"{Path(directory) / WEIGHTS} holds no adapter of {', '.join(known)}, but {_some(shapes)}")
    return LoraConfig(rank, float(alpha), bool(rslora), float(dropout), found)


def check(directory: str | os.PathLike[str], cfg: ModelConfig, lora: LoraConfig) -> None:
    """Checks that a directory holds the adapters that `lora` declares, and no others.

    Raises:
      ValueError: rank, alpha, rslora or targets differ, or a tensor is missing, surplus or of another shape. Dropout
        may differ: it belongs to the training.
    """
    theirs = read_config(directory, cfg)
    for name in ("rank", "alpha", "rslora"):
        if getattr(theirs, name) != getattr(lora, name):
            raise ValueError(
                f"lora.{name}={getattr(lora, name)}, and {Path(directory) / CONFIG} says {getattr(theirs, name)}: the "
                "adapters would be another function; use its value"
            )
    wanted = tuple(_targets(cfg, lora.targets))
    if wanted != theirs.targets:
        raise ValueError(f"lora.targets chooses {wanted}, and {Path(directory) / WEIGHTS} holds {theirs.targets}")
    path, shapes = _open(Path(directory))
    expected = {
        name: shape
        for entry in _targets(cfg, lora.targets).values()
        for half, shape in zip("AB", _their_shapes(entry, lora.rank))
        for name in _names(entry, half)
    }
    if missing := expected.keys() - shapes.keys():
        raise ValueError(f"{path} lacks {_some(missing)}")
    if surplus := shapes.keys() - expected.keys():
        raise ValueError(f"{path} holds tensors that are no adapters of this model: {_some(surplus)}")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(f"{path}: {name} has shape {shapes[name]}; the model and rank ask for {shape}")


def load_adapters(
    directory: str | os.PathLike[str], cfg: ModelConfig, lora: LoraConfig, mesh: jax.sharding.Mesh | None = None
) -> Params:
    """The adapters of a directory as `lora.init_adapters` lays them out: float32, sharded on `mesh`.

    Args:
      lora: `read_config(directory, cfg)`, with another dropout as wanted.
      mesh: None puts them on the first device.

    Raises:
      ValueError: see `check`.
    """
    check(directory, cfg, lora)
    tensors = safetensors.numpy.load_file(Path(directory) / WEIGHTS)
    declared = declare_adapters(cfg, lora)["layers"]
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = dict.fromkeys(declared, one) if mesh is None else mesh_lib.shardings(declared, mesh)
    layers = {}
    for ours, entry in _targets(cfg, lora.targets).items():
        for half in "AB":
            name = f"{ours}_{half.lower()}"
            # Both are stored as [outputs, inputs], we have the inputs first.
            flat = np.stack([tensors[theirs].T for theirs in _names(entry, half)]).astype(np.float32)
            whole = flat.reshape(declared[name].shape)
            layers[name] = jax.make_array_from_callback(whole.shape, shardings[name], partial(_part, whole))
    return {"layers": layers}


def save_adapters(
    directory: str | os.PathLike[str], adapters: Params, cfg: ModelConfig, lora: LoraConfig, *, base: str | None = None
) -> None:
    """Writes float32 adapters as a directory that PEFT, transformers and vLLM load beside their base model.

    Args:
      base: the directory or hub name of the base model, which PEFT loads first; None leaves it to the reader.

    Raises:
      ValueError: the directory holds an adapter already, or the weights of experts are adapted, whose layout in
        PEFT differs between its versions.
    """
    target, entries = Path(directory), _targets(cfg, lora.targets)
    if (target / WEIGHTS).exists():
        raise ValueError(f"{target} holds an adapter already: choose another directory, or empty it")
    tensors: dict[str, np.ndarray] = {}
    for ours, entry in entries.items():
        for half, (rows, columns) in zip("AB", _their_shapes(entry, lora.rank)):
            stack = np.asarray(adapters["layers"][f"{ours}_{half.lower()}"], np.float32)
            flat = stack.reshape(entry.layers, columns, rows)
            tensors |= {name: np.ascontiguousarray(one.T) for name, one in zip(_names(entry, half), flat)}
    target.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    (target / WEIGHTS).chmod(0o644)  # the package writes files that nobody else can read
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": lora.dropout,
        "target_modules": [_module(entry).rpartition(".")[2] for entry in entries.values()],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(target / CONFIG, config)  # last: a directory without it is seen to be unfinished


def _linear(cfg: ModelConfig) -> dict[str, Stored]:
    """The weights that can have adapters, by our names, as they lie in checkpoints."""
    table = stored(cfg)
    return {name: table[f"layers/{name}"] for name in INPUT_AXES}


def _targets(cfg: ModelConfig, patterns: tuple[str, ...]) -> dict[str, Stored]:
    """Those that the patterns choose.

    Raises:
      ValueError: experts are among them.
    """
    chosen = lambda name: any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    found = {name: entry for name, entry in _linear(cfg).items() if chosen(name)}
    if experts := [name for name, entry in found.items() if entry.experts]:
        raise ValueError(
            f"adapters of experts ({', '.join(experts)}) have no settled form in PEFT: choose lora.targets among "
            "query, key, value and output, or export the merged model"
        )
    return found


def _module(entry: Stored) -> str:
    return entry.template.removesuffix(".weight")


def _names(entry: Stored, half: str) -> Iterator[str]:
    """Of one of the two matrices, layer by layer."""
    return (f"{_PREFIX}{_module(entry)}.lora_{half}.weight".format(layer=layer) for layer in range(entry.layers))


def _their_shapes(entry: Stored, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of A and B."""
    assert entry.inputs
    inputs, outputs = math.prod(entry.shape[: entry.inputs]), math.prod(entry.shape[entry.inputs :])
    return (rank, inputs), (outputs, rank)


def _open(directory: Path) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """The file of tensors, and their shapes."""
    path = directory / WEIGHTS
    if not path.is_file():
        torch = [file.name for file in directory.glob("adapter_model.bin")]
        advice = f"convert {torch[0]} to safetensors with PEFT" if torch else "name a directory that PEFT has written"
        raise ValueError(f"{path} is missing: {advice}")
    try:
        with safetensors.safe_open(path, "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is cut short or damaged ({error}): fetch it again") from error
    for name, piece in slices.items():
        if piece.get_dtype() not in DTYPES:
            raise ValueError(f"{path}: {name} is stored as {piece.get_dtype()}; use one of {', '.join(DTYPES)}")
    return path, {name: tuple(piece.get_shape()) for name, piece in slices.items()}


def _part(whole: np.ndarray, index: Any) -> np.ndarray:
    return whole[index]


def _some(names: Any) -> str:
    names = sorted(names)
    return (", ".join(names[:4]) or "nothing") + (f" and {len(names) - 4} more" if len(names) > 4 else "")
