"""Chat templates: messages to the exact text that a model was trained on, and which of it the assistant wrote.

A template is a program from a model's directory, so it runs in jinja2's sandbox. What it sees and does equals
transformers' `apply_chat_template`. `encode_chat` adds the mask of what is trained, and `next_turn` the tokens that
follow a sampled turn; both need a template that only ever appends, and say so when it rewrites what went before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, and what else the template reads
Span = tuple[int, int]  # of characters, the end excluded

REASONING = ("reasoning_content", "thinking", "reasoning")  # what templates call it; the first is the standard name
MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
CUT = "CONTINUE_FINAL_MESSAGE_TAG "  # its space shows whether the template trims; named in templates of the hub

# The blocks rendered so far, and the spans inside {% generation %}. Not a template variable: a template must not reach
# it.
_TRACKED: ContextVar[tuple[list[str], list[Span]] | None] = ContextVar("generation_spans", default=None)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: renders its body, and notes where it stands."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text = caller()
        tracked = _TRACKED.get()
        if tracked is not None:
            start = sum(map(len, tracked[0]))
            tracked[1].append((start, start + len(text)))
        return text


class _SafeNamespace(Namespace):
    """A template's `namespace(...)` without the underscored names that lead out of the sandbox."""

    def __init__(*args: Any, **values: Any):  # `self` may be one of the values
        Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **values).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a chat template may not store {name!r} in a namespace: rename it")
        super().__setitem__(name, value)


class _SafeDict:
    """A template's `dict(...)`. Through the class itself, `dict.update` would change what the sandbox keeps fixed."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson  # jinja2's own escapes for HTML
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        "dict": _SafeDict(),
        "namespace": _SafeNamespace,
    }
    return environment.from_string(source)


@dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of a model's directory, by name, and the special tokens that they may write."""

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # {"bos_token": "<s>", ...}

    def source(self, name: str | None, tools: Sequence[Any] | None) -> str:
        """The template called `name`; without a name "tool_use" where there are tools and it exists, else "default".

        Raises:
          ValueError: there is no such template.
        """
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ValueError(f"no chat template is called {name!r}: use one of {sorted(self.sources)}")
        return self.sources[name]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        name: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, exactly as transformers' `apply_chat_template(tokenize=False)` gives it.

        Args:
          tools: JSON schemas, for a template that offers them to the model; documents: likewise.
          add_generation_prompt: ends with what opens the assistant's turn.
          continue_final_message: the last message stays open, for the model to go on with.
          name: of the template, where the directory has several.
          variables: what else the template reads, such as `enable_thinking` or `date_string`.

        Raises:
          jinja2.TemplateError: what the template itself refuses, in its words.
          ValueError: no message, both ways to end, or a final message that cannot be continued.
        """
        messages = [_plain_message(message) for message in messages]
        source = self.source(name, tools)
        if not messages:
            raise ValueError("a chat needs at least one message")
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError("add_generation_prompt and continue_final_message exclude each other: leave one out")
            messages[-1] = _tagged(messages[-1])
        text = _compiled(source).render(
            **{**self.special_tokens, **_plain(variables)},
            messages=messages,
            tools=_plain(tools),
            documents=_plain(documents),
            add_generation_prompt=add_generation_prompt,
        )
        return _until_tag(text) if continue_final_message else text

    def generation_spans(self, messages: Sequence[Message], **options: Any) -> tuple[str, list[Span]] | None:
        """`render`, and where its `{% generation %}` blocks stand in the text; None for a template without any."""
        messages = [_plain_message(message) for message in messages]
        tools, documents = options.pop("tools", None), options.pop("documents", None)
        source = self.source(options.pop("name", None), tools)
        if not MARKER.search(source):
            return None
        template = _compiled(source)
        values = {**self.special_tokens, **_plain(options), "add_generation_prompt": False}
        with _tracking() as (blocks, spans):
            for block in template.generate(
                **values, messages=messages, tools=_plain(tools), documents=_plain(documents)
            ):
                blocks.append(block)
        return "".join(blocks), spans


@contextmanager
def _tracking() -> Iterator[tuple[list[str], list[Span]]]:
    tracked: tuple[list[str], list[Span]] = ([], [])
    token = _TRACKED.set(tracked)
    try:
        yield tracked
    finally:
        _TRACKED.reset(token)


def _plain(value: Any) -> Any:
    """A fresh copy of JSON-like data. Nothing else goes into the sandbox, whose fence knows no foreign methods."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise TypeError(f"{value!r} of type {type(value).__name__} in a chat: pass text, numbers, lists and mappings only")


