"""xsake inspect --mesh: which part of every array a device of a mesh would hold."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from rich import box
from rich.table import Table

from xsake.cli.terminal import console
from xsake.parallel import mesh as meshes
from xsake.parallel import sharding

if TYPE_CHECKING:
    from xsake.model import Config


def print_placements(config: Config, text: str) -> None:
    """A line for every parameter, then the sums of what training and serving hold."""
    from xsake.model import KVCache, parameter_axes, parameter_shapes

    asked = meshes.parse(text)
    sizes = meshes.MeshSizes(**{x: y or 1 for x, y in dataclasses.asdict(asked).items()})
    meshes.check_divides(
        sizes,
        {
            "fsdp": ("width", config.width),
            "tensor": ("kv_heads", config.kv_heads),
            "tensor 2": ("mlp_width", config.mlp_width),
            "context": ("context", config.context),
        },
    )
    mesh = meshes.abstract_mesh(sizes)
    axes, shapes = parameter_axes(config), parameter_shapes(config)
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    placed = sharding.placements(arrays, sharding.of_parameters(mesh, axes, shapes))
    table = _table(f"{sizes}: {sizes.size:,} devices", "parameter", "shape", "lies on")
    for one in placed:
        lies = ", ".join("·" if x is None else _joined(x) for x in one.spec) or "·"
        table.add_row(one.name, "×".join(map(str, one.shape)), lies, f"{one.device_bytes:,}")
    console.print(table)

    table = _table("", "in float32", "bytes in all")
    device, whole = sharding.total_bytes(placed)
    for name, factor in (("parameters", 1), ("gradient", 1), ("Adam's moments", 2)):
        table.add_row(name, f"{factor * whole:,}", f"{factor * device:,}")
    rows = sizes.data * sizes.fsdp
    batch = jax.ShapeDtypeStruct((rows, config.context), jnp.int32)
    where = sharding.named(mesh, ("batch", "sequence"))
    _add(table, f"tokens of {rows} × {config.context:,}", batch, where)
    if not config.is_sparse:
        cache = jax.eval_shape(lambda: KVCache.empty(config, rows, config.context))
        name = f"KV cache of {rows} × {config.context:,}"
        _add(table, name, cache, sharding.shardings_of(cache, mesh))
    console.print(table)


def _add(table: Table, name: str, tree: Any, shardings: Any) -> None:
    device, whole = sharding.total_bytes(sharding.placements(tree, shardings))
    table.add_row(name, f"{whole:,}", f"{device:,}")


def _joined(names: Any) -> str:
    return names if isinstance(names, str) else " × ".join(names)


def _table(title: str, *names: str) -> Table:
    """As narrow as a terminal of 80 columns."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold")
    table.add_column("bytes per device", justify="right")
    return table
