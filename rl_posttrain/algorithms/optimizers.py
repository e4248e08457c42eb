"""What turns a gradient into a step, before the learning rate: Adam, Adafactor and Muon; and rates by parameter.

Optax computes; here is what is chosen and how parameters are told apart. Layers are stacked along the first axis of
their parameters, so a rule per matrix has to know which axes are the matrix's own.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from optax import contrib

from rl_posttrain.batch import Params

# (path, array) -> the axes (of the input, of the output) of a matrix; None for what is no matrix.
MatrixAxes = Callable[[tuple[Any, ...], Any], tuple[tuple[int, ...], tuple[int, ...]] | None]

MUON_RMS = 0.2  # of a matrix's step, about AdamW's, so that one learning rate serves both


def adam(b1: float, b2: float, epsilon: float) -> optax.GradientTransformation:
    """Kingma and Ba 2014, https://arxiv.org/abs/1412.6980. Two moments of each parameter."""
    return optax.scale_by_adam(b1, b2, epsilon)


def adafactor() -> optax.GradientTransformation:
    """Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235, without momentum and without relative step sizes.

    Of an array's two largest axes, from 128 on, only the means of squares along each are kept. The decay is 1 - t^-0.8;
    the step of each array, all its layers together, is scaled down to a root mean square of 1.
    """
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))


def muon(axes: MatrixAxes, rest: optax.GradientTransformation) -> optax.GradientTransformation:
    """Jordan et al. 2024, https://kellerjordan.github.io/posts/muon: momentum, made orthogonal by Newton-Schulz.

    Steps are scaled by 0.2 sqrt(max(inputs, outputs)), as Liu et al. 2025, https://arxiv.org/abs/2502.16982, do, where
    a root mean square of 0.2 comes out. Each layer's matrix, and each expert's, is orthogonalised by itself.

    Args:
      axes: tells what is a matrix, and how.
      rest: what moves all other parameters.
    """

    def dimensions(tree: Any) -> Any:
        def of(path: tuple[Any, ...], leaf: Any) -> contrib.MuonDimensionNumbers:
            found = axes(path, leaf)
            assert found is not None  # by `kinds`, what is no matrix is masked
            return contrib.MuonDimensionNumbers(*found)

        return jax.tree_util.tree_map_with_path(of, tree)

    def match_rms(updates: Any, params: Any = None) -> Any:
        def scaled(path: tuple[Any, ...], update: Any) -> Any:
            found = axes(path, update)
            assert found is not None
            inputs, outputs = (math.prod(update.shape[axis] for axis in part) for part in found)
            return MUON_RMS * max(inputs, outputs) ** 0.5 * update

        return jax.tree_util.tree_map_with_path(scaled, updates)

    def kinds(params: Params) -> Any:
        name = lambda path, leaf: "rest" if axes(path, leaf) is None else "matrices"
        return jax.tree_util.tree_map_with_path(name, params)

    orthogonal = contrib.scale_by_muon(weight_dimension_numbers=dimensions)
    return optax.partition({"matrices": optax.chain(orthogonal, optax.stateless(match_rms)), "rest": rest}, kinds)


def check_rates(rates: Mapping[str, float], params: Params) -> None:
    """Refuses a pattern without effect, and one of unclear effect.

    Raises:
      ValueError: a pattern matches no parameter, or two match the same.
    """
    names = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern in rates if names else ():  # `optax.tree_map_params` comes with a placeholder for parameters
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"rates: {pattern!r} matches no parameter: there are {', '.join(names)}")
    for name in names:
        found = [pattern for pattern in rates if fnmatch.fnmatchcase(name, pattern)]
        if len(found) > 1:
            raise ValueError(f"rates: {' and '.join(map(repr, found))} both match {name}: make them exclude each other")


def rate_of(rates: Mapping[str, float], path: tuple[Any, ...]) -> float:
    """What the pattern that matches a parameter's path, like "layers/query", gives; 1 where none does."""
    return next((rate for pattern, rate in rates.items() if fnmatch.fnmatchcase(name_of(path), pattern)), 1.0)


def name_of(path: tuple[Any, ...]) -> str:
    """A parameter's path in its tree: "layers/query"."""
    return "/".join(str(getattr(part, "key", part)) for part in path)
