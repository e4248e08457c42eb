"""What storing the frozen base in fewer bits costs: `python -m benchmarks.quantise --model models/smollm2-135m`.

A fixed text is scored token by token with the matrices in float32, bfloat16, int8 and int4, all else in float32. The
difference is that of storage alone.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import benchmarks
from rl_posttrain.data.huggingface import HuggingFaceTokenizer
from rl_posttrain.model import convert, quantise, transformer
from rl_posttrain.model.linear import INPUT_AXES
from rl_posttrain.model.transformer import ModelConfig

BASES = ("float32", "bfloat16", "int8", "int4")
TEXT = """\
The tide tables of a harbour are among the oldest predictions that people make with numbers. A fisherman who has \
watched the same quay for thirty years knows, without a book, that the water will stand highest a little later each \
day, and that the highest tides of all come a day or two after the full moon and the new. Two bodies pull at the sea. \
The moon is small and near, the sun is vast and far, and of the two it is the moon that matters more, because the \
force that raises a tide falls with the cube of the distance. When the two stand in one line their pulls add, and when \
they stand at a right angle they partly cancel.

In the nineteenth century William Thomson built a machine of brass wheels and pulleys that added up the waves of a \
port. Each wheel stood for one of the motions of moon or sun. A clerk set the wheels for the harbour, turned a crank, \
and in four hours a pen had drawn the tides of a whole year. The principle has not changed since. A program still adds \
cosines, one for each motion: for a given time t, the height is the sum of the amplitudes times cos(speed * t + \
phase).

    def height(t, parts):
        return sum(a * math.cos(w * t + p) for a, w, p in parts)

To find the amplitudes one needs measurements, and here the sea is patient: a year of hourly readings, 8,766 of them, \
fixes some sixty numbers with room to spare. What no table predicts is the weather. A storm from the north-west can \
lift the water in a narrow bay by three metres, and it was such a storm, on a night with a spring tide, that broke the \
dykes in 1953. Since then the tables carry a warning in small print. They say what the moon and the sun will do, and \
leave the wind to others.
"""


def stored_bytes(params: Any) -> float:
    """Bytes of a tree of arrays; int4 counts half a byte."""
    bits = lambda dtype: (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits
    return sum(leaf.size * bits(leaf.dtype) / 8 for leaf in jax.tree.leaves(params))


def matrices(params: Any) -> Any:
    """What a narrow base stores otherwise: the matrices that adapters stand beside, and their scales."""
    return {name: leaf for name, leaf in params["layers"].items() if name.removesuffix("_scale") in INPUT_AXES}


def score(params: Any, cfg: ModelConfig, ids: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """float32 [T] log-probability (nats) of each token after the first; all logits [T, V]."""

    @jax.jit
    def run(params):
        tokens = jnp.asarray(ids)[None, :-1]
        row = (jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens), jnp.full_like(tokens, -1))
        logits = transformer.logits(params, cfg, transformer.forward(params, cfg, tokens, *row))[0]
        logprobs = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(logprobs, jnp.asarray(ids)[1:, None], 1)[:, 0], logprobs

    return run(params)


def compare(directory: str) -> dict[str, float]:
    """Prints a table of the bases, and returns its figures."""
    cfg = convert.model_config(directory)
    tokenizer = HuggingFaceTokenizer(directory, chat=False)
    ids = np.asarray(tokenizer.prompt(TEXT))
    figures: dict[str, float] = {"text_count": len(ids) - 1}
    print(f"{len(ids) - 1} tokens; perplexity, mean |logprob difference| and divergence (nats) against float32")
    expected = everywhere = None
    for base in BASES:
        each = lambda array, name, base=base: quantise.quantise(array, name, cfg, base)
        params = quantise.beside(convert.load_params(directory, cfg, each=each))
        logprobs, rows = score(params, cfg, ids)
        if expected is None or everywhere is None:
            expected, everywhere = logprobs, rows
        divergence = float((jnp.exp(everywhere) * (everywhere - rows)).sum(-1).mean())
        measured = {
            "bytes": stored_bytes(params),
            "matrices_bytes": stored_bytes(matrices(params)),
            "perplexity": math.exp(-float(logprobs.mean())),
            "difference": float(jnp.abs(logprobs - expected).mean()),
            "divergence": divergence,
            "same_token_share": float((rows.argmax(-1) == everywhere.argmax(-1)).mean()),
        }
        print(
            f"{base:>9}: {measured['bytes'] / 1e6:7.1f} MB, matrices {measured['matrices_bytes'] / 1e6:6.1f} MB, "
            f"perplexity {measured['perplexity']:.4f}, difference {measured['difference']:.5f}, divergence "
            f"{divergence:.6f}, same most likely token {measured['same_token_share']:.1%}"
        )
        figures |= {f"{base}_{name}": value for name, value in measured.items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.quantise", description=__doc__)
    parser.add_argument("--model", default="models/smollm2-135m", help="a model directory (default: %(default)s)")
    arguments = parser.parse_args()
    place = benchmarks.machine()
    benchmarks.publish("quantise", place, compare(arguments.model))


if __name__ == "__main__":
    main()
