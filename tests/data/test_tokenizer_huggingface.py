"""The tokenizers of model directories against transformers (tests/golden/make_chat.py), and their edges."""

import json

import jax
import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_posttrain.config import ConfigError, build
from rl_posttrain.data import packing, trees
from rl_posttrain.data.chat import encode_chat
from rl_posttrain.data.tokenizer import HuggingFaceTokenizer, TokenizerConfig, make_tokenizer
from rl_posttrain.model.transformer import ModelConfig, init
from rl_posttrain.rollout.generate import generate
from rl_posttrain.rollout.sampling import Sampling
from rl_posttrain.types import Task

FAMILIES = [
    "qwen2_5", "qwen3", "smollm2", "llama3_style", "mistral_style", "gemma_style", "gemma3_style", "phi3_5", "marked",
    "named",
]  # fmt: skip
USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Forty-two."}
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
PLAIN_TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.fixture(scope="module")
def made(model_directory):
    """Family -> its tokenizer."""
    tokenizers = {family: HuggingFaceTokenizer(model_directory(family)) for family in FAMILIES}
    return tokenizers.__getitem__


def task(prompt, demonstration=None):
    return Task("domain", "train", 0, prompt, demonstration)


# ---- ids and texts ----


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_texts_equal_transformers(family, made, chat_goldens):
    tokenizer = made(family)
    for case in chat_goldens[family]["texts"]:
        assert tokenizer.encode_markup(case["text"]) == case["ids"], case
        if not tokenizer.special_ids & set(case["ids"]):
            assert tokenizer.encode(case["text"]) == case["ids"], case


@pytest.mark.parametrize("family", FAMILIES)
def test_decoded_ids_equal_transformers(family, made, chat_goldens):
    for case in chat_goldens[family]["decoded"]:
        assert made(family).decode(case["ids"]) == case["text"], case


