"""How fast one GRPO step of a config is, where the time goes, and how far from the machine's limits that is.

    python -m benchmarks.step --config configs/quickstart.py [--steps 10] [--config.rollout.group_size=16 ...]

Takes the config's supervised warm-up, so that completions are as long and rewards as mixed as at the start of its GRPO
stage, then `--steps` steady steps after a first one that compiles. `--config.init_from=runs/quickstart` with
`--config.sft.steps=0` measures a trained policy. Then the decode and update programs alone, right answers through each
domain's verifier, and the machine's limits.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from benchmarks import decode_cache, machine, median_seconds, publish, roofline, scaled
from experiments import cli
from rl_posttrain import config as config_lib
from rl_posttrain import lifecycle, loop, services
from rl_posttrain.observability.compilations import Compilations
from rl_posttrain.observability.progress import print_table
from rl_posttrain.rollout.generate import decode_groups
from rl_posttrain.rollout.sampling import Sampling
from rl_posttrain.services import Config, Services

PHASES = ("rollout", "verify", "update")
REPEATS = 5
RIGHT_ANSWERS = 64  # different ones through each domain's verifier
# Each matrix product, and each array read, takes long against starting it and is far larger than any cache.
MATRIX_SIZE = {"cpu": 2048}
OTHER_MATRIX_SIZE = 8192
ARRAY_BYTES = 2**28
Figures = dict[str, float]


def main(argv: Sequence[str]) -> int:
    rest, overrides = cli.split_overrides(argv)
    parser = argparse.ArgumentParser(
        "python -m benchmarks.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="a Python file with get_config()")
    parser.add_argument("--steps", type=int, default=10, help="steady steps; the figures are their medians")
    parser.add_argument("--config.KEY", metavar="VALUE", dest="_", help="override a key of the config")
    arguments = parser.parse_args(rest)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: at least 1")
    values = config_lib.apply_overrides(cli.load_config_file(arguments.config), overrides)
    cli.use_compilation_cache()
    size = MATRIX_SIZE.get(jax.default_backend(), OTHER_MATRIX_SIZE)
    measure(services.parse(values), arguments.steps, size, ARRAY_BYTES)
    return 0


def measure(config: Config, steps: int, matrix_size: int, array_bytes: int) -> Figures:
    """Measures, prints the tables and the JSON line, and returns its figures."""
    place = machine()
    with tempfile.TemporaryDirectory() as scratch, services.build(config, scratch) as built:
        state = lifecycle.start(built)
        figures = warm_up(built, state)
        taken = [take_step(built, state) for _ in range(1 + steps)]
        figures |= step_figures(taken)
        figures["peak_memory_bytes"] = peak_memory_bytes()  # before the arrays that measure the limits
        last = taken[-1].collected
        decode, decode_work = decode_figures(built, state, last)
        update, update_work = update_figures(built, state, last)
        verifiers = verify_figures(built, state)
        mesh = jax.sharding.get_mesh()
        limits = roofline.measure(
            mesh, config.model.compute_dtype, size=matrix_size, array_bytes=array_bytes, repeats=REPEATS
        )
    figures |= decode | update | verifiers
    figures |= {
        "limit_flops_per_s": limits.flops_per_s,
        "limit_read_bytes_per_s": limits.read_bytes_per_s,
        "limit_increment_bytes_per_s": limits.increment_bytes_per_s,
        "decode_roofline_share": decode_work.bound_s(limits) / figures["decode_program_s"],
        "update_roofline_share": update_work.bound_s(limits) / figures["update_program_s"],
    }
    show_steps(taken, figures)
    show_verifiers(verifiers)
    show_cache(figures)
    show_roofline(figures, limits, {"decode": decode_work, "update": update_work})
    publish("step", place, figures)
    return figures


def warm_up(built: Services, state: loop.RunState) -> Figures:
    """The supervised stage, as `loop.train` takes it; figures are medians without the step that compiles."""
    measured = []
    for _ in range(built.config.sft.steps):
        measured.append(loop.sft_step(built, state))
        state.step += 1
    loop.begin_stage(built, state)
    names = {"time/step_s": "sft_step_s", "tokens/per_s": "sft_trained_tokens_per_s"}
    steady = measured[1:]
    return {ours: statistics.median(step[name] for step in steady) for name, ours in names.items() if steady}


@dataclass(frozen=True)
class Taken:
    """One step of the loop, measured."""

    seconds: dict[str, float]  # by phase
    collected: loop.Collected
    completions: int
    completion_tokens: int
    trained_tokens: float  # with a weight in the loss, over all passes
    processed_tokens: int  # positions that are no padding, over all passes
    positions: int  # padding included
    compilations: int
    shapes: frozenset[str]  # of prompts and packed rows


def take_step(built: Services, state: loop.RunState) -> Taken:
    """One step as `loop.train` takes it."""
    with Compilations() as compilations:
        metrics, collected = loop.grpo_step(built, state)
    state.step += 1
    rollouts = [rollout for group in collected.groups for rollout in group]
    batches = loop.grpo_batches(built, collected)  # packing is deterministic: what the step trained on
    passes = built.config.grpo.epochs
    bucket = built.config.rollout.prompt_bucket
    longest = -(-max(len(rollout.prompt_tokens) for rollout in rollouts) // bucket) * bucket
    return Taken(
        seconds={phase: metrics[f"time/{phase}_s"] for phase in PHASES},
        collected=collected,
        completions=len(rollouts),
        completion_tokens=sum(len(rollout.completion_tokens) for rollout in rollouts),
        trained_tokens=passes * sum(int((batch.loss_weight > 0).sum()) for batch in batches),
        processed_tokens=passes * sum(int((batch.segments > 0).sum()) for batch in batches),
        positions=passes * sum(batch.tokens.size for batch in batches),
        compilations=compilations.count,
        shapes=frozenset([f"prompts of {longest}", *("rows {} x {}".format(*batch.tokens.shape) for batch in batches)]),
    )


def step_figures(taken: Sequence[Taken]) -> Figures:
    """Medians over the steps after the first; the first's share is its compilations."""
    steady = taken[1:]
    median = lambda value: float(statistics.median(value(step) for step in steady))
    rate = lambda count, phase: median(lambda step: count(step) / step.seconds[phase])
    total = lambda step: sum(step.seconds.values())
    return {
        "step_s": median(total),
        **{f"{phase}_s": median(lambda step, p=phase: step.seconds[p]) for phase in PHASES},
        **{f"{phase}_time_share": median(lambda step, p=phase: step.seconds[p] / total(step)) for phase in PHASES},
        "rollout_tokens_per_s": rate(lambda step: step.completion_tokens, "rollout"),
        "verify_completions_per_s": rate(lambda step: step.completions, "verify"),
        "update_trained_tokens_per_s": rate(lambda step: step.trained_tokens, "update"),
        "update_processed_tokens_per_s": rate(lambda step: step.processed_tokens, "update"),
        "row_use_share": median(lambda step: step.processed_tokens / step.positions),
        "completion_tokens_count": median(lambda step: step.completion_tokens),
        "first_step_s": total(taken[0]),
        "first_step_compilations_count": taken[0].compilations,
        "steady_compilations_count": sum(step.compilations for step in steady),
    }


