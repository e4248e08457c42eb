"""Conversations and preference pairs from jsonl files: one JSON object a line, checked before anything is trained.

docs/data.md shows the schemas. Every refusal names the file, the line and the remedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_posttrain.data.chat import Message


@dataclass(frozen=True)
class PreferencePair:
    """Two completions of a prompt, of which one is preferred."""

    prompt: str | tuple[Message, ...]  # what a user says, or messages up to where the assistant begins
    chosen: str
    rejected: str
    source: str = "pair"  # "FILE, line N", for messages


def read_pairs(path: str) -> list[PreferencePair]:
    """The preference pairs of a file, in its order: objects with "prompt", "chosen" and "rejected"; more is ignored.

    Raises:
      ValueError: the file is missing or empty, or a line is not a pair, or prefers a text to itself.
    """
    return [_pair(row, place) for place, row in _rows(path, "preference pairs")]


def read_split(train: str, heldout: str) -> tuple[list[PreferencePair], list[PreferencePair]]:
    """The pairs of two files, to train on and held out.

    Raises:
      ValueError: as of `read_pairs`, or a prompt is in both.
    """
    key = lambda pair: json.dumps(pair.prompt, sort_keys=True)
    split = read_pairs(train), read_pairs(heldout)
    known = {key(pair): pair.source for pair in split[0]}
    for pair in split[1]:
        if key(pair) in known:
            raise ValueError(f"{pair.source}: the prompt is in {known[key(pair)]} too: take it out of one file")
    return split


def read_chats(path: str) -> list[tuple[Message, ...]]:
    """The conversations of a file, in its order: objects with "messages"; more is ignored.

    Raises:
      ValueError: the file is missing or empty, or a line is not a conversation in which the assistant answers.
    """
    return [_chat(row, place) for place, row in _rows(path, "conversations")]


def _rows(path: str, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """("FILE, line N", object) of each line that is not blank."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file; name a jsonl file of {what}")
    empty = True
    with open(path, "rb") as lines:
        for count, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place, empty = f"{path}, line {count}", False
            try:
                row = json.loads(line.decode("utf-8"))
                json.dumps(row, ensure_ascii=False).encode("utf-8")  # half a surrogate pair is no text
            except ValueError as error:
                raise ValueError(f"{place}: is not a JSON object in UTF-8 ({error}): correct or remove it") from error
            if not isinstance(row, dict):
                raise ValueError(f"{place}: is {_shown(row)}: write one JSON object a line")
            yield place, row
    if empty:
        raise ValueError(f"{path} holds no {what}: write one JSON object a line")


def _pair(row: dict[str, Any], place: str) -> PreferencePair:
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        prompt = _messages(prompt, place, "prompt")
        if prompt[-1]["role"] == "assistant":
            raise ValueError(f'{place}: "prompt" ends with an assistant\'s turn: end it where the assistant begins')
    else:
        prompt = _text(row, "prompt", place, "a text or a list of messages")
    chosen, rejected = (_text(row, key, place, "a text") for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise ValueError(f'{place}: "chosen" and "rejected" are the same text, which prefers nothing: remove the line')
    return PreferencePair(prompt, chosen, rejected, place)


def _chat(row: dict[str, Any], place: str) -> tuple[Message, ...]:
    messages = row.get("messages")
    if not isinstance(messages, list):
        raise ValueError(f'{place}: "messages" is {_shown(messages)}: it must be a list of messages')
    checked = _messages(messages, place, "messages")
    roles = [message["role"] for message in checked]
    if "assistant" not in roles[1:] or roles[0] == "assistant":
        raise ValueError(f"{place}: the roles are {roles}: training needs an assistant's turn after another's")
    return checked


def _messages(messages: list[Any], place: str, key: str) -> tuple[Message, ...]:
    if not messages:
        raise ValueError(f'{place}: "{key}" is an empty list: it needs at least one message')
    for i, message in enumerate(messages):
        where = f"{place}: {key}[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise ValueError(f'{where} is {_shown(message)}: it needs a "role", such as "user"')
        # A call of tools may stand in place of a text, and some templates take a text in blocks.
        if not (isinstance(message.get("content"), (str, list)) or message.get("tool_calls")):
            raise ValueError(f'{where} has "content" {_shown(message.get("content"))}: it must be a text')
    return tuple(messages)


def _text(row: dict[str, Any], key: str, place: str, kind: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        found = f"is {_shown(value)}" if key in row else "is missing"
        raise ValueError(f'{place}: "{key}" {found}: it must be {kind}, and not empty')
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
