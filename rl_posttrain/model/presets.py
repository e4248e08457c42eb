"""Public models by name: sizes for plans and for inspection before anything is fetched.

A checkpoint's own config.json is what counts when it is loaded (`convert.model_config`).
"""

from __future__ import annotations

from rl_posttrain.model.rope import RopeScaling
from rl_posttrain.model.transformer import ModelConfig

Sizes = tuple[int, int, int, int, int, int]  # layers, embed_dim, heads, kv heads, head_dim, mlp_dim


def _model(vocab_size: int, sizes: Sizes, **rest) -> ModelConfig:
    L, D, N, K, H, F = sizes
    return ModelConfig(vocab_size, D, L, N, K, H, F, **rest)


def _llama2(sizes: Sizes) -> ModelConfig:
    return _model(32_000, sizes, norm_epsilon=1e-5, tie_embeddings=False)


def _llama3(sizes: Sizes, factor: float, tied: bool = False) -> ModelConfig:
    scaling = RopeScaling("llama3", factor, original_length=8192)
    return _model(128_256, sizes, rope_theta=500_000.0, rope_scaling=scaling, norm_epsilon=1e-5, tie_embeddings=tied)


def _smollm2(sizes: Sizes, theta: float = 100_000.0) -> ModelConfig:
    return _model(49_152, sizes, rope_theta=theta, norm_epsilon=1e-5)


def _mistral(vocab_size: int, sizes: Sizes, **rest) -> ModelConfig:
    return _model(vocab_size, sizes, norm_epsilon=1e-5, tie_embeddings=False, **rest)


def _qwen2(sizes: Sizes, vocab_size: int = 151_936, epsilon: float = 1e-6, tied: bool = False) -> ModelConfig:
    rest = dict(rope_theta=1_000_000.0, norm_epsilon=epsilon, qkv_bias=True, tie_embeddings=tied)
    return _model(vocab_size, sizes, **rest)


def _qwen3(sizes: Sizes, tied: bool = False, **rest) -> ModelConfig:
    return _model(151_936, sizes, rope_theta=1_000_000.0, qk_norm=True, tie_embeddings=tied, **rest)


def _gemma(vocab_size: int, sizes: Sizes, **rest) -> ModelConfig:
    return _model(vocab_size, sizes, activation="gelu_tanh", norm_plus_one=True, scale_embeddings=True, **rest)


def _gemma2(sizes: Sizes, scalar: int) -> ModelConfig:
    return _gemma(
        256_000,
        sizes,
        post_norms=True,
        query_scale=0.0 if scalar == sizes[4] else scalar**-0.5,
        attention_softcap=50.0,
        logit_softcap=30.0,
        window=4096,
        sliding=tuple(i % 2 == 0 for i in range(sizes[0])),
    )


def _gemma3(sizes: Sizes, vocab_size: int, window: int, scalar: int = 256, linear: bool = True) -> ModelConfig:
    return _gemma(
        vocab_size,
        sizes,
        post_norms=True,
        qk_norm=True,
        query_scale=0.0 if scalar == sizes[4] else scalar**-0.5,
        rope_theta=1_000_000.0,
        rope_scaling=RopeScaling("linear", 8.0) if linear else None,
        local_rope_theta=10_000.0,
        window=window,
        sliding=tuple((i + 1) % 6 > 0 for i in range(sizes[0])),
    )


PRESETS: dict[str, ModelConfig] = {
    "smollm2-135m": _smollm2((30, 576, 9, 3, 64, 1536)),
    "smollm2-360m": _smollm2((32, 960, 15, 5, 64, 2560)),
    "smollm2-1.7b": _smollm2((24, 2048, 32, 32, 64, 8192), theta=130_000.0),
    "llama-2-7b": _llama2((32, 4096, 32, 32, 128, 11008)),
    "llama-2-13b": _llama2((40, 5120, 40, 40, 128, 13824)),
    "llama-2-70b": _llama2((80, 8192, 64, 8, 128, 28672)),
    "llama-3.1-8b": _llama3((32, 4096, 32, 8, 128, 14336), 8.0),
    "llama-3.1-70b": _llama3((80, 8192, 64, 8, 128, 28672), 8.0),
    "llama-3.1-405b": _llama3((126, 16384, 128, 8, 128, 53248), 8.0),
    "llama-3.2-1b": _llama3((16, 2048, 32, 8, 64, 8192), 32.0, tied=True),
    "llama-3.2-3b": _llama3((28, 3072, 24, 8, 128, 8192), 32.0, tied=True),
    "mistral-7b-v0.1": _mistral(32_000, (32, 4096, 32, 8, 128, 14336), window=4096),
    "mistral-7b-v0.3": _mistral(32_768, (32, 4096, 32, 8, 128, 14336), rope_theta=1_000_000.0),
    "mixtral-8x7b": _mistral(
        32_000, (32, 4096, 32, 8, 128, 14336), rope_theta=1_000_000.0, num_experts=8, experts_per_token=2
    ),
    "qwen2.5-0.5b": _qwen2((24, 896, 14, 2, 64, 4864), tied=True),
    "qwen2.5-1.5b": _qwen2((28, 1536, 12, 2, 128, 8960), tied=True),
    "qwen2.5-3b": _qwen2((36, 2048, 16, 2, 128, 11008), tied=True),
    "qwen2.5-7b": _qwen2((28, 3584, 28, 4, 128, 18944), 152_064),
    "qwen2.5-14b": _qwen2((48, 5120, 40, 8, 128, 13824), 152_064, 1e-5),
    "qwen2.5-32b": _qwen2((64, 5120, 40, 8, 128, 27648), 152_064, 1e-5),
    "qwen2.5-72b": _qwen2((80, 8192, 64, 8, 128, 29568), 152_064, 1e-5),
    "qwen3-0.6b": _qwen3((28, 1024, 16, 8, 128, 3072), tied=True),
    "qwen3-1.7b": _qwen3((28, 2048, 16, 8, 128, 6144), tied=True),
    "qwen3-4b": _qwen3((36, 2560, 32, 8, 128, 9728), tied=True),
    "qwen3-8b": _qwen3((36, 4096, 32, 8, 128, 12288)),
    "qwen3-14b": _qwen3((40, 5120, 40, 8, 128, 17408)),
    "qwen3-32b": _qwen3((64, 5120, 64, 8, 128, 25600)),
    "qwen3-30b-a3b": _qwen3((48, 2048, 32, 4, 128, 768), num_experts=128, experts_per_token=8),
    "qwen3-235b-a22b": _qwen3((94, 4096, 64, 4, 128, 1536), num_experts=128, experts_per_token=8),
    "gemma-2b": _gemma(256_000, (18, 2048, 8, 1, 256, 16384)),
    "gemma-7b": _gemma(256_000, (28, 3072, 16, 16, 256, 24576)),
    "gemma-2-2b": _gemma2((26, 2304, 8, 4, 256, 9216), 256),
    "gemma-2-9b": _gemma2((42, 3584, 16, 8, 256, 14336), 256),
    "gemma-2-27b": _gemma2((46, 4608, 32, 16, 128, 36864), 144),
    "gemma-3-1b": _gemma3((26, 1152, 4, 1, 256, 6912), 262_144, 512, linear=False),
    "gemma-3-4b": _gemma3((34, 2560, 8, 4, 256, 10240), 262_208, 1024),
    "gemma-3-12b": _gemma3((48, 3840, 16, 8, 256, 15360), 262_208, 1024),
    "gemma-3-27b": _gemma3((62, 5376, 32, 16, 128, 21504), 262_208, 1024, scalar=168),
}
