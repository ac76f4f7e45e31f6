"""Backends: each a module with two functions, and none imports another.

    why_not(call) -> str | None                    why it cannot run the call
    forward(call) -> (out, logsumexp)              out [B, T, N, Hv], logsumexp float32 [B, T, N]

Both results are differentiable. `Call` has all inputs of a backend;
`attention.py` has checked them. A backend whose forward has a derivative of its own also has

    backward(call, out, logsumexp, d_out, d_logsumexp) -> (dq, dk, dv)

in which `call` may hold a part of the keys: out and logsumexp are those of all keys, and dq is the
part of it that comes from these. `parallel/context` adds up such parts.

A backend whose forward has the statistics of statistics.py as by-products is `Observing`:

    why_not_observed(call) -> str | None
    observed(call, sinks, what) -> (out, (logsumexp, Statistics))

Attention to selected blocks, where every query has its own list of kv blocks, is a module
`selected` of a backend. Its caller, `nsa/selected.py`, defines the derivative:

    why_not(call) -> str | None                                  call: SelectedCall
    forward(call) -> (out, logsumexp)
    backward(call, out, logsumexp, d_out, d_logsumexp) -> (dq, dk, dv)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jaxtyping import Float

from xsake import _jax
from xsake.backends.options import Options
from xsake.block_mask import BlockMask
from xsake.masks.rule import Leaf


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


@runtime_checkable
class Observing(Protocol):
    """A backend whose forward has statistics as by-products."""

    def why_not_observed(self, call: Call) -> str | None:
        """What keeps a call that the backend can run from having them."""

    def observed(
        self, call: Call, sinks: Array | None, what: Any
    ) -> tuple[Array, tuple[Array, Any]]:
        """(out, (logsumexp, Statistics)); `what` and Statistics are those of statistics.py."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectedCall:
    """One checked call of attention to selected blocks.

    Query t of kv head n sees key s if first[t] ≤ s ≤ last[t] and indices[t, n] contains block
    number (s - first[t]) // block: blocks are counted from the first key of the query's sequence.
    """

    q: Leaf  # [B, T, N, H]
    k: Leaf  # [B, S, K, H]
    v: Leaf  # [B, S, K, Hv]
    # int32 [B, T, K, C], a set for every query and kv head: ascending, then -1 up to C. The first
    # key of every listed block is at most last[t].
    indices: Leaf
    first: Leaf  # int32 [B|1, T]; None: 0, one sequence in every batch row
    last: Leaf  # int32 [B|1, T]; None: t, and T = S
    block: int = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})
    options: Options = dataclasses.field(metadata={"static": True})
    # (initial, local): every list has at least the first `initial` blocks and the last `local` ones
    # up to the query's own, as many of them as there are. Kernels may use it.
    forced: tuple[int, int] = dataclasses.field(default=(0, 0), metadata={"static": True})

    @property
    def sizes(self) -> Sizes:
        """B, T, S, N, K, H and Hv."""
        return Sizes.of(self.q, self.k, self.v)


