"""What lies where: the table, shares in bytes, and the assertion that other tests use."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.train.corpus import config
from xsake.block_mask import BlockMask
from xsake.cli.checkpoints import inspect
from xsake.data.stream import Batch
from xsake.hads import Plan
from xsake.hads.terms import Terms
from xsake.masks import documents
from xsake.model import PRESETS, KVCache, parameter_axes, parameter_shapes
from xsake.parallel import sharding
from xsake.parallel.mesh import AXES, MeshSizes, make_mesh
from xsake.train import step


def abstract(**sizes: int) -> AbstractMesh:
    """A mesh without devices."""
    shape = tuple(sizes.get(name, 1) for name in AXES)
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def one_device():
    mesh = make_mesh(MeshSizes(1, 1, 1, 1), jax.devices()[:1])
    assert mesh is None
    devices = np.array(jax.devices()[:1]).reshape(1, 1, 1, 1)
    return jax.sharding.Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 4)


@pytest.mark.parametrize("name", PRESETS)
def test_every_axis_of_every_parameter_is_in_the_table(name):
    axes, shapes = parameter_axes(PRESETS[name]), parameter_shapes(PRESETS[name])
    assert axes.keys() == shapes.keys()
    for parameter, names in axes.items():
        assert len(names) == len(shapes[parameter])
        sharding.spec(names)


def test_parameters_moments_and_average_lie_together():
    whole = config("runs", optimizer__ema_decay=0.9)
    mesh = abstract(fsdp=2, tensor=2)
    like = jax.eval_shape(lambda: step.initial(whole))
    axes = parameter_axes(whole.model)
    found = sharding.of_state(like, mesh, axes)
    wanted = sharding.of_parameters(mesh, axes, parameter_shapes(whole.model))
    assert found.parameters == wanted == found.average
    adam = found.optimizer[1]
    assert adam.mu == wanted == adam.nu
    assert (adam.count.spec, found.step.spec) == (P(), P())
    assert wanted["layers.up.kernel"].spec == P(None, "fsdp", "tensor")
    assert wanted["layers.out.kernel"].spec == P(None, "tensor", None, "fsdp")
    assert wanted["embed.tokens"].spec == P("tensor", "fsdp")


def test_a_vocabulary_that_is_not_divided_stays_whole():
    axes, shapes = parameter_axes(PRESETS["gpt2"]), parameter_shapes(PRESETS["gpt2"])
    found = sharding.of_parameters(abstract(fsdp=2, tensor=2), axes, shapes)
    assert found["embed.tokens"].spec == P(None, "fsdp")  # 50,257 tokens


def test_bytes_of_a_device_are_its_share():
    mesh = abstract(data=2, fsdp=4, tensor=2)
    axes, shapes = (
        parameter_axes(PRESETS["llama-3.2-1b"]),
        parameter_shapes(PRESETS["llama-3.2-1b"]),
    )
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    placed = sharding.placements(tree, sharding.of_parameters(mesh, axes, shapes))
    by_name = {x.name: x for x in placed}
    assert by_name["layers.up.kernel"].device_bytes * 8 == by_name["layers.up.kernel"].bytes
    assert by_name["norm.scale"].device_bytes * 4 == by_name["norm.scale"].bytes
    one, whole = sharding.total_bytes(placed)
    assert whole == 4 * sum(np.prod(shape) for shape in shapes.values())
    assert 1 / 8 <= one / whole < 1 / 8 + 1e-3


def test_caches_plans_and_masks_have_shardings():
    mesh = abstract(data=2, fsdp=2, tensor=2)
    cache = jax.eval_shape(lambda: KVCache.empty(PRESETS["tiny"], 4, 64))
    found = sharding.shardings_of(cache, mesh)
    assert found.k.spec == P(None, ("data", "fsdp"), "tensor", None, None)
    assert found.length.spec == P(("data", "fsdp"))
    plan = Plan(np.ones((2, 4, 3), np.int32), None, Terms(0.84, "kl", "pooled", 16, 48))
    assert sharding.shardings_of(plan, mesh).counts.spec == P(None, "tensor", None)
    ids = np.repeat([[0], [1], [2], [3]], 32, 1)
    mask = BlockMask.from_rule(documents(ids), (32, 32), batch=4, heads=4, block=16)
    found = sharding.shardings_of(mask, mesh)
    assert found.kv_count.spec == P(("data", "fsdp"), None, None)
    assert all(x.spec[0] == ("data", "fsdp") for x in jax.tree.leaves(found.rule))
    with pytest.raises(TypeError, match=r"dict does not name the axes of its arrays and cannot"):
        sharding.specs_of({})


def test_an_unknown_axis_raises():
    with pytest.raises(ValueError, match="'rows' is not a logical axis of an array; add it to TA"):
        sharding.spec(("rows",))


def test_an_array_that_lies_elsewhere_is_named():
    mesh = one_device()
    tree = {"a": jnp.zeros(4), "b": sharding.put(jnp.zeros(4), NamedSharding(mesh, P()))}
    wanted = jax.tree.map(lambda _: NamedSharding(mesh, P()), tree)
    sharding.assert_placed({"b": tree["b"]}, {"b": wanted["b"]})
    assert sharding.bytes_per_device(tree) == {jax.devices()[0]: 32}
    other = AbstractMesh((2, 1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 4)
    with pytest.raises(AssertionError, match=r"^b \[4\] lies as .*, not as NamedSharding"):
        sharding.assert_placed({"b": tree["b"]}, {"b": NamedSharding(other, P("data"))})


def test_a_process_reads_the_rows_of_its_devices_once():
    asked = []

    def read(rows):
        asked.append(list(rows))
        x = np.tile(np.asarray(rows)[:, None], (1, 6)).astype(np.int32)
        return Batch(x, x + 1, x * 0, x.astype(np.float32))

    found = sharding.batch_from_rows(read, (4, 6), one_device())
    assert asked == [[0, 1, 2, 3]]
    np.testing.assert_array_equal(found.tokens[:, 0], [0, 1, 2, 3])
    assert isinstance(sharding.batch_from_rows(read, (4, 6), None).tokens, np.ndarray)


def test_inspect_prints_bytes_per_device(capsys):
    inspect(Path("shipped"), mesh="data=2,fsdp=4,tensor=2")
    said = capsys.readouterr().out
    # float32 [8, 192, 512] over four and two devices
    assert re.search(r"layers.up.kernel\s+8×192×512\s+·, fsdp, tensor\s+393,216", said)
    with pytest.raises(
        ValueError, match=r"kv_heads = 8 is not divisible by mesh.tensor = 3; choos"
    ):
        inspect(Path("shipped"), mesh="tensor=3")


def test_arrays_are_gathered_by_one_program_for_each_shape():
    """Every sample of text gathers the whole model."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    tree = {name: jnp.full((3, 5), i) for i, name in enumerate("ab")}
    for _ in range(3):
        found = sharding.whole(tree, mesh)
    jax.tree.map(np.testing.assert_array_equal, found, tree)
    assert sharding._gather(mesh)._cache_size() == 1
