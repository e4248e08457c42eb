"""Makes the golden arrays of transformers: `python tests/golden/make.py`, where torch and transformers are installed.

For every family and every RoPE type a tiny model, whose weights `golden_models.draw` makes from their names: its
config in both spellings, names and shapes of its tensors as transformers saves them, and its logits in float32 and
bfloat16.
Then RoPE frequencies at real sizes. With `--smollm2 DIR` (from `experiments.import_model --smollm2 --out DIR`) also
greedy continuations and the loss of a text.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from golden_models import draw
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).parent
LENGTHS = (40, 31)  # true lengths of the two rows

SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    rms_norm_eps=1e-5,
)
LLAMA = dict(SIZES, architectures=["LlamaForCausalLM"], model_type="llama")
QWEN2 = dict(SIZES, architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=True)
QWEN3 = dict(SIZES, architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=32, rope_theta=1e6)
GEMMA = dict(SIZES, tie_word_embeddings=True, head_dim=16, rms_norm_eps=1e-6)
MOE = dict(SIZES, num_experts_per_tok=2)
DIVISORS = [1.0, 1.1, 1.3, 1.7, 2.5, 4.0, 6.0, 8.0]
LONGROPE = dict(
    rope_type="longrope",
    short_factor=DIVISORS,
    long_factor=[2 * d for d in DIVISORS],
    original_max_position_embeddings=32,
)
YARN = dict(
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=32,
    beta_fast=2.0,
    beta_slow=0.02,
)

# In the old spelling; transformers writes the new one.
CASES = {
    "llama": LLAMA,
    "llama_tied": dict(LLAMA, tie_word_embeddings=True, rope_theta=100000.0, num_key_value_heads=1),
    "llama_bias": dict(LLAMA, attention_bias=True, head_dim=8),
    "llama_linear": dict(LLAMA, rope_scaling=dict(type="linear", factor=3.0)),
    "llama_dynamic": dict(LLAMA, max_position_embeddings=24, rope_scaling=dict(type="dynamic", factor=2.0)),
    "llama_llama3": dict(
        LLAMA,
        rope_theta=500.0,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama_yarn": dict(LLAMA, rope_scaling=YARN),
    "llama_yarn_mscale": dict(LLAMA, rope_scaling=dict(YARN, mscale=1.0, mscale_all_dim=0.6, truncate=False)),
    "llama_longrope_short": dict(LLAMA, rope_scaling=dict(LONGROPE, original_max_position_embeddings=48)),
    "llama_longrope_long": dict(LLAMA, rope_scaling=dict(LONGROPE, attention_factor=1.2)),
    "mistral": dict(SIZES, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=8),
    "qwen2": dict(QWEN2, use_sliding_window=False, sliding_window=8, max_window_layers=1),
    "qwen2_sliding": dict(QWEN2, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": QWEN3,
    "gemma": dict(GEMMA, architectures=["GemmaForCausalLM"], model_type="gemma", hidden_act="gelu"),
    "gemma2": dict(
        GEMMA,
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        sliding_window=8,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": dict(
        GEMMA,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        num_hidden_layers=3,
        sliding_window=8,
        sliding_window_pattern=3,
        query_pre_attn_scalar=24,
        rope_theta=1e6,
        rope_local_base_freq=100.0,
        rope_scaling=dict(rope_type="linear", factor=8.0),
    ),
    "mixtral": dict(MOE, architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=4),
    "qwen3_moe": dict(
        MOE,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=4,
        moe_intermediate_size=48,
        head_dim=32,
        norm_topk_prob=True,
    ),
}
# At real sizes: case -> config, length of the sequence.
FREQUENCIES = {
    "llama-3.1": (dict(head_dim=128, rope_theta=500000.0, max_position_embeddings=131072), 0),
    "qwen-yarn": (dict(head_dim=128, rope_theta=1e6, max_position_embeddings=32768), 0),
    "deepseek-yarn": (dict(head_dim=64, rope_theta=10000.0, max_position_embeddings=163840), 0),
    "gpt-oss-yarn": (dict(head_dim=64, rope_theta=150000.0, max_position_embeddings=131072), 0),
    "gemma-linear": (dict(head_dim=256, rope_theta=1e6, max_position_embeddings=131072), 0),
    "dynamic-short": (dict(head_dim=64, rope_theta=10000.0, max_position_embeddings=2048), 1000),
    "dynamic-long": (dict(head_dim=64, rope_theta=10000.0, max_position_embeddings=2048), 10000),
    "phi-short": (dict(head_dim=96, rope_theta=10000.0, max_position_embeddings=131072), 4096),
    "phi-long": (dict(head_dim=96, rope_theta=10000.0, max_position_embeddings=131072), 4097),
}
_PHI = dict(
    rope_type="longrope",
    short_factor=[1 + 0.02 * i for i in range(48)],
    long_factor=[1 + 1.3 * i for i in range(48)],
    original_max_position_embeddings=4096,
)
SCALINGS = {
    "llama-3.1": dict(CASES["llama_llama3"]["rope_scaling"], original_max_position_embeddings=8192),
    "qwen-yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
    "deepseek-yarn": dict(
        rope_type="yarn",
        factor=40.0,
        original_max_position_embeddings=4096,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=0.8,
    ),
    "gpt-oss-yarn": dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False),
    "gemma-linear": dict(rope_type="linear", factor=8.0),
    "dynamic-short": dict(rope_type="dynamic", factor=4.0),
    "dynamic-long": dict(rope_type="dynamic", factor=4.0),
    "phi-short": _PHI,
    "phi-long": _PHI,
}


def model_of(config: dict) -> tuple[transformers.PreTrainedModel, dict, dict[str, list[int]]]:
    """The tiny model, its config as transformers writes it, and the shapes of its tensors as transformers saves them.

    The weights are loaded from a file in the layout that transformers saves in, as a published model's would be.
    """
    loaded = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "architectures"})
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        AutoModelForCausalLM.from_config(loaded).save_pretrained(path)
        with safe_open(path / "model.safetensors", "np") as opened:
            shapes = {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}
        written = json.loads((path / "config.json").read_text())
        drawn = draw(shapes, ones="gemma" not in config["model_type"])
        save_file(drawn, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config))  # in the old spelling, as published
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return model, written, shapes


@torch.no_grad()
def logits_of(model: transformers.PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of both rows, padded on the right; padding on the left and each row alone must agree."""
    B, T = tokens.shape
    mask = torch.tensor([[int(t < n) for t in range(T)] for n in LENGTHS])
    right = model(tokens, attention_mask=mask).logits
    if model.dtype == torch.float32:
        gap = T - LENGTHS[1]
        left = torch.stack([tokens[0], tokens[1].roll(gap)])
        left_mask = torch.stack([mask[0], mask[1].roll(gap)])
        positions = (left_mask.cumsum(-1) - 1).clamp(min=0)
        turned = model(left, attention_mask=left_mask, position_ids=positions).logits[1].roll(-gap, 0)
        torch.testing.assert_close(turned[: LENGTHS[1]], right[1, : LENGTHS[1]], atol=2e-5, rtol=0)
        alone = model(tokens[:1]).logits[0]
        torch.testing.assert_close(alone, right[0], atol=2e-5, rtol=0)
    return right.float()