def peak_memory_bytes() -> float:
    """Most memory in use so far: of the fullest accelerator, or of this process where devices keep no statistics."""
    statistics_ = [device.memory_stats() for device in jax.local_devices()]
    if all(statistics_):
        return float(max(entry["peak_bytes_in_use"] for entry in statistics_ if entry))
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def decode_figures(built: Services, state: loop.RunState, collected: loop.Collected) -> tuple[Figures, roofline.Work]:
    """The decode program alone on a step's prompts: its time, its caches, and the naive loop beside it."""
    config, cfg = built.config.rollout, built.config.model
    prompts, lengths, hashes = prompt_arrays(built, collected)
    rows, width = len(lengths), config.group_size
    arguments = (
        state.train.params, prompts, lengths, hashes, np.arange(width, dtype=np.uint32), jax.random.key(0)
    )  # fmt: skip
    settings: dict[str, Any] = dict(
        model_cfg=cfg,
        sampling=Sampling(config.temperature),
        width=width,
        max_tokens=config.max_tokens,
        end_ids=built.tokenizer.end_ids,
    )
    compiled = decode_groups.lower(*arguments, **settings).compile()
    counts = np.asarray(decode_groups(*arguments, **settings)[2])
    shape = decode_cache.layer_cache_shape(cfg, rows, width, config.max_tokens)
    figures = {
        "decode_program_s": median_seconds(lambda: decode_groups(*arguments, **settings), REPEATS),
        "decode_cache_bytes": decode_cache.cache_bytes(cfg, rows, width, config.max_tokens),
        "decode_temporary_bytes": decode_cache.temporary_bytes(compiled),
        "decode_cache_copies_count": decode_cache.count_copies(compiled, shape),
        **decode_cache.compare(state.train.params, prompts, lengths, cfg, width, config.max_tokens, REPEATS),
    }
    mesh = jax.sharding.get_mesh()
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    prefill = roofline.prefill_work(cfg, lengths - 1, replicas)
    decode = roofline.decode_work(cfg, lengths - 1, counts, replicas)
    return figures, roofline.Work(prefill.flops + decode.flops, prefill.bytes + decode.bytes)


