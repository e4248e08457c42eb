"""The README's code runs as it stands there."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rl_posttrain.algorithms.update import UpdateConfig, init_state, make_optimizer, update
from rl_posttrain.batch import Batch
from rl_posttrain.data.packing import Sample, Tree, pack
from rl_posttrain.model.transformer import ModelConfig, init
from rl_posttrain.tasks import Tools, heldout, load
from rl_posttrain.tasks.registry import _FAMILIES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _code(section: str) -> str:
    found = re.search(rf"^## {section}\n.*?```python\n(.*?)```", README, re.S | re.M)
    assert found, f"no Python under {section!r}"
    return found[1]


def test_the_domain_loads_and_its_demonstrations_pass():
    code = _code("Add a domain")
    assert len(code.splitlines()) <= 22
    try:
        exec(compile(code, "words.py", "exec"), {"__name__": "words"})
        domain = load("words/vowels", {"length": 6}, Tools())
        tasks = [*domain.make(0, "train", range(20)), *heldout(domain, 0, 20)]
        assert all(v.passed for v in domain.score(tasks, [task.demonstration or "" for task in tasks]))
        assert not any(v.passed for v in domain.score(tasks, ["zz"] * len(tasks)))
    finally:
        _FAMILIES.pop("words", None)


def test_the_loss_trains():
    code = _code("Add a loss")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names: dict = {}
    exec(compile(code, "loss.py", "exec"), names)
    cfg = ModelConfig(8, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=16)
    good, bad = (Sample([token, 1], np.full(2, 0.25), advantage=sign) for token, sign in ((3, 1.0), (4, -1.0)))
    batch, _ = pack([Tree([5, 2], (good, bad))], row_length=16)
    batch = Batch(**{name: jnp.asarray(getattr(batch, name)) for name in Batch.__dataclass_fields__})
    optimizer = make_optimizer(UpdateConfig(learning_rate=1e-2), total_steps=5)
    state = init_state(init(jax.random.key(0), cfg), optimizer)
    losses = []
    for _ in range(5):
        state, metrics = update(state, batch, model_cfg=cfg, loss=names["loss"], optimizer=optimizer)
        losses.append(float(metrics["policy/entropy"]))
    assert int(state.step) == 5 and losses[-1] != losses[0]


def test_the_map_of_the_tree_names_every_folder_and_module():
    tree = re.search(r"## The tree\n\n```\n(.*?)```", README, re.S)
    assert tree
    here = {path.name for path in (ROOT / "rl_posttrain").iterdir() if not path.name.startswith(("__", "."))}
    for name in here:
        assert re.search(rf"(^|\s){re.escape(name)}(/|\s)", tree[1]), f"{name} is not in the README's map"
    for name in re.findall(r"^  ([a-z_]+)/", tree[1], re.M):
        assert (ROOT / "rl_posttrain" / name).is_dir(), f"the map names {name}/, which does not exist"


def test_the_picture_of_the_result_is_there():
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).is_file(), path
