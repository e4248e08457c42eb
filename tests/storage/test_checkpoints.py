"""Checkpoints: whole or not there, equal bit for bit, on any number of devices."""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rl_posttrain.storage.checkpoints import CheckpointConfig, CheckpointError, Checkpoints, restore_params


def make(seed=0, width=8):
    """A small run: parameters, Adam's state after an update, a key, integers, bfloat16, nothing."""
    params = {"w": jax.random.normal(jax.random.key(seed), (16, width)), "b": jnp.arange(8, dtype=jnp.bfloat16)}
    optimizer = optax.adam(1e-2)
    _, opt_state = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)
    state = {
        "opt_state": opt_state,
        "key": jax.random.key(seed + 100),
        "step": jnp.int32(2**31 - 1),
        "empty": {},
        "nothing": None,
    }
    return params, state


def target(leaf, sharding):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def abstract(tree):
    return jax.tree.map(lambda leaf: target(leaf, leaf.sharding), tree)


def spread(tree, shape):
    """Shardings of a tree over a mesh of `shape`: the first axis over x, the second over y."""
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    return jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec(*("x", "y")[: leaf.ndim])), tree)


def bits(tree):
    """Every leaf as bytes with its dtype, so that equality is that of bits."""
    plain = lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return jax.tree.map(lambda leaf: (str(leaf.dtype), np.asarray(plain(leaf)).tobytes()), tree)


def restored(checkpoints, params, state, **options):
    found = checkpoints.restore(abstract(params), abstract(state), **options)
    assert found is not None
    return found


def test_a_round_trip_is_equal_bit_for_bit_through_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    params, state = make()
    cursor = {"examples": {"next": 17}, "ratio": 0.1, "names": ["a", None]}
    checkpoints = Checkpoints("runs/demo", CheckpointConfig())
    assert checkpoints.restore(abstract(params), abstract(state)) is None
    assert checkpoints.latest() is None and checkpoints.best() is None
    checkpoints.save(3, params, state, cursor)
    checkpoints.close()
    step, back, back_state, back_cursor = restored(Checkpoints("runs/demo", CheckpointConfig()), params, state)
    assert (step, back_cursor) == (3, cursor)
    assert bits(back) == bits(params) and bits(back_state) == bits(state)
    assert jax.tree.structure(back_state) == jax.tree.structure(state)
    assert (tmp_path / "runs/demo/3/params").is_dir()


def test_o26_saved_on_eight_devices_restored_on_one_two_and_eight(tmp_path):
    params, state = make()
    params = jax.device_put(params, spread(params, (2, 4)))
    state["opt_state"] = jax.device_put(state["opt_state"], spread(state["opt_state"], (2, 4)))
    inputs = jax.random.normal(jax.random.key(5), (4, 16))
    loss = jax.jit(lambda params: jnp.tanh(inputs @ params["w"]).sum())
    expected = float(loss(params))
    with_mesh = Checkpoints(tmp_path, CheckpointConfig())
    with_mesh.save(1, params, state, {})
    with_mesh.close()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    for shape in ((1, 1), (2, 1), (4, 2)):
        targets = [jax.tree.map(target, tree, spread(tree, shape)) for tree in (params, state)]
        _, back, back_state, _ = checkpoints.restore(*targets)
        assert back["w"].sharding.mesh.shape == {"x": shape[0], "y": shape[1]}
        assert bits(back) == bits(params) and bits(back_state) == bits(state)
        assert float(loss(back)) == pytest.approx(expected, abs=1e-5)


def test_the_latest_few_and_the_best_are_kept(tmp_path):
    params, state = make()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    for step, score in enumerate([0.1, 0.9, None, 0.3, 0.9, 0.4, None], start=1):
        checkpoints.save(step, params, state, {}, score)
        if step == 4:
            assert checkpoints.best() == 2
    assert checkpoints.latest() == 7
    assert checkpoints.best() == 5  # the later of equals
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["5", "6", "7"]
    again = Checkpoints(tmp_path, CheckpointConfig(keep=1))  # scores survive the restart
    again.save(8, params, state, {}, 0.2)
    assert again.best() == 5
    again.close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["5", "8"]


