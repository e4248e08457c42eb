"""A chat in the terminal with a tiny model: what is shown is what was drawn, turn after turn."""

import io
import json
import shutil

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from experiments import chat, sample
from rl_posttrain.config import ConfigError
from rl_posttrain.data.huggingface import HuggingFaceTokenizer
from rl_posttrain.model import convert, transformer
from rl_posttrain.model.transformer import ModelConfig
from rl_posttrain.rollout.generate import decode_groups
from rl_posttrain.rollout.sampling import Sampling

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<|start|>", "<|end|>", "<|stop|>"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model directory: random weights, and a byte-level vocabulary with a few merges."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("t", "h"), ("th", "e"), ("Ġ", "a")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    ends = {"eos_token_id": [tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|stop|>")]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    cfg = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        embed_dim=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=48,
        tie_embeddings=False,
    )
    convert.save_model(folder, transformer.init(jax.random.key(0), cfg), cfg, length=512)
    return str(folder)


def load(model, **changes):
    options = {"system": None, "temperature": 1.0, "max_tokens": 20, "stops": (), "seed": 0, **changes}
    return chat.load(model, **options)


@pytest.fixture(scope="module")
def speaker(model):
    return load(model)


def scripted(monkeypatch, speaker, *turns):
    """The model draws these ids, in chunks; returns the prompts that it was given."""
    prompts, left = [], list(turns)

    def chunks(speaker, prompt, key):
        prompts.append(list(prompt))
        ids = left.pop(0)
        return iter([ids[i : i + 3] for i in range(0, len(ids), 3)])

    monkeypatch.setattr(chat, "_chunks", chunks)
    return prompts


def test_greedy_ids_equal_those_of_a_rollout(model):
    """In chunks, over several calls, and until `max_tokens` exactly."""
    speaker = load(model, temperature=0.0)
    prompt = speaker.tokenizer.prompt("the cab")
    said, ended = chat.answer(speaker, prompt, speaker.key, lambda text: None)
    tokens, _, counts, done = decode_groups(
        speaker.params,
        np.array([prompt + [0]], np.int32),
        np.array([len(prompt)], np.int32),
        np.zeros(1, np.uint32),
        np.zeros(1, np.uint32),
        jax.random.key(1),
        model_cfg=speaker.cfg,
        sampling=Sampling(0.0),
        width=1,
        max_tokens=20,
        end_ids=speaker.tokenizer.end_ids,
    )
    assert said == np.asarray(tokens)[0, 0, : counts[0, 0]].tolist() and ended == bool(done[0, 0])
    assert len(said) > chat.CHUNK


def test_draws_follow_the_key_and_what_is_shown_is_what_was_drawn(speaker):
    tokenizer, seen = speaker.tokenizer, []
    for seed in (0, 0, 1):
        pieces: list[str] = []
        said, ended = chat.answer(speaker, tokenizer.prompt("ab"), jax.random.key(seed), pieces.append)
        assert "".join(pieces) == tokenizer.decode(said) and len(pieces) > 1
        assert ended == (said[-1] in tokenizer.end_ids) and (ended or len(said) == 20)
        seen.append(said)
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize("end", ["<|end|>", "<|stop|>"])
def test_a_turn_follows_on_what_was_drawn_without_encoding_it_again(monkeypatch, speaker, end):
    """Also where the ids are not those that their text encodes to, and whichever end token came."""
    tokenizer = speaker.tokenizer
    (end_id,) = tokenizer.encode_markup(end)
    drawn = [*tokenizer.encode("t"), *tokenizer.encode("h"), *tokenizer.encode("e"), end_id]
    assert tokenizer.encode("the") != drawn[:-1]
    prompts = scripted(monkeypatch, speaker, drawn, tokenizer.encode("ab"), tokenizer.encode("é"))
    conversation, shown = chat.Conversation(speaker), []
    conversation.ask("one", shown.append)
    assert "".join(shown) == "the"
    conversation.ask("two", shown.append)
    between = "\n<|start|>user\ntwo<|end|>\n<|start|>assistant\n"
    assert prompts[1] == [*prompts[0], *drawn, *tokenizer.encode_markup(between)]
    conversation.ask("three", shown.append)  # after an answer that was cut off, which the template's token ends
    between = "<|end|>\n<|start|>user\nthree<|end|>\n<|start|>assistant\n"
    assert prompts[2] == [*prompts[1], *tokenizer.encode("ab"), *tokenizer.encode_markup(between)]
    conversation.reset()
    assert conversation.ids == []


def test_no_character_is_shown_broken(monkeypatch, speaker):
    tokenizer = speaker.tokenizer
    text = "naïve – 日本語 🙂"
    prompts = scripted(monkeypatch, speaker, tokenizer.encode(text))
    pieces: list[str] = []
    chat.Conversation(speaker).ask("x", pieces.append)
    assert prompts and "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


def test_an_answer_ends_before_a_stop_string_wherever_it_falls(monkeypatch, model):
    speaker = load(model, stops=("STOP", "##"))
    tokenizer = speaker.tokenizer
    before, whole = tokenizer.encode("ab ST"), tokenizer.encode("ab STOP and more")
    scripted(monkeypatch, speaker, whole, before)
    pieces: list[str] = []
    conversation = chat.Conversation(speaker)
    conversation.ask("x", pieces.append)
    assert "".join(pieces) == "ab " and conversation.ids[-4:] == tokenizer.encode("STOP") and not conversation.ended
    pieces.clear()
    conversation.ask("y", pieces.append)
    assert "".join(pieces) == "ab ST"  # what only began like a stop string is shown in the end


def test_the_terminal(monkeypatch, capsys, model):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n/reset\nhello again\n"))
    asked = []
    ask = chat.Conversation.ask
    monkeypatch.setattr(
        chat.Conversation, "ask", lambda self, text, show: (asked.append((text, len(self.ids))), ask(self, text, show))
    )
    assert sample.main(["--model", model, "--max_tokens", "20", "--seed", "3"]) == 0
    assert asked == [("hello", 0), ("hello again", 0)]
    assert capsys.readouterr().out.count("you> ") == 5


def test_one_answer_with_a_system_message(monkeypatch, capsys, model):
    seen = []
    draw = chat._chunks
    monkeypatch.setattr(chat, "_chunks", lambda s, prompt, key: (seen.append(prompt), draw(s, prompt, key))[1])
    command = ["--model", model, "--prompt", "ab", "--max_tokens", "20", "--temperature", "0"]
    assert sample.main(command) == 0
    plain = capsys.readouterr().out
    assert sample.main([*command, "--system", "the"]) == 0
    assert capsys.readouterr().out != plain
    tokenizer = HuggingFaceTokenizer(model)
    user = "<|start|>user\nab<|end|>\n<|start|>assistant\n"
    assert seen[0] == tokenizer.encode_markup(user)
    assert seen[1] == tokenizer.encode_markup("<|start|>system\nthe<|end|>\n" + user)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "2"], "--samples has no effect with --model"),
        (["--max_tokens", "0"], "max_tokens=0"),
        (["--temperature", "-1"], "temperature=-1"),
        (["--stop", ""], "empty stop string"),
    ],
)
def test_what_has_no_effect_or_sense_is_refused(model, arguments, message):
    with pytest.raises(ConfigError, match=message):
        sample.main(["--model", model, "--prompt", "x", *arguments])


def test_a_run_refuses_the_options_of_a_chat():
    with pytest.raises(ConfigError, match="--system has no effect with a run's folder"):
        sample.main(["runs/demo", "--system", "x"])


def test_a_directory_without_a_chat_template_is_refused(model, tmp_path):
    bare = shutil.copytree(model, tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    with pytest.raises(ConfigError, match="no chat template"):
        sample.main(["--model", str(bare)])
