import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_posttrain.config import ConfigError, build
from rl_posttrain.data.tokenizer import ByteTokenizer, CharacterTokenizer, TokenizerConfig, make_tokenizer


def test_characters_follow_the_three_special_ids_in_the_order_of_the_alphabet():
    tokenizer = CharacterTokenizer("ba +")
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.end_ids) == (7, 0, (1,))
    assert tokenizer.encode("ab a") == [4, 3, 5, 4]
    assert tokenizer.prompt("a+") == [4, 6, 2]
    assert tokenizer.completion("a+") == [4, 6, 1]
    assert tokenizer.prompt("") == [2] and tokenizer.completion("") == [1]


def test_bytes_are_utf8_and_need_no_alphabet():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.end_ids) == (259, 0, (1,))
    assert tokenizer.encode("é") == [3 + 0xC3, 3 + 0xA9]
    assert tokenizer.prompt("A") == [68, 2] and tokenizer.completion("A") == [68, 1]


@given(st.text())
def test_bytes_give_back_any_text(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.completion(text)) == text == tokenizer.decode(tokenizer.prompt(text))


@given(st.text(alphabet="0123 +="))
def test_characters_give_back_any_text_over_the_alphabet(text):
    tokenizer = CharacterTokenizer("0123 +=")
    assert tokenizer.decode([0, *tokenizer.completion(text), 0]) == text


def test_bytes_that_are_not_utf8_become_replacement_characters():
    assert ByteTokenizer().decode([3 + 0xFF, 3 + ord("a")]) == "\ufffda"


def test_an_unknown_character_is_named_with_the_alphabet():
    with pytest.raises(ValueError, match=r"\['c', 'z'\].*'azbc'.*alphabet 'ab'"):
        CharacterTokenizer("ab").encode("azbc")


@pytest.mark.parametrize("ids", [[5], [-1]])
def test_an_id_outside_the_vocabulary_is_refused(ids):
    with pytest.raises(ValueError, match="vocabulary of 5"):
        CharacterTokenizer("ab").decode(ids)


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_an_alphabet_holds_every_character_once(alphabet):
    with pytest.raises(ValueError, match="every character once"):
        CharacterTokenizer(alphabet)


def test_configs_name_a_tokenizer():
    assert isinstance(make_tokenizer(build(TokenizerConfig, {})), ByteTokenizer)
    made = make_tokenizer(build(TokenizerConfig, {"kind": "character", "alphabet": "xy"}))
    assert made.encode("yx") == [4, 3]


@pytest.mark.parametrize("values", [{"kind": "character"}, {"kind": "byte", "alphabet": "ab"}, {"kind": "word"}])
def test_configs_that_contradict_themselves_are_refused(values):
    with pytest.raises(ConfigError):
        build(TokenizerConfig, values)
