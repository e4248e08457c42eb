"""A model directory through the commands: checked and copied, trained fully and by adapters, exported, read again."""

import json
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments import cli, export, import_model
from experiments import run as run_command
from rl_posttrain import services
from rl_posttrain.data.huggingface import HuggingFaceTokenizer
from rl_posttrain.model import convert, lora, peft, transformer
from rl_posttrain.model.transformer import ModelConfig
from rl_posttrain.sharding import mesh as mesh_lib

COMMANDS = {"run": run_command, "export": export, "import_model": import_model}
CONFIG = """
def get_config():
    return dict(
        pretrained={pretrained!r},
        lora=dict(rank=0, alpha=6.0, rslora=True, targets=("query", "value", "down")),
        mesh=dict(fsdp=-1),
        tasks={{"strings/reverse": dict(options=dict(min_length=2, max_length=3, letters=4))}},
        rollout=dict(prompts_per_step=4, group_size=4, max_tokens=6, prompt_bucket=16),
        rewards=dict(malformed=-0.5),
        grpo=dict(steps=2, row_length=48),
        update=dict(learning_rate=1e-2),
        evaluation=dict(items=1, rows=8),
    )
"""
ENDS = [0, *range(100, 160)]  # so many that some completions end and some are cut off: their rewards differ


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model as it would be published, with a byte-level tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=270, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(["reverse the letters of the word"] * 3, trainer)
    size = backend.get_vocab_size()
    cfg = ModelConfig(
        vocab_size=size,
        embed_dim=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_dim=64,
        qkv_bias=True,
        norm_epsilon=1e-5,
    )
    convert.save_model(directory, transformer.init(jax.random.key(7), cfg), cfg, length=128, shard_bytes=50_000)
    backend.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    config = {"eos_token": "<|end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return directory


@pytest.fixture(scope="module")
def config_file(model):
    path = model.parent / "config.py"
    path.write_text(CONFIG.format(pretrained=str(model)))
    return str(path)


@pytest.fixture(scope="module", params=["full", "lora"])
def run(request, config_file, tmp_path_factory):
    """(workdir, rank) of a finished run of two steps."""
    workdir = tmp_path_factory.mktemp("runs") / request.param
    rank = {"full": 0, "lora": 2}[request.param]
    arguments = ["--config", config_file, "--workdir", str(workdir), f"--config.lora.rank={rank}"]
    assert run_command.main(arguments) == 0
    return workdir, rank


@pytest.fixture
def refused(monkeypatch, capsys):
    """refused(command, *arguments) -> the error's text of a command that ends with exit code 2."""

    def refused(command, *arguments):
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.guarded(COMMANDS[command].main)
        assert ended.value.code == cli.BAD_CONFIG
        return capsys.readouterr().err

    return refused


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, expected)


def loaded(directory):
    return convert.load_params(directory, convert.model_config(directory))


# ---- import_model ----


def test_a_directory_is_checked_and_described(model, capsys):
    assert import_model.main([str(model)]) == 0
    # 270 tokens * 32 + 2 layers of (2 * 64 + 2 * 32) * 32 + 128 biases + 3 * 32 * 64 + 2 norms * 32, and the last norm
    shown = capsys.readouterr().out
    assert "Qwen2ForCausalLM, 33,632 parameters in 26 tensors, 2 layers of width 32, vocabulary 270" in shown
    assert "whole and understood" in shown


def test_a_copy_is_the_model_and_its_tokenizer(model, tmp_path):
    (model / "optimizer.pt").write_text("what others left behind")
    out = tmp_path / "copy"
    assert import_model.main([str(model), "--out", str(out)]) == 0
    names = {path.name for path in model.iterdir()} - {"optimizer.pt"}
    assert {path.name for path in out.iterdir()} == names
    assert all((out / name).read_bytes() == (model / name).read_bytes() for name in names)


def test_what_cannot_be_imported_is_refused_with_code_2(model, tmp_path, refused):
    assert "neither a directory nor a name" in refused("import_model", tmp_path / "nowhere")
    assert "--out DIRECTORY is missing" in refused("import_model", "somebody/some-model")
    assert "holds weights already" in refused("import_model", model, "--out", model)
    assert "--dtype bfloat16 has no effect" in refused("import_model", model, "--dtype", "bfloat16")
    assert "config.json is missing" in refused("import_model", tmp_path)
    assert "x.gguf is missing" in refused("import_model", "--gguf", tmp_path / "x.gguf", "--out", tmp_path / "o")
    copy = tmp_path / "copy"
    import_model.main([str(model), "--out", str(copy)])
    shard = sorted(copy.glob("*.safetensors"))[1]
    save_file({name: values for name, values in list(load_file(shard).items())[1:]}, shard)
    for arguments in ([copy], [copy, "--out", tmp_path / "again"]):
        assert f"{shard.name} does not hold what" in refused("import_model", *arguments)
    assert not (tmp_path / "again").exists()
    shard.unlink()
    assert f"{shard.name} is missing" in refused("import_model", copy)


