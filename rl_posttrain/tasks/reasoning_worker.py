"""The process that holds reasoning-gym: makes items and scores texts, one JSON line in, one or two out.

Started by `reasoning_process.Worker` with PYTHONHASHSEED=0 (some generators iterate over sets) and confined:
what a scorer does to a hostile text happens here and dies here. Requests are trusted, texts are not.
"""

from __future__ import annotations

import copy
import json
import math
import os
import resource
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from rl_posttrain.tasks.splits import Item, derive, find

CHUNK = 256  # items per dataset object; some generators prepare them all when they are created
TEMPLATE_ITEMS = 64  # how many items decide which part of a question is fixed text
_ADDRESS_SPACE = 4 << 30  # bytes; a text that makes a scorer allocate without end gets a MemoryError
_FAILURES_ALLOWED = 32  # per item asked for, before the generator's settings are to blame
_DATASETS_KEPT, _ENTRIES_KEPT, _TEMPLATES_KEPT = 128, 8192, 1024


class Recent(OrderedDict[Any, Any]):
    """The last `size` values made by key."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def get_or(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self:
            self[key] = make()
            if len(self) > self.size:
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key]


class Server:
    """Datasets, templates and entries that were used lately, and the requests on them."""

    def __init__(self) -> None:
        import reasoning_gym

        self.create = reasoning_gym.create_dataset
        self.datasets = Recent(_DATASETS_KEPT)
        self.entries = Recent(_ENTRIES_KEPT)
        self.templates = Recent(_TEMPLATES_KEPT)

    def dataset(self, name: str, config: dict[str, Any], seed: int) -> Any:
        key = (name, json.dumps(config, sort_keys=True), seed)
        return self.datasets.get_or(key, lambda: self.create(name, seed=seed, size=CHUNK, **config))

    def entry(self, name: str, config: dict[str, Any], seed: int, item: int) -> dict[str, Any]:
        key = (name, json.dumps(config, sort_keys=True), seed, item)
        try:
            return self.entries.get_or(key, lambda: self.dataset(name, config, seed)[item])
        except Exception:
            # word_ladder shrinks itself when it fails: start the next one fresh.
            self.datasets.pop(key[:3], None)
            raise

    def template(self, name: str, config: dict[str, Any]) -> tuple[str, str]:
        """The text before and after what varies between the questions of one generator."""

        def find_fixed() -> tuple[str, str]:
            seed = derive("template", bits=31)
            questions = [self.entry(name, config, seed, item)["question"] for item in range(TEMPLATE_ITEMS)]
            prefix = os.path.commonprefix(questions)
            suffix = os.path.commonprefix([q[len(prefix) :][::-1] for q in questions])[::-1]
            # Operands may share their first digits by chance: keep whole words together with what varies.
            while prefix and prefix[-1].isalnum():
                prefix = prefix[:-1]
            while suffix and suffix[0].isalnum():
                suffix = suffix[1:]
            return prefix, suffix

        return self.templates.get_or((name, json.dumps(config, sort_keys=True)), find_fixed)

    def prompt(self, question: str, request: dict[str, Any]) -> str:
        if request["tag"] is None:
            return question
        prefix, suffix = self.template(request["dataset"], request["config"])
        varying = question.removeprefix(prefix).removesuffix(suffix).strip()
        return f"{request['tag']} {varying}"

    def make(self, request: dict[str, Any]) -> dict[str, Any]:
        """The first item of (seed, index)'s own sequence whose prompt is in the split that was asked for."""
        name, config, index = request["dataset"], request["config"], request["index"]
        failures: list[str] = []

        def fail(reason: str) -> None:
            failures.append(reason)
            if len(failures) >= _FAILURES_ALLOWED:
                raise RuntimeError(f"{len(failures)} items could not be used, the last: {reason}")

        def draw(attempt: int) -> Item | None:
            seed = derive(request["seed"], name, request["split"], attempt, index // CHUNK, bits=31)
            item = index % CHUNK
            try:
                entry = self.entry(name, config, seed, item)
            except Exception as error:  # generators that search fail now and then: take the next item
                fail(repr(error)[:200])
                return None
            reference = {"answer": str(entry["answer"]), "dataset_seed": seed, "item": item}
            demonstration = reference["answer"].strip()
            question = {**request, "reference": reference, "text": demonstration}
            if not request["exact"] and not self.score(question, entry)["right"]:
                # No policy could earn a reward here, e.g. an empty answer, which most scorers refuse.
                fail(f"item {item} of seed {seed}: its own answer {demonstration[:80]!r} is not right")
                return None
            return Item(self.prompt(entry["question"], request), demonstration, reference)

        item = find(draw, request["split"], f"reasoning/{name}")
        return {"prompt": item.prompt, "demonstration": item.demonstration, "reference": item.reference}

    def check(self, request: dict[str, Any]) -> dict[str, Any]:
        """Refuses a config that the generator does not take, before a run depends on it."""
        self.dataset(request["dataset"], request["config"], seed=1)
        return {}

    def find_entry(self, request: dict[str, Any]) -> dict[str, Any]:
        reference = request["reference"]
        name, config = request["dataset"], request["config"]
        entry = self.entry(name, config, reference["dataset_seed"], reference["item"])
        if str(entry["answer"]) != reference["answer"]:
            raise RuntimeError(
                f"{name}: the item made again has the answer {entry['answer']!r}, the task has "
                f"{reference['answer']!r}: the task was made with other options or another reasoning-gym"
            )
        return entry

    def score(self, request: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
        """Right only at full marks: partial credit is generous to constants. Any failure counts as wrong."""
        dataset = self.dataset(request["dataset"], request["config"], request["reference"]["dataset_seed"])
        try:
            # A copy: a scorer that writes into its entry must not sway the next verdict.
            score = float(dataset.score_answer(request["text"], copy.deepcopy(entry)))
        except (Exception, SystemExit) as error:
            return {"right": False, "detail": f"the scorer raised {type(error).__name__} on this text"}
        return {"right": math.isfinite(score) and score >= 1.0, "detail": f"score {score:.3g}"}


def names() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def answer(server: Server, request: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    """Answers one request. Scoring sends {"ready": true} first, so that a hang can be blamed on the text."""

    def reply(content: dict[str, Any]) -> None:
        send({**content, "id": request["id"]})

    try:
        if request["op"] == "score":
            entry = server.find_entry(request)
            reply({"ready": True})
            reply(server.score(request, entry))
        elif request["op"] == "names":
            reply({"names": names()})
        else:
            reply({"make": server.make, "check": server.check}[request["op"]](request))
    except Exception as error:
        reply({"error": str(error), "kind": type(error).__name__})


def main() -> None:
    if sys.flags.hash_randomization:
        raise SystemExit("the worker needs PYTHONHASHSEED=0: some generators depend on the order of sets")
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    # The protocol gets its own descriptor: what the library prints goes to stderr and cannot break a line.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(reply: dict[str, Any]) -> None:
        channel.write(json.dumps(reply) + "\n")
        channel.flush()

    server = Server()
    send({"started": True})
    for line in sys.stdin:
        answer(server, json.loads(line), send)


if __name__ == "__main__":
    main()
