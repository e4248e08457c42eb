"""A model under a mesh that is not there: parts, bytes and refusals, from a config.json alone."""

import json

import pytest

from experiments import inspect
from rl_posttrain.config import ConfigError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 50,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
# embed, then of each layer: query and output, key and value, gate, up and down, two norms; the final norm.
PARAMETERS = 50 * 64 + 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) + 64


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def table(text):
    """Cells by the first cell of their row."""
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[:1] == "│"]
    return {row[0]: row[1:] for row in cells}


def test_every_parameter_has_its_part_on_each_of_devices_that_are_not_there(model, capsys):
    assert inspect.main(["--model", model, "--mesh", "fsdp=32,tensor=2"]) == 0  # more than the tests' eight
    out = capsys.readouterr().out
    assert f"{PARAMETERS:,} parameters, on fsdp=32 x tensor=2 (64 devices)" in out
    rows = table(out)
    assert rows["embed"] == ["50 x 64", "tensor, -", "25 x 64", "6.2 KiB"]
    assert rows["layers/query"] == ["3 x 64 x 4 x 16", "-, fsdp, tensor, -", "3 x 2 x 2 x 16", "768 B"]
    assert rows["layers/down"] == ["3 x 96 x 64", "-, tensor, fsdp", "3 x 48 x 2", "1.1 KiB"]
    assert rows["final_norm"] == ["64", "-", "64", "256 B"]
    assert len(rows) == 11 + 4


def test_totals_are_weights_gradients_and_two_moments(model, capsys):
    assert inspect.main(["--model", model]) == 0
    out = capsys.readouterr().out
    assert "on one device (1 device)" in out
    rows = table(out)
    one = inspect.sized(4 * PARAMETERS)
    assert rows["weights"] == rows["gradients"] == [one] * 3
    assert rows["moments"] == [inspect.sized(8 * PARAMETERS)] * 3
    assert rows["together"] == [inspect.sized(16 * PARAMETERS)] * 3
    assert inspect.main(["--model", model, "--mesh", "data=4"]) == 0
    copied = table(capsys.readouterr().out)["weights"]
    assert copied == [one, inspect.sized(16 * PARAMETERS), one]


def test_the_vocabulary_can_be_padded_to_fit(model, capsys):
    with pytest.raises(ConfigError, match="padded_vocab_size=50 .* set vocab_multiple to a multiple of 4"):
        inspect.main(["--model", model, "--mesh", "tensor=4"])
    with pytest.raises(ConfigError, match=r"num_kv_heads=2 is not divisible by tensor=4 \(legal: 1, 2\)"):
        inspect.main(["--model", model, "--mesh", "tensor=4", "--vocab_multiple", "4"])
    assert inspect.main(["--model", model, "--mesh", "tensor=2", "--vocab_multiple", "8"]) == 0
    assert table(capsys.readouterr().out)["embed"][:3] == ["56 x 64", "tensor, -", "28 x 64"]


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("fsdp=5", r"embed_dim=64 is not divisible by fsdp=5 \(legal: 1, 2, 4, 8, 16, 32, 64\)"),
        ("fsdp", "'fsdp' is no AXIS=SIZE"),
        ("fsdp=2,fsdp=4", "fsdp is given twice"),
        ("fsdp=-1", "give the size"),
        ("fsdp=0", "mesh.fsdp=0"),
        ("fsdp=two", "two"),
        ("shards=2", "shards: unknown key"),
        ("stage=2", "does not split over stage"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(model, mesh, message):
    with pytest.raises(ConfigError, match=message):
        inspect.main(["--model", model, "--mesh", mesh])


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="config.json"):
        inspect.main(["--model", str(tmp_path)])
