"""Shows what a run would train on, before it trains: `python -m experiments.run ... --dry_run`.

One packed batch of each stage with its masks, built by the real path (untrained parameters sample the completions),
and the memory that the compiled updates ask for.
"""

from __future__ import annotations

import tempfile
from typing import Any

import jax
import numpy as np

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
        if config.grpo.steps:
            collected = loop.collect(built, state)
            batch = loop.grpo_batches(built, collected)[0]
            count = len(collected.groups)
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
