"""Type a prompt, see completions: of a run's policy, or in a chat with the model of a directory.

    python -m experiments.sample runs/quickstart --prompt "rev abcdef"
    python -m experiments.sample runs/quickstart --domain strings/reverse --index 3
    python -m experiments.sample --model models/smollm2-135m --system "You are brief."

With `--domain` the prompt is a held-out task of that domain, and each completion has its verdict. Without `--prompt`
or `--domain`, prompts are read from the terminal until end of file. In a chat, /reset begins a new conversation.
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
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("workdir", nargs="?", help="the folder of a run")
    source.add_argument("--model", metavar="DIRECTORY", help="a model in Hugging Face's layout, with a chat template")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", help="text to complete, or to answer once")
    what.add_argument("--domain", help="take a held-out task of this domain, and show the verdicts")
    parser.add_argument("--index", type=int, default=0, help="which task of the domain (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="completions of a run's prompt (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument(
        "--step", default="latest", help='checkpoint: "latest", "best" or a number (default: %(default)s)'
    )
    parser.add_argument("--system", help="a system message before the chat")
    parser.add_argument("--max_tokens", type=int, default=256, help="of an answer in the chat (default: %(default)s)")
    parser.add_argument(
        "--stop", action="append", default=[], help="text that ends an answer in the chat; may be given often"
    )
    arguments = parser.parse_args(argv)
    _refuse_idle(parser, arguments)
    return _complete(arguments) if arguments.model is None else _chat(arguments)


def _refuse_idle(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """An option of the other mode would be silently without effect."""
    from rl_posttrain.config import ConfigError

    chatting = arguments.model is not None
    for name in ("domain", "index", "samples", "step") if chatting else ("system", "max_tokens", "stop"):
        if getattr(arguments, name) != parser.get_default(name):
            mode = "--model" if chatting else "a run's folder"
            raise ConfigError(f"--{name} has no effect with {mode}: leave it out")


def _chat(arguments: argparse.Namespace) -> int:
    from experiments import chat
    from rl_posttrain.config import ConfigError

    cli.use_compilation_cache()
    try:
        speaker = chat.load(
            arguments.model,
            system=arguments.system,
            temperature=arguments.temperature,
            max_tokens=arguments.max_tokens,
            stops=tuple(arguments.stop),
            seed=arguments.seed,
        )
    except ValueError as error:  # of the model's files, or of an option
        raise ConfigError(str(error)) from error
    show = lambda text: print(text, end="", flush=True)
    conversation = chat.Conversation(speaker)
    if arguments.prompt is not None:
        conversation.ask(arguments.prompt, show)
        print()
        return 0
    for line in _lines("you> "):
        if line.strip() == "/reset":
            conversation.reset()
        elif line.strip():
            try:
                conversation.ask(line, show)
            except ValueError as error:  # a template that rewrites what was said
                print(f"{error}\n/reset begins a new conversation", file=sys.stderr)
            print()
    print()
    return 0


def _lines(prompt: str) -> Iterator[str]:
    """What is typed, line by line, until end of file."""
    while True:
        print(prompt, end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.rstrip("\n")


def _complete(arguments: argparse.Namespace) -> int:
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
        for line in _lines("prompt> "):
            yield task_type("prompt", "heldout", 0, line)


if __name__ == "__main__":
    cli.guarded(main)
