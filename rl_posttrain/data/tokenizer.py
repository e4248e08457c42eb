"""Text to token ids and back: two closed vocabularies, and the tokenizer of a pretrained model's directory.

The policy is conditioned on `prompt(text)` and learns to write `completion(text)`. The closed vocabularies share
their special ids: 0 pads, 1 ends a completion, 2 separates the prompt from the completion. Padding and ends are
never told apart by id in training: masks come from lengths (`data.packing`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_posttrain.data.huggingface import HuggingFaceTokenizer

PAD, END, SEPARATOR = 0, 1, 2
SPECIAL_COUNT = 3


class CharacterTokenizer:
    """One id per character of `alphabet`, in its order, after the three special ids.

    Raises:
      ValueError: `alphabet` is empty or repeats a character.
    """

    pad_id: int = PAD
    separator_id: int = SEPARATOR
    end_ids: tuple[int, ...] = (END,)
    special_ids: frozenset[int] = frozenset(range(SPECIAL_COUNT))
    joined_ids: frozenset[int] = frozenset()

    def __init__(self, alphabet: str):
        repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
        if not alphabet or repeated:
            raise ValueError(f"{alphabet=} must hold every character once; repeated: {repeated}")
        self.alphabet = alphabet
        self.vocab_size = SPECIAL_COUNT + len(alphabet)
        self._ids = {character: SPECIAL_COUNT + i for i, character in enumerate(alphabet)}

    def encode(self, text: str) -> list[int]:
        """One id per character, no special ids.

        Raises:
          ValueError: a character that is not in the alphabet.
        """
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise ValueError(
                f"characters {unknown} of {text!r} are not in the alphabet {self.alphabet!r}: "
                "add them to it, or use the byte tokenizer"
            )
        return [self._ids[character] for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special ids are dropped.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        return "".join(self.alphabet[i - SPECIAL_COUNT] for i in _ordinary(ids, self.vocab_size))

    def prompt(self, text: str) -> list[int]:
        """What the policy is conditioned on: the text, then the separator."""
        return [*self.encode(text), SEPARATOR]

    def completion(self, text: str) -> list[int]:
        """What a demonstration trains: the text, then exactly one end."""
        return [*self.encode(text), END]


class ByteTokenizer:
    """One id per byte of the text's UTF-8, after the three special ids: any text, vocabulary 259."""

    pad_id: int = PAD
    separator_id: int = SEPARATOR
    end_ids: tuple[int, ...] = (END,)
    special_ids: frozenset[int] = frozenset(range(SPECIAL_COUNT))
    joined_ids: frozenset[int] = frozenset()
    vocab_size: int = SPECIAL_COUNT + 256

    def encode(self, text: str) -> list[int]:
        """One id per UTF-8 byte, no special ids."""
        return [SPECIAL_COUNT + byte for byte in text.encode("utf-8")]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special ids are dropped, bytes that are not UTF-8 become U+FFFD.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        data = bytes(i - SPECIAL_COUNT for i in _ordinary(ids, self.vocab_size))
        return data.decode("utf-8", errors="replace")

    def prompt(self, text: str) -> list[int]:
        """What the policy is conditioned on: the text, then the separator."""
        return [*self.encode(text), SEPARATOR]

    def completion(self, text: str) -> list[int]:
        """What a demonstration trains: the text, then exactly one end."""
        return [*self.encode(text), END]


Tokenizer = CharacterTokenizer | ByteTokenizer | HuggingFaceTokenizer


def _ordinary(ids: Iterable[int], vocab_size: int) -> list[int]:
    """The ids that stand for text."""
    ids = [int(i) for i in ids]
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(f"ids {outside[:8]} are outside the vocabulary of {vocab_size}")
    return [i for i in ids if i >= SPECIAL_COUNT]


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer to use (config section `tokenizer`)."""

    kind: Literal["character", "byte", "huggingface"] = "byte"
    alphabet: str | None = None  # of the character tokenizer, in the order of its ids
    # Of the Hugging Face tokenizer; see there.
    directory: str | None = None
    chat: bool | None = None
    system: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind == "character" and not self.alphabet:
            raise ValueError("kind='character' needs an alphabet: set `alphabet`, or use kind='byte'")
        if self.kind == "huggingface" and not self.directory:
            raise ValueError("kind='huggingface' needs the model's directory: set `directory`, or use kind='byte'")
        for name, kind in (("alphabet", "character"), *((name, "huggingface") for name in HUGGING_FACE_FIELDS)):
            value = getattr(self, name)
            if self.kind != kind and value is not None and value != {}:
                raise ValueError(f"{name}={value!r} has no effect with kind={self.kind!r}: leave it out")


HUGGING_FACE_FIELDS = ("directory", "chat", "system", "variables")


def make_tokenizer(cfg: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `cfg` names.

    Raises:
      ValueError: the directory lacks a file, or the files contradict each other.
    """
    if cfg.kind == "huggingface":
        return HuggingFaceTokenizer(cfg.directory or "", chat=cfg.chat, system=cfg.system, variables=cfg.variables)
    return ByteTokenizer() if cfg.kind == "byte" else CharacterTokenizer(cfg.alphabet or "")
