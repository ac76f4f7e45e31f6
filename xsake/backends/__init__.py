"""Backends: each a module with two functions, and none imports another.

    why_not(call) -> str | None                    why it cannot run the call
    forward(call) -> (out, logsumexp)              out [B, T, N, Hv], logsumexp float32 [B, T, N]

Both results are differentiable. `Call` has all inputs of a backend;
`attention.py` has checked them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xsake.backends.options import Options
from xsake.block_mask import BlockMask


class Sizes(NamedTuple):
    """The axes of one call."""

    B: int  # batch
    T: int  # query length
    S: int  # key length
    N: int  # query heads
    K: int  # key/value heads; divides N
    H: int  # head size of q and k
    Hv: int  # head size of v

    @classmethod
    def of(cls, q: Any, k: Any, v: Any) -> Sizes:
        """The sizes of q, k and v."""
        (B, T, N, H), (_, S, K, Hv) = q.shape, v.shape
        return cls(B, T, S, N, K, H, Hv)


@dataclasses.dataclass(frozen=True)
class Call:
    """One checked call of `dot_product_attention`."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K Hv"]
    bias: Float[Array, "#B #N #T #S"] | None
    mask: BlockMask
    scale: float
    soft_cap: float | None
    options: Options

    @property
    def sizes(self) -> Sizes:
        """B, T, S, N, K, H and Hv."""
        return Sizes.of(self.q, self.k, self.v)


def accumulator(dtype: Any) -> Any:
    """The dtype of softmax and sums: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def list_index(mask: BlockMask, sizes: Sizes, b: Array, n: Array) -> Array:
    """Which of the mask's Bm · Nm lists serves batch row b and query head n."""
    batch, heads = mask.kv_count.shape[:2]
    batch_row = b if batch > 1 else jnp.zeros_like(b)
    head = n * heads // sizes.N  # N lists: n; K lists: n's kv head; one list: 0
    return batch_row * heads + head


def first_order_only(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps fn, which computes a custom derivative, so that differentiating it again raises."""

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


def unaliased(*arrays: Any) -> tuple[Any, ...]:
    """The arrays behind an optimization barrier, so that XLA fuses no slice into their kernel.

    In a loop over layers, XLA's dynamic-slice fusion lets a kernel read and write slices of stacked
    arrays in place, which saves a copy. It duplicates a kernel whose result is both written to a
    stack and read elsewhere.
    """
    return jax.lax.optimization_barrier(arrays)
