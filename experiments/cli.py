"""What the commands share: config files with overrides, exit codes, the compilation cache, a run's parameters."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BAD_CONFIG, BAD_ENVIRONMENT, PREEMPTED = 2, 3, 75
SCHEDULER = "xla_cpu_enable_concurrency_optimized_scheduler"


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separates `--config.a.b=value` (or `--config.a.b value`) from the other arguments.

    Raises:
      ConfigError: the last override has no value.
    """
    from rl_posttrain.config import ConfigError

    rest: list[str] = []
    overrides: dict[str, str] = {}
    arguments = iter(argv)
    for argument in arguments:
        if argument.startswith("--config."):
            key, equals, value = argument.removeprefix("--config.").partition("=")
            if not equals:
                value = next(arguments, None)
                if value is None:
                    raise ConfigError(f"--config.{key} needs a value")
            overrides[key] = value
        else:
            rest.append(argument)
    return rest, overrides


def load_config_file(path: str) -> Mapping[str, Any]:
    """The mapping that the file's `get_config()` returns.

    Raises:
      ConfigError: no such file, or no `get_config` in it.
    """
    return call_file("--config", path, "get_config")


def call_file(option: str, path: str, function: str) -> Any:
    """What a Python file's `function()` returns, as dicts and lists. `option` names the file in messages.

    Raises:
      ConfigError: no such file, or no such function in it.
    """
    from rl_posttrain.config import ConfigError, plain

    spec = importlib.util.spec_from_file_location("experiment_config", path)
    if not Path(path).is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{option} {path}: there is no such Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, function):
        raise ConfigError(f"{option} {path}: the file must define {function}()")
    return plain(getattr(module, function)())


def guarded(main: Callable[[Sequence[str]], int]) -> None:
    """Runs a command and exits with its code. Errors that people can mend print one line and have their own codes."""
    from rl_posttrain.config import ConfigError
    from rl_posttrain.sandbox.bubblewrap import SandboxUnavailable
    from rl_posttrain.storage.checkpoints import CheckpointError
    from rl_posttrain.tasks import PromptSpaceError

    try:
        code = main(sys.argv[1:])
    except (ConfigError, PromptSpaceError) as error:
        print(f"config refused: {error}", file=sys.stderr)
        code = BAD_CONFIG
    except (SandboxUnavailable, CheckpointError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = BAD_ENVIRONMENT
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"no space left: {error}; free some, or choose another --workdir", file=sys.stderr)
        code = BAD_ENVIRONMENT
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, where JAX is told to already or else in the user's cache folder.

    Call it before the first computation.
    """
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" in flags and SCHEDULER not in flags:
        # Collectives of several CPU devices deadlock in programs that come from the cache (jax 0.10 and 0.12): each
        # device may start them in an order of its own. This flag gives all of them one order.
        os.environ["XLA_FLAGS"] = f"{flags} --{SCHEDULER}=false"
    if jax.config.values["jax_compilation_cache_dir"] is None:  # or JAX_COMPILATION_CACHE_DIR has set it
        folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rl_posttrain" / "jax"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@contextlib.contextmanager
def opened_params(workdir: str, step: str, *, adapters: bool = False) -> Iterator[tuple[Any, Any, int]]:
    """A finished or running run's (config, params, step).

    Args:
      step: "latest", "best" (highest held-out macro accuracy) or a number.
      adapters: the params are the run's adapters alone, not the model with them merged.

    Raises:
      ConfigError: `workdir` holds no run, or a run without adapters where they are wanted.
    """
    import jax

    from rl_posttrain import services
    from rl_posttrain.config import ConfigError
    from rl_posttrain.model import transformer
    from rl_posttrain.sharding import mesh as mesh_lib
    from rl_posttrain.storage import filesystem
    from rl_posttrain.storage.checkpoints import restore_params

    path = filesystem.join(workdir, "config.json")
    if not filesystem.exists(path):
        raise ConfigError(f"{workdir} holds no run: there is no config.json in it")
    config = services.parse(json.loads(filesystem.read(path)))
    wanted = {"latest": None, "best": "best"}.get(step, step)
    if wanted not in (None, "best"):
        if not step.isdigit():
            raise ConfigError(f'--step {step}: must be "latest", "best" or a number')
        wanted = int(step)
    if adapters and not config.lora.rank:
        raise ConfigError(f"{workdir} has no adapters: it trained the whole model (lora.rank=0); export that")
    mesh = mesh_lib.make_mesh(config.mesh)
    directory = config.checkpoint.directory or filesystem.join(workdir, "checkpoints")
    with jax.set_mesh(mesh):
        part = services.trained_part(config, mesh)
        abstract = jax.eval_shape(lambda: transformer.init_tree(jax.random.key(0), config.model, part.declared))
        placed = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        abstract = jax.tree.map(placed, abstract, mesh_lib.shardings(part.declared, mesh))
        found, trained = restore_params(directory, abstract, wanted)
        yield config, trained if adapters else part.policy(trained), found


@contextlib.contextmanager
def opened_run(workdir: str, step: str) -> Iterator[tuple[Any, Any, Any, int]]:
    """The run of `opened_params` with what its tasks need: (config, domains, params, step)."""
    from rl_posttrain import services

    with opened_params(workdir, step) as (config, params, found), services.tools(config) as tools:
        yield config, services.load_domains(config, tools), params, found