def _plain_message(message: Message) -> dict[str, Any]:
    """Keys without a value are left out, and reasoning goes under each name that a template may read."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise ValueError(f'the message {message!r} needs a "role", as in {{"role": "user", "content": "..."}}')
    plain = {key: _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _tagged(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a tag at the end of its text, to be found again after rendering."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + CUT}
    for i in reversed(range(len(content or ()))):
        if content and "text" in content[i]:
            block = {**content[i], "text": content[i]["text"] + CUT}
            return {**message, "content": [*content[:i], block, *content[i + 1 :]]}
    raise ValueError(f"the final message {message!r} has no text to continue: give it some, or add_generation_prompt")


def _until_tag(text: str) -> str:
    at = text.rfind(CUT.strip())
    if at < 0:
        raise ValueError("the chat template leaves the final message out: it cannot be continued with this template")
    # Where the tag lost its space, the template trims messages, and the text before the tag has to be trimmed too.
    return text[:at] if text.startswith(CUT, at) else text[:at].rstrip()


def load_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a model's directory, by name; empty when it has none.

    `chat_template.jinja` and `additional_chat_templates/NAME.jinja` come before `chat_template.json`, and that before
    the entry of `tokenizer_config.json`, which may be one template or a list of named ones.
    """
    found: dict[str, str] = {}
    if (directory / "chat_template.jinja").is_file():
        found["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    if not found and (directory / "chat_template.json").is_file():
        found = _named(json.loads((directory / "chat_template.json").read_text(encoding="utf-8"))["chat_template"])
    return found or _named(tokenizer_config.get("chat_template"))


def _named(entry: Any) -> dict[str, str]:
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    return dict(entry) if isinstance(entry, Mapping) else {item["name"]: item["template"] for item in entry}


class ChatTokenizer(Protocol):
    """What `encode_chat` and `next_turn` need of a tokenizer with a chat template."""

    end_ids: tuple[int, ...]

    @property
    def end_texts(self) -> tuple[str, ...]: ...
    def render(self, messages: Sequence[Message], **options: Any) -> str: ...
    def generation_spans(self, messages: Sequence[Message], **options: Any) -> tuple[str, list[Span]] | None: ...
    def encode_markup(self, text: str) -> list[int]: ...
    def encode_prompt(self, text: str) -> tuple[list[int], list[Span]]: ...


@dataclass(frozen=True)
class EncodedChat:
    """A conversation in tokens."""

    ids: tuple[int, ...]  # [time], equal to transformers' `apply_chat_template(tokenize=True)`
    assistant: tuple[bool, ...]  # [time], what is trained: the assistant's turns, each with exactly one end token


def encode_chat(
    tokenizer: ChatTokenizer, messages: Sequence[Message], *, turns: Literal["all", "last"] = "all", **options: Any
) -> EncodedChat:
    """The token ids of a conversation, and which of them the assistant wrote.

    The template's `{% generation %}` markers say so. Without them, the conversation up to each assistant turn is
    rendered with the generation prompt, and must be how the whole text begins.

    Args:
      turns: "last" trains the last assistant turn alone.
      options: of `ChatTemplate.render`.

    Raises:
      ValueError: the template rewrites earlier turns or writes no end token, an assistant's text holds an end token,
        or no assistant turn is there to train.
    """
    at = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not at or at[0] == 0:
        raise ValueError(f"assistant turns at {at} of {len(messages)} messages: training needs one after another turn")
    at = at[-1:] if turns == "last" else at
    ends = tokenizer.end_texts
    for i in at:
        inside = [end for end in ends if end in json.dumps(messages[i], ensure_ascii=False)]
        if inside:
            raise ValueError(f"messages[{i}] holds the end token {inside[0]!r} in its text: take it out")
    marked = tokenizer.generation_spans(messages, **options)
    if marked is None:
        text = tokenizer.render(messages, **options)
        spans = [_turn_span(tokenizer, messages, i, text, options) for i in at]
    else:
        text, spans = marked
    ids, offsets = tokenizer.encode_prompt(text)
    trained = _turns(ids, offsets, spans, frozenset(tokenizer.end_ids))
    if turns == "last":
        trained = trained[-1:]
    if len(trained) != len(at):
        raise ValueError(f"the template marks {len(trained)} turns with an end token, of {len(at)} by the assistant")
    chosen = {i for turn in trained for i in turn}
    return EncodedChat(tuple(ids), tuple(i in chosen for i in range(len(ids))))


def _turn_span(
    tokenizer: ChatTokenizer, messages: Sequence[Message], i: int, text: str, options: Mapping[str, Any]
) -> Span:
    """Where the assistant's turn `messages[i]` stands in the whole text, its end token included."""
    before = tokenizer.render(messages[:i], add_generation_prompt=True, **options)
    upto = tokenizer.render(messages[: i + 1], **options)
    # Only up to the end token: Phi's template closes a whole conversation with one more.
    closed = [at + len(end) for end in tokenizer.end_texts if (at := upto.find(end, len(before))) >= 0]
    if not upto.startswith(before) or not text.startswith(upto[: min(closed, default=len(before))]):
        raise ValueError(
            f"the chat template rewrites messages[{i}] or what precedes it once more is said, as Qwen3's does with "
            "thinking, so that no one text shows every turn as it was generated: call encode_chat(messages[:n], "
            "turns='last') for each assistant turn, or use a template with {% generation %} markers"
        )
    if not closed:
        raise ValueError(
            f"the chat template writes none of the end tokens {tokenizer.end_texts} after an assistant turn, so that "
            "a model would never learn to stop: write {{ eos_token }} there, or name its end in generation_config.json"
        )
    return len(before), min(closed)


def _turns(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span], ends: frozenset[int]) -> list[list[int]]:
    """The token positions of each assistant turn, the last of them its one end token.

    A marker may stop short of the end token or run past it; a turn may have several marked parts.
    """
    turns, current = [], []
    for start, stop in spans:
        inside = [i for i, (a, b) in enumerate(offsets) if a < stop and b > start]
        if not inside:
            continue
        if inside[-1] + 1 < len(ids) and not any(ids[i] in ends for i in inside):
            inside += [inside[-1] + 1] * (ids[inside[-1] + 1] in ends)
        end = next((n for n, i in enumerate(inside) if ids[i] in ends), None)
        current += inside if end is None else inside[: end + 1]
        if end is not None:
            turns.append(current)
            current = []
    return turns


