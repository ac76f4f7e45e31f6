"""Data parallelism: the rows of a batch dealt out to devices, everything else on all of them.

    mesh (rows: 4)    batch [8, T] ─ 2 rows each ─┬─ sums ─┐
                      state, plan ─ a copy each ──┴────────┴─ added up: the same on every device

Kernels see one device's rows and no sharding. One device has no mesh: the program is then the plain
one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

ROWS = "rows"


def make_mesh(count: int, rows: int, pieces: int) -> Mesh | None:
    """A mesh of `count` devices, or None for one; 0 is as many as can take the same share of rows.

    Args:
      count: of devices.
      rows: of one update.
      pieces: micro-batches into which a device splits its rows.
    """
    devices = jax.devices()
    if count > len(devices):
        raise ValueError(f"run.devices = {count}, but there are {len(devices)}; ask for fewer")
    if count and rows % (count * pieces):
        raise ValueError(
            f"data.rows = {rows} cannot be dealt out evenly to {count} devices with "
            f"optimizer.accumulate = {pieces}; make it a multiple of {count * pieces}, or leave "
            "run.devices to be chosen"
        )
    count = count or most_devices(len(devices), rows, pieces)
    return None if count == 1 else Mesh(np.array(devices[:count]), (ROWS,))


def most_devices(count: int, rows: int, pieces: int) -> int:
    """How many of `count` devices can take the same share of the rows, split into pieces.

    >>> most_devices(8, 20, 2), most_devices(8, 7, 1), most_devices(4, 7, 1)
    (5, 7, 1)
    """
    return max(n for n in range(1, count + 1) if rows % (n * pieces) == 0)


def everywhere(mesh: Mesh | None) -> Any:
    """The sharding of what every device has whole."""
    return SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, P())


def dealt(batch: Any, mesh: Mesh | None) -> Any:
    """The batch with its rows on the devices of the mesh, in order."""
    return batch if mesh is None else jax.device_put(batch, NamedSharding(mesh, P(ROWS)))


def over_rows(sums: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """sums(parameters, batch, plan) of all rows, where `sums` adds up over the rows it is given."""
    if mesh is None:
        return sums

    def all_sums(parameters: Any, batch: Any, plan: Any) -> Any:
        return lax.psum(sums(parameters, batch, plan), ROWS)

    specs = (P(), P(ROWS), P())
    return jax.shard_map(all_sums, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
