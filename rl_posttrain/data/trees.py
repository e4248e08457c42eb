"""From completions and worked examples to trees of tokens, ready to be packed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_posttrain.data.chat import EncodedChat
from rl_posttrain.data.huggingface import HuggingFaceTokenizer
from rl_posttrain.data.jsonl import PreferencePair
from rl_posttrain.data.packing import Sample, Tree, positions
from rl_posttrain.data.tokenizer import Tokenizer
from rl_posttrain.types import Rollout, Task


def from_groups(groups: Sequence[Sequence[Rollout]], weights: np.ndarray, advantages: np.ndarray) -> list[Tree]:
    """One tree per group: the prompt once, each completion a child.

    Args:
      weights: float [P, W], the loss weight of each completion token of a sample.
      advantages: float [P, W].
    """
    return [
        Tree(
            group[0].prompt_tokens,
            tuple(_sample(r, w, a) for r, w, a in zip(group, group_weights, group_advantages)),
        )
        for group, group_weights, group_advantages in zip(groups, weights, advantages, strict=True)
    ]


def _sample(rollout: Rollout, weight: float, advantage: float) -> Sample:
    return Sample(
        tokens=rollout.completion_tokens,
        weights=np.full(len(rollout.completion_tokens), weight, np.float32),
        advantage=float(advantage),
        behaviour_logprobs=rollout.behaviour_logprobs,
        temperature=rollout.temperature,
        policy_version=rollout.policy_version,
    )


def from_examples(tasks: Sequence[Task], tokenizer: Tokenizer) -> list[Tree]:
    """One tree per worked example. Every completion token of the batch, end tokens included, weighs the same.

    Raises:
      ValueError: a task without a demonstration.
    """
    missing = [task.id for task in tasks if task.demonstration is None]
    if missing:
        raise ValueError(f"{missing[0]} has no demonstration: give its domain weight=0, or set sft.steps=0")
    completions = [tokenizer.completion(task.demonstration or "") for task in tasks]
    weight = 1.0 / sum(map(len, completions))
    return [
        Tree(
            tokenizer.prompt(task.prompt),
            (Sample(tokens, np.full(len(tokens), weight, np.float32), advantage=0.0),),
        )
        for task, tokens in zip(tasks, completions)
    ]


def from_chats(chats: Sequence[EncodedChat]) -> list[Tree]:
    """One tree per conversation: the prompt is what precedes the assistant's first token, the rest is one completion
    in which only the assistant's tokens are trained. Each of them weighs the same over all conversations.
    """
    weight = 1.0 / sum(sum(chat.assistant) for chat in chats)
    trees = []
    for chat in chats:
        first = chat.assistant.index(True)
        weights = np.where(chat.assistant[first:], weight, 0.0).astype(np.float32)
        trees.append(Tree(chat.ids[:first], (Sample(chat.ids[first:], weights),)))
    return trees


def from_pairs(pairs: Sequence[PreferencePair], tokenizer: Tokenizer, row_length: int) -> list[Tree]:
    """One whole tree per pair: the prompt, then the chosen completion (advantage +1) and the rejected one (-1), each
    with its end token. Every token weighs what its pair weighs in the mean over these pairs.

    Raises:
      ValueError: naming the pair's source: it does not fit a row, or the tokenizer refuses it.
    """
    trees = []
    for pair in pairs:
        try:
            tree = _pair_tree(pair, tokenizer, 1.0 / len(pairs))
        except ValueError as error:
            raise ValueError(f"{pair.source}: {error}") from error
        if positions(tree) > row_length:
            raise ValueError(
                f"{pair.source}: a prompt of {len(tree.prompt)} tokens and completions of "
                f"{[len(sample.tokens) for sample in tree.samples]} need {positions(tree)} positions in one row, and "
                f"{row_length=}: use longer rows, or remove the pair"
            )
        trees.append(tree)
    return trees


def _pair_tree(pair: PreferencePair, tokenizer: Tokenizer, weight: float) -> Tree:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        prompt = tokenizer.prompt(pair.prompt)
    elif isinstance(pair.prompt, str):
        prompt = tokenizer.prompt(pair.prompt)
    else:
        raise ValueError(
            f"{len(pair.prompt)} messages need a chat template: give the prompt as text, or use a tokenizer of kind "
            "'huggingface'"
        )
    completions = [(tokenizer.completion(text), sign) for text, sign in ((pair.chosen, 1.0), (pair.rejected, -1.0))]
    samples = (Sample(ids, np.full(len(ids), weight, np.float32), advantage=sign) for ids, sign in completions)
    return Tree(prompt, tuple(samples), whole=True)
