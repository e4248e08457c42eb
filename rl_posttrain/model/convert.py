"""Models in Hugging Face's layout, in and out: config.json and safetensors, one file or many with an index.

Import reads slice by slice straight into the sharded arrays: beside these, the host holds about one tensor. Nothing
that is missing, cut short, left over or of another shape passes. Export writes the same names back.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rl_posttrain.batch import Params
from rl_posttrain.model import hf_config
from rl_posttrain.model.hf_files import Checkpoint, read_json, refuse_weights, write_json, write_weights
from rl_posttrain.model.hf_names import Stored, by_path, stored
from rl_posttrain.model.transformer import ModelConfig, declare, is_parameter
from rl_posttrain.sharding import mesh as mesh_lib

# Copied by an export beside the weights; config.json is written anew.
BESIDE = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)


def model_config(directory: str | os.PathLike[str], *, length: int = 0) -> ModelConfig:
    """The model in a directory; see `hf_config.read_config`.

    Raises:
      ValueError: no config.json, or a model that is not supported.
    """
    return hf_config.read_config(read_json(Path(directory) / "config.json"), length=length)


def open_checkpoint(directory: str | os.PathLike[str], cfg: ModelConfig) -> tuple[Checkpoint, dict[str, Stored]]:
    """Checks that a directory holds all of `cfg`'s tensors and no others, before any is read.

    Returns:
      The tensors, and where each of our parameters lies among them.

    Raises:
      ValueError: a file or tensor is missing, cut short, surplus, of another shape or of a quantised type.
    """
    source, table = Checkpoint(directory), stored(cfg)
    if "head" in table and table["head"].template not in source.shapes and model_config(directory).tie_embeddings:
        table["head"] = table["embed"]
    expected = {name: entry.their_shape for entry in table.values() for name in entry.names()}
    if cfg.tie_embeddings and "lm_head.weight" in source.shapes:
        expected["lm_head.weight"] = table["embed"].their_shape
    source.check(expected)
    if cfg.tie_embeddings and "lm_head.weight" in source.shapes:
        _check_tied(source)
    return source, table


def load_params(
    directory: str | os.PathLike[str],
    cfg: ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    each: Callable[[jax.Array, str], Any] = lambda array, name: array,
) -> Params:
    """The weights of a directory as float32 arrays, sharded by the rules on `mesh` (None: the first device).

    Each process reads what its own devices hold. A tied checkpoint fills both tables of an untied `cfg`.

    Args:
      cfg: `model_config(directory)`, with fields of the run changed as wanted.
      each: what becomes of an array, given also its name, before the next is read: the tree holds its results.

    Raises:
      ValueError: a file or tensor is missing, cut short, surplus or of another shape, or the mesh does not fit.
    """
    source, table = open_checkpoint(directory, cfg)
    declared = declare(cfg)
    if mesh is None:
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: one, declared, is_leaf=is_parameter)
    else:
        mesh_lib.check(cfg, mesh)
        shardings = mesh_lib.shardings(declared, mesh)
    placements = dict(by_path(shardings))
    paths = [path for path, _ in by_path(declared, is_parameter)]
    leaves = [each(_load(source, table[path], placements[path]), path.rpartition("/")[2]) for path in paths]
    source.close()
    return jax.tree.unflatten(jax.tree.structure(declared, is_leaf=is_parameter), leaves)


def _check_tied(source: Checkpoint) -> None:
    """A tied model's output table, where one is stored all the same, must be the embedding."""
    (rows, _), step = source.shapes["model.embed_tokens.weight"], 4096
    for start in range(0, rows, step):
        index = (slice(start, min(start + step, rows)), slice(None))
        if not np.array_equal(source.read("model.embed_tokens.weight", index), source.read("lm_head.weight", index)):
            raise ValueError(
                f"{source.directory}: config.json ties the embeddings, yet lm_head.weight in "
                f"{source.files['lm_head.weight']} differs from model.embed_tokens.weight: set tie_word_embeddings to "
                "false if they were trained apart"
            )


def _load(source: Checkpoint, entry: Stored, sharding: jax.sharding.Sharding) -> jax.Array:
    """One of our arrays. Stacked ones are filled layer by layer, in place on the devices."""
    shape = ((entry.experts,) if entry.experts else ()) + entry.shape
    if not entry.layers:
        return jax.make_array_from_callback(shape, sharding, partial(_part, source, entry, 0))
    filled = _zeros((entry.layers, *shape), sharding)()
    within = _without_layers(sharding)
    for layer in range(entry.layers):
        piece = jax.make_array_from_callback(shape, within, partial(_part, source, entry, layer))
        filled = _put(sharding)(filled, piece, layer)
    return filled.block_until_ready()


def _without_layers(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[1:]))


@lru_cache(maxsize=64)
def _zeros(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=sharding)


@lru_cache(maxsize=64)
def _put(sharding: jax.sharding.Sharding) -> Any:
    """Writes one layer into a stack, which is donated."""
    put = lambda stack, piece, layer: jax.lax.dynamic_update_index_in_dim(stack, piece, layer, 0)
    return jax.jit(put, donate_argnums=0, out_shardings=sharding)


