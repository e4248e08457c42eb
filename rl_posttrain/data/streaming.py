"""Text while its tokens still come: no broken characters, and stop strings wherever token boundaries fall."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rl_posttrain.data.tokenizer import Tokenizer

BROKEN = "\ufffd"  # what bytes decode to that are no character, or not yet


class IncrementalDecoder:
    """Decodes ids as they come: the texts of all `push` calls and of `flush`, joined, are `tokenizer.decode` of all.

    A character whose bytes are spread over several tokens comes with the last of them, and is never broken.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Decoding starts one piece early, because some vocabularies drop a space before the first token alone.
        self._window: list[int] = []
        self._shown_ids = 0  # how many ids at the front of the window are that piece
        self._shown = ""  # its text
        self._text = ""  # of the window

    def push(self, ids: Iterable[int]) -> str:
        """The text that is final with these ids."""
        ids = list(ids)
        self._window += [i for i in ids if i not in self._tokenizer.special_ids]
        self._text = self._tokenizer.decode(self._window)
        joined = self._window and self._window[-1] in self._tokenizer.joined_ids
        if joined or self._text.endswith(BROKEN):
            return ""
        return self._release()

    @property
    def pending(self) -> str:
        """Whole characters that the next ids could still change."""
        return self._text[len(self._shown) :].rstrip(BROKEN)

    def flush(self) -> str:
        """The rest; bytes that never became a character are U+FFFD."""
        return self._release()

    def _release(self) -> str:
        new = self._text[len(self._shown) :]
        if new:
            self._window = self._window[self._shown_ids :]
            self._shown_ids = len(self._window)
            self._shown = self._text = self._tokenizer.decode(self._window)
        return new


@dataclass(frozen=True)
class Stop:
    """Where a completion ended at a stop string."""

    text: str  # what precedes the stop string
    tokens: int  # how many were sampled until the stop string was whole: keep `ids[:tokens]` and their logprobs
    stop: str  # which it was


class StopSearch:
    """Looks for stop strings in the text of ids as they come.

    The tokens that carry a stop string are kept: they were sampled, and what follows is conditioned on them. Only the
    text is cut, in the middle of a token where need be.

    Raises:
      ValueError: no stop string, or an empty one.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        if not stops or not all(stops):
            raise ValueError(f"{stops=} must be stop strings, none of them empty")
        self.stops = tuple(stops)
        self._decoder = IncrementalDecoder(tokenizer)
        self._longest = max(map(len, stops))
        self._text = ""
        self._tokens = 0

    def push(self, token: int) -> Stop | None:
        """The stop that this token completes; the earliest in the text, and the longest of those that begin there."""
        searched = max(0, len(self._text) - self._longest + 1)  # a stop further to the left was found before
        self._text += self._decoder.push([token])
        self._tokens += 1
        tail = self._text[searched:] + self._decoder.pending
        found = [(at, -len(stop), stop) for stop in self.stops if (at := tail.find(stop)) >= 0]
        if not found:
            return None
        at, _, stop = min(found)
        return Stop((self._text[:searched] + tail)[: searched + at], self._tokens, stop)


def find_stop(tokenizer: Tokenizer, ids: Iterable[int], stops: Sequence[str]) -> Stop | None:
    """The first stop in the text of `ids`, as `StopSearch` finds it token by token; None where there is none."""
    search = StopSearch(tokenizer, stops)
    return next((stop for token in ids if (stop := search.push(token)) is not None), None)