def accumulator(dtype: Any) -> Any:
    """The dtype of softmax and sums: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


Integers = TypeVar("Integers", Array, np.ndarray)


def quotient(x: Integers, divisor: int) -> Integers:
    """x // divisor for x ≥ 0, as one operation; `//` compiles to many, because it rounds down.

    Of a NumPy array it is a constant.
    """
    if isinstance(x, np.ndarray):
        return x // divisor
    return x if divisor == 1 else jax.lax.div(x, jnp.asarray(divisor, x.dtype))


def remainder(x: Integers, divisor: int) -> Integers:
    """x % divisor for x ≥ 0, likewise."""
    if isinstance(x, np.ndarray):
        return x % divisor
    return jax.lax.rem(x, jnp.asarray(divisor, x.dtype))


def kv_head(n: Array, sizes: Sizes) -> Array:
    """The kv head of query head n."""
    return quotient(n, sizes.N // sizes.K)


def list_index(mask: BlockMask, sizes: Sizes, b: Integers, n: Integers) -> Integers:
    """Which of the mask's Bm · Nm lists serves batch row b and query head n."""
    batch, heads = mask.kv_count.shape[:2]
    head = quotient(n, sizes.N // heads)  # N lists: n; K lists: n's kv head; one list: 0
    return head if batch == 1 else b * heads + head


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


class Derivatives(NamedTuple):
    """Attention from two functions of plain JAX: `xla` and `dense` differ in these only.

    output(settings, q, k, v, bias, mask) returns (out, logsumexp), out not rounded to q's dtype;
    gradients(settings, saved, cotangents) returns (dq, dk, dv, dbias). settings is hashable.
    """

    name: str  # of the backend
    output: Callable[..., tuple[Array, Array]]
    gradients: Callable[..., tuple[Any, ...]]

    def forward(self, settings: Any, call: Call) -> tuple[Array, Array]:
        """(out, logsumexp), differentiable once, in reverse mode."""
        arrays = reverse_only(self.name, call.q, call.k, call.v, call.bias)
        return _attention(self, settings, *arrays, call.mask)

    def backward(
        self, settings: Any, call: Call, results: tuple[Array, Array], cotangents: Any
    ) -> tuple[Array, Array, Array]:
        """(dq, dk, dv) of the call's keys; the results may cover more keys than the call has."""
        saved = (call.q, call.k, call.v, None, call.mask, *results)
        dq, dk, dv, _ = self._gradients(settings)(saved, cotangents)
        return dq, dk, dv

    def _gradients(self, settings: Any) -> Callable[..., tuple[Any, ...]]:
        return first_order_only(self.name, functools.partial(self.gradients, settings))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    of: Derivatives, settings: Any, q: Array, k: Array, v: Array, bias: Any, mask: BlockMask
) -> tuple[Array, Array]:
    out, logsumexp = of.output(settings, q, k, v, bias, mask)
    return out.astype(q.dtype), logsumexp


def _attention_fwd(
    of: Derivatives, settings: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any
) -> Any:
    run = first_order_only(of.name, functools.partial(of.output, settings))
    out, logsumexp = run(q, k, v, bias, mask)
    # The output is saved unrounded: dp - delta is a difference of nearly equal numbers.
    return (out.astype(q.dtype), logsumexp), (q, k, v, bias, mask, out, logsumexp)


def _attention_bwd(of: Derivatives, settings: Any, saved: Any, cotangents: Any) -> Any:
    return *of._gradients(settings)(saved, cotangents), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def reverse_only(name: str, *arrays: Any) -> tuple[Any, ...]:
    """The arrays, for a custom_vjp: forward-mode derivatives raise our sentence, not JAX's."""

    @jax.custom_jvp
    def unchanged(arrays: Any) -> Any:
        return arrays

    def tangents(primals: Any, tangents: Any) -> Any:
        leaves, structure = jax.tree.flatten(tangents[0])
        moving = [not isinstance(x, SymbolicZero) for x in leaves]
        marked = iter(_only_transposed.bind(*itertools.compress(leaves, moving), name=name))
        leaves = [next(marked) if moves else x for x, moves in zip(leaves, moving, strict=True)]
        return primals[0], jax.tree.unflatten(structure, leaves)

    unchanged.defjvp(tangents, symbolic_zeros=True)
    return unchanged(arrays)


def _refuse_forward_mode(*args: Any, name: str) -> Any:
    raise NotImplementedError(
        f"the {name!r} backend has reverse-mode derivatives only (jax.grad, jax.vjp); take "
        "forward-mode ones (jax.jvp, jax.jacfwd, jax.linearize) with implementation='reference'"
    )


