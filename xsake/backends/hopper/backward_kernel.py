"""Block-sparse attention backward on Hopper (sm90), in Pallas Mosaic GPU.

    transposed lists, delta = rowsum(d_out * out) - d_lse, zeros for dq                   prepare.py

    seven products, bitwise reproducible:
      ColumnsKernel  work tile = a kv block, visits its row blocks:   dv += pT d_out     dk += dsT q
      RowsKernel     work tile = a row block, visits its kv blocks:   dq += ds k
    five products (`fused`): ColumnsKernel also computes ds k and adds it to dq in float32; the
      order of the additions varies
    eight products, with a head of 256: ColumnsKernel runs twice, because the accumulators of dk
      and dv do not fit in registers together

    p = 2^(s - lse) in base 2,  dp = d_out vT,  ds = p (dp - delta), which is the gradient of a bias
    too; with a soft cap, ds is also multiplied by its derivative, 1 - tanh²(scale · q kT / cap)
    a bias [B|1, N|1, T, S] whose gradient is wanted takes seven products: RowsKernel stores it;
    that of one value per key is a sum in ColumnsKernel

Both kernels are built like the forward: a memory warpgroup reads the list and runs ahead with TMA,
two compute warpgroups have 64 rows (of keys, of queries) each and accumulate in registers. An empty
row and rows past T have lse = +inf: their p and ds are zeros.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from xsake import _jax
from xsake.backends.hopper.backward_columns import ColumnsKernel
from xsake.backends.hopper.backward_rows import RowsKernel
from xsake.backends.hopper.bias_tile import bias_operands
from xsake.backends.hopper.layouts import ALIGNED, pad_tokens, round_up
from xsake.backends.hopper.limits import FUSED_SIZE
from xsake.backends.hopper.prepare import prepare
from xsake.backends.hopper.rule_tile import rule_operands
from xsake.backends.hopper.shape import Shape
from xsake.backends.hopper.work_table import work_table
from xsake.backends.kernel_rule import KernelRule
from xsake.backends.options import BackwardTiling
from xsake.block_mask.lists import Lists

MAX_COLUMNS = 256  # of accumulators in a warpgroup's registers
CASTS = ("pass", "kernel")
DEFAULT_TILING = BackwardTiling()


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    lists: Lists,
    *,
    block: tuple[int, int] = (128, 128),
    rule: KernelRule | None = None,
    row_rule: KernelRule | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    bias: jax.Array | None = None,
    wants_bias: bool = False,
    deterministic: bool = False,
    tiling: BackwardTiling = DEFAULT_TILING,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """dq [B, T, N, H], dk [B, S, K, H], dv [B, S, K, Hv] in the dtype of q; that of the bias.

    q, out, d_out [B, T, N, H|Hv], k, v [B, S, K, H|Hv], lse and d_lse float32 [B, N, T] as the
    forward returns them. `lists` name the kv blocks of every row block, full ones first. A kernel
    over row blocks takes `row_rule` where it is given: the same rule in the form that suits it.
    wants_bias: the last result is the gradient of the bias, in its shape and dtype; otherwise None.
    deterministic: that gradient does not depend on the order in which heads are computed.
    """
    if tiling.cast not in CASTS:
        raise ValueError(f"cast is {tiling.cast!r}, which is none of {CASTS}")
    shape = Shape.of(q, k, v, lists, block)
    B, T, S, N, K, H, Hv = shape.sizes
    rule = rule or KernelRule(None)
    by_pairs = bias is not None and wants_bias and bias.shape[2] > 1
    by_key = wants_bias and not by_pairs
    d_bias = None
    fused = tiling.fused and not by_pairs and shape.largest_head <= FUSED_SIZE
    with jax.named_scope("delta_and_lists"):
        prepared = prepare(
            out,
            lse,
            d_out,
            d_lse,
            lists,
            shape,
            tiling,
            zeros=H if fused else None,
            counts=fused and tiling.cast == "kernel",
            pairs=_traced_intervals(row_rule),
            interpret=interpret,
        )
    if prepared.intervals is not None:  # XLA drops its own computation of them
        rule = rule._replace(columns=(prepared.intervals,))
    padded = tuple(pad_tokens(x, round_up(x.shape[1], ALIGNED)) for x in (q, k, v, d_out))
    common = dict(
        scale=1 / math.sqrt(H) if scale is None else scale,
        soft_cap=soft_cap,
        bias=bias,
        interpret=interpret,
    )
    bias_operand = bias_operands(bias, shape)
    tokens = *padded, prepared.lse, prepared.delta
    gradients: dict[str, jax.Array] = {}
    together = H + Hv <= MAX_COLUMNS
    for names in (("dk", "dv"),) if together else (("dk",), ("dv",)):
        columns = ColumnsKernel(
            shape, rule, tiling, results=names, fused=fused, sums_bias=by_key, **common
        )
        more = prepared.row_blocks, *rule_operands(rule, shape, axis=1), *bias_operand
        written = prepared.table, prepared.zeros, prepared.counters
        table, zeros, counters = _unshared(written, (*tokens, *more))
        with jax.named_scope("dk_dv_dq" if fused else "_".join(names)):
            gradients |= columns((*tokens, table, *more), zeros, counters, interpret)
    if not fused:
        rule = row_rule or rule
        adds = False
        if by_pairs:
            d_bias, adds = _bias_zeros(bias, shape, deterministic or interpret)
        with jax.named_scope("work_table"):
            how, nesting = _together(bias, lists, tiling) if adds else (tiling, "bni")
            table = work_table(lists, B, N, K, shape.kv_bytes, how, interpret, nesting=nesting)
        rows = RowsKernel(shape, rule, tiling, adds=adds, **common)
        more = lists.kv_index.reshape(-1), *rule_operands(rule, shape, axis=0), *bias_operand
        table, d_bias = _unshared((table, d_bias), (*tokens, *more))
        with jax.named_scope("dq"):
            gradients["dq"], d_bias = rows((*tokens, table, *more), d_bias, interpret)
    if by_key:
        d_bias = gradients["bias_sums"][:, :, None]
    d_bias = _reduced(d_bias, bias) if wants_bias else None
    dk, dv = (_sum_heads(gradients[x][:, :S], shape.group) for x in ("dk", "dv"))
    return gradients["dq"][:, :T], dk, dv, d_bias


def _unshared(written, others):
    """Arrays or None that a kernel writes to, which mapped calls do not share."""
    return [None if x is None else _jax.own_copy(x, others) for x in written]


def _traced_intervals(row_rule):
    """The intervals of keys for each query, unless they are constants or there are none."""
    if row_rule is None or not row_rule.is_interval or not row_rule.rows:
        return None
    (pairs,) = row_rule.rows
    return pairs if isinstance(pairs, jax.core.Tracer) else None


def _bias_zeros(bias, shape, in_order):
    """(where the gradient of a bias is written, whether heads and batch rows are added there).

    Otherwise heads and batch rows that share the bias have gradients of their own, whose sum is
    taken later, in a fixed order; that takes as much memory as a bias that they do not share.
    """
    B, _, _, N, *_ = shape.sizes
    full = B, N, shape.padded_rows, shape.padded_keys
    is_shared = bias.shape[:2] != (B, N)
    if is_shared and not in_order:
        return jnp.zeros((*bias.shape[:2], *full[2:]), jnp.float32), True
    return jnp.zeros(full, bias.dtype), False


def _together(bias, lists, tiling):
    """(the tiling, the nesting of work tiles) in which those that share a bias run together.

    They read the same rows of it, and add to the same rows of its gradient in L2, at about the same
    time. One head after another, both pass through memory once per head: at 16,384 tokens and 16
    heads 9 GB of bfloat16 are read, and 34 GB of float32 sums are read and written.
    """
    separate = "".join(axis for axis, size in zip("bn", bias.shape[:2], strict=True) if size > 1)
    nesting = separate + "i" + "bn".replace(separate, "")
    # Lists of their own have different lengths: sorted, the heads of a row block would not meet.
    # The last few work tiles are sorted in any order.
    is_shared = lists.kv_count.shape[:2] == (1, 1)
    return dataclasses.replace(tiling, order="longest" if is_shared else "natural"), nesting


def _reduced(x, bias):
    """The gradient of the bias from that of all its elements, or of their sums."""
    axes = tuple(i for i, size in enumerate(bias.shape) if size == 1 and x.shape[i] > 1)
    x = x[..., : bias.shape[2], : bias.shape[3]]
    if axes:
        x = x.sum(axes, dtype=jnp.float32, keepdims=True)
    return x.astype(bias.dtype)


def _sum_heads(x, group):
    """[B, S, N, H] -> [B, S, K, H]: the sum over the query heads of each kv head."""
    if group == 1:
        return x
    B, S, N, H = x.shape
    grouped = x.reshape(B, S, N // group, group, H)
    return grouped.astype(jnp.float32).sum(axis=3).astype(x.dtype)
