"""RoPE scaling against transformers' frequencies at real sizes (`tests/golden/rope.npz`), and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from rl_posttrain.model import rope
from rl_posttrain.model.hf_config import read_config, write_config
from rl_posttrain.model.rope import RopeScaling

ROPE = np.load(Path(__file__).resolve().parents[1] / "golden" / "rope.npz")
CASES = sorted({key.split("/")[0] for key in ROPE.files})
LLAMA = json.loads(str(ROPE["llama-3.1/config"]))


def scaled(**rope_scaling):
    return {**LLAMA, "rope_scaling": rope_scaling}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_attention_factor_equal_transformers(name):
    cfg = read_config(json.loads(str(ROPE[f"{name}/config"])), length=int(ROPE[f"{name}/length"]))
    got = rope.frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    # transformers computes them in float32, we in float64.
    np.testing.assert_allclose(got, ROPE[f"{name}/frequencies"], rtol=5e-6)
    assert rope.attention_factor(cfg.rope_scaling) == pytest.approx(float(ROPE[f"{name}/factor"]), rel=1e-12)


def test_cases_cover_every_type():
    kinds = {json.loads(str(ROPE[f"{name}/config"]))["rope_scaling"]["rope_type"] for name in CASES}
    assert kinds == {"linear", "dynamic", "llama3", "yarn", "longrope"}


def test_o07_llama3_multipliers():
    cfg = read_config(
        {
            **LLAMA,
            "head_dim": 64,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        }
    )
    ratio = rope.frequencies(64, 5e5, cfg.rope_scaling) / rope.frequencies(64, 5e5)
    np.testing.assert_allclose(ratio[[13, 15, 31]], [1.0, 0.605573, 0.03125], rtol=1e-5)


@pytest.mark.parametrize("longest", [32768, 131072])
def test_o07_yarn_multipliers_whatever_the_declared_length(longest):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    cfg = read_config({**scaled(**yarn), "rope_theta": 1e6, "max_position_embeddings": longest})
    ratio = rope.frequencies(128, 1e6, cfg.rope_scaling) / rope.frequencies(128, 1e6)
    np.testing.assert_allclose(ratio[[0, 30, 63]], [1.0, 0.691176, 0.25], rtol=1e-5)
    assert rope.attention_factor(cfg.rope_scaling) == pytest.approx(1.138629, abs=1e-6)


def test_the_old_name_of_the_type_and_the_new_spelling_mean_the_same():
    old = read_config(scaled(type="linear", factor=4))
    new = {key: value for key, value in LLAMA.items() if key not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": LLAMA["rope_theta"]}
    assert read_config(new) == old and old.rope_scaling == RopeScaling("linear", 4.0)


def test_one_mapping_per_type_of_layer():
    one = {"rope_type": "default", "rope_theta": 7.0}
    nested = {key: value for key, value in LLAMA.items() if key not in ("rope_scaling", "rope_theta")}
    nested |= {"rope_parameters": {"full_attention": one, "sliding_attention": {**one, "rope_theta": 3.0}}}
    assert read_config(nested).rope_theta == 7.0
    sliding = {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"], "num_key_value_heads": 2}
    cfg = read_config({**nested, **sliding, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True})
    assert (cfg.rope_theta, cfg.local_rope_theta) == (7.0, 3.0)


def test_dynamic_and_longrope_follow_the_length_of_the_run():
    dynamic = {**scaled(rope_type="dynamic", factor=4.0), "max_position_embeddings": 2048}
    short, long = read_config(dynamic, length=2048), read_config(dynamic, length=2049)
    plain = rope.frequencies(64, LLAMA["rope_theta"])
    np.testing.assert_allclose(rope.frequencies(64, LLAMA["rope_theta"], short.rope_scaling), plain, rtol=1e-6)
    assert (rope.frequencies(64, LLAMA["rope_theta"], long.rope_scaling)[1:] < plain[1:]).all()
    phi = json.loads(str(ROPE["phi-long/config"]))
    assert read_config(phi).rope_scaling.divisors[1] == pytest.approx(1.02)
    assert read_config(phi, length=4097).rope_scaling.divisors[1] == pytest.approx(2.3)
    # What a run computed with is what its export says, for any length.
    written = write_config(read_config(phi, length=4097), length=131072)
    assert read_config(written).rope_scaling.divisors[1] == pytest.approx(2.3)


@pytest.mark.parametrize(
    "section, named",
    [
        ({"rope_type": "su", "factor": 2.0}, "rope type su is unknown"),
        ({"rope_type": "ntk", "factor": 2.0}, "rope type ntk is unknown"),
        ({"type": "mrope", "factor": 2.0}, "rope type mrope is unknown"),
        ({"type": "yarn", "rope_type": "linear", "factor": 2.0}, "linear, yarn"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "needs high_freq_factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, r"\['beta_fast'\]"),
        ({"rope_type": "yarn", "factor": 2.0, "mrope_section": [8, 8]}, r"\['mrope_section'\]"),
        ({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0]}, "needs long_factor"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
    ],
)
def test_o07_what_is_unknown_or_missing_is_refused(section, named):
    with pytest.raises(ValueError, match=named):
        read_config(scaled(**section))


def test_spellings_that_contradict_each_other_are_refused():
    both = {**scaled(rope_type="linear", factor=2.0), "rope_parameters": {"rope_type": "linear", "factor": 4.0}}
    with pytest.raises(ValueError, match="contradicts"):
        read_config(both)
    same = {**both, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    assert read_config(same).rope_scaling == RopeScaling("linear", 2.0)


def test_longrope_with_another_number_of_divisors_is_refused():
    section = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 3, "long_factor": [1.0] * 3}
    cfg = read_config(scaled(**section))
    with pytest.raises(ValueError, match="holds 3 numbers"):
        rope.frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