def _part(source: Checkpoint, entry: Stored, layer: int, index: Any) -> np.ndarray:
    """Float32 values of the part `index` of one layer of our array."""
    if entry.experts:
        experts = range(*index[0].indices(entry.experts))
        return np.stack([_tensor(source, entry, entry.name(layer, expert), index[1:]) for expert in experts])
    return _tensor(source, entry, entry.name(layer), index)


def _tensor(source: Checkpoint, entry: Stored, name: str, index: tuple[slice, ...]) -> np.ndarray:
    bounds = [part.indices(length)[:2] for part, length in zip(index, entry.shape, strict=True)]
    lengths = [stop - start for start, stop in bounds]
    if entry.inputs is None:
        start, stop = bounds[0]
        rows = slice(min(start, entry.rows), min(stop, entry.rows))
        part = source.read(name, (rows, *index[1:])).astype(np.float32, copy=False)
        padding = lengths[0] - part.shape[0]
        return np.pad(part, [(0, padding)] + [(0, 0)] * (part.ndim - 1)) if padding else part
    outputs = _flat(bounds[entry.inputs :], entry.shape[entry.inputs :])
    if entry.inputs == 0:
        return source.read(name, (outputs,)).astype(np.float32, copy=False).reshape(lengths)
    inputs = _flat(bounds[: entry.inputs], entry.shape[: entry.inputs])
    part = source.read(name, (outputs, inputs))
    return np.ascontiguousarray(part.T, dtype=np.float32).reshape(lengths)


def _flat(bounds: list[tuple[int, int]], shape: tuple[int, ...]) -> slice:
    """The slice of axes that are stored as one. Only the first may be cut."""
    inner = math.prod(shape[1:])
    whole = all(bound == (0, length) for bound, length in zip(bounds[1:], shape[1:]))
    assert whole, f"a sharding cuts {shape} at {bounds}: only heads are split, not their width"
    return slice(bounds[0][0] * inner, bounds[0][1] * inner)


def save_model(
    directory: str | os.PathLike[str],
    params: Params,
    cfg: ModelConfig,
    *,
    source: str | os.PathLike[str] | None = None,
    length: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    shard_bytes: int = 2_000_000_000,
) -> None:
    """Writes a directory that transformers loads: weights, config.json, and the source's tokenizer files.

    Embeddings that `cfg` does not tie are untied in the written config. Rows that pad the vocabulary are cut. The
    host holds one file at a time.

    Args:
      source: the directory that the model came from.
      length: without a source, the longest sequence that the model is meant for, in tokens.
      dtype: that the weights are rounded to.
      shard_bytes: the largest file, unless one tensor is larger.

    Raises:
      ValueError: the directory holds weights already, the source describes another model, or `params` are spread
        over processes.
    """
    target = Path(directory)
    refuse_weights(target)
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params)):
        raise ValueError("the parameters are spread over several processes: restore the checkpoint in one to export it")
    origin = None if source is None else read_json(Path(source) / "config.json")
    config = hf_config.write_config(cfg, origin, length=length, dtype=dtype)
    target.mkdir(parents=True, exist_ok=True)
    _write_weights(target, dict(by_path(params)), cfg, np.dtype(jnp.dtype(dtype)), shard_bytes)
    if source is not None:
        copy_beside(Path(source), target)
    write_json(target / "config.json", config)  # last: a directory without it is seen to be unfinished


def copy_beside(source: Path, target: Path) -> None:
    """Copies tokenizer files, the generation config and the licence."""
    for pattern in BESIDE:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
                (target / file.name).chmod(0o644)


def _write_weights(
    target: Path, leaves: Mapping[str, jax.Array], cfg: ModelConfig, dtype: np.dtype, shard_bytes: int
) -> None:
    table = stored(cfg)
    sizes = {
        (path, layer): math.prod(entry.their_shape) * max(1, entry.experts) * dtype.itemsize
        for path, entry in table.items()
        for layer in range(max(1, entry.layers))
    }
    # Layer after layer, as others write them; what stands outside the layers comes first.
    order = sorted(sizes, key=lambda key: (key[0].startswith("layers/"), key[1], key[0]))
    tensors = lambda key: _their_tensors(leaves[key[0]], table[key[0]], key[1], dtype)
    write_weights(target, {key: sizes[key] for key in order}, tensors, shard_bytes)


def _their_tensors(leaf: jax.Array, entry: Stored, layer: int, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of one layer (if it has layers) of our array, as they are stored."""
    ours = np.asarray(_take(leaf, layer) if entry.layers else leaf).astype(dtype)
    for expert in range(max(1, entry.experts)):
        one = ours[expert] if entry.experts else ours
        if entry.inputs is None:
            one = one[: entry.rows]
        elif entry.inputs == 0:
            one = one.reshape(-1)
        else:
            one = one.reshape(math.prod(entry.shape[: entry.inputs]), -1).T
        yield entry.name(layer, expert), np.ascontiguousarray(one)


_take = jax.jit(lambda stack, layer: jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False))
