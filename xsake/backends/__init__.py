"""Backends: each a module with two functions, and none imports another.

    why_not(q, k, v, bias, mask, *, soft_cap, options) -> str | None     why it cannot run
    forward(q, k, v, bias, mask, *, scale, soft_cap, options) -> (out, logsumexp)

q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv], bias [B|1, N|1, T|1, S|1] or None, mask a
BlockMask. out is [B, T, N, Hv] in q's dtype, logsumexp [B, T, N] float32. Both are differentiable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from xsake.block_mask import BlockMask


@dataclasses.dataclass(frozen=True)
class Options:
    """How a backend works, never what it computes. Every default is a good choice.

    Attributes:
      deterministic: gradients bit-equal from run to run, where that costs speed.
      xla: an xla_chunks.Steps instead of the device's.
      hopper_forward: a hopper_forward.ForwardTiling instead of the measured table's.
      hopper_backward: a hopper_backward.BackwardTiling instead of the measured table's.
    """

    deterministic: bool = False
    xla: Any = None
    hopper_forward: Any = None
    hopper_backward: Any = None


class Sizes(NamedTuple):
    """The axes of one call; see DESIGN's letters."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int

    @classmethod
    def of(cls, q: Any, k: Any, v: Any) -> Sizes:
        """Reads the letters off q, k and v."""
        (B, T, N, H), (_, S, K, Hv) = q.shape, v.shape
        return cls(B, T, S, N, K, H, Hv)


def accumulator(dtype: Any) -> Any:
    """What softmax and sums are kept in: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def mask_place(mask: BlockMask, sizes: Sizes, b: Array, n: Array) -> Array:
    """Which of the mask's Bm·Nm lists serves batch row b and query head n."""
    batch, heads = mask.kv_count.shape[:2]
    row = b if batch > 1 else jnp.zeros_like(b)
    head = n * heads // sizes.N  # N lists: n; K lists: n's kv head; one list: 0
    return row * heads + head


def first_order_only(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn, which refuses to be differentiated: it is itself part of a derivative."""

    @jax.custom_jvp
    def unchanged(args: Any) -> Any:
        return args

    @unchanged.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"the {name!r} backend has first derivatives only; "
            "take second derivatives with implementation='reference'"
        )

    return lambda *args: fn(*unchanged(args))


def own_copies(*arrays: Any) -> tuple[Any, ...]:
    """The same arrays, apart from any stack of layers that they come from or go to.

    In a loop XLA hands a kernel a place inside the stack instead of a slice (its dynamic-slice
    fusion). That saves a copy of what is read; but a kernel whose result is stacked and used too
    would run twice.
    """
    return jax.lax.optimization_barrier(arrays)