def prompt_arrays(built: Services, collected: loop.Collected) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A step's prompts as `decode_groups` takes them: tokens [R, S + 1], lengths [R], hashes [R]."""
    prompts = [group[0].prompt_tokens for group in collected.groups]
    bucket = built.config.rollout.prompt_bucket
    tokens = np.zeros((len(prompts), -(-max(map(len, prompts)) // bucket) * bucket), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    hashes = [zlib.crc32(group[0].task.id.encode()) for group in collected.groups]
    return tokens, np.array(list(map(len, prompts)), np.int32), np.array(hashes, np.uint32)


def update_figures(built: Services, state: loop.RunState, collected: loop.Collected) -> tuple[Figures, roofline.Work]:
    """The update program alone, on the first batch of a step."""
    config = built.config
    host = loop.grpo_batches(built, collected)[0]
    batch = built.place(host)
    if state.reference is not None:
        batch = replace(batch, reference_logprobs=built.score(state.reference, batch)[0])

    def update() -> Any:
        state.train, metrics = built.grpo_update(state.train, batch)
        return state.train, metrics

    seconds = median_seconds(update, REPEATS)
    compiled = built.grpo_update.func.lower(*built.grpo_update.args, state.train, batch).compile()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.train.params))
    mesh = jax.sharding.get_mesh()
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    work = roofline.update_work(config.model, host, config.update.micro_batches, parameters, replicas)
    figures = {
        "parameters_count": parameters,
        "update_program_s": seconds,
        "update_temporary_bytes": decode_cache.temporary_bytes(compiled),
    }
    return figures, work


def verify_figures(built: Services, state: loop.RunState) -> Figures:
    """Right answers per second through each domain's verifier: what a trained policy asks of it.

    Domains without worked examples are left out.
    """
    figures = {}
    for name, domain in built.domains.items():
        start = state.counters.get(name, 0)
        tasks = domain.make(built.config.seed, "train", range(start, start + RIGHT_ANSWERS))
        answers = [task.demonstration for task in tasks if task.demonstration is not None]
        if len(answers) < len(tasks):
            continue
        wrong = [verdict for verdict in domain.score(tasks, answers) if not verdict.passed]
        if wrong:
            raise RuntimeError(f"{name}: the verifier refuses a worked example: {wrong[0]}")
        seconds = median_seconds(lambda: domain.score(tasks, answers) and None, REPEATS)  # noqa: B023
        figures[f"verify_{name.replace('/', '_')}_per_s"] = len(tasks) / seconds
    return figures


def show_steps(taken: Sequence[Taken], figures: Figures) -> None:
    """Time and throughput of each phase, compilations and memory."""
    trained, processed = figures["update_trained_tokens_per_s"], figures["update_processed_tokens_per_s"]
    rates = {
        "rollout": f"{scaled(figures['rollout_tokens_per_s'], 'tokens/s')} sampled",
        "verify": f"{scaled(figures['verify_completions_per_s'], 'completions/s')}",
        "update": f"{scaled(trained, 'tokens/s')} trained, {scaled(processed, 'tokens/s')} processed",
    }
    rows = [
        [phase, f"{figures[f'{phase}_s']:.4f}", f"{figures[f'{phase}_time_share']:.1%}", rates[phase]]
        for phase in PHASES
    ]
    rows.append(["all", f"{figures['step_s']:.4f}", "", f"{figures['first_step_s']:.1f} s in the first step"])
    title = f"one step: medians of {len(taken) - 1} after the first"
    print_table(title, ["phase", "seconds", "share", "throughput"], rows)
    if "sft_step_s" in figures:
        tokens = scaled(figures["sft_trained_tokens_per_s"], "tokens/s")
        print(f"before, each step of the warm-up: {figures['sft_step_s']:.4f} s, {tokens} trained")
    print(f"{figures['row_use_share']:.0%} of the packed positions hold tokens, the rest is padding")
    print(f"peak memory {scaled(figures['peak_memory_bytes'], 'B')}")
    print(
        f"{taken[0].compilations} programs compiled in the first step, "
        f"{figures['steady_compilations_count']} in the {len(taken) - 1} after it"
    )
    seen = taken[0].shapes
    for number, step in enumerate(taken[1:], start=2):
        if step.compilations:
            new = ", ".join(sorted(step.shapes - seen)) or "no new shape of prompts or packed rows"
            print(f"  step {number} compiled {step.compilations}: {new}")
        seen |= step.shapes


def show_verifiers(verifiers: Figures) -> None:
    """Right answers per second, by domain."""
    rows = [
        [name.removeprefix("verify_").removesuffix("_per_s"), scaled(rate, "/s")] for name, rate in verifiers.items()
    ]
    print_table("right answers through each domain's verifier", ["domain", "answers"], rows)


def show_cache(figures: Figures) -> None:
    """What decoding does with its caches, beside the naive loop."""
    size = lambda name: scaled(figures[name], "B")
    print_table(
        "decoding, on one device",
        ["loop", "caches", "temporaries", "copies of a cache", "seconds"],
        [
            [
                "rollout program",
                size("decode_cache_bytes"),
                size("decode_temporary_bytes"),
                str(figures["decode_cache_copies_count"]),
                f"{figures['decode_program_s']:.4f}",
            ],
            *(
                [
                    f"greedy, {title}",
                    size("decode_cache_bytes"),
                    size(f"{name}_temporary_bytes"),
                    "",
                    f"{figures[f'{name}_decode_s']:.4f}",
                ]
                for name, title in (("in_place", "caches in place"), ("stacked", "caches stacked by a scan"))
            ),
        ],
    )
    print(
        f"stacked over in place: {figures['stacked_over_in_place_time_ratio']:.2f} x the time, "
        f"{figures['stacked_over_in_place_temporary_ratio']:.2f} x the temporaries"
    )


def show_roofline(figures: Figures, limits: roofline.Limits, work: dict[str, roofline.Work]) -> None:
    """The machine's limits, and how near the two programs come."""
    print_table(
        "this machine, measured",
        ["limit", "rate"],
        [
            ["matrix product", scaled(limits.flops_per_s, "FLOP/s")],
            ["reading memory", scaled(limits.read_bytes_per_s, "B/s")],
            ["x + 1 in place", scaled(limits.increment_bytes_per_s, "B/s")],
        ],
    )
    rows = []
    for name, needed in work.items():
        seconds = figures[f"{name}_program_s"]
        rows.append(
            [
                name,
                scaled(needed.flops, "FLOP"),
                scaled(needed.bytes, "B"),
                f"{needed.bound_s(limits):.4f}",
                needed.bound_by(limits),
                f"{seconds:.4f}",
                f"{figures[f'{name}_roofline_share']:.1%}",
                scaled(needed.flops / seconds, "FLOP/s"),
            ]
        )
    columns = ["program", "operations", "bytes", "least s", "bound by", "s", "of the bound", "rate"]
    print_table("the roofline: what each program needs against what it takes", columns, rows)


if __name__ == "__main__":
    cli.guarded(main)
