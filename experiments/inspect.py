"""Shows a model under a mesh before anything is loaded, or what a run would train on before it trains.

    python -m experiments.inspect --model DIRECTORY --mesh fsdp=8,tensor=2
    python -m experiments.run ... --dry_run

The first needs a config.json and no devices: every parameter, its shape and its part on each device of the mesh. The
second (`dry_run`) builds one packed batch of each stage with its masks by the real path (untrained parameters sample
the completions), and shows the memory that the compiled updates ask for.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from experiments import cli

COLUMNS = 32  # positions of the first row that are shown
FIELDS = (
    "tokens",
    "labels",
    "positions",
    "segments",
    "parents",
    "loss_weight",
    "advantages",
    "behaviour_logprobs",
)


def dry_run(config: Any, workdir: str) -> int:
    """Prints the batches and the compiled memory; writes nothing to `workdir`."""
    from rl_posttrain import lifecycle, loop, services
    from rl_posttrain.data import trees
    from rl_posttrain.data.packing import pack

    with tempfile.TemporaryDirectory() as scratch, services.build(config, scratch) as built:
        state = lifecycle.start(built)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.train.params))
        print(f"{parameters:,} parameters on {jax.device_count()} x {jax.devices()[0].device_kind}; workdir {workdir}")
        if config.sft.steps:
            tasks = loop.make_tasks(built, next(state.examples))
            section = config.sft
            batch, _ = pack(
                trees.from_examples(tasks, built.tokenizer),
                section.row_length,
                built.rows_multiple(section.update),
            )
            show(f"sft: {len(tasks)} worked examples", batch, built.tokenizer)
            show_memory(built.sft_update, state.train, built.place(batch))
        if config.preference.steps:
            section = config.preference
            pairs = [built.pairs[0][i] for i in next(state.pairs)]
            batch, _ = pack(
                trees.from_pairs(pairs, built.tokenizer, section.row_length),
                section.row_length,
                built.rows_multiple(section.update),
            )
            show(f"preference: {len(pairs)} pairs", batch, built.tokenizer)
            show_memory(built.preference_update, state.train, built.place(batch))
        if config.grpo.steps:
            collected = loop.collect(built, state)
            batch = loop.grpo_batches(built, collected)[0]
            count = len(collected.kept)
            show(
                f"grpo: the first of {config.grpo.mini_batches} mini-batches of {count} groups",
                batch,
                built.tokenizer,
            )
            show_memory(built.grpo_update, state.train, built.place(batch))
    return 0


def show(title: str, batch: Any, tokenizer: Any) -> None:
    """Prints the batch's shape, how full it is, and the first positions of its first row."""
    from rl_posttrain.observability.progress import print_table

    rows, length = batch.tokens.shape
    used, trained = int((batch.segments > 0).sum()), int((batch.loss_weight > 0).sum())
    print(f"\n{title}: {rows} rows of {length} tokens, {used / (rows * length):.0%} used, {trained} tokens trained")
    table = []
    for t in range(min(COLUMNS, length)):
        cells = [f"{np.asarray(getattr(batch, name))[0, t]:.4g}" for name in FIELDS]
        cells[0] += f" {tokenizer.decode([batch.tokens[0, t]])!r}"
        cells[1] += f" {tokenizer.decode([batch.labels[0, t]])!r}"
        table.append([str(t), *cells])
    print_table(f"row 0, positions 0 to {len(table) - 1}", ["t", *FIELDS], table)


