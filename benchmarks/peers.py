"""Ours beside TRL, Tunix and transformers: a GRPO step, a long prompt, decoding, and loading a model. Linux, CPU.

    python -m benchmarks.peers [--only NAME ...] [--model models/smollm2-135m] [--peers .cache/peers]

Everybody has the same weights, prompts and lengths: float32 unless said, temperature 1, end tokens off so that every
completion is full, AdamW, one update of the whole step. Each contender is a process of its own, in an environment of
its own where the pins collide; the environments are made under `--peers` and used again. Figures are medians of three
rounds after one that warms up. Ours and TRL take turns, and so do those that decode. A contender that fails is
reported with its reason. "Others" is what processes besides the contender took of the cores: where it is marked,
measure again.

    generation_vs_trl, generation_vs_tunix   4 prompts x 8 completions, 64 + 64 tokens: their seconds over ours
    update_vs_trl, update_vs_tunix           the same step: everything after the generation
    update_vs_trl_bf16                       the same, TRL in bfloat16 autocast, its default precision
    step_memory_vs_trl                       the same step: our peak resident memory over theirs
    long_prompt_speedup                      one prompt of 2,048 tokens x 8 completions of 32: the step of the fastest
                                             peer that finishes over ours; a peer takes one step, not warmed up
    long_prompt_memory_ratio                 our peak over that of the peer that needs least
    decode_vs_transformers                   decode steps alone, 32 at once: our tokens/s over theirs
    decode_vs_tunix                          the same; measured when asked for by name
    decode_fraction_of_limit                 our tokens/s over those of a decode step's matrix products alone
    import_s, import_memory_ratio            from a directory to a policy; the process's peak over the weights' bytes

Our settings are in `SETTINGS`; `--config.KEY=VALUE` overrides them. The whole takes about 25 minutes on two cores, and
up to 20 GB of memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine, publish, scaled
from benchmarks.peers_host import Work
from benchmarks.peers_plan import DEFAULT, MEASUREMENTS, NEEDS, Contender, Figures, Measurement, Result, parts, ratios
from benchmarks.peers_processes import Host, Unavailable, environment
from experiments import cli
from rl_posttrain.config import ConfigError
from rl_posttrain.observability.progress import Progress, print_table

DIRTY_CORES = 0.15  # taken by others: marked, since the figure may be off
# Ours, by measurement: overrides of the run's config, chosen by what the compiler plans for the update's temporaries.
SETTINGS: dict[str, dict[str, str]] = {
    # A group at a time 3.4 GB, and nothing is computed twice; all at once 9.5 GB; remat "dots" 3.7 GB, "full" 2.5 GB.
    "step": {"update.micro_batches": "4"},
    # 1.7 GB; with dense attention 2.5 GB.
    "long": {"model.remat": "full", "model.attention": "blockwise"},
    "decode": {},
    "import": {},
}


def main(argv: Sequence[str]) -> int:
    rest, overrides = cli.split_overrides(argv)
    parser = argparse.ArgumentParser(
        "python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NEEDS, default=DEFAULT, metavar="NAME", help="these figures")
    parser.add_argument("--model", default="models/smollm2-135m", help="a directory in Hugging Face's layout")
    parser.add_argument("--peers", default=".cache/peers", help="where the peers' environments and logs are kept")
    parser.add_argument("--config.KEY", metavar="VALUE", dest="_", help="override a setting of ours")
    arguments = parser.parse_args(rest)
    measure(arguments.only, arguments.model, Path(arguments.peers), overrides)
    return 0


def measure(
    names: Sequence[str],
    model: str,
    peers: Path,
    overrides: Mapping[str, str],
    measurements: Sequence[Measurement] = MEASUREMENTS,
) -> Figures:
    """Measures, prints the tables and the JSON line, and returns its figures.

    Raises:
      ConfigError: `model` holds no model.
    """
    if not Path(model, "config.json").is_file():
        raise ConfigError(
            f"--model {model} holds no model: `python -m experiments.import_model --smollm2 --out {model}` makes one"
        )
    model = str(Path(model).absolute())
    place: dict[str, Any] = machine() | {"settings": {}, "versions": {}, "failed": {}}
    figures: Figures = {}
    for measurement in measurements:
        wanted = {contender for name in names if NEEDS[name][0] == measurement.name for contender in NEEDS[name][1]}
        if not wanted:
            continue
        settings = {**SETTINGS[measurement.name], **overrides}
        results: dict[str, Result] = {}
        for together in measurement.turns:
            chosen = [contender for contender in together if contender.name in wanted]
            results |= take_turns(chosen, measurement, measurement.work(model), peers, settings)
        show(measurement, results)
        compared = ratios(measurement, results, weight_bytes(model))
        figures |= {name: value for name, value in compared.items() if name in names}
        place["settings"][measurement.name] = settings
        for name, result in results.items():
            place["versions"][name] = result.versions
            if result.error:
                place["failed"][f"{measurement.name}_{name}"] = result.error
            else:
                values = parts(measurement, result).items()
                figures |= {f"{measurement.name}_{name}_{key}": value for key, value in values}
    print_table("figures", ["name", "value"], [[name, figures[name]] for name in NEEDS if name in figures])
    publish("peers", place, figures)
    return figures


def weight_bytes(model: str) -> int:
    """Bytes of the weights' files."""
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))


