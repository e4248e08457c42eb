"""Conversations as packed rows: what the assistant wrote is trained, each turn with one end, and nothing else is."""

import numpy as np
import pytest

from rl_posttrain.data import trees
from rl_posttrain.data.chat import encode_chat
from rl_posttrain.data.huggingface import HuggingFaceTokenizer
from rl_posttrain.data.packing import pack

CHATS = [
    [
        {"role": "user", "content": "one and one?"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "and one more?"},
        {"role": "assistant", "content": "three, I think"},
    ],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
]


@pytest.mark.parametrize("family", ["llama3_style", "qwen2_5", "gemma_style"])
def test_o21_every_turn_trains_one_end_and_no_pads(family, model_directory):
    tokenizer = HuggingFaceTokenizer(model_directory(family))
    encoded = [encode_chat(tokenizer, chat) for chat in CHATS]
    batch, _ = pack(trees.from_chats(encoded), 256, 1)
    trained = np.asarray(batch.loss_weight) > 0
    labels = np.asarray(batch.labels)[trained]
    assert labels.size == sum(sum(chat.assistant) for chat in encoded)
    assert np.isin(labels, tokenizer.end_ids).sum() == 3  # turns, of both conversations
    assert np.asarray(batch.loss_weight).sum() == pytest.approx(1.0)
    assert (np.asarray(batch.segments)[trained] > 0).all()
    said = tokenizer.decode([token for token in labels.tolist() if token not in tokenizer.end_ids])
    assert [text in said for text in ("two", "three, I think", "hello", "more", "hi?")] == [True] * 3 + [False] * 2


def test_every_token_stands_in_its_place(model_directory):
    tokenizer = HuggingFaceTokenizer(model_directory("llama3_style"))
    chat = encode_chat(tokenizer, CHATS[0])
    (tree,) = trees.from_chats([chat])
    assert (*tree.prompt, *tree.samples[0].tokens) == chat.ids
    batch, _ = pack([tree], 256, 1)
    real = np.flatnonzero(np.asarray(batch.segments)[0])
    positions = np.asarray(batch.positions)[0, real]
    # Every position once: the prompt's last token opens the completion.
    np.testing.assert_array_equal(positions, np.arange(len(chat.ids)))
    np.testing.assert_array_equal(np.asarray(batch.tokens)[0, real], chat.ids)
