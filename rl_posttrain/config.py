"""Configs stop here: a ConfigDict (or any mapping) becomes frozen dataclasses, strictly, before anything is built.

Unknown keys are refused with the nearest known one, types are coerced without loss ("1e-6" to a float; 1.5 for
an int is refused), ranges are checked by the dataclass's own `__post_init__`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A config that was refused. The message names the key, the value and the remedy."""


def build(cls: type[T], values: Mapping[str, Any], path: str = "config") -> T:
    """Turns a mapping into the frozen dataclass `cls`, recursively.

    Raises:
      ConfigError: unknown or missing key, wrong type, or a value that `cls` refuses.
    """
    values = plain(values)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise ConfigError(f"{path}.{key}: unknown key{nearest(str(key), fields)}")
    arguments = {}
    for name, field in fields.items():
        if name in values:
            arguments[name] = coerce(hints[name], values[name], f"{path}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{path}.{name}: missing; it has no default")
    try:
        return cls(**arguments)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def nearest(key: str, known: typing.Iterable[str]) -> str:
    """`; did you mean "x"?`, or the list of what is known."""
    known = list(known)
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f'; did you mean "{close[0]}"?' if close else f"; known: {', '.join(sorted(known))}"


def coerce(kind: Any, value: Any, path: str) -> Any:
    """`value` as `kind`, without loss of information. Strings come from the command line and are parsed."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(kind, value, path)
    if origin is typing.Literal:
        options = typing.get_args(kind)
        if value in options:
            return value
        raise ConfigError(f"{path}={value!r}: must be one of {', '.join(map(repr, options))}")
    if dataclasses.is_dataclass(kind):
        if isinstance(value, Mapping):
            return build(kind, value, path)  # type: ignore[arg-type]
        raise ConfigError(f"{path}={value!r}: must be a section with keys")
    if origin in (tuple, list):
        return _coerce_sequence(kind, value, path)
    if origin in (dict, Mapping, typing.get_origin(Mapping[str, int])):
        return _coerce_mapping(kind, value, path)
    scalars = {bool: _bool, int: _int, float: _float, str: _str}
    if kind in scalars:
        try:
            return scalars[kind](value)
        except (ValueError, TypeError, OverflowError):
            raise ConfigError(f"{path}={value!r}: must be of type {kind.__name__}") from None
    raise TypeError(f"{path}: config fields of type {kind} are not supported")


def _coerce_union(kind: Any, value: Any, path: str) -> Any:
    options = typing.get_args(kind)
    if type(None) in options and (value is None or (isinstance(value, str) and value.lower() == "none")):
        return None
    rest = [option for option in options if option is not type(None)]
    if len(rest) != 1:
        raise TypeError(f"{path}: a union of several types is not supported")
    return coerce(rest[0], value, path)


def _coerce_sequence(kind: Any, value: Any, path: str) -> tuple[Any, ...]:
    items = typing.get_args(kind)
    if isinstance(value, str):
        text = value.strip()
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = [part.strip() for part in text.strip("()[]").split(",") if part.strip()]
        if not isinstance(value, (tuple, list)):
            value = [value]
    if isinstance(value, Mapping) or not isinstance(value, typing.Iterable):
        raise ConfigError(f"{path}={value!r}: must be a sequence")
    value = list(value)
    if len(items) == 2 and items[1] is Ellipsis or typing.get_origin(kind) is list:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise ConfigError(f"{path}={tuple(value)!r}: must have {len(items)} entries")
    return tuple(coerce(item, entry, f"{path}[{i}]") for i, (item, entry) in enumerate(zip(items, value)))


def _coerce_mapping(kind: Any, value: Any, path: str) -> dict[str, Any]:
    _, item = typing.get_args(kind)
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            pass
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}={value!r}: must be a mapping")
    return {str(key): coerce(item, entry, f"{path}.{key}") for key, entry in value.items()}


def _bool(value: Any) -> bool:
    table = {"true": True, "false": False, "1": True, "0": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in table:
        return table[value.strip().lower()]
    raise ValueError


def _int(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, int):
        return value
    number = float(value)  # "1e3" and 8.0 are whole numbers, 1.5 is not
    if number != int(number):
        raise ValueError
    return int(value, 0) if isinstance(value, str) and value.strip().lstrip("+-").isdigit() else int(number)


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def apply_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Sets dotted keys ("update.learning_rate" -> "3e-5") in a copy of a nested mapping.

    New keys and sections are allowed here, since a config file leaves out what keeps its default; `build` judges
    them, knows the fields and names the nearest one.

    Raises:
      ConfigError: a key goes on below a value, as in "seed.x".
    """
    tree = plain(values)
    for dotted, value in overrides.items():
        node, *rest = tree, *dotted.split(".")
        for part in rest[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"config.{dotted}: {part}={node!r} is a value, not a section with keys")
        node[rest[-1]] = value
    return tree


def plain(value: Any) -> Any:
    """A ConfigDict, frozen or not, or any mapping, as dicts and lists all the way down."""
    if hasattr(value, "to_dict"):  # a ConfigDict is no `Mapping`
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def to_dict(section: Any) -> Any:
    """A config dataclass as plain JSON data: what `config.json` holds and a resumed run is compared with."""
    if dataclasses.is_dataclass(section):
        return {f.name: to_dict(getattr(section, f.name)) for f in dataclasses.fields(section) if f.init}
    if isinstance(section, Mapping):
        return {key: to_dict(value) for key, value in section.items()}
    return [to_dict(value) for value in section] if isinstance(section, (tuple, list)) else section


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