def test_without_keep_best_only_the_latest_stay(tmp_path):
    params, state = make()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1, keep_best=False))
    for step, score in ((1, 0.9), (2, 0.1)):
        checkpoints.save(step, params, state, {}, score)
    assert checkpoints.latest() == checkpoints.best() == 2
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir() if path.name.isdigit()] == ["2"]


def test_restore_params_of_the_latest_the_best_or_a_step(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    stored = {step: make(seed=step) for step in (1, 2, 3)}
    for step, score in ((1, 0.7), (2, None), (3, 0.2)):
        checkpoints.save(step, *stored[step], {}, score)
    checkpoints.close()
    for asked, step in ((None, 3), ("best", 1), (2, 2)):
        found, params = restore_params(tmp_path, abstract(stored[1][0]), asked)
        assert found == step and bits(params) == bits(stored[step][0])
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9.*\[3, 2, 1\]"):
        restore_params(tmp_path, abstract(stored[1][0]), 9)
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        restore_params(tmp_path / "absent", abstract(stored[1][0]))
    assert not (tmp_path / "absent").exists()


def test_arrays_may_be_donated_while_the_save_runs(tmp_path):
    params, state = make(width=4096)
    expected = bits(params)
    wanted = abstract(params)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, params, state, {})
    wreck = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    for _ in range(3):
        params = wreck(params)
    checkpoints.close()
    assert bits(restore_params(tmp_path, wanted)[1]) == expected


def test_a_partial_save_is_never_the_latest(tmp_path):
    params, state = make()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, params, state, {})
    checkpoints.close()
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")  # what a killed save leaves
    again = Checkpoints(tmp_path, CheckpointConfig())
    assert again.latest() == 1
    again.save(2, params, state, {})
    assert again.latest() == 2
    again.close()
    assert not list(tmp_path.glob("*tmp*"))


@pytest.mark.parametrize("damage", ["torn files", "missing item"])
def test_a_damaged_checkpoint_falls_back_and_is_written_again(damage, tmp_path, caplog):
    stored = {step: make(seed=step) for step in (1, 2, 3)}
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    for step in (1, 2, 3):
        checkpoints.save(step, *stored[step], {"at": step}, score=1 / step)
    checkpoints.close()
    if damage == "torn files":
        for path in (tmp_path / "3").rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[:3])
    else:
        shutil.rmtree(tmp_path / "3" / "state")
    with caplog.at_level(logging.WARNING):
        again = Checkpoints(tmp_path, CheckpointConfig(keep=2))
        step, params, _, cursor = restored(again, *stored[1])
    assert (step, cursor) == (2, {"at": 2}) and bits(params) == bits(stored[2][0])
    assert any("checkpoint 3" in record.getMessage() and "trying" in record.getMessage() for record in caplog.records)
    assert again.best() == 1  # the damaged score has not hidden the others
    again.save(3, *stored[3], {"at": 3})
    again.close()
    fresh = Checkpoints(tmp_path, CheckpointConfig())
    assert restored(fresh, *stored[1])[0] == 3 and fresh.best() == 1


def test_what_follows_the_restored_step_is_dropped_at_the_next_save(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=3))
    stored = {step: make(seed=step) for step in (1, 2, 3)}
    for step in (1, 2, 3):
        checkpoints.save(step, *stored[step], {}, score=step / 10)
    assert restored(checkpoints, *stored[1], step=1)[0] == 1
    assert checkpoints.latest() == 3  # nothing is lost before there is something new
    checkpoints.save(2, *stored[3], {"again": True})
    assert checkpoints.latest() == 2
    step, params, _, cursor = restored(checkpoints, *stored[1])
    assert (step, cursor) == (2, {"again": True}) and bits(params) == bits(stored[3][0])
    assert checkpoints.best() == 1


