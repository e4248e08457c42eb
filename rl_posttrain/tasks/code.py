"""Small programs, by example or to instruction: the completion is a Python expression in `x`.

The expression becomes the body of a function that runs in the sandbox on inputs that the prompt does not
show. The outputs expected of them stay outside; every one must be right. Any program that computes the
function is right, whatever it looks like.
"""

from __future__ import annotations

import ast
import string
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random
from typing import Any

from rl_posttrain.config import ConfigError, build
from rl_posttrain.tasks.registry import Domain, FunctionCheck, Tools, register, require_member
from rl_posttrain.tasks.splits import Item, PromptSpaceError, procedural
from rl_posttrain.types import Task, Verdict

HIDDEN = 8  # calls on inputs that the prompt does not show
TEXT_LIMIT = 256  # characters of a completion; the demonstrations have under 20


@dataclass(frozen=True)
class Linear:
    """slope * x + offset, shown at `examples` different inputs in 0..max_input."""

    max_slope: int = 9
    max_offset: int = 30
    max_input: int = 30
    examples: int = 2

    def __post_init__(self) -> None:
        if not 2 <= self.max_slope <= 999 or not 1 <= self.max_offset <= 9999:
            raise ValueError(f"max_slope={self.max_slope}, max_offset={self.max_offset}: must be in 2..999 and 1..9999")
        if not 2 <= self.examples <= 8:
            raise ValueError(f"examples={self.examples}: must be in 2..8; one point does not determine a line")
        if self.max_input < self.examples:
            raise ValueError(f"max_input={self.max_input}: must be at least examples={self.examples}")


@dataclass(frozen=True)
class Slices:
    """One to `max_parts` slices of a word, joined; shown on `examples` words of different lengths."""

    max_parts: int = 2
    examples: int = 2
    min_length: int = 4
    max_length: int = 6
    letters: int = 26

    def __post_init__(self) -> None:
        if not 1 <= self.max_parts <= 2:
            raise ValueError(f"max_parts={self.max_parts}: must be 1 or 2")
        if not 2 <= self.examples <= 4:
            raise ValueError(f"examples={self.examples}: must be in 2..4; one word leaves many programs possible")
        if not 3 <= self.min_length or self.max_length - self.min_length + 1 < self.examples:
            raise ValueError(
                f"min_length={self.min_length}, max_length={self.max_length}: min_length must be at least 3, "
                f"and the range must hold a different length for each of examples={self.examples} words"
            )
        if not self.max_length <= self.letters <= 26:
            raise ValueError(
                f"letters={self.letters}: must be between max_length={self.max_length} and 26, since the "
                "letters of a word differ"
            )


@dataclass(frozen=True)
class Arithmetic:
    """min_steps..max_steps operations, done to x one after another, each with a number in 2..max_number."""

    min_steps: int = 2
    max_steps: int = 3
    max_number: int = 99

    def __post_init__(self) -> None:
        if not 1 <= self.min_steps <= self.max_steps <= 8:
            raise ValueError(
                f"min_steps={self.min_steps}, max_steps={self.max_steps}: must satisfy 1 <= min_steps <= max_steps <= 8"
            )
        if not 3 <= self.max_number <= 999:
            raise ValueError(f"max_number={self.max_number}: must be in 3..999")


def _linear(options: Linear, rng: Random) -> Item:
    slope, offset = rng.randint(1, options.max_slope), rng.randint(0, options.max_offset)
    shown = sorted(rng.sample(range(options.max_input + 1), options.examples))
    pool = [x for x in range(-9, 2 * options.max_input + 10) if x not in shown]
    prompt = " ".join(["fit", *(f"{x}:{slope * x + offset}" for x in shown)])
    factor = "x" if slope == 1 else f"{slope}*x"
    answer = f"{factor}+{offset}" if offset else factor
    calls = [[x, slope * x + offset] for x in rng.sample(pool, HIDDEN)]
    return Item(prompt, answer, {"calls": calls})


# What one part can be.
_PARTS = {
    f"x{text}": part
    for text, part in {
        "": slice(None),
        "[::-1]": slice(None, None, -1),
        "[1:]": slice(1, None),
        "[2:]": slice(2, None),
        "[:-1]": slice(None, -1),
        "[:-2]": slice(None, -2),
        "[1:-1]": slice(1, -1),
        "[:2]": slice(None, 2),
        "[:3]": slice(None, 3),
        "[-2:]": slice(-2, None),
        "[-3:]": slice(-3, None),
        "[::2]": slice(None, None, 2),
        "[1::2]": slice(1, None, 2),
        "[::-2]": slice(None, None, -2),
        "[1::-1]": slice(1, None, -1),
        "[2::-1]": slice(2, None, -1),
        "[-2::-1]": slice(-2, None, -1),
        "[:-3:-1]": slice(None, -3, -1),
        "[:1]": slice(None, 1),
        "[-1:]": slice(-1, None),
        "[1:3]": slice(1, 3),
        "[:0:-1]": slice(None, 0, -1),
        "[-2:0:-1]": slice(-2, 0, -1),
        "[::3]": slice(None, None, 3),
        "[-2::-2]": slice(-2, None, -2),
    }.items()
}
Program = tuple[str, ...]  # keys of _PARTS, added up


