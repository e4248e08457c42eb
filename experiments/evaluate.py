"""Held-out accuracy of a run: `python -m experiments.evaluate runs/quickstart --step best --samples 8 --temperature 1`.

Prints accuracy per domain with 95% Wilson intervals, and pass@k where there are several samples of a prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from experiments import cli


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m experiments.evaluate", description=__doc__)
    parser.add_argument("workdir", help="the folder of a run")
    parser.add_argument(
        "--step", default="latest", help='checkpoint: "latest", "best" or a number (default: %(default)s)'
    )
    parser.add_argument("--items", type=int, help="held-out prompts per domain (default: the run's)")
    parser.add_argument("--samples", type=int, help="completions per prompt (default: the run's)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the run's)")
    parser.add_argument("--top_k", type=int, help="draw from the k most likely tokens only (default: the run's)")
    parser.add_argument(
        "--top_p", type=float, help="draw from the most likely tokens of this mass (default: the run's)"
    )
    parser.add_argument("--output", help="also write the rows, in the form of evaluation.json, to this file")
    arguments = parser.parse_args(argv)

    from rl_posttrain import evaluation
    from rl_posttrain.config import ConfigError
    from rl_posttrain.data.tokenizer import make_tokenizer
    from rl_posttrain.observability.progress import print_table

    cli.use_compilation_cache()
    with cli.opened_run(arguments.workdir, arguments.step) as (config, domains, params, step):
        chosen = {name: getattr(arguments, name) for name in ("items", "samples", "temperature", "top_k", "top_p")}
        try:
            section = dataclasses.replace(config.evaluation, **{k: v for k, v in chosen.items() if v is not None})
        except ValueError as error:
            raise ConfigError(str(error)) from error
        outcomes = evaluation.evaluate(
            params,
            domains,
            section,
            tokenizer=make_tokenizer(config.tokenizer),
            model_cfg=config.model,
            max_tokens=config.rollout.max_tokens,
            prompt_bucket=config.rollout.prompt_bucket,
            seed=config.seed,
            policy_version=step,
        )
    rows = evaluation.rows(outcomes, "evaluation", step)
    percent = lambda value: f"{100 * value:.1f}"
    table = [
        [r["domain"], r["metric"], percent(r["value"]), f"[{percent(r['low'])}, {percent(r['high'])}]", str(r["n"])]
        for r in rows
    ]
    print_table(
        f"step {step}, percent; {section.samples} sample(s) at temperature {section.temperature:g}",
        ["domain", "metric", "value", "95% interval", "items"],
        table,
    )
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    cli.guarded(main)
