"""The device mesh, and one table of rules that says which logical axis is split over which mesh axis.

Parameters name their logical axes in `model.transformer.declare`; `shardings` turns those names into
`NamedSharding`s through `RULES`, and `constrain` does the same for activations inside jitted code. A mesh
becomes current with `with jax.set_mesh(mesh):`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "stage", "context", "expert", "tensor")

# Logical axis -> mesh axes. What is not named here is replicated.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    # The tables are split on vocab alone: fsdp on their embed axis makes XLA rematerialise the whole lookup.
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert": ("expert",),
}

# Fields of a ModelConfig and the logical axis that each one is the length of.
_LENGTHS = {
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
    "mlp_dim": "mlp",
    "embed_dim": "embed",
    "padded_vocab_size": "vocab",
}


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. At most one is -1: it takes the devices that the others leave.

    `data` replicates parameters, `fsdp` splits them; both split the rows of a batch. `tensor` splits heads,
    the mlp and the vocabulary.

    Raises:
      ValueError: a size below 1 other than -1, several -1, or an axis that is not implemented above 1.
    """

    data: int = 1
    fsdp: int = 1
    stage: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self):
        for axis in AXES:
            size = getattr(self, axis)
            if size < 1 and size != -1:
                raise ValueError(f"mesh.{axis}={size}: use 1 or more, or -1 for the devices left over")
        for axis in ("stage", "context", "expert"):
            if getattr(self, axis) != 1:
                raise ValueError(
                    f"mesh.{axis}={getattr(self, axis)}: this version does not split over {axis}; "
                    f"leave it at 1 and use data, fsdp or tensor"
                )
        if sum(size == -1 for size in self.sizes) > 1:
            raise ValueError(f"mesh sizes {dict(zip(AXES, self.sizes, strict=True))}: only one axis can be -1")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of `AXES`, -1 where the axis is to be filled."""
        return tuple(getattr(self, field.name) for field in fields(self))


def make_mesh(cfg: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of all `devices` (by default `jax.devices()`) with the axes `AXES`.

    Axis types are Auto: with Explicit ones, `jax.make_mesh`'s default, sort, top_k and take_along_axis raise.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    known = math.prod(size for size in cfg.sizes if size != -1)
    wrong = len(devices) % known if -1 in cfg.sizes else len(devices) != known
    if wrong:
        written = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, cfg.sizes, strict=True) if size != 1) or "1"
        raise ValueError(
            f"mesh {written} does not cover {len(devices)} devices: the sizes must multiply to "
            f"{len(devices)}, so each of them must be one of {_divisors(len(devices))}; "
            f"set one axis to -1 to fill it"
        )
    sizes = tuple(len(devices) // known if size == -1 else size for size in cfg.sizes)
    grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def partition_spec(axes: Sequence[str | None]) -> P:
    """The spec of an array whose dimensions have these logical axes (None: replicated).

    Raises:
      ValueError: an axis that is neither in `RULES` nor None.
    """
    return P(*(_mesh_axes(axis) or None for axis in axes))


def shardings(declared: Any, mesh: Mesh | AbstractMesh) -> Any:
    """A tree of `NamedSharding` for a tree of declared parameters (leaves with a field `axes`)."""
    place = lambda parameter: NamedSharding(mesh, partition_spec(parameter.axes))
    return jax.tree.map(place, declared, is_leaf=lambda node: hasattr(node, "axes"))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of an array [B, ...] whose rows are spread over data and fsdp."""
    return NamedSharding(mesh, P(RULES["batch"]))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Asks XLA to lay out `x`, whose dimensions have these logical axes, by the rules on the current mesh.

    A dimension named None is whole on every device; dimensions after the last named one are left to the
    compiler. A hint, not a demand: without a current mesh it does nothing, and a dimension that its mesh axes
    do not divide (one row of decode on eight devices) is left to the compiler too. Mesh axes that an
    enclosing `shard_map` already split by hand are left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    spec = []
    for length, axis in zip(x.shape, axes, strict=False):
        names = tuple(name for name in _mesh_axes(axis) if name not in mesh.manual_axes)
        divides = length % math.prod(mesh.shape[name] for name in names) == 0
        spec.append((names or None) if divides else P.UNCONSTRAINED)
    spec += [P.UNCONSTRAINED] * (x.ndim - len(axes))
    return jax.lax.with_sharding_constraint(x, P(*spec))


def shards(axis: str, length: int) -> int:
    """How many pieces the current mesh cuts a logical axis of this length into: 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    pieces = math.prod(mesh.shape[name] for name in RULES[axis] if name not in mesh.manual_axes)
    return pieces if length % pieces == 0 else 1


def check(model_cfg: Any, mesh: Mesh | AbstractMesh) -> None:
    """Refuses a model whose dimensions the mesh does not divide.

    Args:
      model_cfg: a `model.transformer.ModelConfig`.

    Raises:
      ValueError: names every such dimension with the mesh sizes that would be legal.
    """
    problems = []
    for field, axis in _LENGTHS.items():
        length = getattr(model_cfg, field)
        pieces = math.prod(mesh.shape[name] for name in RULES[axis])
        if length % pieces:
            problem = (
                f"{field}={length} is not divisible by {'*'.join(RULES[axis])}={pieces} (legal: {_divisors(length)})"
            )
            if axis == "vocab":
                problem += f", or set vocab_multiple to a multiple of {pieces}"
            problems.append(problem)
    if problems:
        raise ValueError("the mesh does not divide the model: " + "; ".join(problems))


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def _mesh_axes(axis: str | None) -> tuple[str, ...]:
    if axis is None:
        return ()
    if axis not in RULES:
        raise ValueError(f"logical axis {axis!r} has no rule: use one of {', '.join(RULES)}, or None")
    return RULES[axis]
