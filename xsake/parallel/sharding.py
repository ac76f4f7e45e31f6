"""Which axis of an array lies on which axis of the mesh: one table for all arrays.

    parameter  layers.up.kernel [layers, embed, mlp]  ─ TABLE ─  P(None, "fsdp", "tensor")
    batch      tokens [batch, sequence]               ─ TABLE ─  P(("data", "fsdp"), "context")

An axis of an array has a logical name: parameters know theirs (`model.parameter_axes`), and so do
KVCache and Plan (`axes`), rules and BlockMasks (`partition_spec`). The optimiser's moments
and the average lie where their parameters lie. XLA partitions everything but attention, which runs
under shard_map, because XLA cannot partition kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from xsake.block_mask import BlockMask
from xsake.masks.rule import Rule, partition_spec
from xsake.parallel.mesh import BATCH_AXES

Tree = TypeVar("Tree")
Axes = tuple[str | None, ...]
AnyMesh = Mesh | AbstractMesh  # one without devices says where arrays would lie

# Logical axis -> axes of the mesh. The names are those of the model's parameters and activations.
TABLE: dict[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "sequence": ("context",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "embed": ("fsdp",),  # an axis of parameters; that of hidden states is "width"
    "width": (),
    "layers": (),
    "head_size": (),
    "context": (),  # of learned positions
    "capacity": (),  # of a cache
    "row_blocks": (),
    "kv_blocks": (),
    "branches": (),
    "block": (),
    "pool_width": (),
    "index_heads": (),
    "index_size": (),
}
# Axes that stay whole on a mesh that does not divide them. GPT-2 has 50,257 tokens.
WHOLE_IF_UNEVEN = ("vocab",)


def spec(axes: Axes, shape: Sequence[int] | None = None, mesh: AnyMesh | None = None) -> P:
    """The PartitionSpec of an array with these logical axes; None is an axis that stays whole.

    With shape and mesh, a batch of one row stays whole, and so does a vocabulary that the mesh does
    not divide.

    >>> tuple(spec(("layers", "embed", "heads", "head_size")))
    (None, 'fsdp', 'tensor', None)
    """
    found: list[Any] = []
    for number, name in enumerate(axes):
        if name is not None and name not in TABLE:
            raise ValueError(f"{name!r} is not a logical axis of an array; add it to TABLE")
        names = () if name is None else TABLE[name]
        if mesh is not None and shape is not None and name in WHOLE_IF_UNEVEN:
            size = math.prod(mesh.shape[x] for x in names)
            names = names if shape[number] % size == 0 else ()
        if shape is not None and name == "batch" and shape[number] == 1:
            names = ()
        found.append(names[0] if len(names) == 1 else names or None)
    return P(*found)


def named(mesh: AnyMesh, axes: Axes, shape: Sequence[int] | None = None) -> NamedSharding:
    """The NamedSharding of an array with these logical axes."""
    return NamedSharding(mesh, spec(axes, shape, mesh))


def replicated(mesh: Mesh | None) -> Sharding:
    """The sharding of arrays that every device holds whole."""
    return SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, P())


def constrained(x: Array, axes: Axes, mesh: Mesh | None) -> Array:
    """x, which lies on the mesh as TABLE says; x itself without a mesh. Under jit."""
    return x if mesh is None else lax.with_sharding_constraint(x, named(mesh, axes, x.shape))


def everywhere(tree: Tree, mesh: Mesh | None) -> Tree:
    """The arrays of a tree, whole on every device; the tree itself without a mesh. Under jit."""
    if mesh is None:
        return tree

    def one(x: Any) -> Any:
        is_array = isinstance(x, Array)  # a layer's inputs may hold a name too
        return lax.with_sharding_constraint(x, replicated(mesh)) if is_array else x

    return jax.tree.map(one, tree)


# ------------------------------------------------------------------------------ shardings of trees


def of_parameters(
    mesh: AnyMesh, axes: Mapping[str, Axes], shapes: Mapping[str, Sequence[int]]
) -> dict[str, NamedSharding]:
    """The sharding of every parameter by name."""
    return {name: named(mesh, axes[name], shapes[name]) for name in axes}


def of_state(tree: Any, mesh: AnyMesh, axes: Mapping[str, Axes]) -> Any:
    """The sharding of every leaf of a training state.

    A leaf below a key that is the name of a parameter lies where that parameter lies: parameters,
    Adam's moments, an average. Everything else, such as a step count, is replicated.
    """

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = next((x.key for x in path if getattr(x, "key", None) in axes), None)
        if name is None:
            return NamedSharding(mesh, P())
        return named(mesh, axes[name], leaf.shape)

    return jax.tree_util.tree_map_with_path(one, tree)


def specs_of(x: Any) -> Any:
    """x with a PartitionSpec in place of every array: a mask, a rule, or what names its axes.

    The class of x is a dataclass with `axes`, the names of those of each field: KVCache, Plan.
    """
    if x is None:
        return None
    if isinstance(x, BlockMask):
        return x.partition_spec(batch=BATCH_AXES, heads="tensor")
    if isinstance(x, Rule):
        return partition_spec(x, BATCH_AXES, "tensor")
    axes: Mapping[str, Axes] | None = getattr(type(x), "axes", None)
    if axes is None:
        raise TypeError(
            f"{type(x).__name__} does not name the axes of its arrays and cannot be put on a mesh; "
            "pass a BlockMask, a Plan, or a class with `axes`"
        )
    found = {
        name: None if (array := getattr(x, name)) is None else spec(named_axes, array.shape)
        for name, named_axes in axes.items()
    }
    return dataclasses.replace(x, **found)


def shardings_of(x: Any, mesh: AnyMesh) -> Any:
    """`specs_of` as NamedShardings."""
    return jax.tree.map(
        lambda one: NamedSharding(mesh, one), specs_of(x), is_leaf=lambda one: isinstance(one, P)
    )


def put(tree: Tree, shardings: Any) -> Tree:
    """The arrays of a tree on the devices, by a tree of shardings or by one for all.

    Every process passes the same values and copies the parts that its devices hold.
    """
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)

    def one(x: Any, sharding: Sharding) -> Array:
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        x = x if isinstance(x, np.ndarray) else np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(one, tree, shardings)


def whole(tree: Tree, mesh: Mesh | None) -> Tree:
    """The arrays of a tree, gathered on this process's first device; all processes call it."""
    if mesh is None:
        return tree
    gather = _gather(mesh)
    return jax.tree.map(lambda x: gather(x).addressable_data(0), tree)