def test_a_saved_step_is_left_alone(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    params, state = make()
    checkpoints.save(1, params, state, {"first": True})
    checkpoints.save(1, params, state, {"first": False})
    assert restored(checkpoints, params, state)[3] == {"first": True}


def test_another_model_is_refused_with_the_reason(tmp_path):
    params, state = make()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, params, state, {})
    with pytest.raises(CheckpointError, match=r"model or optimizer differs.*steps \[1\].*\(16, 4\)"):
        checkpoints.restore(abstract(make(width=4)[0]), abstract(state))
    assert checkpoints.latest() == 1


def test_bad_values_are_refused(tmp_path):
    params, state = make()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    with pytest.raises(ValueError, match="score=nan"):
        checkpoints.save(1, params, state, {}, float("nan"))
    with pytest.raises(ValueError, match="not JSON"):
        checkpoints.save(1, params, state, {"position": np.arange(2)})
    with pytest.raises(ValueError, match="state={} has no arrays"):
        checkpoints.save(1, params, {}, {})
    assert checkpoints.latest() is None
    for name in ("every", "keep"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            CheckpointConfig(**{name: 0})


def test_o27_a_full_disk_names_the_reason_and_keeps_the_previous_checkpoint(tmp_path):
    mounted = tmp_path / "small"
    mounted.mkdir()
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a small tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(mounted)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        params = {"w": jax.random.normal(jax.random.key(0), (500, 1000))}  # 2 MB that do not compress
        state = {"step": jnp.int32(1)}
        checkpoints = Checkpoints(mounted, CheckpointConfig())
        checkpoints.save(1, params, state, {})
        assert checkpoints.latest() == 1
        checkpoints.save(2, jax.tree.map(lambda leaf: leaf + 1, params), state, {}, score=0.9)
        with pytest.raises(CheckpointError, match="no space left.*step 1 is intact.*free some space") as caught:
            checkpoints.wait()
        assert caught.value.errno == errno.ENOSPC
        again = Checkpoints(mounted, CheckpointConfig())
        step, back, _, _ = restored(again, params, state)
        assert step == 1 and bits(back) == bits(params)
        assert again.latest() == 1 and again.best() is None
        again.close()
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


KILLED = """
import os, sys
import jax, jax.numpy as jnp
from rl_posttrain.storage.checkpoints import CheckpointConfig, Checkpoints
checkpoints = Checkpoints(sys.argv[1], CheckpointConfig())
step, state = checkpoints.latest() or 0, {"step": jnp.int32(0)}
while True:
    step += 1
    checkpoints.save(step, {f"w{i}": jnp.full((512, 512), float(step)) for i in range(24)}, state, {"step": step})
    print(step, flush=True)
"""


def kill_while_saving(directory, saves):
    """Runs a program that does nothing but save, and kills it right after it began its `saves`-th save."""
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(directory)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        for _ in range(saves):
            begun = int(child.stdout.readline())
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    return begun


def check_after_kill(directory, begun):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = {f"w{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=one) for i in range(24)}
    checkpoints = Checkpoints(directory, CheckpointConfig())
    found = checkpoints.restore(params, {"step": jax.ShapeDtypeStruct((), jnp.int32, sharding=one)})
    assert found is not None
    step, params, _, cursor = found
    assert step >= begun - 1  # that one is whole: a save waits for the one before
    assert cursor == {"step": step}
    assert all(bool((leaf == step).all()) for leaf in params.values())
    checkpoints.close()


def test_killed_while_saving_the_previous_checkpoint_restores(tmp_path):
    check_after_kill(tmp_path, kill_while_saving(tmp_path, saves=3))


@pytest.mark.slow
def test_killed_again_and_again_every_restart_finds_a_whole_checkpoint(tmp_path):
    for saves in (2, 5, 1, 7, 3, 4, 6, 1, 2, 9):
        check_after_kill(tmp_path, kill_while_saving(tmp_path, saves))
