"""Files behind any URL: local paths, gs://, memory:// and whatever else fsspec knows. Imports no JAX.

There is no append and no rename here: object stores have neither (an append to gs:// overwrites without an
error), so everything above writes immutable files whole.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem


def join(url: str | os.PathLike[str], *parts: str) -> str:
    """`url` with `parts` appended: `join("gs://b", "c", "d")` is "gs://b/c/d".

    A local path comes back absolute and normalised (Orbax refuses relative ones); a URL keeps its scheme and
    both slashes, which `os.path` and `pathlib` would merge into "gs:/b".
    """
    text = os.fspath(url)
    scheme, separator, path = text.partition("://")
    if not separator:
        return os.path.abspath(os.path.join(os.path.expanduser(text), *parts))
    if scheme in ("file", "local"):
        return os.path.abspath(os.path.join(path, *parts))
    pieces = [path.rstrip("/"), *(part.strip("/") for part in parts)]
    return f"{scheme}://" + "/".join(piece for piece in pieces if piece)


def is_local(url: str | os.PathLike[str]) -> bool:
    """Whether `url` is on this machine's file system."""
    return "://" not in join(url)


def write_atomic(url: str | os.PathLike[str], content: bytes) -> None:
    """Writes `content` so that a reader sees the old file or the whole new one, never a part.

    Locally: a hidden file beside it, fsync, rename. On an object store: one PUT, which has that property.

    Raises:
      OSError: with `errno.ENOSPC` when the disk is full; nothing is left behind then.
    """
    filesystem, path = _open(url)
    if not isinstance(filesystem, LocalFileSystem):
        filesystem.pipe_file(path, content)
        return
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")  # hidden: Parquet readers skip it
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the rename itself survives a power loss only once the folder is synced
    finally:
        os.close(descriptor)


def read(url: str | os.PathLike[str]) -> bytes:
    """The whole file. Raises FileNotFoundError when there is none."""
    filesystem, path = _open(url)
    return filesystem.cat_file(path)


def exists(url: str | os.PathLike[str]) -> bool:
    """Whether a file or folder is there."""
    filesystem, path = _open(url)
    return filesystem.exists(path)


def list(url: str | os.PathLike[str], recursive: bool = False) -> Sequence[str]:
    """URLs of what a folder holds, sorted; of the files below it at any depth when `recursive`.

    A folder that does not exist is empty, as it is on an object store.
    """
    filesystem, path = _open(url)
    try:
        found = filesystem.find(path) if recursive else filesystem.ls(path, detail=False)
    except FileNotFoundError:
        return []
    if isinstance(filesystem, LocalFileSystem):
        return sorted(found)
    return sorted(str(filesystem.unstrip_protocol(entry)) for entry in found)


def remove(url: str | os.PathLike[str]) -> None:
    """Removes a file, or a folder with all that it holds. Raises FileNotFoundError when there is none."""
    filesystem, path = _open(url)
    filesystem.rm(path, recursive=filesystem.isdir(path))


def makedirs(url: str | os.PathLike[str]) -> None:
    """Creates a folder and its parents; no harm when it is there. Object stores have no folders to create."""
    filesystem, path = _open(url)
    filesystem.makedirs(path, exist_ok=True)


def _open(url: str | os.PathLike[str]) -> tuple[Any, str]:
    """The fsspec file system behind `url` and the path inside it."""
    filesystem, path = url_to_fs(join(url))
    filesystem.invalidate_cache()  # another process may have written since the last listing
    return filesystem, path
