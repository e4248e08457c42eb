"""Chat templates against transformers (tests/golden/make_chat.py), assistant masks, and turns appended by token."""

import json
from datetime import datetime
from pathlib import PurePosixPath

import jinja2
import pytest
import tokenizers
from jinja2.sandbox import SecurityError

from rl_posttrain.data import packing
from rl_posttrain.data.chat import ChatTemplate, encode_chat, load_templates, next_turn
from rl_posttrain.data.tokenizer import HuggingFaceTokenizer

FAMILIES = [
    "qwen2_5", "qwen3", "smollm2", "llama3_style", "mistral_style", "gemma_style", "gemma3_style", "phi3_5", "marked",
    "named",
]  # fmt: skip
SYSTEM = {"role": "system", "content": "Be brief."}
USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}
AGAIN, LAST = {"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}
FOUR = [USER, REPLY, AGAIN, LAST]
MARKING = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
MARKING += "{% if m.role == 'assistant' %}TURN{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def made(model_directory):
    """Family -> its tokenizer."""
    tokenizers = {family: HuggingFaceTokenizer(model_directory(family)) for family in FAMILIES}
    return tokenizers.__getitem__


def template(source, **special_tokens):
    return ChatTemplate({"default": source}, special_tokens)


def trained(tokenizer, chat):
    """The text of each run of trained ids, special tokens shown."""
    runs, inside = [], False
    for i, assistant in zip(chat.ids, chat.assistant):
        if assistant and not inside:
            runs.append([])
        inside = assistant
        if assistant:
            runs[-1].append(i)
    return [tokenizer._backend.decode(run, skip_special_tokens=False) for run in runs]


# ---- against transformers ----


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_and_ids_equal_transformers(family, made, chat_goldens):
    tokenizer, rendered, refused = made(family), 0, 0
    for name, golden in chat_goldens[family]["chats"].items():
        messages, options = (chat_goldens["conversations"][name][key] for key in ("messages", "options"))
        if "error" in golden:
            with pytest.raises((jinja2.TemplateError, TypeError, ValueError)) as caught:
                tokenizer.render(messages, **options)
            if golden["kind"] == "TemplateError":
                assert str(caught.value) == golden["error"], name
            refused += 1
            continue
        text = tokenizer.render(messages, **options)
        assert text == golden["text"], name
        assert tokenizer.encode_markup(text) == golden["ids"], name
        rendered += 1
    assert rendered >= 19 and rendered + refused == len(chat_goldens["conversations"])


@pytest.mark.parametrize(
    ("family", "default"),
    [
        ("qwen2_5", "You are Qwen, created by Alibaba Cloud."),
        ("llama3_style", "Today is 26 Jul 2024."),
        ("gemma_style", "<bos><start_of_turn>user"),
    ],
)
def test_o23_messages_without_system_give_the_ids_of_transformers(family, default, made, chat_goldens):
    for name in ("user", "three_turns"):
        golden, conversation = chat_goldens[family]["chats"][name], chat_goldens["conversations"][name]
        text = made(family).render(conversation["messages"], **conversation["options"])
        assert made(family).encode_prompt(text)[0] == golden["ids"]
        assert default in text


def test_o23_the_error_of_a_template_surfaces(made):
    with pytest.raises(jinja2.TemplateError, match="^This model takes no system message$"):
        made("gemma_style").prompt([SYSTEM, USER])
    with pytest.raises(jinja2.TemplateError, match="^This model takes no system message$"):
        encode_chat(made("gemma_style"), [SYSTEM, USER, REPLY])


@pytest.mark.parametrize("family", ["smollm2", "llama3_style", "mistral_style", "gemma_style", "phi3_5"])
def test_o22_the_ids_of_a_chat_equal_transformers(family, made, chat_goldens):
    for name in ("answered", "four_turns"):
        golden, conversation = chat_goldens[family]["chats"][name], chat_goldens["conversations"][name]
        if "ids" in golden and (family, name) != ("mistral_style", "four_turns"):  # see the refusals
            chat = encode_chat(made(family), conversation["messages"], **conversation["options"])
            assert list(chat.ids) == golden["ids"]


def test_masks_equal_transformers_up_to_the_end_token(made, chat_goldens):
    """Its marker spans the line break after the end token as well, which nobody generates."""
    tokenizer, compared = made("marked"), 0
    for name, golden in chat_goldens["marked"]["chats"].items():
        messages, options = (chat_goldens["conversations"][name][key] for key in ("messages", "options"))
        spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if sum(golden.get("mask", [])) == 0 or options.get("add_generation_prompt") or messages[0]["role"] == "note":
            continue
        chat = encode_chat(tokenizer, messages, **options)
        after_end = [b in tokenizer.end_ids for b in [0, *golden["ids"][:-1]]]
        expected = [bool(m) and not after for m, after in zip(golden["mask"], after_end)]
        assert (list(chat.ids), list(chat.assistant)) == (golden["ids"], expected), name
        assert sum(i in tokenizer.end_ids for i, m in zip(chat.ids, chat.assistant) if m) == len(spoken)
        compared += 1
    assert compared >= 6


# ---- what a template sees ----


def test_today_is_todays_date_unless_it_is_given(made):
    assert f"Today is {datetime.now():%d %b %Y}." in made("llama3_style").render([USER])
    assert "Today is 1 May 2000." in made("llama3_style").render([USER], date_string="1 May 2000")


def test_variables_come_before_special_tokens_and_missing_ones_are_empty():
    written = template("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", bos_token="<s>", eos_token="</s>")
    assert written.render([USER], eos_token="<end>") == "<s>|<end>|"


def test_json_keeps_characters_as_they_are():
    assert template("{{ messages[0].content | tojson }}").render([{**USER, "content": "é<&>'👍"}]) == '"é<&>\'👍"'


def test_templates_make_mappings():
    assert template("{{ dict(a=1) }} {{ dict.fromkeys('ab', 0) }}").render([USER]) == "{'a': 1} {'a': 0, 'b': 0}"


def test_the_callers_messages_stay_as_they_were():
    message = {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None}
    before = json.dumps(message)
    template("{{ messages[0].content[0].text }}").render([message], continue_final_message=True)
    assert json.dumps(message) == before


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.format.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__.co_consts[0] }}{{ strftime_now.__globals__.os }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._hidden = 1 %}",
        "{{ dict.__subclasses__() }}",
        "{{ dict.update(messages[0], content='') or messages[0].content }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_or_change_what_it_gets(source):
    try:
        assert template(source).render([USER]) == ""
    except (SecurityError, jinja2.UndefinedError):
        return
    assert "__globals__" in source  # what is merely asked for is undefined, and empty when written