@given(text=st.text())
@pytest.mark.parametrize("family", ["smollm2", "llama3_style", "mistral_style", "gemma_style"])
def test_any_text_decodes_to_itself(family, made, text):
    tokenizer = made(family)
    if family in ("mistral_style", "gemma_style"):
        text = text.replace("▁", "")  # these vocabularies write a space so, and cannot tell the two apart
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("family", "text"), [("smollm2", "a<|im_end|>b"), ("mistral_style", "<s>a</s>b")])
def test_special_tokens_in_ordinary_text_are_ordinary_text(family, made, text):
    tokenizer = made(family)
    assert not tokenizer.special_ids & set(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_settings_that_a_tokenizer_file_carries_along_cut_and_pad_nothing(model_directory):
    directory = model_directory("smollm2")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    tokenizer["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 2, "pad_type_id": 0,
        "pad_token": "<|im_end|>",
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    made = HuggingFaceTokenizer(directory)
    assert 3 < len(made.encode("xyzxyz")) < 10 and 3 < len(made.encode_markup("xyzxyz")) < 10


def test_ids_of_a_padded_vocabulary_decode_to_nothing_and_others_are_refused(model_directory):
    directory = model_directory("qwen2_5")
    size = HuggingFaceTokenizer(directory).vocab_size
    (directory / "config.json").write_text(json.dumps({"vocab_size": size + 8}))
    padded = HuggingFaceTokenizer(directory)
    assert padded.vocab_size == size + 8
    assert padded.decode([*padded.encode("a"), size + 7, *padded.encode("b")]) == "ab"
    for outside in (size + 8, -1):
        with pytest.raises(ValueError, match=rf"ids \[{outside}\] are outside the vocabulary of {size + 8}"):
            padded.decode([outside])


def test_a_token_beyond_the_model_is_refused_where_it_is_encoded(model_directory):
    directory = model_directory("qwen2_5", add_bos_token=False)
    plain = HuggingFaceTokenizer(directory)
    last = plain.vocab_size - 1
    (directory / "config.json").write_text(json.dumps({"text_config": {"vocab_size": last}}))
    smaller = HuggingFaceTokenizer(directory)
    assert smaller.vocab_size == last
    with pytest.raises(ValueError, match=rf"ids \[{last}\]"):
        smaller.encode_markup("</tool_call>")


# ---- ends ----


def test_ends_come_from_both_configs_and_the_tokenizer(model_directory):
    directory = model_directory("qwen2_5")
    made = HuggingFaceTokenizer(directory)
    assert made.end_texts == ("<|im_end|>", "<|endoftext|>") and made.decode(made.end_ids) == ""
    assert made.end_ids[made.end_texts.index("<|endoftext|>")] == made.pad_id
    (directory / "generation_config.json").unlink()
    (directory / "config.json").write_text(json.dumps({"eos_token_id": made.encode_markup("<|eot_id|>")[0]}))
    assert HuggingFaceTokenizer(directory).end_texts == ("<|im_end|>", "<|eot_id|>")


def test_the_end_that_only_the_template_writes_stops_generation_too(model_directory):
    directory = model_directory("gemma_style")
    (directory / "generation_config.json").unlink()
    assert HuggingFaceTokenizer(directory).end_texts == ("<eos>", "<end_of_turn>")
    assert HuggingFaceTokenizer(directory, chat=False).end_texts == ("<eos>",)


def test_a_directory_without_any_end_is_refused(model_directory):
    directory = model_directory("qwen2_5", eos_token=None, template=None)
    (directory / "generation_config.json").write_text("{}")
    with pytest.raises(ValueError, match="names no end token: set eos_token in tokenizer_config.json"):
        HuggingFaceTokenizer(directory)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["Forty-two.", "", "\n\nYes", "日本 👍", "a\n"])
def test_a_completion_is_the_turn_that_the_template_writes_with_one_end(family, text, made, chat_goldens):
    tokenizer = made(family)
    completion = tokenizer.completion(text)
    assert [i for i in completion if i in tokenizer.end_ids] == completion[-1:]
    thought = "<think>\n\n</think>\n\n" if family == "qwen3" else ""  # its template shows the last turn so
    trimmed = text.strip() if family in ("llama3_style", "mistral_style", "gemma_style", "gemma3_style") else text
    expected = thought + (trimmed.lstrip("\n") if family == "qwen3" else trimmed)
    assert tokenizer.decode(completion) == expected
    conversation = tokenizer.render([USER, {"role": "assistant", "content": text}])
    begun = tokenizer.encode_markup(tokenizer.render([USER], add_generation_prompt=True))
    whole = tokenizer.encode_markup(conversation)
    if not text.startswith("\n"):  # a break merges with that of the prompt, whose ids are given by then
        assert (begun + completion) == whole[: len(begun) + len(completion)]


def test_a_template_without_an_end_still_gives_completions_one(model_directory):
    made = HuggingFaceTokenizer(model_directory("qwen2_5", template=PLAIN_TEMPLATE.replace("{{ eos_token }}", "")))
    assert made.completion("ab") == [*made.encode("ab\n"), made.end_ids[0]]


def test_a_completion_that_holds_an_end_is_refused(made):
    with pytest.raises(ValueError, match=r"holds the end token '<\|im_end\|>': take it out"):
        made("smollm2").completion("a<|im_end|>b")


def test_a_template_that_opens_demonstrations_otherwise_is_refused(model_directory):
    template = PLAIN_TEMPLATE.replace("assistant: {%", "assistant: <think>\n{%")
    made = HuggingFaceTokenizer(model_directory("qwen2_5", template=template))
    assert made.decode(made.prompt("a")).endswith("assistant: <think>\n")
    with pytest.raises(ValueError, match="opens a demonstration of the assistant otherwise"):
        made.completion("a")


def test_o21_with_pad_as_end_every_row_trains_exactly_one_end(made):
    tokenizer = made("smollm2")
    assert tokenizer.pad_id in tokenizer.end_ids
    examples = [task("Add.", "Forty-two."), task("And?", "Yes."), task("Cut.", "")]
    batch, placements = packing.pack(trees.from_examples(examples, tokenizer), row_length=96)
    end, weights = tokenizer.pad_id, np.asarray(batch.loss_weight)
    for place in placements:
        span = slice(place.start, place.start + place.length)
        labels = np.asarray(batch.labels)[place.row, span]
        assert (weights[place.row, span] > 0).all()
        assert (labels == end).tolist() == [False] * (place.length - 1) + [True]
    assert ((weights > 0) & (np.asarray(batch.labels) == end)).sum() == len(examples)
    assert (weights[np.asarray(batch.segments) == 0] == 0).all()

    chat = encode_chat(tokenizer, [USER, REPLY, USER, {"role": "assistant", "content": "Yes."}])
    trained = [i for i, assistant in zip(chat.ids, chat.assistant) if assistant]
    assert trained == [*tokenizer.completion("Forty-two."), *tokenizer.completion("Yes.")]
    assert trained.count(end) == 2 and chat.ids.count(end) == 5


def test_rollouts_work_with_it_unchanged(made):
    tokenizer = made("gemma_style")  # two ends
    cfg = ModelConfig(
        vocab_size=tokenizer.vocab_size, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16
    )
    tasks = [task("What is twelve plus thirty?")]
    rollouts = generate(
        init(jax.random.key(0), cfg), tasks, tokenizer=tokenizer, model_cfg=cfg, sampling=Sampling(1.0), width=64,
        max_tokens=96, prompt_bucket=8, rows=1, key=jax.random.key(1), policy_version=0,
    )[0]  # fmt: skip
    assert {rollout.prompt_tokens for rollout in rollouts} == {tuple(tokenizer.prompt(tasks[0].prompt))}
    last = {rollout.completion_tokens[-1] for rollout in rollouts if rollout.finish_reason == "stop"}
    assert last == set(tokenizer.end_ids)  # each of them ends some
    for rollout in rollouts:
        inner = rollout.completion_tokens[: -1 if rollout.finish_reason == "stop" else None]
        assert not set(inner) & set(tokenizer.end_ids)
        assert rollout.text == tokenizer.decode(inner)


# ---- the start ----

STARTING = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [0], "tokens": ["<|begin_of_text|>"]}},
}


