"""What a sweep runs: `get_sweep()`'s points and seeds as whole configs, each with a folder of its own.

    runs = plan(values, {"grid": {"update.learning_rate": [3e-4, 1e-3]}, "seeds": [0, 1]}, {}, Path("runs/rates"))

docs/sweeps.md has the format. Nothing is started here, and no device is touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_posttrain import config as config_lib
from rl_posttrain.config import ConfigError

if TYPE_CHECKING:
    from rl_posttrain.services import Config

KEYS = ("grid", "points", "seeds")
SLUG = 60  # characters of a directory's name that are for people


@dataclass
class Run:
    """One run: a point with a seed. Only `status` and `detail` change.

    Attributes:
      name, overrides: of its point; the values as the config has them.
      detail: why it failed.
    """

    name: str
    overrides: dict[str, Any]
    seed: int
    config: Config
    folder: Path
    status: Literal["waiting", "running", "finished", "failed", "interrupted"] = "waiting"
    detail: str = ""

    @property
    def title(self) -> str:
        return f"{self.name}, seed {self.seed}"


@dataclass(frozen=True)
class Sweep:
    """What a sweep file asks for. The points of a sweep are `points` times the grid, each with every seed."""

    grid: dict[str, list[Any]]  # values by dotted key
    points: list[tuple[str, dict[str, Any]]]  # (name or "", overrides)
    seeds: dict[int, dict[str, Any]]  # overrides that come with a seed; none: the config's seed alone


def plan(
    values: Mapping[str, Any], given: Any, common: Mapping[str, str], workdir: Path, source: str = "get_sweep()"
) -> list[Run]:
    """Every run in order, the seeds of a point together: all checked, none started.

    Args:
      values: the config that the points change.
      given: what `get_sweep()` returned.
      common: overrides of the command line, which hold at every point.
      source: the sweep's file, for messages.

    Raises:
      ConfigError: the sweep is not understood, a point is refused as a config, two points are the same, or a
        folder holds a run with another config.
    """
    from rl_posttrain import lifecycle, services

    sweep = read(given, source)
    check_apart(sweep, common, source)
    base = config_lib.apply_overrides(values, common)
    seeds = sweep.seeds or {services.parse(base).seed: {}}
    keys = {*sweep.grid, *(key for _, point in sweep.points for key in point)}
    runs: list[Run] = []
    for (name, point), combination in itertools.product(sweep.points, itertools.product(*sweep.grid.values())):
        chosen = dict(zip(sweep.grid, combination, strict=True))
        for seed, extra in seeds.items():
            with _at(f"{source}, {label_of(name, point, chosen, keys)}, seed {seed}"):
                tree = config_lib.apply_overrides(base, {**point, **chosen, **extra, "seed": seed})
                config = services.parse(tree)
                _check_domains(config)
            resolved = config_lib.to_dict(config)
            # As the config has them, so that "1e-3" and 0.001 are one point with one folder.
            listed, gridded = ({key: _value_at(resolved, key) for key in part} for part in (point, chosen))
            label, overrides = label_of(name, listed, gridded, keys), {**listed, **gridded}
            folder = workdir / directory_name(label, overrides) / f"seed{seed}"
            runs.append(Run(label, overrides, seed, config, folder))
    _check_distinct(runs, source)
    for run in runs:
        with _at(run.title):
            lifecycle.check_workdir(run.config, str(run.folder))
        run.status = "finished" if finished(run) else "waiting"
    return runs


def read(given: Any, source: str) -> Sweep:
    """Checks the form of what `get_sweep()` returned.

    Raises:
      ConfigError: naming the part, and the nearest known key where one is misspelt.
    """
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(f"{source}: get_sweep() must return a mapping with {', '.join(KEYS)}: see docs/sweeps.md")
    for key in given:
        if key not in KEYS:
            raise ConfigError(f"{source}: {key}: unknown key{config_lib.nearest(str(key), KEYS)}")
    grid = given.get("grid", {})
    if not isinstance(grid, Mapping):
        raise ConfigError(f"{source}: grid={grid!r}: must map each dotted config key to a list of values")
    for key, choices in grid.items():
        if not isinstance(choices, list) or not choices:
            raise ConfigError(f"{source}: grid[{key!r}]={choices!r}: must be a list with at least one value")
    points = given.get("points", [{}])
    named = list(points.items()) if isinstance(points, Mapping) else [("", point) for point in points]
    if not named or not all(isinstance(name, str) and isinstance(point, Mapping) for name, point in named):
        raise ConfigError(f"{source}: points={points!r}: must be mappings of config keys to values, listed or by name")
    seeds = given.get("seeds", {})
    if not isinstance(seeds, Mapping):
        if not isinstance(seeds, list) or not seeds or len(set(seeds)) < len(seeds):
            raise ConfigError(f"{source}: seeds={seeds!r}: must be different integers, at least one")
        seeds = {seed: {} for seed in seeds}
    for seed, extra in seeds.items():
        if not isinstance(seed, int) or isinstance(seed, bool) or not isinstance(extra, Mapping):
            raise ConfigError(f"{source}: seeds: {seed!r}: must be an integer, alone or with a mapping of overrides")
    return Sweep(dict(grid), [(name, dict(point)) for name, point in named], {s: dict(x) for s, x in seeds.items()})


def check_apart(sweep: Sweep, common: Mapping[str, str], source: str) -> None:
    """Refuses a key that is set at two places, whole or in part: one of them would have no effect.

    Raises:
      ConfigError: naming both; or a key sets the seed, which would compare different seeds with each other.
    """
    sets = [("the command line", key) for key in common]
    for number, (name, point) in enumerate(sweep.points):
        sets += [(f"points[{name or number}]", key) for key in point]
    sets += [("grid", key) for key in sweep.grid]
    sets += [(f"seeds[{seed}]", key) for seed, extra in sweep.seeds.items() for key in extra]
    for place, key in sets:
        if key == "seed" and (place != "the command line" or sweep.seeds):
            raise ConfigError(f'{source}: {place} sets seed: name seeds in "seeds" alone, so that points share them')
    for (one, a), (other, b) in itertools.combinations(sets, 2):
        if one != other and one.partition("[")[0] == other.partition("[")[0]:
            continue  # two points, or two seeds: never at once
        if f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}."):
            raise ConfigError(f"{source}: {a} of {one} and {b} of {other} set the same: leave one out")


def label_of(name: str, point: Mapping[str, Any], chosen: Mapping[str, Any], keys: set[str]) -> str:
    """A point for people, like "ppo, learning_rate=0.0003": its name or its overrides, then those of the grid.

    Keys are shortened to their last part where that is unique among `keys`, all that the sweep sets.
    """
    tails = [key.rpartition(".")[2] for key in keys]
    short = lambda key: tail if tails.count(tail := key.rpartition(".")[2]) == 1 else key
    text = lambda value: value if isinstance(value, str) else json.dumps(value, default=str)
    shown = dict(chosen) if name else {**point, **chosen}
    return ", ".join([name] * bool(name) + [f"{short(key)}={text(value)}" for key, value in shown.items()]) or "base"


def directory_name(label: str, overrides: Mapping[str, Any]) -> str:
    """A readable name, and a hash of the overrides, which alone tells points apart.

    It has no "=": readers of Parquet take such a part of a path for a column.
    """
    digest = hashlib.sha256(json.dumps(overrides, sort_keys=True).encode()).hexdigest()
    slug = re.sub(r"[^A-Za-z0-9.+-]+", "_", label)[:SLUG].strip("._-")
    return f"{slug or 'point'}-{digest[:10]}"


def finished(run: Run) -> bool:
    """Whether the run's folder holds all that `experiments.run` leaves at the end of this very config."""
    if not all((run.folder / name).exists() for name in ("config.json", "evaluation.json", "report.html")):
        return False
    document = lambda name: json.loads((run.folder / name).read_text(encoding="utf-8"))
    if document("config.json") != json.loads(json.dumps(config_lib.to_dict(run.config))):
        return False  # it is to get more steps
    last = {row["metric"] for row in document("evaluation.json") if row["step"] == run.config.total_steps}
    return last >= ({"accuracy", "accuracy_change"} if run.config.grpo.steps else {"accuracy"})


def _value_at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


@contextlib.contextmanager
def _at(place: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _check_domains(config: Config) -> None:
    """A misspelt domain, as in "tasks.strings/srot.weight", would pass as one more domain."""
    from rl_posttrain.tasks import names

    for name in config.tasks:
        if name not in names():
            raise ConfigError(f"config.tasks.{name}: there is no such domain{config_lib.nearest(name, names())}")


def _check_distinct(runs: Sequence[Run], source: str) -> None:
    folders: dict[str, Run] = {}
    checkpoints: dict[str, Run] = {}
    for run in runs:
        other = folders.setdefault(str(run.folder), run)
        if other is not run:
            raise ConfigError(f"{source}: {other.title} is there twice: leave one out")
        directory = run.config.checkpoint.directory
        if directory is not None and checkpoints.setdefault(directory, run) is not run:
            raise ConfigError(
                f"{source}: config.checkpoint.directory={directory!r} cannot hold the checkpoints of several runs: "
                "leave it out, and each run keeps its own in its folder"
            )