def test_foreign_objects_stay_out_of_the_sandbox():
    with pytest.raises(TypeError, match="of type PurePosixPath in a chat: pass text, numbers, lists and mappings only"):
        template("{{ messages[0].content }}").render([{"role": "user", "content": PurePosixPath("x")}])


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "at least one message"),
        ([{"content": "Hi"}], {}, 'needs a "role"'),
        ([USER], {"name": "rag"}, r"no chat template is called 'rag': use one of \['default'\]"),
        ([USER], {"add_generation_prompt": True, "continue_final_message": True}, "exclude each other"),
        ([{"role": "user"}], {"continue_final_message": True}, "has no text to continue"),
        ([{"role": "tool", "content": "x"}], {"continue_final_message": True}, "leaves the final message out"),
    ],
)
def test_what_cannot_be_rendered_is_refused(messages, options, message):
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match=message):
        template(source).render(messages, **options)


def test_templates_are_found_wherever_a_directory_keeps_them(tmp_path):
    config = {"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]}
    assert load_templates(tmp_path, {}) == {}
    assert load_templates(tmp_path, {"chat_template": "a"}) == {"default": "a"}
    assert load_templates(tmp_path, config) == {"default": "a", "rag": "b"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "c"}))
    assert load_templates(tmp_path, config) == {"default": "c"}
    (tmp_path / "chat_template.jinja").write_text("d")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("e")
    found = load_templates(tmp_path, config)
    assert found == {"default": "d", "tool_use": "e"}
    named = ChatTemplate(found)
    assert (named.render([USER]), named.render([USER], tools=[]), named.render([USER], name="tool_use")) == (
        "d",
        "e",
        "e",
    )


# ---- what is trained ----


