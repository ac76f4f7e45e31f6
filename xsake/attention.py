"""dot_product_attention(q, k, v, mask=mask): check, choose a backend, call it. Nothing else.

    q [B, T, N, H] ─┐
    k [B, S, K, H] ─┼─ check ─ choose ─┬─ backends/hopper/       Mosaic GPU, sm90
    v [B, S, K, Hv]─┤                  ├─ backends/xla/          any device, visits live blocks
    BlockMask ──────┘                  ├─ backends/dense.py      any device, T x S in memory
                                       ├─ backends/tpu/          Mosaic TPU, by name only
                                       └─ backends/reference.py  any device, the definition
                                               └─▶ out, logsumexp ─ sinks ─ out

Everything that limits which keys a query sees (mask, is_causal, windows, lengths, segments,
positions) becomes one BlockMask before a backend is asked. Sinks are applied to the result:
out · eᴸ / (eᴸ + Σ exp(sink)), with L the logsumexp.

>>> import jax, xsake
>>> q = k = v = jax.random.normal(jax.random.key(0), (1, 256, 4, 64))
>>> xsake.dot_product_attention(q, k, v, is_causal=True).shape
(1, 256, 4, 64)
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from xsake import masks
from xsake.backends import Call, Sizes, accumulator, run_forward, with_sinks
from xsake.backends.choice import BACKENDS, Explanation, choose, is_empty
from xsake.backends.options import Options
from xsake.block_mask import BLOCK, BlockMask
from xsake.masks.integers import integers
from xsake.masks.rule import Rule, check_fits, combine, result_sizes

__all__ = ["Explanation", "dot_product_attention", "explain"]

Tensor = Array | np.ndarray
Abstract = Tensor | jax.ShapeDtypeStruct
Mask = BlockMask | Rule | Bool[Tensor, "..."]
Window = int | tuple[int | None, int | None] | None


class Arguments(TypedDict, total=False):
    """Keyword arguments of `dot_product_attention`; the overloads spell out the other two."""

    scale: float | None
    is_causal: bool
    query_seq_lengths: Int[Tensor, ...] | None
    key_value_seq_lengths: Int[Tensor, ...] | None
    local_window_size: Window
    logits_soft_cap: float | None
    sinks: Float[Tensor, ...] | None
    q_segment_ids: Int[Tensor, ...] | None
    kv_segment_ids: Int[Tensor, ...] | None
    q_positions: Int[Tensor, ...] | None
    kv_positions: Int[Tensor, ...] | None
    options: Options | None


@overload
def dot_product_attention(
    query: Float[Tensor, "*B T N H"],
    key: Float[Tensor, "*B S K H"],
    value: Float[Tensor, "*B S K Hv"],
    bias: Float[Tensor, ...] | None = None,
    mask: Mask | None = None,
    *,
    implementation: str | None = None,
    return_residual: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> Float[Array, "*B T N Hv"]: ...


@overload
def dot_product_attention(
    query: Float[Tensor, "*B T N H"],
    key: Float[Tensor, "*B S K H"],
    value: Float[Tensor, "*B S K Hv"],
    bias: Float[Tensor, ...] | None = None,
    mask: Mask | None = None,
    *,
    implementation: str | None = None,
    return_residual: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]: ...


def dot_product_attention(
    query: Float[Tensor, "*B T N H"],
    key: Float[Tensor, "*B S K H"],
    value: Float[Tensor, "*B S K Hv"],
    bias: Float[Tensor, ...] | None = None,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Tensor, ...] | None = None,
    key_value_seq_lengths: Int[Tensor, ...] | None = None,
    local_window_size: Window = None,
    implementation: str | None = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    sinks: Float[Tensor, ...] | None = None,
    q_segment_ids: Int[Tensor, ...] | None = None,
    kv_segment_ids: Int[Tensor, ...] | None = None,
    q_positions: Int[Tensor, ...] | None = None,
    kv_positions: Int[Tensor, ...] | None = None,
    options: Options | None = None,
) -> Any:
    """softmax(scale · q kᵀ + bias) v over the keys that each query may see.

    Accepts all arguments of `jax.nn.dot_product_attention`, and more. Blocks without allowed pairs
    are not computed. A query that sees no key gets zeros, logsumexp -inf and zero gradients.

    Args:
      query: [B, T, N, H], or [T, N, H].
      key: [B, S, K, H]; K divides N, and query head n uses kv head n // (N / K).
      value: [B, S, K, Hv].
      bias: added to the logits, after the soft cap; broadcastable to [B, N, T, S], differentiable.
      mask: which keys a query sees: a BlockMask, a rule of `xsake.masks`, a bool array
        broadcastable to [B, N, T, S] (True = attend), or None.
      scale: of the logits; default 1/sqrt(H).
      is_causal: a query sees keys at its own position and before.
      query_seq_lengths: int [B]; queries past it see nothing.
      key_value_seq_lengths: int [B]; keys past it are not seen.
      local_window_size: w or (left, right): keys q - left … q + right; None = no limit there.
      implementation: a backend by name, which runs or raises; default the fastest that can run.
      return_residual: also return the logsumexp [B, T, N] float32, sinks left out; differentiable.
      logits_soft_cap: cap · tanh(logits / cap).
      sinks: [N] or [N, M], learnable logits that join the softmax's denominator.
      q_segment_ids: int [B, T]; only equal ids see each other, negative ones see nothing.
      kv_segment_ids: int [B, S]; default q_segment_ids.
      q_positions: int [B, T], what causal and window rules compare; default arange.
      kv_positions: int [B, S].
      options: settings of the backends; they change the result by rounding at most.

    Returns:
      [B, T, N, Hv] in query's dtype; with return_residual, that and the logsumexp.
    """
    q, k, v, is_unbatched = check_qkv(query, key, value)
    sizes = Sizes.of(q, k, v)
    limits = [
        _segments(sizes, q_segment_ids, kv_segment_ids),
        lengths_rule(sizes, query_seq_lengths, key_value_seq_lengths),
        masks.causal() if is_causal else masks.everything(),
        window_rule(local_window_size),
    ]
    positions = _positions(sizes, q_positions, kv_positions)
    call = Call(
        q, k, v,
        bias=_check_bias(sizes, bias),
        mask=_block_mask(sizes, mask, combine(limits), positions),
        scale=1 / math.sqrt(sizes.H) if scale is None else number("scale", scale),
        soft_cap=check_soft_cap(logits_soft_cap),
        options=Options.of(options),
    )  # fmt: skip
    sinks = check_sinks(sizes, sinks)
    if isinstance(implementation, _Question):
        return implementation.ask(call)
    out, logsumexp = _run(implementation, call)
    out = out if sinks is None else with_sinks(out, logsumexp, sinks)
    if is_unbatched:
        out, logsumexp = out[0], logsumexp[0]
    return (out, logsumexp) if return_residual else out


def explain(
    query: Abstract,
    key: Abstract,
    value: Abstract,
    bias: Abstract | None = None,
    mask: Mask | None = None,
    *,
    implementation: str | None = None,
    return_residual: bool = False,
    **arguments: Unpack[Arguments],
) -> Explanation:
    """Returns the backend that `dot_product_attention` would take, and every backend's reason.

    Takes the same arguments; q, k, v and bias may be shapes.

    >>> import jax, xsake
    >>> q = jax.ShapeDtypeStruct((1, 256, 4, 64), "float32")
    >>> xsake.explain(q, q, q, is_causal=True).reasons["reference"] is None
    True
    """
    question = _Question(implementation or "")

    def ask(query: Any, key: Any, value: Any, bias: Any) -> Any:
        return dot_product_attention(
            query, key, value, bias, mask, implementation=question, **arguments
        )

    jax.eval_shape(ask, query, key, value, bias)
    return question.answer


# ------------------------------------------------------------------------------------------- choose


class _Question(str):
    """A name, or "", passed as `implementation` to store an Explanation instead of computing."""

    answer: Explanation

    def ask(self, call: Call) -> int:
        """Keeps the answer, and returns something that `jax.eval_shape` takes."""
        self.answer = choose(str(self) or None, call)
        return 0


def _run(asked: str | None, call: Call) -> tuple[Array, Array]:
    """(out, logsumexp) by the chosen backend."""
    explanation = choose(asked, call)
    if is_empty(call):
        B, T, _, N, _, _, Hv = call.sizes
        out = jnp.zeros((B, T, N, Hv), call.q.dtype)
        return out, jnp.full((B, T, N), -jnp.inf, accumulator(call.q.dtype))
    if explanation.chosen is None:
        raise ValueError(
            f"implementation {asked!r} cannot run this call: it {explanation.reasons[str(asked)]}"
        )
    return run_forward(BACKENDS[explanation.chosen].forward, call)


# -------------------------------------------------------------------------------------------- check


def check_qkv(query: Any, key: Any, value: Any) -> tuple[Array, Array, Array, bool]:
    """q, k and v as 4-D arrays that fit together, and whether they came without a batch axis."""
    q, k, v = map(_array, ("query", "key", "value"), (query, key, value))
    if q.ndim not in (3, 4):
        raise ValueError(f"query must be [B, T, N, H] or [T, N, H], got shape {list(q.shape)}")
    for name, x in (("key", k), ("value", v)):
        if x.ndim != q.ndim:
            raise ValueError(
                f"{name} must have as many axes as query ({q.ndim}), got shape {list(x.shape)}"
            )
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype} but query is {q.dtype}; cast one of them")
    if not jnp.issubdtype(q.dtype, jnp.floating) or q.dtype.itemsize < 2:
        raise TypeError(f"query must be float16, bfloat16, float32 or float64, got {q.dtype}")
    is_unbatched = q.ndim == 3
    if is_unbatched:
        q, k, v = q[None], k[None], v[None]
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"key and value must agree in [B, S, K], got {list(k.shape)} and {list(v.shape)}"
        )
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"query has {q.shape[0]} batch rows but key has {k.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"query has head size {q.shape[3]} but key has {k.shape[3]}")
    if 0 in q.shape[2:] or 0 in v.shape[2:]:
        raise ValueError(
            "B, T and S may be 0, but not the number of heads or their size, "
            f"got {list(q.shape)} and {list(v.shape)}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"query has {q.shape[2]} heads, which {k.shape[2]} key/value heads do not divide"
        )
    return q, k, v, is_unbatched


def _array(name: str, x: Any) -> Array:
    if x is None or isinstance(x, (str, dict)):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    return jnp.asarray(x)


def number(name: str, value: Any, above: float = -math.inf) -> float:
    """A finite number above a limit, or an error that names it."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be a plain number, got a traced array; fold it into query")
    if (not np.isscalar(value) and np.ndim(value)) or isinstance(value, (str, bool)):
        raise TypeError(f"{name} must be a plain number, got {value!r}")
    if not math.isfinite(value) or value <= above:
        limit = "" if above == -math.inf else f" above {above}"
        raise ValueError(f"{name} must be a finite number{limit}, got {value!r}")
    return float(value)


