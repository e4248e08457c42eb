"""Type a prompt, see completions: `python -m experiments.sample runs/quickstart --prompt "rev abcdef"`.

With `--domain NAME` the prompt is a held-out task of that domain (`--index`), and each completion has its verdict.
Without either, prompts are read from the terminal until end of file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from experiments import cli


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m experiments.sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workdir", help="the folder of a run")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", help="text to complete")
    what.add_argument("--domain", help="take a held-out task of this domain, and show the verdicts")
    parser.add_argument("--index", type=int, default=0, help="which task of the domain (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="completions of a prompt (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument(
        "--step", default="latest", help='checkpoint: "latest", "best" or a number (default: %(default)s)'
    )
    arguments = parser.parse_args(argv)

    import jax

    from rl_posttrain.config import ConfigError, nearest
    from rl_posttrain.data.tokenizer import make_tokenizer
    from rl_posttrain.rewards.verifiers import verify
    from rl_posttrain.rollout.generate import generate
    from rl_posttrain.rollout.sampling import Sampling
    from rl_posttrain.types import Task

    cli.use_compilation_cache()
    with cli.opened_run(arguments.workdir, arguments.step) as (config, domains, params, step):
        tokenizer = make_tokenizer(config.tokenizer)
        if arguments.domain is not None and arguments.domain not in domains:
            raise ConfigError(f"--domain {arguments.domain}: not in this run{nearest(arguments.domain, domains)}")
        for task in _tasks(arguments, config, domains, Task):
            try:
                (group,) = generate(
                    params,
                    [task],
                    tokenizer=tokenizer,
                    model_cfg=config.model,
                    sampling=Sampling(arguments.temperature),
                    width=arguments.samples,
                    max_tokens=config.rollout.max_tokens,
                    prompt_bucket=config.rollout.prompt_bucket,
                    rows=1,
                    key=jax.random.key(arguments.seed),
                    policy_version=step,
                )
            except ValueError as error:  # a character that the tokenizer does not know
                if arguments.prompt is not None:
                    raise ConfigError(str(error)) from error
                print(error, file=sys.stderr)
                continue
            print(f"{task.prompt}")
            verdicts = verify(domains, group) if arguments.domain is not None else [None] * len(group)
            for rollout, verdict in zip(group, verdicts):
                logprob = sum(rollout.behaviour_logprobs)
                judged = f"  {verdict.status}{': ' + verdict.detail if verdict.detail else ''}" if verdict else ""
                print(f"  -> {rollout.text!r:24} ({rollout.finish_reason}, logprob {logprob:.2f}){judged}")
    return 0


def _tasks(arguments: argparse.Namespace, config: Any, domains: Any, task_type: Any) -> Iterator[Any]:
    if arguments.domain is not None:
        yield from domains[arguments.domain].make(config.seed, "heldout", [arguments.index])
    elif arguments.prompt is not None:
        yield task_type("prompt", "heldout", 0, arguments.prompt)
    else:
        while True:
            print("prompt> ", end="", flush=True)
            line = sys.stdin.readline()
            if not line:
                return
            yield task_type("prompt", "heldout", 0, line.rstrip("\n"))


if __name__ == "__main__":
    cli.guarded(main)