@pytest.mark.parametrize(
    ("family", "end"),
    [("qwen2_5", "<|im_end|>"), ("smollm2", "<|im_end|>"), ("llama3_style", "<|eot_id|>"), ("mistral_style", "</s>"),
     ("gemma_style", "<end_of_turn>"), ("gemma3_style", "<end_of_turn>"), ("phi3_5", "<|end|>"),
     ("marked", "<|im_end|>")],
)  # fmt: skip
def test_the_assistants_turns_are_trained_each_with_one_end(family, end, made):
    tokenizer = made(family)
    chat = encode_chat(tokenizer, FOUR)
    assert [text.strip() for text in trained(tokenizer, chat)] == [f"Yes.{end}", f"No.{end}"]
    last = encode_chat(tokenizer, FOUR, turns="last")
    assert last.ids == chat.ids and [text.strip() for text in trained(tokenizer, last)] == [f"No.{end}"]


@pytest.mark.parametrize("family", ["qwen2_5", "smollm2", "llama3_style", "gemma_style", "marked"])
def test_a_chat_begins_as_the_prompt_and_trains_the_completion(family, made):
    """Supervised training and rollout see the same tokens."""
    tokenizer = made(family)
    chat = encode_chat(tokenizer, [USER, REPLY])
    prompt, completion = tokenizer.prompt([USER]), tokenizer.completion("Yes.")
    assert list(chat.ids[: len(prompt) + len(completion)]) == prompt + completion
    mask = [False] * len(prompt) + [True] * len(completion)
    assert list(chat.assistant) == mask + [False] * (len(chat.ids) - len(mask))


def test_a_call_of_a_tool_is_trained_and_its_result_is_not(made):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}], "content": ""}
    chat = encode_chat(made("qwen2_5"), [USER, call, {"role": "tool", "content": "3"}, REPLY])
    texts = trained(made("qwen2_5"), chat)
    assert texts[0].endswith('{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>')
    assert len(texts) == 2 and texts[1] == "Yes.<|im_end|>" and "tool_response" not in "".join(texts)


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_remedy(made):
    with pytest.raises(ValueError, match=r"rewrites messages\[2\] or what precedes it"):  # the system message moves on
        encode_chat(made("mistral_style"), [SYSTEM, *FOUR])
    qwen3 = made("qwen3")
    with pytest.raises(ValueError, match=r"rewrites messages\[1\].*turns='last'\) for each assistant turn"):
        encode_chat(qwen3, FOUR)
    first, second = (encode_chat(qwen3, FOUR[:n], turns="last") for n in (2, 4))
    empty = "<think>\n\n</think>\n\n"
    assert trained(qwen3, first) == [f"{empty}Yes.<|im_end|>"] and trained(qwen3, second) == [f"{empty}No.<|im_end|>"]


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n", ["Yes.<|im_end|>"]),
        ("{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}", ["Yes.<|im_end|>"]),
        (
            "{% generation %}Yes.{% endgeneration %}|{% generation %}on<|im_end|>{% endgeneration %}",
            ["Yes.", "on<|im_end|>"],
        ),
    ],
)
def test_markers_may_stop_short_of_the_end_or_run_past_it(turn, expected, model_directory):
    tokenizer = HuggingFaceTokenizer(model_directory("smollm2", template=MARKING.replace("TURN", turn)))
    assert trained(tokenizer, encode_chat(tokenizer, [USER, REPLY])) == expected


def test_markers_without_an_end_are_refused(model_directory):
    turn = "{% generation %}{{ m.content }}{% endgeneration %}\n"
    tokenizer = HuggingFaceTokenizer(model_directory("smollm2", template=MARKING.replace("TURN", turn)))
    with pytest.raises(ValueError, match="marks 0 turns with an end token, of 1 by the assistant"):
        encode_chat(tokenizer, [USER, REPLY])


def test_a_template_without_an_end_is_refused(model_directory):
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    source += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = HuggingFaceTokenizer(model_directory("qwen2_5", template=source))
    with pytest.raises(ValueError, match="never learn to stop: write {{ eos_token }} there"):
        encode_chat(tokenizer, [USER, REPLY])
    with pytest.raises(ValueError, match="closes an assistant turn with none of the end tokens"):
        next_turn(tokenizer, [AGAIN], ended=True)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER], r"assistant turns at \[\] of 1 messages"),
        ([REPLY, USER, REPLY], r"assistant turns at \[0, 2\] of 3"),
        ([USER, {"role": "assistant", "content": "a<|im_end|>"}], r"messages\[1\] holds the end token '<\|im_end\|>'"),
    ],
)
def test_chats_that_cannot_be_trained_are_refused(messages, message, made):
    with pytest.raises(ValueError, match=message):
        encode_chat(made("smollm2"), messages)