# ---- a run's export ----


def test_an_export_holds_the_parameters_of_the_checkpoint(run, model, tmp_path, capsys):
    workdir, rank = run
    out = tmp_path / "out"
    assert export.main([str(workdir), "--out", str(out), "--shard_bytes", "50000"]) == 0
    assert "step 2 of" in capsys.readouterr().out
    with cli.opened_params(str(workdir), "latest") as (config, params, step):
        assert step == 2
    before, after = loaded(model), loaded(out)
    assert_same(after, params)
    moved = {name for name, values in after["layers"].items() if not np.array_equal(values, before["layers"][name])}
    assert moved == ({"query", "value", "down"} if rank else set(after["layers"]))
    assert np.array_equal(after["embed"], before["embed"]) == bool(rank)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    assert set(HuggingFaceTokenizer(out).end_ids) == set(ENDS)
    assert import_model.main([str(out)]) == 0
    again = services.parse({"pretrained": str(out), "tasks": {"strings/reverse": {}}})  # the next run starts from it
    assert again.model == config.model


def test_an_export_refuses_to_mix(run, model, tmp_path, refused):
    workdir, _ = run
    assert "holds weights already" in refused("export", workdir, "--out", model)
    assert "holds no run" in refused("export", model.parent, "--out", tmp_path / "out")


def test_adapters_alone_are_those_of_the_checkpoint_and_a_run_starts_from_them(
    run, model, config_file, tmp_path, refused
):
    workdir, rank = run
    out = tmp_path / "adapter"
    if not rank:
        assert "has no adapters" in refused("export", workdir, "--adapter", "--out", out)
        return
    assert export.main([str(workdir), "--adapter", "--out", str(out)]) == 0
    assert "--dtype has no effect" in refused("export", workdir, "--adapter", "--out", out, "--dtype", "bfloat16")
    assert "holds an adapter already" in refused("export", workdir, "--adapter", "--out", out)
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    cfg = convert.model_config(model)
    found = peft.read_config(out, cfg)
    assert (found.rank, found.alpha, found.rslora, found.targets) == (2, 6.0, True, ("query", "value", "down"))
    with cli.opened_params(str(workdir), "latest", adapters=True) as (_, adapters, _):
        assert all(np.asarray(values).any() for values in adapters["layers"].values())
    assert_same(peft.load_adapters(out, cfg, found), adapters)
    with cli.opened_params(str(workdir), "latest") as (_, merged, _):
        pass
    mine = lora.merge(loaded(model), peft.load_adapters(out, cfg, found), found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, atol=1e-6), merged, mine)

    values = cli.load_config_file(config_file)
    started = services.parse({**values, "lora": {**values["lora"], "rank": 2, "adapter": str(out)}})
    mesh = mesh_lib.make_mesh(started.mesh)
    with jax.set_mesh(mesh):
        first = services.compiled(started, mesh)["init_params"]()
    assert_same(first, peft.load_adapters(out, cfg, found))

    start = ["run", "--config", config_file, "--workdir", tmp_path / "next", f"--config.lora.adapter={out}"]
    assert "has no effect with rank=0" in refused(*start)
    message = refused(*start, "--config.lora.rank=2", "--config.lora.alpha=7")
    assert "lora.alpha=7.0" in message and "says 6.0" in message
    assert "both name what the run starts from" in refused(*start, "--config.lora.rank=2", "--config.init_from=x")


def test_a_run_from_a_damaged_model_is_refused_with_code_2(model, config_file, tmp_path, refused):
    copy = tmp_path / "copy"
    import_model.main([str(model), "--out", str(copy)])
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-8])
    for name, rank in (("full", 0), ("lora", 2)):
        arguments = ["--config", config_file, "--workdir", tmp_path / name, f"--config.pretrained={copy}"]
        message = refused("run", *arguments, f"--config.lora.rank={rank}", "--dry_run")
        assert "config.pretrained" in message and shard.name in message
