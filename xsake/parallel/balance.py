"""Heads with uneven budgets over the devices of the tensor axis: who computes which heads.

    work of kv groups    9 8 7 1 1 1 1 2      as they lie: devices of 2 heads  17  8  2  3
                                              ordered by balance_heads         10  9  8  3

Devices meet after every layer, at the sum over the output projection, so each layer waits for its
slowest device. Query heads that share a kv head stay together. Every device holds equally many kv
heads, so that arrays stay evenly sharded; the order of heads is all that changes, and it changes
once: `with_head_order` of a model and of a plan permute the projections and the budgets, and the
model's outputs are the same up to the order of a sum.

Where there are as many devices as kv heads, no order helps; there a context axis splits rows
instead, which `context.rows` balances.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class HeadBalance:
    """An order of kv heads for every layer, and what it does to the devices' work."""

    order: np.ndarray  # int [layers, K]: head order[l, i] of the model becomes head i
    before: np.ndarray  # [layers, devices] work, heads as they lie
    after: np.ndarray  # [layers, devices] work, heads in `order`

    @property
    def before_ratio(self) -> np.ndarray:
        """The largest device's work ÷ the mean, [layers], heads as they lie."""
        return _largest_over_mean(self.before)

    @property
    def after_ratio(self) -> np.ndarray:
        """The same with heads in `order`."""
        return _largest_over_mean(self.after)

    @property
    def speedup(self) -> float:
        """Time of all layers before ÷ after, where a layer takes as long as its largest device."""
        largest = self.after.max(1).sum()
        return float(self.before.max(1).sum() / largest) if largest else 1.0

    def __str__(self) -> str:
        rows = [f"{'layer':>5}  {'before':>6}  {'after':>6}   largest device ÷ mean"]
        for layer, pair in enumerate(zip(self.before_ratio, self.after_ratio, strict=True)):
            rows.append(f"{layer:>5}  {pair[0]:6.3f}  {pair[1]:6.3f}")
        return "\n".join([*rows, f"all layers: {self.speedup:.3f} times faster"])


def balance_heads(work: Any, devices: int, kv_heads: int | None = None) -> HeadBalance:
    """Orders kv heads so that consecutive groups of K / devices have nearly equal work.

    Args:
      work: [layers, N] or [N], of every query head: blocks visited, such as `plan.counts.sum(-1)`.
      devices: of the tensor axis; divides the kv heads.
      kv_heads: K, which divides N; default N.

    >>> found = balance_heads([9, 8, 7, 1, 1, 2, 1, 1], 4)
    >>> found.before_ratio, found.after_ratio
    (array([2.26666667]), array([1.33333333]))
    """
    work = np.atleast_2d(np.asarray(work, np.float64))
    if work.ndim != 2 or not np.isfinite(work).all() or (work < 0).any():
        raise ValueError(
            f"work must be [layers, heads] of finite numbers from 0 up, got shape "
            f"{list(work.shape)}"
        )
    layers, heads = work.shape
    K = heads if kv_heads is None else kv_heads
    if K < 1 or heads % K:
        raise ValueError(f"kv_heads = {K} does not divide the {heads} heads of work")
    if devices < 1 or K % devices:
        raise ValueError(
            f"{devices} devices do not divide {K} kv heads; use a tensor axis of a size that does, "
            "and a context axis for the rest, which balances rows"
        )
    groups = work.reshape(layers, K, heads // K).sum(-1)
    order = np.stack([_ordered(layer, devices) for layer in groups])
    after = np.take_along_axis(groups, order, axis=1)
    return HeadBalance(
        order,
        groups.reshape(layers, devices, -1).sum(-1),
        after.reshape(layers, devices, -1).sum(-1),
    )


def query_order(order: Any, heads: int) -> np.ndarray:
    """An order of kv heads [..., K] as one of query heads [..., N], whose groups stay together.

    >>> query_order([1, 0], 4)
    array([2, 3, 0, 1])
    """
    order = np.asarray(order)
    group = heads // order.shape[-1]
    members = order[..., None] * group + np.arange(group)
    return members.reshape(*order.shape[:-1], heads)


def _largest_over_mean(loads: np.ndarray) -> np.ndarray:
    mean = loads.mean(1)
    return np.where(mean > 0, loads.max(1) / np.where(mean > 0, mean, 1), 1.0)


def _ordered(work: np.ndarray, devices: int) -> np.ndarray:
    """One layer's kv heads, device after device.

    The heaviest head goes to the device with the least work that has space; then heads are
    exchanged as long as the larger of the two devices gets less.
    """
    space = len(work) // devices
    members: list[list[int]] = [[] for _ in range(devices)]
    for head in np.argsort(-work, kind="stable"):
        free = [d for d in range(devices) if len(members[d]) < space]
        members[min(free, key=lambda d: work[members[d]].sum())].append(int(head))
    held = np.array(members)
    while (swap := _best_swap(work, held)) is not None:
        (a, i), (b, j) = swap
        held[a, i], held[b, j] = held[b, j], held[a, i]
    return np.sort(held, axis=1).reshape(-1)


def _best_swap(work: np.ndarray, held: np.ndarray) -> tuple[Any, Any] | None:
    """The exchange with the most loaded device that lowers the larger of both loads most."""
    loads = work[held].sum(1)
    a = int(loads.argmax())
    given, taken = work[held[a]][:, None, None], work[held][None]  # [i, device, j]
    larger = np.maximum(loads[a] - given + taken, loads[None, :, None] + given - taken)
    larger[:, a] = np.inf
    i, b, j = np.unravel_index(int(larger.argmin()), larger.shape)
    if larger[i, b, j] >= loads[a] * (1 - 1e-12):
        return None
    return (a, int(i)), (int(b), int(j))