def show_memory(update: Any, state: Any, batch: Any) -> None:
    """Prints what XLA plans for one update, per device."""
    memory = update.func.lower(*update.args, state, batch).compile().memory_analysis()
    mib = lambda size: f"{size / 2**20:.1f} MiB"
    print(
        f"compiled update, per device: {mib(memory.argument_size_in_bytes)} of arguments "
        f"({mib(memory.alias_size_in_bytes)} reused for the results), {mib(memory.temp_size_in_bytes)} of temporaries"
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m experiments.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", required=True, metavar="DIRECTORY", help="in Hugging Face's layout; no weights needed"
    )
    parser.add_argument(
        "--mesh", default="", metavar="AXIS=SIZE,...", help="such as fsdp=8,tensor=2 (default: one device)"
    )
    parser.add_argument("--vocab_multiple", type=int, default=1, help="pads the tables to a multiple of it")
    arguments = parser.parse_args(argv)

    from rl_posttrain.config import ConfigError
    from rl_posttrain.model import convert

    try:
        cfg = convert.model_config(arguments.model)
        cfg = dataclasses.replace(cfg, vocab_multiple=arguments.vocab_multiple)
        show_model(arguments.model, cfg, abstract_mesh(arguments.mesh))
    except ConfigError:
        raise
    except ValueError as error:  # of the model's config, or of a mesh that does not divide it
        raise ConfigError(str(error)) from error
    return 0


def abstract_mesh(text: str) -> AbstractMesh:
    """The mesh of "fsdp=8,tensor=2", without its devices.

    Raises:
      ConfigError: an axis that does not exist or is not implemented, or a size that is no number above 0.
    """
    from rl_posttrain.config import ConfigError, build
    from rl_posttrain.sharding.mesh import AXES, MeshConfig

    given = {}
    for part in filter(None, text.split(",")):
        axis, equals, size = part.partition("=")
        if not equals:
            raise ConfigError(f"--mesh {text}: {part!r} is no AXIS=SIZE; write it as in fsdp=8,tensor=2")
        if axis in given:
            raise ConfigError(f"--mesh {text}: {axis} is given twice")
        given[axis] = size
    sizes = build(MeshConfig, given, "--mesh").sizes
    if -1 in sizes:
        raise ConfigError(f"--mesh {text}: there are no devices here that -1 could take; give the size")
    return AbstractMesh(sizes, AXES)


def show_model(name: str, cfg: Any, mesh: AbstractMesh) -> None:
    """Prints every parameter with its part on a device, and what training all of them asks for in float32.

    Raises:
      ValueError: the mesh does not divide the model; the message has the legal sizes.
    """
    from rl_posttrain.model import transformer
    from rl_posttrain.model.hf_names import by_path
    from rl_posttrain.observability.progress import print_table
    from rl_posttrain.sharding import mesh as mesh_lib

    mesh_lib.check(cfg, mesh)
    declared = transformer.declare(cfg)
    placements = dict(by_path(mesh_lib.shardings(declared, mesh)))
    rows, whole, part = [], 0, 0
    for path, parameter in by_path(declared, transformer.is_parameter):
        shape = placements[path].shard_shape(parameter.shape)
        whole, part = whole + math.prod(parameter.shape), part + math.prod(shape)
        split = ", ".join("+".join(_axes(entry)) or "-" for entry in placements[path].spec)
        rows.append([path, written(parameter.shape), split, written(shape), sized(4 * math.prod(shape))])
    devices = math.prod(mesh.shape.values())
    axes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    print(f"{name}: {whole:,} parameters, on {axes} ({devices} device{'s' * (devices > 1)})")
    print_table("", ["parameter", "shape", "split over", "on each device", "float32"], rows)
    print_table(
        "float32, when every parameter is trained by AdamW",
        ["", "on each device", "on all devices", "one copy"],
        [
            [title, sized(4 * copies * part), sized(4 * copies * part * devices), sized(4 * copies * whole)]
            for title, copies in (("weights", 1), ("gradients", 1), ("moments", 2), ("together", 4))
        ],
    )
    print("Activations, logits and decoding's caches come on top.")


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes that one dimension is split over."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def written(shape: Sequence[int]) -> str:
    """2 x 3 x 4"""
    return " x ".join(map(str, shape))


def sized(count: int) -> str:
    """Bytes for people: 1.5 GiB."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} B"


if __name__ == "__main__":
    cli.guarded(main)
