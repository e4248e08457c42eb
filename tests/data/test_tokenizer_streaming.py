"""Text as its tokens come: whole characters only, and stop strings across token boundaries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_posttrain.data.streaming import IncrementalDecoder, Stop, StopSearch, find_stop
from rl_posttrain.data.tokenizer import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer

KINDS = ["byte", "byte_level", "pieces_prefixed", "pieces"]


@pytest.fixture(scope="module")
def tokenizers(model_directory):
    families = {"byte_level": "smollm2", "pieces_prefixed": "mistral_style", "pieces": "gemma_style"}
    made = {kind: HuggingFaceTokenizer(model_directory(family)) for kind, family in families.items()}
    return {"byte": ByteTokenizer(), **made}


def streamed(tokenizer, ids, cuts):
    """What each chunk of ids shows; `cuts` are where the chunks end."""
    decoder = IncrementalDecoder(tokenizer)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [*(decoder.push(ids[a:b]) for a, b in zip(edges, edges[1:])), decoder.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(), cuts=st.lists(st.integers(0, 99), max_size=12))
def test_any_text_streamed_in_any_split_decodes_to_itself(kind, tokenizers, text, cuts):
    if kind.startswith("pieces"):
        text = text.replace("▁", "")  # their vocabulary writes a space so
    pieces = streamed(tokenizers[kind], tokenizers[kind].encode(text), cuts)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), cuts=st.lists(st.integers(0, 99), max_size=12))
def test_any_ids_streamed_in_any_split_give_the_text_of_all(kind, tokenizers, data, cuts):
    """Broken bytes and special tokens included: as a policy may sample them."""
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    assert "".join(streamed(tokenizer, ids, cuts)) == tokenizer.decode(ids)
    assert "".join(streamed(tokenizer, ids, range(25))) == tokenizer.decode(ids)


def test_text_shows_as_soon_as_it_is_whole():
    tokenizer, decoder = ByteTokenizer(), IncrementalDecoder(ByteTokenizer())
    shown = [decoder.push([i]) for i in tokenizer.encode("a👍é")]
    assert shown == ["a", "", "", "", "👍", "", "é"] and decoder.flush() == ""


def test_bytes_that_never_become_a_character_show_at_the_end():
    tokenizer, decoder = ByteTokenizer(), IncrementalDecoder(ByteTokenizer())
    assert decoder.push(tokenizer.encode("a👍")[:-1]) == ""
    assert decoder.pending == "a" and decoder.flush() == "a\ufffd"


# ---- stop strings ----


def test_o14_a_stop_inside_a_token_cuts_the_text_there(tokenizers):
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("It is Paris, and")
    paris = next(n for n in range(len(ids)) if "Pari" in tokenizer.decode(ids[: n + 1]))
    assert tokenizer.decode([ids[paris]]) == " Paris"  # one token, which goes on after the stop
    logprobs = [-0.1 * n for n in range(len(ids))]
    stop = find_stop(tokenizer, ids, ["Pari"])
    assert stop == Stop("It is ", paris + 1, "Pari")
    assert len(ids[: stop.tokens]) == len(logprobs[: stop.tokens]) == paris + 1


@pytest.mark.parametrize("kind", KINDS)
def test_o14_a_stop_over_several_tokens_and_after_an_emoji(kind, tokenizers):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("Hi 👍\nStop here. More")
    found = find_stop(tokenizer, ids, ["nothing", "\nStop here."])
    assert found is not None and found.text == "Hi 👍" and "\ufffd" not in found.text
    assert "\nStop here." in tokenizer.decode(ids[: found.tokens])
    assert "\nStop here." not in tokenizer.decode(ids[: found.tokens - 1])


@pytest.mark.parametrize("kind", KINDS)
def test_o14_an_emoji_of_four_byte_tokens_as_the_stop(kind, tokenizers):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("a👍👍")
    found = find_stop(tokenizer, ids, ["👍"])
    assert found == Stop("a", len(ids) - 4, "👍")  # the last of its four bytes completes it, and none is waited for


@given(
    text=st.text(alphabet="ab👍é ", max_size=20), stops=st.lists(st.text("ab👍 ", min_size=1, max_size=3), min_size=1)
)
@pytest.mark.parametrize("kind", ["byte", "byte_level", "pieces"])
def test_stops_are_found_where_a_search_of_every_prefix_finds_them(kind, tokenizers, text, stops):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    expected = None
    for n in range(len(ids) + 1):
        prefix = tokenizer.decode(ids[:n])
        places = [(prefix.find(stop), -len(stop), stop) for stop in stops if stop in prefix]
        if places:
            at, _, stop = min(places)
            expected = Stop(prefix[:at], n, stop)
            break
    assert find_stop(tokenizer, ids, stops) == expected


def test_without_a_stop_nothing_is_found():
    tokenizer = CharacterTokenizer("abc")
    assert find_stop(tokenizer, tokenizer.completion("abcab"), ["ca", "cb"]) == Stop("ab", 4, "ca")
    assert find_stop(tokenizer, tokenizer.completion("abc"), ["ca"]) is None


@pytest.mark.parametrize("stops", [[], ["a", ""]])
def test_empty_stops_are_refused(stops):
    with pytest.raises(ValueError, match="none of them empty"):
        StopSearch(ByteTokenizer(), stops)