@pytest.fixture(scope="module")
def starting(chat_goldens, model_directory):
    """(template writes it, post-processor adds it, add_bos_token) -> the tokenizer of a Llama-like directory."""

    def make(in_template, in_processor, declared=None, **options):
        template = ("{{ bos_token }}" if in_template else "") + PLAIN_TEMPLATE
        processor = None
        if in_processor:
            start = HuggingFaceTokenizer(model_directory("llama3_style")).start_id
            processor = json.loads(json.dumps(STARTING).replace('"ids": [0]', f'"ids": [{start}]'))
        directory = model_directory("llama3_style", template=template, post_processor=processor, add_bos_token=declared)
        return HuggingFaceTokenizer(directory, **options)

    return make


@pytest.mark.parametrize(
    ("in_template", "in_processor", "declared"),
    [(True, False, None), (True, True, None), (True, True, True), (False, True, None), (False, False, True),
     (True, False, False), (True, True, False), (False, True, False)],
)  # fmt: skip
def test_o22_exactly_one_start_token_whoever_adds_it(in_template, in_processor, declared, starting):
    tokenizer = starting(in_template, in_processor, declared)
    start = tokenizer.encode_markup("<|begin_of_text|>")[0]
    rollout = tokenizer.prompt("Hi")
    supervised = trees.from_examples([task("Hi", "Yes.")], tokenizer)[0]
    chat = encode_chat(tokenizer, [USER, REPLY])
    for ids in (rollout, supervised.prompt, list(chat.ids)):
        assert ids[0] == start and list(ids).count(start) == 1
    assert list(chat.ids[: len(rollout)]) == rollout
    assert list(supervised.samples[0].tokens).count(start) == 0
    trained = [i for i, assistant in zip(chat.ids, chat.assistant) if assistant]
    assert trained == tokenizer.completion("Forty-two.")  # the start token shifts the mask along


@pytest.mark.parametrize(("in_processor", "declared"), [(True, None), (False, True), (True, True), (True, False)])
def test_o22_raw_text_has_one_start_token_too(in_processor, declared, starting):
    tokenizer = starting(False, in_processor, declared, chat=False)
    expected = tokenizer.encode_markup("<|begin_of_text|>Hi")
    assert tokenizer.prompt("Hi") == tokenizer.prompt("<|begin_of_text|>Hi") == expected


def test_a_start_token_that_nobody_adds_is_not_added(starting, made):
    """As transformers: SmolLM2 declares `<|im_start|>` as its start token, and starts no plain text with it."""
    assert starting(False, False).start_id is None and starting(False, False, False).start_id is None
    assert made("smollm2").start_id is None


@pytest.mark.parametrize("family", FAMILIES)
def test_starts_of_texts_equal_transformers(family, made, chat_goldens):
    for case in chat_goldens[family]["texts"]:
        begins_with_start = case["started"][:1] == case["ids"][:1] == [made(family).start_id]
        expected = case["ids"] if begins_with_start else case["started"]  # theirs would have two
        assert made(family).encode_prompt(case["text"])[0] == expected, case


# ---- configs and prompts ----


def test_a_prompt_is_one_users_message_or_several_messages(made, chat_goldens):
    tokenizer = made("qwen2_5")
    chats, conversations = chat_goldens["qwen2_5"]["chats"], chat_goldens["conversations"]
    user = conversations["user"]["messages"]
    assert tokenizer.prompt(user[0]["content"]) == tokenizer.prompt(user) == chats["user"]["ids"]
    assert tokenizer.prompt(conversations["three_turns"]["messages"]) == chats["three_turns"]["ids"]


def test_raw_text_is_taken_as_it_is(model_directory):
    directory = model_directory("mistral_style")
    raw = HuggingFaceTokenizer(directory, chat=False)
    assert raw.prompt("The capital") == raw.encode_markup("<s>The capital")
    assert raw.decode(raw.prompt("The capital") + raw.completion(" is Paris")) == "The capital is Paris"
    assert raw.completion("a")[-1:] == [raw.end_ids[0]] == raw.encode_markup("</s>")
    with pytest.raises(ValueError, match="1 messages need a chat template"):
        raw.prompt([USER])
    with pytest.raises(ValueError, match="leave chat=False out"):
        raw.render([USER])
    without = HuggingFaceTokenizer(model_directory("mistral_style", template=None))
    assert without.prompt("The capital") == raw.prompt("The capital")


