"""Small model directories, as a hub has them, from the goldens of tests/golden/make_chat.py."""

import json
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture(scope="session")
def chat_goldens():
    return json.loads((GOLDEN / "chat.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def model_directory(chat_goldens, tmp_path_factory):
    """(family, template=source or None, post_processor=json or None, **changes of tokenizer_config) -> directory."""

    def make(family, *, template="its own", post_processor="its own", **changes):
        entry = chat_goldens[family]
        directory = tmp_path_factory.mktemp(family)
        tokenizer = json.loads((GOLDEN / "chat" / f"{entry['tokenizer']}.json").read_text(encoding="utf-8"))
        if post_processor != "its own":
            tokenizer["post_processor"] = post_processor
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
        config = {key: value for key, value in {**entry["config"], **changes}.items() if value is not None}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        ends = {"eos_token_id": [ids[end] for end in entry["ends"]]}
        (directory / "generation_config.json").write_text(json.dumps(ends))
        (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
        if template == "its own":
            named = {"default": entry["template"]} if isinstance(entry["template"], str) else entry["template"]
            sources = {name: (GOLDEN / "chat" / f"{file}.jinja").read_text("utf-8") for name, file in named.items()}
        else:
            sources = {} if template is None else {"default": template}
        for name, source in sources.items():
            folder = directory if name == "default" else directory / "additional_chat_templates"
            folder.mkdir(exist_ok=True)
            (folder / f"{'chat_template' if name == 'default' else name}.jinja").write_text(source, encoding="utf-8")
        return directory

    return make
