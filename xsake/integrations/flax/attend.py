"""attention(mask): an `attention_fn` for Flax's attention modules.

    nnx.MultiHeadAttention(…, attention_fn=attention(rule)) ────────────┐
    linen.MultiHeadDotProductAttention(…, attention_fn=attention(rule)) ┤
                                                                        ▼
    Attend: (q, k, v, mask=…, dropout_rate=…, …) ─┬─ dropout, weights and the like: refused
                                                  └─ xsake.dot_product_attention

The mask that the module is called with and the one given to `attention` are intersected. Flax
itself is not imported. Linen silently drops every argument that the signature of an `attention_fn`
does not name, so `Attend` names all of them, also those that it refuses.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake import masks
from xsake.arguments import Tensor
from xsake.attention import dot_product_attention
from xsake.backends.options import Options
from xsake.block_mask import BlockMask
from xsake.block_mask.input_mask import InputMask, as_input_mask
from xsake.masks.carrying import remedy_for
from xsake.masks.rule import Rule, combine

__all__ = ["Attend", "attention"]


def attention(
    mask: Any = None,
    *,
    layer: int | None = None,
    decode: bool | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
    options: Options | None = None,
) -> Attend:
    """Returns an `attention_fn` that skips the blocks which `mask` drops.

    A mask that a Flax module is called with may be a rule or a BlockMask too, or an array: bool, or
    0 and 1 in another dtype, as `make_causal_mask` gives it. An array with other values raises;
    under jit, where values cannot be read, it makes output and gradients NaN. Softmax is always in
    float32, and a query that sees no key gets zeros where Flax gives a mean of the values.

    Args:
      mask: for every call: a rule of `xsake.masks`, an array broadcastable to [B, N, T, S], a
        BlockMask, or an InputMask such as a Plan. Arrays are constants of the compiled program.
      layer: which layer of the plan; required for an InputMask and for nothing else.
      decode: whether one query with more than one key and an array as mask is a step of Flax's
        decode mode. Then the query is at the position of the last key that the array shows, and
        rules apply there; if False, at position 0. By default such a call is refused if it has a
        rule.
      scale: of `dot_product_attention`, as are the following.
      logits_soft_cap: cap · tanh(logits / cap).
      implementation: a backend by name, which runs or raises.
      options: settings of the backends.
    """
    settings = dict(
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        implementation=implementation,
        options=options,
    )
    given = {name: x for name, x in settings.items() if x is not None}
    return Attend(_checked_mask(mask, layer), layer, decode, given)


@dataclasses.dataclass(frozen=True, eq=False)
class Attend:
    """What `attention` returns: a function with the arguments of Flax's dot_product_attention."""

    mask: Rule | BlockMask | InputMask | None
    layer: int | None
    decode: bool | None
    settings: dict[str, Any]  # of `dot_product_attention`

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        *,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> Array:
        """Attention of query [batch…, T, N, H] to key and value [batch…, S, K, H]."""
        check_call(
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            module=module,
            precision=precision,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        q, k, v = _promoted(query, key, value, dtype, promote_dtype)
        batch = q.shape[:-3]
        q, k, v = (x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in (q, k, v))
        bias = None if bias is None else _flat("bias", jnp.asarray(bias), batch)
        given, is_binary = _call_mask(mask, batch)
        fixed = self._fixed_mask(q, k)
        if q.shape[1] == 1 < k.shape[1] and isinstance(given, Array):
            fixed, is_causal = _for_one_query(fixed, is_causal, given, self.decode), False
        both = _intersection(fixed, given)
        out = dot_product_attention(q, k, v, bias, both, is_causal=is_causal, **self.settings)
        if is_binary is not None:
            out = out * jnp.where(is_binary, 1, jnp.nan).astype(out.dtype)  # gradients are NaN too
        return out.reshape(*batch, *out.shape[1:])

    def _fixed_mask(self, q: Array, k: Array) -> Rule | BlockMask | None:
        """The mask that `attention` was given, of these q and k."""
        if not isinstance(self.mask, InputMask):
            return self.mask
        if q.shape[1] != k.shape[1]:
            raise ValueError(
                "a plan selects blocks of a sequence that attends to itself, but there are "
                f"{q.shape[1]} queries and {k.shape[1]} keys; use attention(rule) for cross "
                "attention and decode mode"
            )
        return self.mask.mask(self.layer, q, k)


# ----------------------------------------------------------------------------------------- refusals


def check_call(
    *,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    module: Any = None,
    precision: Any = None,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    **others: Any,
) -> None:
    """Raises for arguments of Flax's attention that XSAKE does not support."""
    _refuse_dropout(dropout_rate, deterministic)
    _refuse_weights(module)
    check_precision(precision)
    _refuse_products(
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )


def _refuse_dropout(rate: float, deterministic: bool) -> None:
    if rate > 0 and not deterministic:
        raise NotImplementedError(
            f"dropout_rate={rate} would drop attention weights, which XSAKE does not support; call "
            "the module with deterministic=True, or build it with dropout_rate=0 and apply "
            "dropout to its output"
        )


def _refuse_weights(module: Any) -> None:
    if module is not None:
        raise NotImplementedError(
            "sow_weights=True asks for attention weights [B, N, T, S], which XSAKE never holds as "
            "a whole; leave it out, or inspect weights with Flax's own attention_fn"
        )


def check_precision(precision: Any) -> None:
    """A `jax.lax.Precision` is a lower bound, and float32 products have the highest one."""
    try:
        for each in precision if isinstance(precision, tuple) else (precision,):
            lax.Precision(each)
    except (TypeError, ValueError):
        raise NotImplementedError(
            f"precision={precision!r} selects an algorithm for products, which XSAKE cannot "
            "follow; give None or one of jax.lax.Precision: float32 products always have HIGHEST"
        ) from None


def _refuse_products(**functions: Any) -> None:
    for name, function in functions.items():
        if function is not None:
            raise NotImplementedError(
                f"{name} would replace a product inside attention, which XSAKE does not support; "
                "leave it out, or use Flax's own attention_fn"
            )


# -------------------------------------------------------------------------------------------- masks


def _checked_mask(mask: Any, layer: int | None) -> Rule | BlockMask | InputMask | None:
    """What `attention` was given, with arrays as rules."""
    is_plain = mask is None or isinstance(mask, Rule | BlockMask)
    by_input = not is_plain and (callable(mask) or isinstance(mask, InputMask))
    if by_input and layer is None:
        remedy = f"; a rule? {remedy_for(mask)}" if inspect.isfunction(mask) else ""
        raise ValueError(
            f"{type(mask).__name__} selects blocks by layer: attention(mask, layer=…) needs the "
            f"number of the layer that this module is{remedy}"
        )
    if layer is not None and not by_input:
        raise ValueError(
            f"layer={layer} is for a plan, but mask is {type(mask).__name__}; leave layer out"
        )
    if by_input:
        return as_input_mask(mask)
    if is_plain:
        return mask
    found, is_binary = _bool_array(mask)
    if is_binary is not None:
        raise ValueError(
            f"mask is a traced {mask.dtype} array, whose values cannot be checked; give a bool "
            "array, or call attention(mask) outside jit"
        )
    return masks.array(found)


def _call_mask(
    mask: Any, batch: tuple[int, ...]
) -> tuple[Array | Rule | BlockMask | None, Array | None]:
    """The mask of a call, arrays as bool [B|1, N|1, T|1, S|1]; and `is_binary` of `_bool_array`."""
    if mask is None or isinstance(mask, Rule | BlockMask):
        return mask, None
    found, is_binary = _bool_array(mask)
    return _flat("mask", found, batch), is_binary


def _bool_array(mask: Any) -> tuple[Array, Array | None]:
    """(mask != 0, whether all values are 0 or 1); the latter is None where that is known."""
    if not isinstance(mask, (Array, np.ndarray)):
        raise TypeError(
            "mask must be an array, a rule of xsake.masks or a BlockMask, got "
            f"{type(mask).__name__}; a plan goes to attention(plan, layer=…), a function of "
            "(b, n, q, k) into masks.rule(fn)"
        )
    if mask.dtype == jnp.bool_:
        return jnp.asarray(mask), None
    if isinstance(mask, jax.core.Tracer):
        return mask != 0, ((mask == 0) | (mask == 1)).all()
    values = np.asarray(mask)  # NumPy's operators are not traced, also inside jit
    if not ((values == 0) | (values == 1)).all():
        raise ValueError(
            f"mask is {mask.dtype} with values other than 0 and 1, and Flax would read all but 0 "
            "as True; for an additive mask (0 = attend) give mask == 0"
        )
    return jnp.asarray(values != 0), None


def _flat(name: str, x: Array, batch: tuple[int, ...]) -> Array:
    """x [batch…|1, N|1, T|1, S|1] with one batch axis, of size 1 where it was 1 throughout."""
    wide = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    lead, rest = wide.shape[:-3], wide.shape[-3:]
    if len(lead) != len(batch) or any(
        size not in (1, full) for size, full in zip(lead, batch, strict=True)
    ):
        raise ValueError(
            f"{name} must be broadcastable to [*{list(batch)}, N, T, S], got shape {list(x.shape)}"
        )
    if math.prod(lead) != 1:
        wide = jnp.broadcast_to(wide, batch + rest)
    return wide.reshape(math.prod(wide.shape[:-3]), *rest)


def _for_one_query(
    fixed: Rule | BlockMask | None, is_causal: bool, given: Array, decode: bool | None
) -> Rule | None:
    """The rule of a call with one query, several keys and an array as mask."""
    if isinstance(fixed, BlockMask):
        raise ValueError(
            f"the BlockMask of attention(mask) is for {fixed.shape[0]} queries, but this call, "
            "perhaps a step of decode mode, has one; give its rule: attention(rule, decode=True)"
        )
    rules = [] if fixed is None else [fixed]
    if is_causal:
        rules.append(masks.causal())
    if not rules:
        return None
    rule = combine(rules)
    if decode is False:
        return rule
    if decode is None:
        raise ValueError(
            f"{rule} needs the position of this single query, which Flax does not pass; give "
            "attention(…, decode=True) for decode mode, or decode=False for position 0"
        )
    keys = jnp.arange(given.shape[-1], dtype=jnp.int32)
    last = jnp.where(given.any((1, 2)), keys[None], 0).max(-1, keepdims=True)
    return masks.at_positions(rule, last)


def _intersection(
    fixed: Rule | BlockMask | None, given: Array | Rule | BlockMask | None
) -> Rule | BlockMask | Array | None:
    if fixed is None or given is None:
        return given if fixed is None else fixed
    return fixed & given


# -------------------------------------------------------------------------------------------- types


def _promoted(
    query: Tensor, key: Tensor, value: Tensor, dtype: Any, promote: Callable[..., Any] | None
) -> tuple[Array, Array, Array]:
    """q, k, v in `dtype`, or in the smallest one that holds all three, as in Flax."""
    if promote is not None:
        q, k, v = promote((query, key, value), dtype=dtype)
        return q, k, v
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    return jnp.asarray(query, dtype), jnp.asarray(key, dtype), jnp.asarray(value, dtype)