def take_turns(
    contenders: Sequence[Contender], measurement: Measurement, work: Work, peers: Path, ours: Mapping[str, str]
) -> dict[str, Result]:
    """Measures the contenders one after another, round after round. `ours`: the settings of our own.

    Returns:
      A result for each, by name.
    """
    results = {contender.name: Result() for contender in contenders}
    hosts: dict[str, Host] = {}
    rounds = [contender.warm_ups + contender.rounds for contender in contenders]
    try:
        with Progress(sum(rounds), "rounds") as bar:
            done = 0
            for turn in range(max(rounds, default=0)):
                for contender, last in zip(contenders, rounds):
                    result = results[contender.name]
                    if result.error or turn >= last:
                        continue
                    settings = dict(ours) if contender.name == "ours" else contender.settings
                    try:
                        host = opened(contender, measurement, replace(work, settings=settings), peers, hosts)
                        sample = host.measure()
                    except Unavailable as error:
                        result.error = str(error)
                        continue
                    result.versions = host.versions
                    if turn >= contender.warm_ups:
                        result.samples.append(sample)
                    done += 1
                    bar.update(done, f"{measurement.name} {contender.name}", {"s": sample["wall_s"]})
    finally:
        for host in hosts.values():
            host.close()
    return results


def opened(contender: Contender, measurement: Measurement, work: Work, peers: Path, hosts: dict[str, Host]) -> Host:
    """The contender's process among `hosts`, started where there is none or where each round takes a new one.

    Raises:
      Unavailable: it did not install, or did not start.
    """
    if contender.fresh and contender.name in hosts:
        hosts.pop(contender.name).close()
    if contender.name not in hosts:
        python = environment(peers, contender.environment)
        log = f"{measurement.name}-{contender.name}"
        hosts[contender.name] = Host(python, contender.module, work, peers, log)
    return hosts[contender.name]


def show(measurement: Measurement, results: Mapping[str, Result]) -> None:
    """One row for each contender: its medians, or why it has none."""
    rows = []
    for name, result in results.items():
        if result.error:
            rows.append([name, result.error, "", "", ""])
            continue
        values = parts(measurement, result)
        if "tokens_per_s" in values:
            speed = f"{values['tokens_per_s']:.1f} tokens/s"
        else:
            shown = [key for key in ("wall_s", "generate_s", "update_s") if key in values]
            speed = ", ".join(f"{key.removesuffix('_s')} {values[key]:.2f}" for key in shown)
        walls = [sample["wall_s"] for sample in result.samples]
        busiest = max(sample["other_cores"] for sample in result.samples)
        others = f"{busiest:.2f} cores{'  DIRTY' if busiest > DIRTY_CORES else ''}"
        rows.append([name, speed, f"{min(walls):.2f} to {max(walls):.2f}", scaled(values["peak_bytes"], "B"), others])
    title = (
        f"{measurement.name}: {measurement.prompts} x {measurement.group_size}, "
        f"{measurement.prompt_length} + {measurement.max_tokens} tokens"
    )
    print_table(title, ["contender", "median s", "whole, s", "peak", "others, at most"], rows)


if __name__ == "__main__":
    cli.guarded(main)
