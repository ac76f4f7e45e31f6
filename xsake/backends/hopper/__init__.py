"""Hopper GPUs (sm90): checks, what the kernels need of a rule, and the gradient's wiring.

rule ── token_rule ── an expression of (b, n, q, k) and of integers per query and per key
lists ─┬─ hopper_forward.py ── out, logsumexp
       └─ hopper_prepare.py ── hopper_backward.py ── dq, dk, dv
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.extend import core

from xsake import _jax
from xsake.backends import Options, Sizes, first_order_only, own_copies
from xsake.backends.hopper.tilings import measured
from xsake.block_mask import BlockMask
from xsake.masks import carrying, positional
from xsake.masks.rule import And, Everything, Not, Or, Rule, Tokens

HEAD_SIZES = (64, 128, 256)  # of q and k, and of v; others are filled up with zeros
BLOCKS = (64, 128)  # on each side
NEEDS_JAX = (0, 11)


def why_not(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    mask: BlockMask,
    *,
    soft_cap: float | None,
    options: Options,
) -> str | None:
    """The first thing that keeps the kernels from running this call."""
    if reason := _jax.why_no_hopper(NEEDS_JAX):
        return reason
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16; this is {q.dtype}"
    if bias is not None:
        return "has no bias"
    if max(q.shape[-1], v.shape[-1]) > HEAD_SIZES[-1]:
        return f"takes heads of up to {HEAD_SIZES[-1]}; these are {q.shape[-1]} and {v.shape[-1]}"
    if not set(mask.block) <= set(BLOCKS):
        return f"takes blocks of 64 and 128; these are {mask.block[0]} × {mask.block[1]}"
    try:
        token_rule(mask.rule, *mask.shape)
    except UnsupportedRuleError as reason:
        return str(reason)
    return None


def forward(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    mask: BlockMask,
    *,
    scale: float,
    soft_cap: float | None,
    options: Options,
) -> tuple[Array, Array]:
    """(out [B, T, N, Hv], logsumexp [B, T, N])."""
    Hv = v.shape[-1]
    settings = Settings(float(scale), soft_cap, options)
    out, logsumexp = _attention(settings, *map(_filled_up, (q, k, v)), mask)
    return out[..., :Hv], logsumexp


def _filled_up(x: Array) -> Array:
    """Zeros behind the head, up to a size that the kernels have: they add nothing to a product."""
    size = next(size for size in HEAD_SIZES if size >= x.shape[-1])
    return x if size == x.shape[-1] else jnp.pad(x, ((0, 0),) * 3 + ((0, size - x.shape[-1]),))


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed when the kernels are compiled."""

    scale: float
    soft_cap: float | None
    options: Options


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    settings: Settings, q: Array, k: Array, v: Array, mask: BlockMask
) -> tuple[Array, Array]:
    out, logsumexp = _forward(settings, q, k, v, mask)
    return out, jnp.moveaxis(logsumexp, 1, 2)


def _attention_fwd(settings: Settings, *primals: Any) -> Any:
    q, k, v, mask = custom_vjp_primal_tree_values(primals)
    run = first_order_only("hopper", functools.partial(_forward, settings))
    out, logsumexp = run(q, k, v, mask)
    # The logsumexp is saved as the backward reads it, [B, N, T].
    return (out, jnp.moveaxis(logsumexp, 1, 2)), (q, k, v, mask, out, logsumexp)


def _attention_bwd(settings: Settings, saved: Any, cotangents: Any) -> Any:
    run = first_order_only("hopper", functools.partial(_backward, settings))
    d_out, d_logsumexp = cotangents
    if isinstance(d_out, SymbolicZero):
        d_out = jnp.zeros(d_out.shape, d_out.dtype)
    if isinstance(d_logsumexp, SymbolicZero):  # as a rule: the logsumexp is seldom asked for
        d_logsumexp = None
    return (*run(saved, (d_out, d_logsumexp)), None)


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=0)
def _forward(
    settings: Settings, q: Array, k: Array, v: Array, mask: BlockMask
) -> tuple[Array, Array]:
    from xsake.backends.hopper import forward_kernel as kernels

    out, logsumexp = kernels.forward(
        q,
        k,
        v,
        mask.lists,
        block=mask.block,
        rule=_kernel_rule(mask),
        scale=settings.scale,
        soft_cap=settings.soft_cap,
        tiling=settings.options.hopper_forward
        or kernels.ForwardTiling(**measured("forward", Sizes.of(q, k, v), mask)),
    )
    return own_copies(out, logsumexp)


@functools.partial(jax.jit, static_argnums=0)
def _backward(settings: Settings, saved: Any, cotangents: Any) -> tuple[Array, Array, Array]:
    from xsake.backends.hopper import backward_kernel as kernels

    q, k, v, mask, out, logsumexp = saved
    d_out, d_logsumexp = cotangents
    options = settings.options
    tiling = options.hopper_backward or kernels.BackwardTiling(
        **measured("backward", Sizes.of(q, k, v), mask)
    )
    if options.deterministic:  # the fused form adds dq in any order
        tiling = dataclasses.replace(tiling, fused=False)
    gradients = kernels.backward(
        q,
        k,
        v,
        out,
        logsumexp,
        d_out,
        None if d_logsumexp is None else jnp.moveaxis(d_logsumexp, 2, 1),
        mask.lists,
        block=mask.block,
        rule=_kernel_rule(mask),
        scale=settings.scale,
        soft_cap=settings.soft_cap,
        tiling=tiling,
    )
    return own_copies(*gradients)


