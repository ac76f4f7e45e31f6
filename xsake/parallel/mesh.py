"""Data parallelism: the batch is sharded over the devices, everything else is replicated.

    mesh (batch: 4)    batch [8, T] ─ 2 batch rows per device ─┬─ sums ─┐
                       state, plan ─ a copy per device ────────┴────────┴─ psum: equal everywhere

Kernels run per device under shard_map and need no sharding logic. With one device there is no mesh,
and the program contains no shard_map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

BATCH_AXIS = "batch"
Tree = TypeVar("Tree")


def make_mesh(count: int, rows: int, accumulate: int) -> Mesh | None:
    """A mesh of `count` devices, or None for one device.

    Args:
      count: devices; 0 takes the largest number that divides the batch evenly.
      rows: batch rows of one update.
      accumulate: micro-batches into which each device splits its batch rows.
    """
    devices = jax.devices()
    if count > len(devices):
        raise ValueError(f"run.devices = {count}, but there are {len(devices)}; ask for fewer")
    if count and rows % (count * accumulate):
        raise ValueError(
            f"data.rows = {rows} is not divisible by run.devices × optimizer.accumulate = "
            f"{count} × {accumulate}; make it a multiple of {count * accumulate}, or set "
            "run.devices = 0 to have the number chosen"
        )
    count = count or largest_device_count(len(devices), rows, accumulate)
    return None if count == 1 else Mesh(np.array(devices[:count]), (BATCH_AXIS,))


def largest_device_count(count: int, rows: int, accumulate: int) -> int:
    """The largest number of devices, at most `count`, that can each take equal micro-batches.

    >>> largest_device_count(8, 20, 2), largest_device_count(8, 7, 1), largest_device_count(4, 7, 1)
    (5, 7, 1)
    """
    return max(n for n in range(1, count + 1) if rows % (n * accumulate) == 0)


def replicated(mesh: Mesh | None) -> Sharding:
    """The sharding of arrays that every device holds whole."""
    return SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, P())


def shard_batch(batch: Tree, mesh: Mesh | None) -> Tree:
    """The batch with its rows (axis 0 of every array) split over the devices, in order."""
    return batch if mesh is None else jax.device_put(batch, NamedSharding(mesh, P(BATCH_AXIS)))


def sum_over_batch(sums: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """sums(parameters, batch, plan) by shard_map and psum; `sums` adds up over the rows it gets."""
    if mesh is None:
        return sums

    def all_sums(parameters: Any, batch: Any, plan: Any) -> Any:
        return lax.psum(sums(parameters, batch, plan), BATCH_AXIS)

    specs = (P(), P(BATCH_AXIS), P())
    return jax.shard_map(all_sums, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