def _run(program: Program, word: str) -> str:
    return "".join(word[_PARTS[part]] for part in program)


@cache
def _programs(parts: int) -> tuple[Program, ...]:
    """Programs of `parts` parts, one for each different function that no program of fewer parts computes."""
    probes = [string.ascii_lowercase[:length] for length in range(3, 14)]
    seen = {tuple(_run(p, w) for w in probes) for n in range(1, parts) for p in _programs(n)}
    kept = []
    for program in sorted(product(_PARTS, repeat=parts), key=lambda p: (len("+".join(p)), p)):
        outputs = tuple(_run(program, word) for word in probes)
        if outputs not in seen:
            seen.add(outputs)
            kept.append(program)
    return tuple(kept)


def _slices(options: Slices, rng: Random) -> Item:
    alphabet = string.ascii_lowercase[: options.letters]
    candidates = [p for parts in range(1, options.max_parts + 1) for p in _programs(parts)]
    for _ in range(1000):
        program = rng.choice(_programs(rng.randint(1, options.max_parts)))
        if program == ("x",):  # no puzzle
            continue
        lengths = rng.sample(range(options.min_length, options.max_length + 1), options.examples)
        shown = ["".join(rng.sample(alphabet, length)) for length in lengths]
        consistent = [p for p in candidates if all(_run(p, word) == _run(program, word) for word in shown)]
        if len(consistent) == 1:  # otherwise the examples would leave the function to guesswork
            break
    else:
        raise PromptSpaceError(f"code/slices: {options} hardly ever shows enough to determine a program")
    prompt = " ".join(["map", *(f"{word}>{_run(program, word)}" for word in shown)])
    hidden = []
    while len(hidden) < HIDDEN:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 12)))
        if word not in shown:
            hidden.append([word, _run(program, word)])
    return Item(prompt, "+".join(program), {"calls": hidden})


def _arithmetic(options: Arithmetic, rng: Random) -> Item:
    names = rng.choices(("add", "sub", "mul"), k=rng.randint(options.min_steps, options.max_steps))
    steps = [(name, rng.randint(2, options.max_number)) for name in names]
    text, is_sum = "x", False
    for name, number in steps:
        if name == "mul":
            text, is_sum = f"({text})*{number}" if is_sum else f"{text}*{number}", False
        else:
            text, is_sum = f"{text}{'+' if name == 'add' else '-'}{number}", True
    calls = [[x, _apply(steps, x)] for x in rng.sample(range(-20, 21), HIDDEN)]
    return Item(" ".join(["do", *(f"{name} {number}" for name, number in steps)]), text, {"calls": calls})


def _apply(steps: Sequence[tuple[str, int]], x: int) -> int:
    for name, number in steps:
        x = x * number if name == "mul" else x + number if name == "add" else x - number
    return x


_DOMAINS: dict[str, tuple[type, Callable[[Any, Random], Item]]] = {
    "arithmetic": (Arithmetic, _arithmetic),
    "linear": (Linear, _linear),
    "slices": (Slices, _slices),
}


@register("code", _DOMAINS)
def load(name: str, options: dict[str, Any], tools: Tools) -> Domain:
    """See `registry.load`."""
    section, question = _DOMAINS[require_member(name, _DOMAINS)]
    settings = build(section, options, name)
    judge = tools.judge
    if judge is None:
        raise ConfigError(
            f"domain {name!r}: completions are programs, which need Tools.judge to run in a sandbox; "
            "use rewards.verifiers.tools(pool)"
        )

    def generate(rng: Random) -> Item:
        return question(settings, rng)

    def score(tasks: Sequence[Task], texts: Sequence[str]) -> list[Verdict]:
        known: dict[tuple[str, FunctionCheck], Verdict] = {}  # samples of a group often agree
        wanted = []
        for task, text in zip(tasks, texts, strict=True):
            calls = tuple(((x,), expected) for x, expected in task.reference["calls"])
            wanted.append((text.strip(), FunctionCheck("f", calls)))
        for text, check in wanted:
            fault = _not_an_expression(text)
            if fault:
                known[text, check] = Verdict("malformed", (False,) * len(check.calls), fault)
        programs = [key for key in dict.fromkeys(wanted) if key not in known]
        verdicts = judge(tools.pool, [(f"f = lambda x: (\n{text}\n)\n", check) for text, check in programs])
        known.update(zip(programs, verdicts, strict=True))
        return [known[key] for key in wanted]

    return Domain(name, procedural(name, generate), score)


def _not_an_expression(text: str) -> str:
    """Why `text` cannot be the body of a lambda, or "". Spares the sandbox what cannot run."""
    if len(text) > TEXT_LIMIT:
        return f"{len(text)} characters; a program here has at most {TEXT_LIMIT}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"not a Python expression: {error}"
    return ""
