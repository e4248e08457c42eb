"""The tokenizer of a pretrained model's directory, with its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from rl_posttrain.data.chat import ChatTemplate, Message, Span, load_templates

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class HuggingFaceTokenizer:
    """The tokenizer of a model's directory, with its chat template; ids equal those of transformers.

    Args:
      directory: holds tokenizer.json and tokenizer_config.json, and what else the model has of
        special_tokens_map.json, generation_config.json, config.json, chat_template.jinja or chat_template.json.
      chat: prompts are rendered by the chat template; False takes them as raw text; None is True where the directory
        has a template.
      system: a system message before every chat that has none. None leaves it to the template, which may have a
        default of its own.
      variables: of the chat template, for every chat, such as {"enable_thinking": False}.

    Raises:
      ValueError: a file is missing or damaged, the files contradict each other, or nothing says how a text ends.
      jinja2.TemplateError: the template refuses the system message.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        chat: bool | None = None,
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ):
        self.directory = Path(directory)
        if not (self.directory / "tokenizer.json").is_file():
            raise ValueError(
                f"{directory} has no tokenizer.json: name a directory that transformers' `save_pretrained` wrote with "
                "a fast tokenizer (a tokenizer.model alone is converted by loading it there and saving it)"
            )
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        except Exception as error:  # the package raises no narrower class
            raise ValueError(f"{self.directory / 'tokenizer.json'} is damaged ({error}): fetch it again") from error
        self._backend.no_truncation()  # a file may carry the settings of somebody's last call
        self._backend.no_padding()
        config = _read(self.directory, "tokenizer_config.json", required=True)
        model = _read(self.directory, "config.json")
        named = {**_read(self.directory, "special_tokens_map.json"), **config}
        self._check_added(config.get("added_tokens_decoder", {}))
        self.special_tokens = {name: _content(named[name]) for name in SPECIAL_TOKENS if named.get(name) is not None}
        more = named.get("extra_special_tokens") or named.get("additional_special_tokens") or ()
        if isinstance(more, Mapping):  # named as the model's own templates call them
            self.special_tokens |= {name: _content(token) for name, token in more.items()}
            more = ()
        self._register([*self.special_tokens.values(), *map(_content, more)])
        self.special_ids = frozenset(
            i for i, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        joined = [vocabulary[token] for token in ("<0xC3>", "<0xA9>") if token in vocabulary]
        fallback = self._backend.decode(joined) == "é"  # characters that lack a token are written in bytes
        self.joined_ids = frozenset(i for token, i in vocabulary.items() if fallback and _is_byte(token))
        size = {**model, **model.get("text_config", {})}.get("vocab_size")
        self.vocab_size: int = max(vocabulary.values()) + 1 if size is None else size
        self.start_id = self._start(config)
        templates = load_templates(self.directory, config)
        if chat and not templates:
            raise ValueError(f"{directory} has no chat template: add chat_template.jinja, or use chat=False")
        self.template = ChatTemplate(templates, self.special_tokens) if templates and chat is not False else None
        if self.template is None and (system is not None or variables):
            raise ValueError(f"{system=} and {variables=} have no effect on raw text: leave them out, or set chat=True")
        self.system, self.variables = system, dict(variables or {})
        self.end_ids = self._ends(model, _read(self.directory, "generation_config.json"))
        pad = self.special_tokens.get("pad_token")
        self.pad_id: int = self.end_ids[0] if pad is None else self._id(pad)

    # ---- what rollout and packing use ----

    def encode(self, text: str) -> list[int]:
        """The ids of ordinary text. No special ids: `<s>` in the text is three characters."""
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return ids if self.special_ids.isdisjoint(ids) else self._plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special ids are dropped, bytes that are not UTF-8 become U+FFFD.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        return self._backend.decode(self._inside(int(i) for i in ids), skip_special_tokens=True)

    def prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        """What the policy is conditioned on: a user's message, or several messages, up to where the assistant begins.

        Raises:
          ValueError: messages without a chat template.
        """
        if self.template is not None:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return self.encode_prompt(self.render(messages, add_generation_prompt=True))[0]
        if not isinstance(prompt, str):
            raise ValueError(f"{len(prompt)} messages need a chat template: give text, or set chat=True")
        return self.encode_prompt(prompt)[0]

    def completion(self, text: str) -> list[int]:
        """What a demonstration trains: the text as the template writes an assistant's turn, then exactly one end.

        Raises:
          ValueError: the text holds an end token, or the template does not append it to a prompt.
        """
        if self.template is None:
            return [*self._continue(text, self.encode, ("\n", "a")), self.end_ids[0]]
        found = [end for end in self.end_texts if end in text]
        if found:
            raise ValueError(f"{text!r} holds the end token {found[0]!r}: take it out")
        user = [{"role": "user", "content": "a"}]
        before = self.render(user, add_generation_prompt=True)
        whole = self.render([*user, {"role": "assistant", "content": text}])
        if not whole.startswith(before):
            raise ValueError(
                f"the chat template of {self.directory} opens a demonstration of the assistant otherwise than a "
                f"generated turn, which begins {before[-60:]!r}: set `variables` so that they agree, or use chat=False"
            )
        ids = self._continue(whole[len(before) :], self.encode_markup, (before, "\n", "a"))
        length = next((i for i, token in enumerate(ids) if token in self.end_ids), len(ids))
        return [*ids[:length], ids[length] if length < len(ids) else self.end_ids[0]]

    # ---- what `data.chat` uses ----

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """`ChatTemplate.render` with this tokenizer's system message and variables.

        Raises:
          ValueError: there is no chat template, or it is switched off.
        """
        return self._chat_template().render(self._with_system(messages), **{**self.variables, **options})

    def generation_spans(self, messages: Sequence[Message], **options: Any) -> tuple[str, list[Span]] | None:
        """`ChatTemplate.generation_spans` likewise; None where the template has no markers."""
        return self._chat_template().generation_spans(self._with_system(messages), **{**self.variables, **options})

    def encode_markup(self, text: str) -> list[int]:
        """The ids of text whose special tokens are meant, such as what a template wrote."""
        return self._inside(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> tuple[list[int], list[Span]]:
        """Ids of the beginning of a sequence, and where each stands in the text. Exactly one start token, if any."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids, offsets = self._inside(encoding.ids), list(encoding.offsets)
        if self.start_id is None or ids[:1] == [self.start_id]:
            return ids, offsets
        return [self.start_id, *ids], [(0, 0), *offsets]

    @property
    def end_texts(self) -> tuple[str, ...]:
        """The end tokens as a template writes them."""
        return tuple(token for i in self.end_ids if (token := self._backend.id_to_token(i)) is not None)

    # ---- the parts ----

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True  # the package's name for: read them as ordinary text
        return plain

    def _chat_template(self) -> ChatTemplate:
        if self.template is None:
            raise ValueError(f"no chat template: add chat_template.jinja to {self.directory}, and leave chat=False out")
        return self.template

    def _with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        if self.system is None or (messages and messages[0]["role"] == "system"):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def _continue(self, text: str, encode: Callable[[str], list[int]], anchors: Sequence[str]) -> list[int]:
        """Ids of text that goes on where other text ends, without the space that some vocabularies put before a text.

        An anchor whose last token would merge with the text is passed over.
        """
        for anchor in anchors:
            head, whole = encode(anchor), encode(anchor + text)
            if whole[: len(head)] == head:
                return whole[len(head) :]
        return encode(text)

    def _inside(self, ids: Iterable[int]) -> list[int]:
        ids = list(ids)
        outside = [i for i in ids if not 0 <= i < self.vocab_size]
        if outside:
            raise ValueError(f"ids {outside[:8]} are outside the vocabulary of {self.vocab_size} in {self.directory}")
        return ids

    def _check_added(self, added: Mapping[str, Any]) -> None:
        for i, token in added.items():
            if self._backend.id_to_token(int(i)) != _content(token):
                raise ValueError(
                    f"{self.directory}: tokenizer_config.json calls id {i} {_content(token)!r}, and tokenizer.json "
                    f"{self._backend.id_to_token(int(i))!r}: load and save the tokenizer with transformers"
                )

    def _register(self, tokens: Iterable[str]) -> None:
        """Special tokens of the config are special, whatever tokenizer.json says of them."""
        self._backend.add_special_tokens([token for token in tokens if self._backend.token_to_id(token) is not None])

    def _id(self, token: str) -> int:
        found = self._backend.token_to_id(token)
        if found is None:
            raise ValueError(
                f"{self.directory}: the special token {token!r} is not in tokenizer.json: correct tokenizer_config.json"
            )
        return found

    def _start(self, config: Mapping[str, Any]) -> int | None:
        """The start token that the tokenizer itself puts before a text; a template may write it besides.

        tokenizer.json decides, as in transformers; where it was made without the step, the config's wish counts.
        """
        if "bos_token" not in self.special_tokens:
            return None
        start = self._id(self.special_tokens["bos_token"])
        return start if self._backend.encode("a").ids[:1] == [start] or config.get("add_bos_token") else None

    def _ends(self, model: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
        """Every id that ends a completion, the tokenizer's own first: of both configs, and of the chat template."""
        ends = [self._id(self.special_tokens["eos_token"])] if "eos_token" in self.special_tokens else []
        for section in (generation, model, model.get("text_config", {})):
            found = section.get("eos_token_id")
            ends += found if isinstance(found, list) else [] if found is None else [found]
        if self.template is not None:
            ends += self._template_end(frozenset(ends))
        if not ends:
            raise ValueError(
                f"{self.directory} names no end token: set eos_token in tokenizer_config.json, or eos_token_id in "
                "generation_config.json"
            )
        return tuple(self._inside(dict.fromkeys(ends)))

    def _template_end(self, known: frozenset[int]) -> list[int]:
        """The special token after an assistant's turn, where no config names it: generation must stop there too."""
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Okay"}]
        closing = self.encode_markup(self.render(chat).rpartition("Okay")[2])
        return [] if known.intersection(closing) else [i for i in closing if i in self.special_ids][:1]


def _read(directory: Path, name: str, required: bool = False) -> dict[str, Any]:
    """A JSON file of the directory; empty where it is not there."""
    path = directory / name
    if not path.is_file():
        if required:
            raise ValueError(f"{directory} has no {name}: copy it from where the model came from")
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): fetch it again") from error


def _content(token: Any) -> str:
    """Tokens are written as text, or as a mapping with their text and flags."""
    return token["content"] if isinstance(token, Mapping) else token


def _is_byte(token: str) -> bool:
    """<0x0A>: one byte of a character that the vocabulary lacks."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
