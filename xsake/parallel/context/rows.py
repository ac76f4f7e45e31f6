"""Moves query row blocks between devices so that all have equal work under the mask at hand.

    row blocks of a device, most visits first     9 8 7 6   5 4 3 2    two rounds for c = 4 devices
    scheduled to devices                          0 1 2 3   3 2 1 0    → 11 visits for each

Every device gives equally many of its row blocks to every device, which takes one all_to_all of
fixed size. A round has one row block for each device; the heaviest goes to the device that has the
least work so far, over the rounds of all devices. All devices compute the same schedule from the
number of visits of every row block. A new mask moves other row blocks without a compile or a
transfer to the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake.parallel.context.layout import NAMES, token_order


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


def check_divides(tokens: int, devices: int, block: int) -> None:
    """Raises unless a device's tokens are as many whole row blocks for each device."""
    if tokens % (devices * block):
        raise ValueError(
            f"balance=True needs as many row blocks on a device as a multiple of the {devices} "
            f"devices, got {tokens} tokens in blocks of {block}; use smaller blocks, a length that "
            f"is a multiple of {devices * devices * block}, or layout='zigzag'"
        )


def schedule(work: Array, axis: str, devices: int, block: int) -> Schedule:
    """By the work of this device's row blocks, [row blocks]; see `check_divides`."""
    every = lax.all_gather(work, axis)  # [c, row blocks]: 4 bytes for each row block
    order = orders(every, devices)[lax.axis_index(axis)]
    return Schedule(order, axis, block)


def orders(work: Array, devices: int) -> Array:
    """Every device's row blocks by the device that they go to, [c, c · R], from [c, blocks]."""
    heaviest = jnp.argsort(-work, axis=1, stable=True).astype(jnp.int32)
    # [rounds, c, devices]: the first rounds of all devices, then the second ones
    rounds = jnp.moveaxis(heaviest.reshape(devices, -1, devices), 1, 0)
    visits = jnp.take_along_axis(work, heaviest, axis=1)
    visits = jnp.moveaxis(visits.reshape(devices, -1, devices), 1, 0)

    def assign(loads: Array, given: tuple[Array, Array]) -> tuple[Array, Array]:
        row_blocks, visits = given
        least = jnp.argsort(loads, stable=True)
        return loads.at[least].add(visits), jnp.zeros_like(row_blocks).at[least].set(row_blocks)

    flat = (rounds.reshape(-1, devices), visits.reshape(-1, devices))
    _, by_device = lax.scan(assign, visits[0, 0] * 0, flat)
    # [rounds, c, device] as [c, device, rounds]
    return jnp.moveaxis(by_device.reshape(rounds.shape), 0, 2).reshape(devices, -1)


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
    return np.asarray(visits[device_rows(visits, devices, method)].sum(1))


def device_rows(visits: Any, devices: int, method: str) -> np.ndarray:
    """The row blocks that each device computes, [devices, R]; arguments as in `device_loads`.

    >>> device_rows([1, 2, 3, 4, 5, 6, 7, 8], 2, "zigzag")
    array([[0, 1, 6, 7],
           [2, 3, 4, 5]])
    """
    own = np.asarray(visits).reshape(devices, -1)
    if method in NAMES:
        return token_order(own.size, devices, method).reshape(devices, -1)
    if method != "balanced":
        raise ValueError(f"method {method!r} is not one of contiguous, zigzag, balanced")
    by_device = np.asarray(orders(jnp.asarray(own), devices))  # [from, to · R], of each device
    row = by_device + np.arange(devices)[:, None] * own.shape[1]
    return np.moveaxis(row.reshape(devices, devices, -1), 1, 0).reshape(devices, -1)