@functools.lru_cache(maxsize=4)
def _gather(mesh: Mesh) -> Callable[[Any], Any]:
    """The identity, whose result every device has; cached, because jit compares by identity."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))


# ------------------------------------------------------------------------------------------ batches


def batch_from_rows(
    read: Callable[[Sequence[int]], Tree], shape: tuple[int, int], mesh: Mesh | None
) -> Tree:
    """A batch [rows, length] on the mesh. Every process reads only the rows that its devices hold.

    Args:
      read: the given rows of the batch, a NamedTuple of arrays [len(rows), length].
      shape: (rows, length) of the whole batch.
      mesh: None: the whole batch, as `read` returns it.
    """
    if mesh is None:
        return read(range(shape[0]))
    sharding = named(mesh, ("batch", "sequence"))
    rows = local_rows(sharding, shape)
    offset = {row: i for i, row in enumerate(rows)}

    def part(x: np.ndarray, index: Any) -> np.ndarray:
        chosen = [offset[row] for row in range(*index[0].indices(shape[0]))]
        return x[chosen][:, index[1]]

    return jax.tree.map(
        lambda x: jax.make_array_from_callback(shape, sharding, lambda index: part(x, index)),
        read(rows),
    )


def local_rows(sharding: Sharding, shape: tuple[int, ...]) -> list[int]:
    """The indices along axis 0 that the devices of this process hold, ascending."""
    found: set[int] = set()
    for index in sharding.addressable_devices_indices_map(shape).values():
        assert index is not None
        found.update(range(*index[0].indices(shape[0])))
    return sorted(found)


# ---------------------------------------------------------------------------------- what lies where


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one array lies: `xsake inspect --mesh` prints a line for each."""

    name: str
    shape: tuple[int, ...]
    spec: P
    device_bytes: int  # of one device
    bytes: int  # of the whole array

    @property
    def copies(self) -> float:
        """How many devices hold the same element, as a share of all devices: 1 is replicated."""
        return self.device_bytes / self.bytes if self.bytes else 1.0


def placements(tree: Any, shardings: Any) -> list[Placement]:
    """Where every array of a tree lies; the arrays may be ShapeDtypeStructs."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = []
    for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        size = np.dtype(leaf.dtype).itemsize
        part = sharding.shard_shape(tuple(leaf.shape))
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shape = tuple(leaf.shape)
        found.append(
            Placement(
                name, shape, sharding.spec, size * math.prod(part), size * math.prod(leaf.shape)
            )
        )
    return found


def bytes_per_device(tree: Any) -> dict[Any, int]:
    """Bytes of a tree of arrays on every device of this process, counted shard by shard."""
    found: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return found


def assert_placed(tree: Any, shardings: Any) -> None:
    """Raises AssertionError, naming the array, unless each lies as `shardings` say."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), wanted in zip(leaves, jax.tree.leaves(shardings), strict=True):
        if not leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise AssertionError(
                f"{name} {list(leaf.shape)} lies as {leaf.sharding}, not as {wanted}"
            )


def total_bytes(placed: Iterable[Placement]) -> tuple[int, int]:
    """(bytes of one device, bytes of the whole) of some arrays."""
    placed = list(placed)
    return sum(x.device_bytes for x in placed), sum(x.bytes for x in placed)
