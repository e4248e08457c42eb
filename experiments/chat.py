"""Talks with a model in the terminal (`experiments.sample --model`): its chat template, and text as it is made.

What was sampled is never encoded again: a conversation is the first prompt's ids, then what the model drew and the
ids of each next turn (`data.chat.next_turn`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rl_posttrain.data.chat import next_turn
from rl_posttrain.data.huggingface import HuggingFaceTokenizer
from rl_posttrain.data.streaming import IncrementalDecoder, StopSearch
from rl_posttrain.model import convert
from rl_posttrain.model.cache import PrefixCache, SuffixCache, decode_step, empty_suffix, prefill, unstack_layers
from rl_posttrain.model.transformer import ModelConfig, embed, final_norm, logits
from rl_posttrain.rollout.sampling import Sampling, sample

CHUNK = 8  # tokens that are drawn between two looks at the text
SHORTEST = 64  # tokens that a prefix is padded to at least, and then to powers of two: few programs are compiled


@dataclass(frozen=True)
class Speaker:
    """A model that answers, and how."""

    params: Any
    layers: Any  # the same layers, each by itself
    cfg: ModelConfig
    tokenizer: HuggingFaceTokenizer
    sampling: Sampling
    max_tokens: int  # of an answer, its end token included
    stops: tuple[str, ...]  # an answer ends before the first of them
    key: jax.Array


def load(
    directory: str, *, system: str | None, temperature: float, max_tokens: int, stops: tuple[str, ...], seed: int
) -> Speaker:
    """The model in a directory, on the first device.

    Raises:
      ValueError: the directory holds no whole model, or no tokenizer with a chat template; or a number out of range.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: use at least 1")
    if not all(stops):
        raise ValueError(f"{stops=}: an empty stop string would end every answer at once")
    sampling = Sampling(temperature)
    tokenizer = HuggingFaceTokenizer(directory, chat=True, system=system)
    cfg = convert.model_config(directory)
    params = convert.load_params(directory, cfg)
    layers = jax.jit(unstack_layers, static_argnums=1)(params, cfg)
    return Speaker(params, layers, cfg, tokenizer, sampling, max_tokens, stops, jax.random.key(seed))


@dataclass
class Conversation:
    """What was said so far, in ids."""

    speaker: Speaker
    ids: list[int] = field(default_factory=list)
    ended: bool = False  # the last answer ended with an end token, which is in `ids`
    turns: int = 0  # also those of earlier conversations, so that no draw is repeated

    def reset(self) -> None:
        """Forgets what was said."""
        self.ids, self.ended = [], False

    def ask(self, text: str, show: Callable[[str], object]) -> None:
        """Says `text`, and shows the answer piece by piece.

        Raises:
          ValueError: the chat template cannot go on; the conversation is as it was.
        """
        message = {"role": "user", "content": text}
        if self.ids:
            prompt = self.ids + next_turn(self.speaker.tokenizer, [message], ended=self.ended)
        else:
            prompt = self.speaker.tokenizer.prompt([message])
        said, self.ended = answer(self.speaker, prompt, jax.random.fold_in(self.speaker.key, self.turns), show)
        self.ids = prompt + said
        self.turns += 1


def answer(
    speaker: Speaker, prompt: list[int], key: jax.Array, show: Callable[[str], object]
) -> tuple[list[int], bool]:
    """Draws an answer to `prompt` and shows its text while it comes, up to a stop string, whole characters only.

    Returns:
      The ids that were drawn, those of a stop string included, and whether the last is an end token.
    """
    decoder, search = IncrementalDecoder(speaker.tokenizer), None
    if speaker.stops:
        search = StopSearch(speaker.tokenizer, speaker.stops)
    held = max(map(len, speaker.stops), default=1) - 1  # characters at the end that may begin a stop string
    said: list[int] = []
    text, shown, ended = "", 0, False
    for chunk in _chunks(speaker, prompt, key):
        ended = chunk[-1] in speaker.tokenizer.end_ids
        said += chunk
        words = chunk[:-1] if ended else chunk
        stop = next((stop for token in words if (stop := search.push(token)) is not None), None) if search else None
        if stop is not None:
            show(stop.text[shown:])
            return said[: stop.tokens], False
        text += decoder.push(words)
        show(text[shown : max(shown, len(text) - held)])
        shown = max(shown, len(text) - held)
    show((text + decoder.flush())[shown:])
    return said, ended


def _chunks(speaker: Speaker, prompt: list[int], key: jax.Array) -> Iterator[list[int]]:
    """The ids of an answer as they are drawn, until an end token or `max_tokens`."""
    length = len(prompt) - 1
    padded = np.zeros((1, max(SHORTEST, 1 << (length - 1).bit_length())), np.int32)
    padded[0, :length] = prompt[:-1]
    prefix = _prefill(speaker.params, speaker.cfg, padded, np.array([length], np.int32))
    suffix = empty_suffix(speaker.cfg, 1, speaker.max_tokens)
    current, slot, ends = prompt[-1], 0, speaker.tokenizer.end_ids
    while slot < speaker.max_tokens and (slot == 0 or current not in ends):
        limit = min(slot + CHUNK, speaker.max_tokens)
        drawn, stopped, suffix = _decode(
            speaker.params,
            speaker.layers,
            prefix,
            suffix,
            np.int32(current),
            np.int32(slot),
            np.int32(limit),
            key,
            cfg=speaker.cfg,
            sampling=speaker.sampling,
            ends=ends,
        )
        chunk = np.asarray(drawn)[: int(stopped) - slot].tolist()
        yield chunk
        current, slot = chunk[-1], int(stopped)


_prefill = jax.jit(prefill, static_argnums=1)


@partial(jax.jit, static_argnames=("cfg", "sampling", "ends"), donate_argnames="suffix")
def _decode(
    params: Any,
    layers: Any,
    prefix: PrefixCache,
    suffix: SuffixCache,
    current: jax.Array,
    slot: jax.Array,
    limit: jax.Array,
    key: jax.Array,
    *,
    cfg: ModelConfig,
    sampling: Sampling,
    ends: tuple[int, ...],
) -> tuple[jax.Array, jax.Array, SuffixCache]:
    """Draws tokens `slot`, `slot + 1`, ... of an answer, up to `limit` or an end token.

    Returns:
      int32 [CHUNK] ids, the slot after the last of them, and the advanced cache.
    """
    first = slot

    def unfinished(carry):
        slot, current, *_ = carry
        return (slot < limit) & ((slot == first) | (current != jnp.asarray(ends)).all())

    def step(carry):
        slot, current, drawn, suffix = carry
        x, suffix = decode_step(layers, cfg, embed(params, cfg, current.reshape(1, 1)), prefix, suffix, slot)
        scores = logits(params, cfg, final_norm(params, cfg, x)).reshape(-1)
        token, _ = sample(jax.random.uniform(jax.random.fold_in(key, slot)), scores, sampling)
        return slot + 1, token, drawn.at[slot - first].set(token), suffix

    start = (slot, current, jnp.zeros(CHUNK, jnp.int32), suffix)
    stopped, _, drawn, suffix = jax.lax.while_loop(unfinished, step, start)
    return drawn, stopped, suffix
