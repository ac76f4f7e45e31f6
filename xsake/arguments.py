"""Arguments of attention, checked: arrays, numbers, ids, and what becomes the BlockMask of a call.

Each function returns the argument in the form that a Call has, or raises one sentence with the
name, what was given and what is allowed. All entry points of the library use them.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool

from xsake import masks
from xsake.backends import Sizes
from xsake.block_mask import BLOCK, BlockMask
from xsake.masks.carrying import remedy_for
from xsake.masks.integers import MAKE_STATIC, integers
from xsake.masks.rule import Rule, check_fits, result_sizes

Tensor = Array | np.ndarray
Abstract = Tensor | jax.ShapeDtypeStruct
Mask = BlockMask | Rule | Bool[Tensor, "..."]
Window = int | tuple[int | None, int | None] | None


def check_qkv(query: Any, key: Any, value: Any) -> tuple[Array, Array, Array, bool]:
    """q, k and v as 4-D arrays that fit together, and whether they came without a batch axis."""
    q, k, v = map(as_array, ("query", "key", "value"), (query, key, value))
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


def as_array(name: str, x: Any) -> Array:
    """x as an array of JAX, or an error that names it."""
    problem = TypeError(f"{name} must be an array, got {type(x).__name__}")
    if x is None or isinstance(x, (str, dict)):
        raise problem
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):  # objects, strings, lists of unequal lengths
        raise problem from None


def floating_dtype(name: str, dtype: Any) -> Any:
    """A dtype of floating numbers, or an error that names the argument."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{name} must be a floating dtype, got {dtype!r}")
    return found


def number(name: str, value: Any, above: float = -math.inf) -> float:
    """A finite number above a limit, or an error that names it."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be a plain number, got a traced array; fold it into query")
    is_number = isinstance(value, (int, float, np.number)) or hasattr(value, "dtype")
    if not is_number or isinstance(value, bool) or np.ndim(value):
        raise TypeError(f"{name} must be a plain number, got {value!r}")
    if not math.isfinite(value) or value <= above:
        limit = "" if above == -math.inf else f" above {above}"
        raise ValueError(f"{name} must be a finite number{limit}, got {value!r}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """True or False, or an error that names it."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} must be known when a call is traced; {MAKE_STATIC}, or pass a mask"
        )
    if isinstance(value, str) or np.ndim(value) or value not in (False, True):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_bias(sizes: Sizes, bias: Any) -> Array | None:
    """The bias as [B|1, N|1, T|1, S|1]."""
    if bias is None:
        return None
    bias = as_array("bias", bias)
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
    sinks = as_array("sinks", sinks)
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


def positions_of(sizes: Sizes, query: Any, key_value: Any) -> tuple[Array | None, Array | None]:
    """Positions of queries and keys, [B, T] and [B, S]; None where none are given."""
    return (
        per_token("q_positions", query, sizes.B, sizes.T),
        per_token("kv_positions", key_value, sizes.B, sizes.S),
    )


def segments_rule(sizes: Sizes, q_ids: Any, kv_ids: Any) -> Rule:
    """The rule that a query sees keys of its own segment; everything without ids."""
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


def block_mask_of(sizes: Sizes, mask: Any, rule: Rule, positions: tuple[Any, Any]) -> BlockMask:
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
            raise TypeError(f"mask is a function; {remedy_for(mask)}")
        is_plan = callable(getattr(mask, "mask", None))
        if isinstance(mask, bool | str) or is_plan:
            shown = f"a {type(mask).__name__}" if is_plan else repr(mask)
            more = "; a plan's mask is plan.mask(layer, q, k)" * is_plan
            raise TypeError(
                f"mask is {shown}; give a rule, a BlockMask, a bool array or None{more}"
            )
        mask = as_array("mask", mask)
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