def next_turn(
    tokenizer: ChatTokenizer, messages: Sequence[Message], *, ended: bool, first: str = "a", **options: Any
) -> list[int]:
    """The ids to append after a sampled assistant turn, so that nothing that was sampled is encoded again.

    They close the turn, hold the new messages, and open the assistant's next turn, as the template does between two
    turns. They are observations: not trained.

    Args:
      messages: what follows the sampled turn: the user's next message, or a tool's results.
      ended: an end token was sampled (`finish_reason == "stop"`); otherwise the template's own is prepended.
      first: stands in for the first user message and the sampled text, which do not matter to what follows.
      options: of `ChatTemplate.render`.

    Raises:
      ValueError: the template does not simply append, or closes the turn with no end token.
    """
    opening = [{"role": "user", "content": first}]
    before = tokenizer.render(opening, add_generation_prompt=True, **options)
    turn = {"role": "assistant", "content": first}
    whole = tokenizer.render([*opening, turn, *messages], add_generation_prompt=True, **options)
    rest = whole[len(before) :].lstrip()  # some templates begin the turn with a space of their own
    if not whole.startswith(before) or not rest.startswith(first):
        raise ValueError(
            "the chat template rewrites an earlier turn when the next one comes, so that the sampled tokens cannot "
            "stay as they are: use a template that only appends, such as one that keeps the thinking of every turn"
        )
    tail = rest[len(first) :]
    places = [at for end in tokenizer.end_texts if (at := tail.find(end)) >= 0]
    if not places or tail[: min(places)].strip():
        raise ValueError(
            f"the chat template closes an assistant turn with none of the end tokens {tokenizer.end_texts}: write "
            "{{ eos_token }} there, or name its end in generation_config.json"
        )
    ids = tokenizer.encode_markup(tail)
    closing = next(i for i, token in enumerate(ids) if token in tokenizer.end_ids)
    return ids[closing + 1 :] if ended else ids
