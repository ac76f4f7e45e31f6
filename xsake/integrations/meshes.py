"""shard_map for functions whose arguments come as a user has them, on any kind of mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def over_mesh(
    function: Callable[..., Any], mesh: Any, in_specs: tuple[Any, ...], out_specs: Any
) -> Callable[..., Any]:
    """The function under `jax.shard_map`.

    A mesh of `jax.make_mesh` has Explicit axes, over which shard_map takes only arguments that are
    sharded as in_specs say: they are resharded.
    """
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    if AxisType.Explicit not in getattr(mesh, "axis_types", ()):
        return mapped

    def resharded(*arguments: Any) -> Any:
        return mapped(*(_put(mesh, x, spec) for x, spec in zip(arguments, in_specs, strict=True)))

    return resharded


def _put(mesh: Any, x: Any, specs: Any) -> Any:
    """A pytree with the shardings of a tree of specs, of which one may stand for a whole part."""

    def put(spec: Any, part: Any) -> Any:
        sharding = None if spec is None else NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: x if sharding is None else jax.sharding.reshard(x, sharding), part
        )

    return jax.tree.map(put, specs, x, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))
