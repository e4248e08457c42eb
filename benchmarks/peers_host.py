"""The process of a contender in the peers benchmark: it measures itself when asked, in its own environment.

    parent                              contender
    python -m benchmarks.peers_trl WORK  -> {"ready": {versions}}
    measure                              -> {"wall_s": ..., "other_cores": ..., "peak_bytes": ..., ...}
    (end of file)                           ends

What fails answers {"error": reason}. Standard library alone, since the peers' environments have nothing of ours; Linux
alone, since it reads /proc.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, TextIO

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
LEAST_AVAILABLE_BYTES = 800e6  # of the machine's memory: below it, the kernel would choose whom to kill
GUARD_SECONDS = 0.05


@dataclass(frozen=True)
class Work:
    """What every contender of one measurement has to do. P prompts of equal length."""

    kind: str  # "step": generate and update; "decode": decode steps alone; "import": from a directory to a policy
    model: str  # directory in Hugging Face's layout
    prompts: list[list[int]]  # token ids
    texts: list[str]  # the same prompts; each encodes to exactly its ids
    group_size: int  # completions of each prompt
    max_tokens: int  # of each completion, always reached
    memory_limit_bytes: float
    settings: dict[str, Any]  # of the one contender

    @property
    def prompt_length(self) -> int:
        """Tokens of each prompt."""
        return len(self.prompts[0])

    def check_prompts(self, tokenizer: Callable[[list[str]], Any]) -> None:
        """Raises RuntimeError where a tokenizer of transformers makes other prompts of the texts."""
        if tokenizer(self.texts)["input_ids"] != self.prompts:
            raise RuntimeError(f"the tokenizer of {self.model} does not encode the texts to the prompts")

    def encoded(self) -> str:
        """As the contender's process takes it."""
        return json.dumps(asdict(self))


class Turns:
    """The contender's side of the conversation: `while turns.begin(): ...; turns.end(...)`."""

    def __init__(self, questions: TextIO, answers: TextIO, packages: tuple[str, ...]) -> None:
        self._questions, self._answers, self._packages = questions, answers, packages
        self._ready = False
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Waits until a measurement is asked for, and starts the meter; False: there will be no more."""
        if not self._ready:
            self._ready = True
            self.answer({"ready": {name: version(name) for name in self._packages}})
        asked = bool(self._questions.readline())
        self._busy, self._own, self._started = busy_seconds(), time.process_time(), time.perf_counter()
        return asked

    def end(self, **seconds: float) -> None:
        """Answers with the time since `begin`, parts of it by name, and what others took of the processor."""
        wall = time.perf_counter() - self._started
        others = busy_seconds() - self._busy - (time.process_time() - self._own)
        measured = {"wall_s": wall, "other_cores": max(0.0, others / wall), "peak_bytes": peak_bytes()}
        self.answer({**measured, **seconds})

    def answer(self, value: dict[str, Any]) -> None:
        """One line to the parent."""
        with self._lock:
            self._answers.write(json.dumps(value) + "\n")
            self._answers.flush()


Contender = Callable[[Work, Turns], None]


def serve(contender: Contender, packages: tuple[str, ...]) -> None:
    """Runs the contender of this process on the work in argv[1], and exits.

    Args:
      packages: whose versions belong to the result.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    turns = Turns(sys.stdin, answers, packages)
    work = Work(**json.loads(sys.argv[1]))
    threading.Thread(target=_guard_memory, args=(work.memory_limit_bytes, turns), daemon=True).start()
    try:
        contender(work, turns)
    except Exception as error:  # whatever a peer raises is its result
        turns.answer({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
        raise


def _guard_memory(limit: float, turns: Turns) -> None:
    """Ends the process before the machine runs out of memory, and says so."""
    while True:
        resident, available = status_bytes("VmRSS"), available_bytes()
        if resident > limit or available < LEAST_AVAILABLE_BYTES:
            reason = f"stopped by the memory guard at {resident / 1e9:.1f} GB ({available / 1e9:.1f} GB left)"
            turns.answer({"error": reason})
            os._exit(1)
        time.sleep(GUARD_SECONDS)


def peak_bytes() -> int:
    """Most resident memory of this process so far."""
    return status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    """A field of /proc/self/status that is given in kB."""
    return _kilobytes("/proc/self/status", name)


def available_bytes() -> int:
    """Memory that the machine could still give."""
    return _kilobytes("/proc/meminfo", "MemAvailable")


def _kilobytes(path: str, name: str) -> int:
    with open(path) as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} has no {name}: this benchmark needs Linux")


def busy_seconds() -> float:
    """Seconds for which the machine's cores were busy since it started, summed: also when stolen by a host."""
    with open("/proc/stat") as lines:
        user, nice, system, _, _, interrupts, soft, steal = map(int, lines.readline().split()[1:9])
    return (user + nice + system + interrupts + soft + steal) / TICKS_PER_SECOND


class Stopwatch:
    """Seconds spent inside functions, by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def watch(self, owner: Any, method: str, name: str, finish: Callable[[Any], Any] = lambda result: result) -> None:
        """Replaces `owner.method` by itself, timed as `name`. `finish`: waits for the result, where it is a promise."""
        original = getattr(owner, method)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            result = finish(original(*arguments, **keywords))
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
            return result

        setattr(owner, method, timed)

    def take(self, name: str) -> float:
        """The seconds of `name` since they were last taken."""
        return self._seconds.pop(name, 0.0)
