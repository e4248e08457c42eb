"""Pairs and conversations from files: what is read, what is refused and where, and the trees of pairs."""

import json
from pathlib import Path

import numpy as np
import pytest

from rl_posttrain.data import trees
from rl_posttrain.data.huggingface import HuggingFaceTokenizer
from rl_posttrain.data.jsonl import PreferencePair, read_chats, read_pairs
from rl_posttrain.data.packing import pack
from rl_posttrain.data.tokenizer import ByteTokenizer, CharacterTokenizer
from rl_posttrain.tasks.answers import final_answer

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "data.md"

USER = {"role": "user", "content": "hi"}
PAIR = {"prompt": "ab", "chosen": "cd", "rejected": "e"}
CHAT = {"messages": [USER, {"role": "assistant", "content": "hello"}]}


def written(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
    return str(path)


def test_pairs_are_read_in_order_with_their_lines(tmp_path):
    path = written(tmp_path, {**PAIR, "annotator": 3}, b"", b"  ", {**PAIR, "prompt": [USER], "rejected": "\u00e9"})
    assert read_pairs(path) == [
        PreferencePair("ab", "cd", "e", f"{path}, line 1"),
        PreferencePair((USER,), "cd", "\u00e9", f"{path}, line 4"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "is not a JSON object in UTF-8"),
        (b'{"prompt": "\xff"}', "is not a JSON object in UTF-8"),
        (b'{"prompt": "a", "chosen": "\\ud800", "rejected": "b"}', "surrogates not allowed"),
        (["prompt"], r'is \["prompt"\]: write one JSON object a line'),
        ({**PAIR, "prompt": ""}, '"prompt" is "": it must be a text or a list of messages, and not empty'),
        ({**PAIR, "prompt": []}, '"prompt" is an empty list'),
        ({**PAIR, "prompt": ["hi"]}, r'prompt\[0\] is "hi": it needs a "role"'),
        ({**PAIR, "prompt": [{"role": "user"}]}, r'prompt\[0\] has "content" null: it must be a text'),
        ({**PAIR, "prompt": CHAT["messages"]}, "ends with an assistant's turn"),
        ({"prompt": "a", "chosen": "b"}, '"rejected" is missing: it must be a text'),
        ({**PAIR, "chosen": 3}, '"chosen" is 3: it must be a text'),
        ({**PAIR, "rejected": "cd"}, "are the same text, which prefers nothing"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_line(tmp_path, line, message):
    path = written(tmp_path, PAIR, b"", line)
    with pytest.raises(ValueError, match=f"data.jsonl, line 3: .*{message}"):
        read_pairs(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": "hi"}, '"messages" is "hi": it must be a list'),
        ({}, '"messages" is null'),
        ({"messages": [{"role": "", "content": "a"}]}, r'messages\[0\] is .*: it needs a "role"'),
        ({"messages": [USER, USER]}, r"roles are \['user', 'user'\]: training needs"),
        ({"messages": CHAT["messages"][::-1]}, r"roles are \['assistant', 'user'\]"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_line(tmp_path, line, message):
    with pytest.raises(ValueError, match=f"data.jsonl, line 2: .*{message}"):
        read_chats(written(tmp_path, CHAT, line))


def test_conversations_may_call_tools(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    chat = {"messages": [USER, call, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "3"}]}
    assert read_chats(written(tmp_path, CHAT, chat)) == [tuple(CHAT["messages"]), tuple(chat["messages"])]


@pytest.mark.parametrize("read", [read_pairs, read_chats])
def test_a_file_that_is_missing_or_empty_is_refused(tmp_path, read):
    with pytest.raises(ValueError, match="absent.jsonl: there is no such file; name a jsonl file of"):
        read(str(tmp_path / "absent.jsonl"))
    with pytest.raises(ValueError, match="data.jsonl holds no"):
        read(written(tmp_path, b"", b" "))


def test_the_documented_examples_are_read(tmp_path):
    pairs, chats, questions = (
        block.split("```")[0].strip().encode() for block in DOCUMENT.read_text("utf-8").split("```json")[1:]
    )
    assert [pair.chosen for pair in read_pairs(written(tmp_path, pairs))] == ["7", "Hello!"]
    assert [len(chat) for chat in read_chats(written(tmp_path, chats))] == [2]
    assert final_answer(json.loads(questions)["answer"]) == "7"


def test_a_pair_is_one_whole_tree():
    tokenizer = ByteTokenizer()
    pairs = [PreferencePair("ab", "cd", "e"), PreferencePair("f", "g", "hi")]
    first, second = trees.from_pairs(pairs, tokenizer, row_length=16)
    assert list(first.prompt) == tokenizer.prompt("ab") and first.whole and second.whole
    assert [(list(s.tokens), s.advantage) for s in first.samples] == [
        (tokenizer.completion("cd"), 1.0),
        (tokenizer.completion("e"), -1.0),
    ]
    assert {float(w) for tree in (first, second) for sample in tree.samples for w in sample.weights} == {0.5}
    batch, _ = pack([first, second], 16)
    ends = np.asarray(batch.labels)[np.asarray(batch.loss_weight) > 0] == 1
    assert ends.sum() == 4  # each completion trains one end token


def test_a_prompt_of_messages_goes_through_the_chat_template(model_directory):
    tokenizer = HuggingFaceTokenizer(model_directory("qwen2_5"))
    messages = ({"role": "system", "content": "be brief"}, USER)
    (tree,) = trees.from_pairs([PreferencePair(messages, "hello", "no")], tokenizer, row_length=256)
    assert list(tree.prompt) == tokenizer.prompt(messages)
    assert [sample.tokens[-1] in tokenizer.end_ids for sample in tree.samples] == [True, True]
    assert tokenizer.decode(tree.samples[0].tokens).strip() == "hello"


@pytest.mark.parametrize(
    ("pair", "tokenizer", "message"),
    [
        (
            PreferencePair("ab", "cd", "e", "f, line 7"),
            ByteTokenizer(),
            r"completions of \[3, 2\] need 9 .*row_length=8",
        ),
        (PreferencePair((USER,), "cd", "e", "f, line 7"), ByteTokenizer(), "1 messages need a chat template"),
        (
            PreferencePair("a", "b", "z", "f, line 7"),
            CharacterTokenizer("ab"),
            r"\['z'\] of 'z' are not in the alphabet",
        ),
    ],
)
def test_pairs_that_cannot_be_trained_are_refused_with_their_line(pair, tokenizer, message):
    with pytest.raises(ValueError, match=f"f, line 7: .*{message}"):
        trees.from_pairs([pair], tokenizer, row_length=8)