def test_configs_name_a_directory_a_system_message_and_variables(model_directory):
    directory = str(model_directory("qwen3"))
    values = {
        "kind": "huggingface",
        "directory": directory,
        "system": "Be brief.",
        "variables": {"enable_thinking": False},
    }
    made = make_tokenizer(build(TokenizerConfig, values))
    assert isinstance(made, HuggingFaceTokenizer)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    text += "<think>\n\n</think>\n\n"
    assert made.prompt("Hi") == made.encode_markup(text)
    assert made.completion("Yes") == made.encode_markup("Yes<|im_end|>")
    own = [{"role": "system", "content": "Mine."}, USER]
    assert "Be brief" not in made.render(own) and "Mine." in made.render(own)
    raw = make_tokenizer(build(TokenizerConfig, {"kind": "huggingface", "directory": directory, "chat": False}))
    assert raw.prompt("Hi") == raw.encode("Hi")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "huggingface"}, "needs the model's directory: set `directory`"),
        ({"kind": "huggingface", "directory": "d", "alphabet": "ab"}, "alphabet='ab' has no effect"),
        ({"directory": "d"}, "directory='d' has no effect with kind='byte'"),
        ({"chat": False}, "chat=False has no effect with kind='byte'"),
        ({"system": "Be brief."}, "system='Be brief.' has no effect"),
        ({"variables": {"a": 1}}, "variables={'a': 1} has no effect"),
    ],
)
def test_configs_that_contradict_themselves_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        build(TokenizerConfig, values)


def test_options_of_a_chat_have_no_effect_on_raw_text_and_are_refused(model_directory):
    directory = model_directory("qwen3")
    for options in ({"system": "Be brief."}, {"variables": {"enable_thinking": False}}):
        with pytest.raises(ValueError, match="have no effect on raw text"):
            HuggingFaceTokenizer(directory, chat=False, **options)
    with pytest.raises(ValueError, match="has no chat template: add chat_template.jinja, or use chat=False"):
        HuggingFaceTokenizer(model_directory("qwen3", template=None), chat=True)


def test_a_template_that_takes_no_system_message_says_so_at_once(model_directory):
    with pytest.raises(jinja2.TemplateError, match="This model takes no system message"):
        HuggingFaceTokenizer(model_directory("gemma_style"), system="Be brief.")


# ---- damaged directories ----


def test_a_missing_file_is_named_with_a_remedy(model_directory, tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer.json: name a directory that transformers"):
        HuggingFaceTokenizer(tmp_path)
    directory = model_directory("qwen2_5")
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer_config.json: copy it from"):
        HuggingFaceTokenizer(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_damaged_file_is_named(name, model_directory):
    directory = model_directory("qwen2_5")
    (directory / name).write_bytes((directory / name).read_bytes()[:-20])
    with pytest.raises(ValueError, match=f"{name} is damaged .*: fetch it again"):
        HuggingFaceTokenizer(directory)


def test_files_that_contradict_each_other_are_refused(model_directory):
    added = {"7": {"content": "<|im_end|>", "special": True}}
    with pytest.raises(ValueError, match=r"calls id 7 '<\|im_end\|>', and tokenizer.json '.*': load and save"):
        HuggingFaceTokenizer(model_directory("qwen2_5", added_tokens_decoder=added))
    with pytest.raises(ValueError, match="the special token '<nowhere>' is not in tokenizer.json"):
        HuggingFaceTokenizer(model_directory("qwen2_5", pad_token="<nowhere>"))


def test_special_tokens_of_the_map_count_where_the_config_has_none(model_directory):
    directory = model_directory("qwen2_5", eos_token=None, pad_token=None)
    tokens = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "additional_special_tokens": ["<think>"]}
    (directory / "special_tokens_map.json").write_text(json.dumps(tokens))
    made = HuggingFaceTokenizer(directory)
    assert made.end_texts[0] == "<|im_end|>" and made.pad_id == made.end_ids[0]
    assert made.decode(made.encode_markup("<think>a</think>")) == "a</think>"
    named = {"extra_special_tokens": {"thought_token": "<think>"}, "eos_token": "<|im_end|>"}
    (directory / "special_tokens_map.json").write_text(json.dumps(named))
    made = HuggingFaceTokenizer(directory)
    assert made.decode(made.encode_markup("<think>a</think>")) == "a</think>"
    assert made.special_tokens["thought_token"] == "<think>"
