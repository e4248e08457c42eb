"""The files of a model directory in Hugging Face's layout: JSON, and tensors in safetensors, one file or several.

A file that is missing, cut short, or at odds with the index is refused by name.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives NumPy the bfloat16 that safetensors returns)
import numpy as np
import safetensors
import safetensors.numpy

from rl_posttrain.model import hf_config

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
# Buffers of old checkpoints, which follow from the config; and what stands beside the text half of a picture model.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")
_PICTURES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
_TEXT_HALF = (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", ""))
# Pages of a mapped file count as this process's memory until it is closed, so it is reopened after so many bytes.
_REOPEN_AFTER = 1 << 26


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file. Raises ValueError, with its name, when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: {path.parent} must hold a model in Hugging Face's layout") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): fetch it again") from error


class Checkpoint:
    """The tensors of a directory: where each one lies, its shape, and slices of it."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Reads the index and every file's header.

        Raises:
          ValueError: a file is missing, cut short, or holds other tensors than the index says.
        """
        self.directory = Path(directory)
        self._opened: Any = None  # handle of the file that was read last
        self._opened_file, self._touched = "", 0  # its name, bytes read since it was opened
        placed = self._index()
        pictures = _holds_pictures(self.directory)
        self.files: dict[str, str] = {}  # name -> file
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._written: dict[str, str] = {}  # name -> name in the file
        for file in sorted(set(placed.values())):
            for written, shape in self._header(file, {name for name in placed if placed[name] == file}).items():
                if _DERIVED.fullmatch(written) or (pictures and _PICTURES.fullmatch(written)):
                    continue
                name = _text_name(written) if pictures else written
                self.files[name], self.shapes[name], self._written[name] = file, shape, written

    def _index(self) -> dict[str, str]:
        """Name -> file; of a single file, its own name stands for all tensors."""
        if (self.directory / INDEX).is_file():
            placed = read_json(self.directory / INDEX).get("weight_map")
            if not placed:
                raise ValueError(f"{self.directory / INDEX} has no weight_map: fetch it again")
            for file in sorted(set(placed.values())):
                if not (self.directory / file).is_file():
                    inside = [name for name in placed if placed[name] == file]
                    raise ValueError(
                        f"{self.directory / file} is missing: {INDEX} places {len(inside)} tensors in it, such as "
                        f"{inside[0]}; fetch it"
                    )
            return placed
        if (self.directory / SINGLE).is_file():
            return {"": SINGLE}
        torch = [path.name for path in self.directory.glob("*.bin")]
        advice = f"convert {torch[0]} to safetensors with transformers" if torch else "fetch them"
        raise ValueError(f"{self.directory} holds neither {SINGLE} nor {INDEX}: {advice}")

    def _header(self, file: str, placed: set[str]) -> dict[str, tuple[int, ...]]:
        """Shapes of a file's tensors, after a look at whether it is whole."""
        path = self.directory / file
        try:
            with safetensors.safe_open(path, "np") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}
        except safetensors.SafetensorError as error:
            first = f", which holds {min(placed)} and others," if placed != {""} else ""
            raise ValueError(f"{path}{first} is cut short or damaged ({error}): fetch it again") from error
        for name, piece in slices.items():
            if piece.get_dtype() not in DTYPES:
                raise ValueError(
                    f"{path}: {name} is stored as {piece.get_dtype()}; use weights in one of {', '.join(DTYPES)}, not "
                    "quantised ones"
                )
        if placed != {""} and placed != set(slices):
            raise ValueError(
                f"{path} does not hold what {INDEX} says: missing {_some(placed - set(slices))}, surplus "
                f"{_some(set(slices) - placed)}; fetch both again"
            )
        return {name: tuple(piece.get_shape()) for name, piece in slices.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Part of a tensor, in the dtype that it is stored in."""
        file = self.files[name]
        if self._opened_file != file or self._touched > _REOPEN_AFTER:
            self.close()
            self._opened = safetensors.safe_open(self.directory / file, "np").__enter__()
            self._opened_file = file
        part = self._opened.get_slice(self._written[name])[index]
        # A part of each row touches every page of these rows.
        self._touched += part.shape[0] * math.prod(self.shapes[name][1:]) * part.itemsize
        return part

    def close(self) -> None:
        """Lets go of the open file."""
        if self._opened is not None:
            self._opened.__exit__(None, None, None)
        self._opened, self._opened_file, self._touched = None, "", 0

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compares names and shapes.

        Raises:
          ValueError: a tensor is missing, surplus, or of another shape; it is named, with its file.
        """
        missing = expected.keys() - self.shapes.keys()
        if missing:
            looked = ", ".join(sorted(set(self.files.values())))
            raise ValueError(f"{self.directory}: config.json asks for tensors that {looked} lack: {_some(missing)}")
        surplus = self.shapes.keys() - expected.keys()
        if surplus:
            where = {f"{name} in {self.files[name]}" for name in surplus}
            raise ValueError(f"{self.directory}: tensors that the model of config.json does not have: {_some(where)}")
        for name, shape in expected.items():
            if self.shapes[name] != shape:
                raise ValueError(
                    f"{self.directory / self.files[name]}: {name} has shape {self.shapes[name]}; config.json asks for "
                    f"{shape}"
                )


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return (", ".join(names[:6]) or "none") + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _holds_pictures(directory: Path) -> bool:
    return bool(set(read_json(directory / "config.json").get("architectures") or []) & set(hf_config.WITH_PICTURES))


def _text_name(name: str) -> str:
    for prefix, replacement in _TEXT_HALF:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON file that everyone may read."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    path.chmod(0o644)


def refuse_weights(directory: Path) -> None:
    """Raises ValueError when a directory that is to be written holds weights already: files of both would mix."""
    if any(directory.glob("*.safetensors")):
        raise ValueError(f"{directory} holds weights already: choose another directory, or empty it")


def write_weights(
    directory: Path,
    sizes: Mapping[Any, int],
    tensors: Callable[[Any], Iterable[tuple[str, np.ndarray]]],
    shard_bytes: int,
) -> None:
    """Writes one file, or several with an index, that everyone may read. One file is in memory at a time.

    Args:
      sizes: bytes of each piece, in order.
      tensors: names and values of a piece, which stays within a file.
      shard_bytes: the largest file, unless one piece is larger.
    """
    shards: list[list[Any]] = [[]]
    filled = 0
    for piece, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(piece)
        filled += size
    weight_map: dict[str, str] = {}
    for number, pieces in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        inside = dict(named for piece in pieces for named in tensors(piece))
        safetensors.numpy.save_file(inside, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)  # the package writes files that nobody else can read
        weight_map |= dict.fromkeys(inside, file)
    if len(shards) > 1:
        write_json(directory / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
