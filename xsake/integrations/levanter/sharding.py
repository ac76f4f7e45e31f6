"""Sharding: a call under shard_map, over the mesh axes of batch rows and kv heads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax import Array
from jax.sharding import PartitionSpec

from xsake import attention
from xsake.block_mask import BlockMask
from xsake.integrations.levanter.axes import Axes
from xsake.integrations.meshes import over_mesh

__all__ = ["Sharding"]


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Mesh axes that batch rows and heads are sharded over."""

    mesh: Any
    batch: tuple[str, ...]
    heads: tuple[str, ...]

    @classmethod
    def of(cls, mesh: Any, mapping: Any, axes: Axes) -> Sharding:
        """Of Levanter's mapping from named axes to mesh axes."""
        if mesh is None or mapping is None:
            raise ValueError(
                "mesh and axis_mapping are given together: the devices, and {axis: mesh axis} for "
                f"the axes {[*axes.batch, *axes.kv_heads]}"
            )
        if not hasattr(mesh, "shape") or not isinstance(mapping, Mapping):
            raise TypeError(
                "mesh must be a jax.sharding.Mesh and axis_mapping a dict of axes, got "
                f"{type(mesh).__name__} and {type(mapping).__name__}"
            )
        over = {
            name: _mesh_axes(name, mapping[name])
            for name in axes.sizes
            if mapping.get(name) not in (None, (), [])
        }
        if unknown := [x for found in over.values() for x in found if x not in mesh.shape]:
            raise ValueError(
                f"axis_mapping names the mesh axis {unknown[0]!r}, but the mesh has "
                f"{list(mesh.shape)}"
            )
        used = [x for found in over.values() for x in found]
        if twice := [x for x in used if used.count(x) > 1]:
            raise ValueError(
                f"axis_mapping shards {[name for name in over if twice[0] in over[name]]} over the "
                f"mesh axis {twice[0]!r}, which can shard one of them only"
            )
        if whole := [name for name in over if name not in (*axes.batch, *axes.kv_heads)]:
            raise ValueError(
                f"axis_mapping shards {whole[0]!r}, but only batch rows and kv heads, "
                f"{[*axes.batch, *axes.kv_heads]}, can be sharded here; leave it out, or use "
                "xsake.parallel.context_attention for a split sequence"
            )
        for name, found in over.items():
            count = math.prod(mesh.shape[x] for x in found)
            if axes.sizes[name] % count:
                raise ValueError(
                    f"{axes.sizes[name]} along {name!r} cannot be sharded over {count} devices of "
                    f"mesh axis {found if len(found) > 1 else found[0]!r}; shard over fewer devices"
                )
        batch, heads = (
            tuple(x for name in names for x in over.get(name, ()))
            for names in (axes.batch, axes.kv_heads)
        )
        return cls(mesh, batch, heads)

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: BlockMask,
        arrays: dict[str, Any],
        how: dict[str, Any],
    ) -> Array:
        """The call under shard_map."""
        tokens = PartitionSpec(self.batch, None, self.heads, None)
        specs = {
            "bias": None if (bias := arrays["bias"]) is None else self._of_pairs(bias),
            "sinks": None if arrays["sinks"] is None else PartitionSpec(self.heads),
        }

        def local(q: Array, k: Array, v: Array, mask: Any, arrays: dict[str, Any]) -> Array:
            return attention.dot_product_attention(q, k, v, mask=mask, **arrays, **how)

        in_specs = (*[tokens] * 3, mask.partition_spec(self.batch, self.heads), specs)
        return over_mesh(local, self.mesh, in_specs, tokens)(q, k, v, mask, arrays)

    def _of_pairs(self, x: Array) -> PartitionSpec:
        batch = self.batch if x.shape[0] > 1 else None
        return PartitionSpec(batch, self.heads if x.shape[1] > 1 else None, None, None)


def _mesh_axes(name: str, axes: Any) -> tuple[str, ...]:
    found = (axes,) if isinstance(axes, str) else axes
    if not isinstance(found, (tuple, list)) or not all(isinstance(x, str) for x in found):
        raise TypeError(
            f"axis_mapping[{name!r}] must be the name of a mesh axis or several, got {axes!r}"
        )
    return tuple(found)
