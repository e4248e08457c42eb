"""Mesh, rules and refusals."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rl_posttrain.config import ConfigError, build
from rl_posttrain.model.transformer import ModelConfig, declare
from rl_posttrain.sharding import mesh as mesh_lib
from rl_posttrain.sharding.mesh import MeshConfig, check, constrain, make_mesh, shardings, shards

CFG = ModelConfig(
    vocab_size=37,
    embed_dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=24,
    vocab_multiple=4,
    qkv_bias=True,
    qk_norm=True,
    tie_embeddings=False,
)


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ({"data": 8}, (8, 1, 1, 1, 1, 1)),
        ({"data": -1}, (8, 1, 1, 1, 1, 1)),
        ({"data": 2, "fsdp": -1, "tensor": 2}, (2, 2, 1, 1, 1, 2)),
        ({"fsdp": 8, "tensor": -1}, (1, 8, 1, 1, 1, 1)),
    ],
)
def test_mesh_covers_all_devices_with_auto_axes(sizes, expected):
    mesh = make_mesh(MeshConfig(**sizes))
    assert mesh.axis_names == mesh_lib.AXES and mesh.devices.shape == expected
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert {d.id for d in mesh.devices.flat} == set(range(8))


def test_mesh_of_some_devices():
    mesh = make_mesh(MeshConfig(tensor=-1), jax.devices()[:2])
    assert mesh.shape["tensor"] == 2


@pytest.mark.parametrize("sizes", [{}, {"data": 3}, {"data": 4, "tensor": 4}, {"data": 3, "fsdp": -1}])
def test_wrong_factorisations_name_the_legal_sizes(sizes):
    with pytest.raises(ValueError, match="does not cover 8 devices.*one of 1, 2, 4, 8"):
        make_mesh(MeshConfig(**sizes))


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"data": 0}, "mesh.data=0"),
        ({"tensor": -2}, "mesh.tensor=-2"),
        ({"data": -1, "fsdp": -1}, "only one axis can be -1"),
        ({"stage": 2}, "mesh.stage=2: this version does not split over stage"),
        ({"context": -1}, "mesh.context=-1"),
        ({"expert": 4}, "mesh.expert=4"),
    ],
)
def test_config_refuses(sizes, message):
    with pytest.raises(ValueError, match=message):
        MeshConfig(**sizes)
    with pytest.raises(ConfigError, match=message):
        build(MeshConfig, sizes, "config.mesh")


def test_parameter_shardings_follow_the_rules():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    placed = shardings(declare(CFG), mesh)
    specs = {name: placed["layers"][name].spec for name in placed["layers"]}
    assert specs["query"] == P(None, "fsdp", "tensor", None)
    assert specs["key"] == P(None, "fsdp", "tensor", None)
    assert specs["key_bias"] == P(None, "tensor", None)
    assert specs["output"] == P(None, "tensor", None, "fsdp")
    assert specs["down"] == P(None, "tensor", "fsdp")
    assert specs["query_norm"] == specs["mlp_norm"] == P(None, None)
    # On vocab alone: fsdp as well makes the lookup rematerialise the table.
    assert placed["embed"].spec == placed["head"].spec == P("tensor", None)
    assert all(s.mesh == mesh for s in jax.tree.leaves(placed))


def test_batch_sharding_splits_rows_over_data_and_fsdp():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    rows = jax.device_put(jnp.zeros((8, 5)), mesh_lib.batch_sharding(mesh))
    assert {s.data.shape for s in rows.addressable_shards} == {(2, 5)}


def test_unknown_logical_axis_is_refused():
    class Declared(NamedTuple):
        axes: tuple[str, ...]

    mesh = make_mesh(MeshConfig(data=8))
    with pytest.raises(ValueError, match="logical axis 'head'.*heads"):
        shardings({"w": Declared(("head",))}, mesh)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="logical axis 'rows'"):
        constrain(jnp.zeros((8, 2)), "rows")


def test_check_names_every_dimension_with_its_legal_sizes():
    check(CFG, make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4]))
    with pytest.raises(ValueError) as error:
        check(CFG, make_mesh(MeshConfig(tensor=8)))
    message = str(error.value)
    assert "num_heads=4 is not divisible by tensor=8 (legal: 1, 2, 4)" in message
    assert "num_kv_heads=2 is not divisible by tensor=8 (legal: 1, 2)" in message
    assert "padded_vocab_size=40" not in message and "mlp_dim" not in message
    plain = ModelConfig(37, 18, 1, 4, 4, 8, 24)
    with pytest.raises(ValueError, match="embed_dim=18 is not divisible by fsdp=4") as error:
        check(plain, make_mesh(MeshConfig(fsdp=4, tensor=2)))
    assert "padded_vocab_size=37" in str(error.value) and "set vocab_multiple" in str(error.value)


def test_constrain_without_a_mesh_returns_its_input():
    x = jnp.ones((4, 2))
    assert constrain(x, "batch", None) is x
    assert shards("batch", 8) == 1


def test_constrain_lays_out_what_the_mesh_divides():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        lay = lambda shape, *axes: jax.jit(lambda x: constrain(x, *axes))(jnp.zeros(shape)).sharding
        same = lambda got, spec, ndim: got.is_equivalent_to(NamedSharding(mesh, spec), ndim)
        assert same(lay((8, 6, 4), "batch", None, "heads"), P(("data", "fsdp"), None, "tensor"), 3)
        assert same(lay((8, 6, 4), "batch"), P(("data", "fsdp")), 3)
        # Three rows on four devices: the compiler decides.
        jaxpr = jax.make_jaxpr(lambda x: constrain(x, "batch", "heads"))(jnp.zeros((3, 6)))
        assert jaxpr.eqns[0].params["unconstrained_dims"] == {0}
        assert jaxpr.eqns[0].params["sharding"].spec[1] == "tensor"
        assert shards("batch", 8) == 4 and shards("batch", 6) == 1 and shards("vocab", 8) == 2


def test_constrain_inside_shard_map_leaves_manual_axes_alone():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):

        @jax.jit
        @jax.shard_map(in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        def twice(x):
            return constrain(2 * x, "batch", "heads")

        assert (twice(jnp.ones((8, 4))) == 2).all()
