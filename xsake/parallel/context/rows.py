"""Moves query row blocks between devices so that all have equal work under the mask at hand.

    row blocks of a device, most visits first     9 8 7 6 5 4 3 2
    scheduled to c = 4 devices, back and forth    0 1 2 3 3 2 1 0      → 11 visits for each

Every device schedules its own row blocks over all devices, equally many to each: that takes one
all_to_all of fixed size, and no device has to know the others' masks. A new mask moves other row
blocks without a compile or a transfer to the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


class Schedule(NamedTuple):
    """Which row blocks of this device go where: order [c · R], R to each device."""

    order: Array  # int32 [row blocks]
    axis: str
    block: int  # tokens of a row block

    def sent(self, x: Array, axis: int) -> Array:
        """x with its axis of tokens (or of row blocks) as the devices compute it."""
        return lax.all_to_all(_by_blocks(x, axis, self.order), self.axis, axis, axis, tiled=True)

    def returned(self, x: Array, axis: int) -> Array:
        """The inverse of `sent`."""
        home = lax.all_to_all(x, self.axis, axis, axis, tiled=True)
        return _by_blocks(home, axis, jnp.argsort(self.order))


def _by_blocks(x: Array, axis: int, order: Array) -> Array:
    """x with the blocks of an axis in another order."""
    shape = x.shape
    x = x.reshape(*shape[:axis], order.shape[0], -1, *shape[axis + 1 :])
    return jnp.take(x, order, axis=axis).reshape(shape)


def schedule(work: Array, axis: str, devices: int, block: int) -> Schedule:
    """By the work of this device's row blocks, [row blocks]."""
    (count,) = work.shape
    if count % devices:
        raise ValueError(
            f"balance=True needs as many row blocks on a device as a multiple of the {devices} "
            f"devices, got {count} of {block} tokens; use smaller blocks or layout='zigzag'"
        )
    return Schedule(order_of(work, devices, lax.axis_index(axis)), axis, block)


def order_of(work: Array, devices: int, sender: Any) -> Array:
    """A sender's row blocks by the device that they go to, [devices · R]."""
    heaviest = jnp.argsort(-work, stable=True).astype(jnp.int32)
    rounds = heaviest.reshape(-1, devices)  # each round has one row block for each device
    back = (jnp.arange(len(rounds)) % 2 == 1)[:, None]
    by_device = jnp.where(back, rounds[:, ::-1], rounds).T  # [device, rounds]
    # another device is first at each sender, so that the heaviest row blocks go to different ones
    return jnp.roll(by_device, sender, axis=0).reshape(-1)


def device_loads(visits: Any, devices: int, method: str) -> np.ndarray:
    """Visits of every device, [devices], from those of all row blocks in the order of the text.

    Args:
      visits: [row blocks], over all heads; a multiple of the devices (of twice as many, zigzag).
      devices: of the context axis.
      method: "contiguous", "zigzag", or "balanced", as `balance=True` schedules row blocks.

    >>> device_loads([1, 2, 3, 4, 5, 6, 7, 8], 2, "contiguous")
    array([10, 26])
    >>> device_loads([1, 2, 3, 4, 5, 6, 7, 8], 2, "balanced")
    array([18, 18])
    """
    visits = np.asarray(visits)
    own = visits.reshape(devices, -1)
    if method == "contiguous":
        return np.asarray(own.sum(1))
    if method == "zigzag":
        halves = visits.reshape(2 * devices, -1).sum(1)
        return np.asarray(halves[:devices] + halves[::-1][:devices])
    if method != "balanced":
        raise ValueError(f"method {method!r} is not one of contiguous, zigzag, balanced")
    orders = [np.asarray(order_of(jnp.asarray(x), devices, d)) for d, x in enumerate(own)]
    sent = [x[order].reshape(devices, -1).sum(1) for x, order in zip(own, orders, strict=True)]
    return np.asarray(np.sum(sent, axis=0))
