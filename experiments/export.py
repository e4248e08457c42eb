"""Writes a run's model as a directory that transformers and vLLM load: `python -m experiments.export RUN --out DIR`.

Adapters are merged (in float32, if their base is stored narrower), or written alone, in PEFT's layout, with
`--adapter`. Tokenizer and generation config come from the directory that the run started from.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from experiments import cli


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m experiments.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workdir", help="the folder of a run")
    parser.add_argument("--out", required=True, help="the directory to write")
    parser.add_argument(
        "--step", default="latest", help='checkpoint: "latest", "best" or a number (default: %(default)s)'
    )
    parser.add_argument(
        "--adapter", action="store_true", help="the adapters alone, in float32, for PEFT and vLLM beside the base model"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the written weights; the others round, which undoes small updates (default: %(default)s)",
    )
    parser.add_argument("--shard_bytes", type=int, default=2_000_000_000, help="largest file (default: %(default)s)")
    parser.add_argument("--length", type=int, default=0, help="longest sequence, of a model without a pretrained one")
    arguments = parser.parse_args(argv)

    from rl_posttrain.config import ConfigError

    alone = arguments.adapter
    for name in ("dtype", "shard_bytes", "length") if alone else ():
        if getattr(arguments, name) != parser.get_default(name):
            raise ConfigError(f"--{name} has no effect on --adapter, which writes float32 in one file: leave it out")
    with cli.opened_params(arguments.workdir, arguments.step, adapters=alone) as (config, params, step):
        try:
            (_save_adapters if alone else _save_model)(arguments, config, params)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    print(f"step {step} of {arguments.workdir}{', adapters alone,' * alone} in {arguments.dtype}: {arguments.out}")
    if config.pretrained is None and not alone:
        print("There is no tokenizer beside it: this run used one of ours, which transformers does not know.")
    return 0


def _save_adapters(arguments: argparse.Namespace, config: Any, adapters: Any) -> None:
    from rl_posttrain.model import peft

    peft.save_adapters(arguments.out, adapters, config.model, config.lora, base=config.pretrained)


def _save_model(arguments: argparse.Namespace, config: Any, params: Any) -> None:
    from rl_posttrain.model import convert, quantise

    convert.save_model(
        arguments.out,
        params if config.lora.base == "float32" else quantise.plain(params),
        config.model,
        source=config.pretrained,
        length=arguments.length,
        dtype=arguments.dtype,
        shard_bytes=arguments.shard_bytes,
    )


if __name__ == "__main__":
    cli.guarded(main)