def make_families() -> None:
    tokens = torch.from_numpy(np.random.RandomState(7).randint(1, SIZES["vocab_size"], (2, LENGTHS[0])))
    for name, config in CASES.items():
        model, written, shapes = model_of(config)
        single = logits_of(model, tokens)
        half = logits_of(model.to(torch.bfloat16), tokens)
        valid = lambda x: np.concatenate([x[0].numpy(), x[1, : LENGTHS[1]].numpy()])
        bfloat16 = (valid(half).view(np.uint32) >> 16).astype(np.uint16)  # exact: the values are bfloat16
        np.savez_compressed(
            HERE / f"family_{name}.npz",
            tokens=tokens.numpy().astype(np.int32),
            lengths=np.array(LENGTHS, np.int32),
            logits=valid(single),  # [sum of lengths, V]
            logits_bfloat16=bfloat16,
            old_config=json.dumps(config),
            new_config=json.dumps(written),
            shapes=json.dumps(shapes),
        )
        error = np.abs(valid(single) - valid(half)).max()
        print(f"{name}: |logits| up to {np.abs(valid(single)).max():.2f}, bfloat16 off by {error:.4f}")


def make_frequencies() -> None:
    values: dict[str, np.ndarray] = {}
    for name, (sizes, length) in FREQUENCIES.items():
        scaling = SCALINGS[name]
        config = dict(LLAMA, **sizes, rope_scaling=scaling)
        loaded = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "architectures"})
        inverse, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](loaded, "cpu", seq_len=length or None)
        values |= {f"{name}/frequencies": inverse.numpy(), f"{name}/factor": np.float64(factor)}
        values |= {f"{name}/config": np.array(json.dumps(config)), f"{name}/length": np.int32(length)}
    np.savez_compressed(HERE / "rope.npz", **values)


PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "What is 17 + 25? Explain your answer.",
    "List three uses of a paper clip.",
    "Translate 'good morning' into French.",
)
TEXT = (
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the "
    "engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889. Locally nicknamed La dame "
    "de fer, it was constructed as the centerpiece of the 1889 World's Fair."
)


@torch.no_grad()
def make_smollm2(directory: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    values: dict[str, np.ndarray] = {"prompts": np.array(json.dumps(PROMPTS))}
    for i, prompt in enumerate(PROMPTS):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        done = model.generate(**ids, max_new_tokens=64, min_new_tokens=64, do_sample=False)
        values[f"prompt{i}"] = ids["input_ids"][0].numpy().astype(np.int32)
        values[f"completion{i}"] = done[0, ids["input_ids"].shape[1] :].numpy().astype(np.int32)
        print(repr(tokenizer.decode(values[f"completion{i}"])))
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    values |= {"text": ids[0].numpy().astype(np.int32), "loss": np.float64(model(ids, labels=ids).loss)}
    np.savez_compressed(HERE / "smollm2.npz", **values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", metavar="DIR", help="the imported SmolLM2; its goldens alone are made")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.smollm2:
        make_smollm2(arguments.smollm2)
    else:
        make_families()
        make_frequencies()


if __name__ == "__main__":
    main()