# The identity on tangents. Reverse mode transposes it and never runs it; forward mode runs it.
_only_transposed = core.Primitive("xsake_only_transposed")
_only_transposed.multiple_results = True
_only_transposed.def_impl(_refuse_forward_mode)
_only_transposed.def_abstract_eval(lambda *tangents, name: tangents)
ad.primitive_transposes[_only_transposed] = lambda cotangents, *tangents, name: [
    cotangent if ad.is_undefined_primal(x) else None
    for cotangent, x in zip(cotangents, tangents, strict=True)
]
batching.primitive_batchers[_only_transposed] = lambda tangents, dims, name: (
    _only_transposed.bind(*tangents, name=name),
    dims,
)
mlir.register_lowering(
    _only_transposed, lambda context, *tangents, name: _refuse_forward_mode(name=name)
)


@jax.custom_jvp
def scale_gradient(x: Array, factor: Array) -> Array:
    """x, whose gradient is multiplied by `factor`."""
    return x


@scale_gradient.defjvp
def _scale_tangent(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[0] * primals[1].astype(tangents[0].dtype)


def run_forward(forward: Callable[[Call], tuple[Array, Any]], call: Call) -> tuple[Array, Any]:
    """forward(call) of any backend, NaN with its gradients if a list of the mask was cut.

    Its second result is the logsumexp, or that and the statistics.

    That costs a pass over the output, and over the gradients, for masks that can overflow only.
    Inside `jax.shard_map`, all arrays of the call are first marked as varying alike.
    """
    given = {name: getattr(call, name) for name in ("q", "k", "v", "bias", "mask")}
    if axes := _jax.varying_axes(*jax.tree.leaves(given)):
        given = {name: _jax.vary(x, axes) for name, x in given.items()}
    if (overflow := given["mask"].overflow) is None:
        return forward(dataclasses.replace(call, **given))
    factor = jnp.where(overflow, jnp.nan, 1.0)
    given |= {
        name: scale_gradient(x, factor)
        for name, x in given.items()
        if name != "mask" and x is not None
    }
    results = forward(dataclasses.replace(call, **given))
    out, more = jax.tree.map(lambda x: x * factor.astype(x.dtype), results)
    return out, more


def with_sinks(out: Array, logsumexp: Array, sinks: Array) -> Array:
    """Takes the sinks' share out of every query's output: out · exp(L) / (exp(L) + Σ exp(sink)).

    sinks [N, M]. -inf is no sink at all; differences and gradients of infinities would be NaN.
    """
    some = (sinks != -jnp.inf).any(-1)[None, None]  # [1, 1, N], as logsumexp [B, T, N]
    sinks = jnp.where(some[0, 0, :, None], sinks, 0)
    total = jax.nn.logsumexp(sinks, axis=-1)[None, None]
    counts = some & (logsumexp != -jnp.inf)
    # 1 / (1 + eˣ) in a form whose gradient is accurate where the sinks are weak
    share = jnp.exp(-jax.nn.softplus(jnp.where(counts, total - logsumexp, -jnp.inf)))
    return (out * share[..., None]).astype(out.dtype)


def merged(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
    """Softmax over two sets of keys from (out, logsumexp) of each: weights exp(L - L of both)."""
    (out, a), (other, b) = one, two
    m = jax.lax.stop_gradient(jnp.maximum(a, b))
    m = jnp.where(m == -jnp.inf, 0, m)  # of nothing and nothing: -inf - -inf would be NaN
    one_share, other_share = jnp.exp(a - m), jnp.exp(b - m)
    total = one_share + other_share
    some = total != 0  # NaN is not nothing
    total = jnp.where(some, total, 1)
    out = out * (one_share / total)[..., None] + other * (other_share / total)[..., None]
    return out, jnp.where(some, m + jnp.log(total), -jnp.inf)


def unaliased(*arrays: Any) -> tuple[Any, ...]:
    """The arrays behind an optimization barrier, so that XLA fuses no slice into their kernel.

    In a loop over layers, XLA's dynamic-slice fusion lets a kernel read and write slices of stacked
    arrays in place, which saves a copy. It duplicates a kernel whose result is both written to a
    stack and read elsewhere.
    """
    return jax.lax.optimization_barrier(arrays)