def _kernel_rule(mask: BlockMask) -> Any:
    """The mask's rule as the kernels take it, None without one."""
    from xsake.backends.hopper.items import TokenRule

    expression, rows, columns = token_rule(mask.rule, *mask.shape)
    if expression is None:
        return None

    def allows(b: Any, n: Any, q: Any, k: Any, row_values: Any, column_values: Any) -> Any:
        return expression(Tokens.at(b, n, q, k), row_values, column_values)

    return TokenRule(allows, rows, columns)


# --------------------------------------------------------------------------------------- the rule


class UnsupportedRuleError(ValueError):
    """A rule that needs more than integers per query and per key."""


@dataclasses.dataclass
class Columns:
    """Integers per query and per key that a rule reads, collected while it is translated."""

    rows: list[Array] = dataclasses.field(default_factory=list)  # int32 [B|1, T] each
    columns: list[Array] = dataclasses.field(default_factory=list)  # int32 [B|1, S] each

    def row(self, values: Array) -> int:
        """The place of values in what the kernel hands back, per query."""
        self.rows.append(values.astype(jnp.int32))
        return len(self.rows) - 1

    def column(self, values: Array) -> int:
        """The same per key."""
        self.columns.append(values.astype(jnp.int32))
        return len(self.columns) - 1


# (tokens, integers per query, integers per key) -> bool tile
Expression = Callable[[Tokens, Any, Any], Any]

# What a lifted function may do to index tiles inside a kernel.
_LOWERS = frozenset(
    "add sub mul neg max min sign abs and or eq ne lt le gt ge select_n copy div rem "
    "convert_element_type broadcast_in_dim pjit jit integer_pow squeeze reshape".split()
)


def token_rule(
    rule: Rule | None, T: int, S: int
) -> tuple[Expression | None, tuple[Array, ...], tuple[Array, ...]]:
    """(expression, integers per query, integers per key); the expression is None without a rule."""
    if rule is None or isinstance(rule, Everything):
        return None, (), ()
    found = Columns()
    expression = _translate(rule, found, T, S)
    return expression, tuple(found.rows), tuple(found.columns)


def _translate(rule: Rule, found: Columns, T: int, S: int) -> Expression:
    again = functools.partial(_translate, found=found, T=T, S=S)
    match rule:
        case And():
            a, b = again(rule.a), again(rule.b)
            return lambda *at: a(*at) & b(*at)
        case Or():
            a, b = again(rule.a), again(rule.b)
            return lambda *at: a(*at) | b(*at)
        case Not():
            a = again(rule.a)
            # Mosaic has no negation of a bool tile
            return lambda *at: jnp.where(a(*at), jnp.int32(0), jnp.int32(1)) > 0
        case carrying.Documents():
            i, j = found.row(rule.q_ids), found.column(rule.kv_ids)
            return lambda tokens, rows, columns: (rows[i] == columns[j]) & (rows[i] >= 0)
        case carrying.Lengths():
            return _translate_lengths(rule, found, T, S)
        case carrying.Prefix():
            j = found.column(jnp.broadcast_to(rule.lengths[:, None], (rule.lengths.shape[0], S)))
            return lambda tokens, rows, columns: tokens.k < columns[j]
        case carrying.Positioned():
            return _translate_positions(rule, found, again(rule.a))
        case positional.Window() | positional.First() | positional.GlobalTokens():
            return lambda tokens, rows, columns: rule.allows(tokens)
        case positional.Chunked() | positional.Strided():
            return lambda tokens, rows, columns: rule.allows(tokens)
        case carrying.Custom() if not rule.arrays:
            _check_function(rule)
            return lambda tokens, rows, columns: rule.allows(tokens)
    raise UnsupportedRuleError(f"has no tiles for {rule}, which needs more than positions and ids")


def _translate_lengths(rule: carrying.Lengths, found: Columns, T: int, S: int) -> Expression:
    """Token indices below a length per batch row: 0 or 1 for every query and key."""
    parts: list[Expression] = []
    if rule.query is not None:
        i = found.row(jnp.arange(T) < rule.query[:, None])
        parts.append(lambda tokens, rows, columns: rows[i] > 0)
    if rule.key_value is not None:
        j = found.column(jnp.arange(S) < rule.key_value[:, None])
        parts.append(lambda tokens, rows, columns: columns[j] > 0)
    return lambda *at: parts[0](*at) & parts[-1](*at)


def _translate_positions(
    rule: carrying.Positioned, found: Columns, inner: Expression
) -> Expression:
    i = None if rule.q_positions is None else found.row(rule.q_positions)
    j = None if rule.kv_positions is None else found.column(rule.kv_positions)

    def expression(tokens: Tokens, rows: Any, columns: Any) -> Any:
        if i is not None:
            tokens = tokens._replace(q=rows[i])
        if j is not None:
            tokens = tokens._replace(k=columns[j])
        return inner(tokens, rows, columns)

    return expression


def _check_function(rule: carrying.Custom) -> None:
    """A lifted function goes into the kernel if it does nothing there that tiles cannot."""
    tile, one = jax.ShapeDtypeStruct((64, 128), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda b, n, q, k: rule.allows(Tokens.at(b, n, q, k)))(
        one, one, tile, tile
    )
    used = {equation.primitive.name for equation in _equations(jaxpr.jaxpr)}
    if foreign := sorted(used - _LOWERS):
        raise UnsupportedRuleError(f"cannot trace {rule} into a kernel: it uses {foreign}")


def _equations(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from _equations(inner)