# ---- turns appended token by token ----


@pytest.mark.parametrize("family", ["qwen2_5", "smollm2", "llama3_style", "mistral_style", "gemma_style", "phi3_5"])
@pytest.mark.parametrize("ended", [True, False])
def test_appended_turns_are_what_the_template_writes(family, ended, made):
    tokenizer = made(family)
    sampled = tokenizer.completion("Yes.")[: None if ended else -1]
    ids = tokenizer.prompt([USER]) + sampled + next_turn(tokenizer, [AGAIN], ended=ended)
    assert ids == tokenizer.prompt([USER, REPLY, AGAIN])
    sampled = tokenizer.completion("No.")[: None if ended else -1]
    more = ids + sampled + next_turn(tokenizer, [{"role": "user", "content": "日本?"}], ended=ended)
    assert more == tokenizer.prompt([*FOUR, {"role": "user", "content": "日本?"}])


def test_results_of_tools_are_appended_likewise(made):
    tokenizer = made("qwen2_5")
    results = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]
    ids = tokenizer.prompt([USER]) + tokenizer.completion("Yes.") + next_turn(tokenizer, results, ended=True)
    assert ids == tokenizer.prompt([USER, REPLY, *results])


def test_a_sampled_turn_with_thinking_stays_although_the_template_would_cut_it(made):
    tokenizer = made("qwen3")
    sampled = tokenizer.encode_markup("<think>\nAdd.\n</think>\n\n42<|im_end|>")
    appended = next_turn(tokenizer, [AGAIN], ended=True)
    text = tokenizer._backend.decode(sampled + appended, skip_special_tokens=False)
    assert text.endswith("42<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(ValueError, match="rewrites an earlier turn when the next one comes"):
        next_turn(tokenizer, [AGAIN], ended=True, enable_thinking=False)


def test_o15_a_two_turn_row_keeps_the_sampled_ids(tmp_path):
    """[he][llo] was sampled; encoding its text again would give [hello], which the policy never drew."""
    tokenizer = toy(tmp_path)
    he, llo, hello, end, good, bye = (
        tokenizer.encode_markup(t)[0] for t in ("he", "llo", "hello", "</s>", "good", "bye")
    )
    assert tokenizer.encode("hello") == [hello] and tokenizer.decode([he, llo]) == "hello"

    prompt, first, second = tokenizer.prompt("hi"), [he, llo, end], [good, bye, end]
    observed = next_turn(tokenizer, [{"role": "user", "content": "bye"}], ended=True)
    tokens = [*first, *observed, *second]
    assert tokenizer._backend.decode(prompt + tokens, skip_special_tokens=False) == tokenizer.render(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"},
         {"role": "user", "content": "bye"}, {"role": "assistant", "content": "goodbye"}],
    )  # fmt: skip

    weights = [1.0] * 3 + [0.0] * len(observed) + [1.0] * 3
    logprobs = [-0.1, -0.2, -0.3, *[0.0] * len(observed), -0.4, -0.5, -0.6]
    tree = packing.Tree(prompt, (packing.Sample(tokens, weights, 1.0, logprobs),))
    batch, (place,) = packing.pack([tree], row_length=64)
    span = slice(place.start, place.start + place.length)
    labels, weight, logprob = (
        getattr(batch, name)[0, span] for name in ("labels", "loss_weight", "behaviour_logprobs")
    )
    assert labels[weight > 0].tolist() == first + second and hello not in labels
    assert logprob[weight > 0].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6])
    assert (
        batch.tokens[0, place.start + 1 : place.start + 4].tolist() == first
    )  # what the second turn is conditioned on


def toy(directory):
    """A vocabulary in which "hello" is one token and also two."""
    words = ["<s>", "</s>", "[", "]", "h", "e", "l", "o", "g", "d", "b", "y", "i", "he", "ll", "llo", "hello"]
    words += ["go", "od", "good", "by", "bye"]
    merges = ["h e", "l l", "ll o", "he llo", "g o", "o d", "go od", "b y", "by e"]
    model = tokenizers.models.BPE(
        vocab={word: i for i, word in enumerate(words)}, merges=[tuple(m.split()) for m in merges]
    )
    made = tokenizers.Tokenizer(model)
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(directory / "tokenizer.json"))
    source = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}"
    source += "{{ m.content + eos_token }}{% endif %}{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": source.replace("'", '"')}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return HuggingFaceTokenizer(directory)