def _check_bias(sizes: Sizes, bias: Any) -> Array | None:
    if bias is None:
        return None
    bias = _array("bias", bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"bias must be floating (a bool mask goes to mask), got {bias.dtype}")
    return _broadcastable("bias", bias, sizes)


def _broadcastable(name: str, x: Array, sizes: Sizes) -> Array:
    """x with 4 axes, each 1 or that of [B, N, T, S]."""
    full = (sizes.B, sizes.N, sizes.T, sizes.S)
    wide = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if wide.ndim != 4 or any(d not in (1, f) for d, f in zip(wide.shape, full, strict=True)):
        raise ValueError(
            f"{name} must be broadcastable to [B, N, T, S] = {list(full)}, "
            f"got shape {list(x.shape)}"
        )
    return wide


def check_soft_cap(cap: Any) -> float | None:
    """A number above 0, or None."""
    return None if cap is None else number("logits_soft_cap", cap, above=0.0)


def window_rule(size: Any) -> Rule:
    """Keys within `local_window_size`; None: all."""
    return masks.everything() if size is None else masks.sliding_window(size)


def check_sinks(sizes: Sizes, sinks: Any) -> Array | None:
    """Sinks as float [N, M]."""
    if sinks is None:
        return None
    sinks = _array("sinks", sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks must be floating, got {sinks.dtype}")
    if sinks.ndim not in (1, 2) or sinks.shape[0] != sizes.N or sinks.size == 0:
        raise ValueError(
            f"sinks must be [N] or [N, M] with N = {sizes.N} query heads, "
            f"got shape {list(sinks.shape)}"
        )
    return sinks.reshape(sizes.N, -1).astype(jnp.promote_types(sinks.dtype, jnp.float32))


def per_token(name: str, ids: Any, batch: int, length: int) -> Array | None:
    """int [B|1, length]; a 1-D array is shared by the batch."""
    if ids is None:
        return None
    ids = integers(name, ids)
    wide = ids[None] if ids.ndim == 1 else ids
    if wide.ndim != 2 or wide.shape[0] not in (1, batch) or wide.shape[1] != length:
        raise ValueError(f"{name} must be [{batch}, {length}], got shape {list(ids.shape)}")
    return wide


def _positions(sizes: Sizes, query: Any, key_value: Any) -> tuple[Array | None, Array | None]:
    return (
        per_token("q_positions", query, sizes.B, sizes.T),
        per_token("kv_positions", key_value, sizes.B, sizes.S),
    )


def _segments(sizes: Sizes, q_ids: Any, kv_ids: Any) -> Rule:
    if q_ids is None and kv_ids is None:
        return masks.everything()
    if q_ids is None:
        raise ValueError("kv_segment_ids needs q_segment_ids beside it")
    if kv_ids is None and sizes.T != sizes.S:
        raise ValueError(
            f"q_segment_ids alone is enough only if T = S, got T = {sizes.T} and S = {sizes.S}; "
            "give kv_segment_ids too"
        )
    q_ids = per_token("q_segment_ids", q_ids, sizes.B, sizes.T)
    kv_ids = per_token("kv_segment_ids", kv_ids, sizes.B, sizes.S)
    return masks.documents(q_ids, kv_ids)


def lengths_rule(sizes: Sizes, query: Any, key_value: Any) -> Rule:
    """Queries and keys before these lengths, int [B] each or None."""
    found = []
    for name, x in (("query_seq_lengths", query), ("key_value_seq_lengths", key_value)):
        found.append(None if x is None else integers(name, x))
        if found[-1] is not None and found[-1].shape != (sizes.B,):
            raise ValueError(f"{name} must have shape [{sizes.B}], got {list(found[-1].shape)}")
    return masks.lengths(*found)


def _block_mask(sizes: Sizes, mask: Any, rule: Rule, positions: tuple[Any, Any]) -> BlockMask:
    """One BlockMask of everything that limits which keys a query sees."""
    if isinstance(mask, BlockMask):
        if positions != (None, None):
            raise ValueError(
                "positions cannot be applied to a BlockMask, whose blocks are already chosen; "
                "give them to BlockMask.from_rule(rule, shape, q_positions=…, kv_positions=…)"
            )
        _check_block_mask(sizes, mask)
        mask = mask.packed()
        return mask if rule == masks.everything() else mask & rule
    if isinstance(mask, Rule):
        rule = mask & rule
    elif mask is not None:
        if callable(mask):
            raise TypeError("mask is a function; wrap it with xsake.masks.rule(fn)")
        mask = _array("mask", mask)
        if mask.dtype != jnp.bool_:
            raise TypeError(f"mask must be bool (an additive mask goes to bias), got {mask.dtype}")
        rule = masks.array(_broadcastable("mask", mask, sizes)) & rule
    check_fits(rule, sizes.B, sizes.N, sizes.T, sizes.S)
    shape = (sizes.T, sizes.S)
    if 0 in sizes[:3]:  # no backend will read the mask, and there is none without tokens
        rule, positions, shape = masks.everything(), (None, None), (1, 1)
    return BlockMask.from_rule(
        masks.at_positions(rule, *positions),
        shape,
        batch=sizes.B,
        heads=sizes.N,
        block=(block_for(shape[0]), block_for(shape[1])),
    )


def block_for(length: int) -> int:
    """128 tokens, or the smallest power of two from 16 up that holds a shorter sequence."""
    return min(BLOCK, max(16, 1 << (length - 1).bit_length()))


def _check_block_mask(sizes: Sizes, mask: BlockMask) -> None:
    if mask.shape != (sizes.T, sizes.S):
        raise ValueError(
            f"mask is for (T, S) = {mask.shape}, but query and key have {(sizes.T, sizes.S)}"
        )
    batch, heads = mask.kv_count.shape[:2]
    if batch not in (1, sizes.B):
        raise ValueError(f"mask has {batch} batch rows, but query has {sizes.B}")
    if heads not in (1, sizes.K, sizes.N):
        raise ValueError(
            f"mask has {heads} heads; it may have 1, {sizes.K} (key/value heads) "
            f"or {sizes.N} (query heads)"
        )
    if mask.rule is None:
        return
    check_fits(mask.rule, sizes.B, sizes.N, sizes.T, sizes.S)
    distinguished = result_sizes(mask.rule, sizes.B, sizes.N, by_number=True)
    for name, number, lists in zip(
        ("batch rows", "heads"), distinguished, (batch, heads), strict=True
    ):
        if number > lists:
            raise ValueError(
                f"the mask's rule distinguishes {number} {name}, but its lists are for {lists}; "
                "build it with batch=… and heads=… of this call"
            )
