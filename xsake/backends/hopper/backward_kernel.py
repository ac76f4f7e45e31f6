"""Block-sparse attention backward on Hopper (sm90), in Pallas Mosaic GPU.

    transposed lists, delta = rowsum(d_out * out) - d_lse, zeros for dq                   prepare.py

    seven products, bitwise reproducible:
      ColumnsKernel  work tile = a kv block, visits its row blocks:   dv += pT d_out     dk += dsT q
      RowsKernel     work tile = a row block, visits its kv blocks:   dq += ds k
    five products (`fused`): ColumnsKernel also computes ds k and adds it to dq in float32; the
      order of the additions varies
    eight products, with a head of 256: ColumnsKernel runs twice, because the accumulators of dk
      and dv do not fit in registers together

    p = 2^(s - lse) in base 2,  dp = d_out vT,  ds = p (dp - delta); with a soft cap, ds is also
    multiplied by its derivative, 1 - tanh²(scale · q kT / cap)

Both kernels are built like the forward: a memory warpgroup reads the list and runs ahead with TMA,
two compute warpgroups have 64 rows (of keys, of queries) each and accumulate in registers. An empty
row and rows past T have lse = +inf: their p and ds are zeros.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from xsake.backends.hopper.backward_columns import ColumnsKernel
from xsake.backends.hopper.backward_rows import RowsKernel
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
    tiling: BackwardTiling = DEFAULT_TILING,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq [B, T, N, H], dk [B, S, K, H], dv [B, S, K, Hv] in the dtype of q.

    q, out, d_out [B, T, N, H|Hv], k, v [B, S, K, H|Hv], lse and d_lse float32 [B, N, T] as the
    forward returns them. `lists` name the kv blocks of every row block, full ones first. A kernel
    over row blocks takes `row_rule` where it is given: the same rule in the form that suits it.
    """
    if tiling.cast not in CASTS:
        raise ValueError(f"cast is {tiling.cast!r}, which is none of {CASTS}")
    shape = Shape.of(q, k, v, lists, block)
    B, T, S, N, K, H, Hv = shape.sizes
    rule = rule or KernelRule(None)
    fused = tiling.fused and shape.largest_head <= FUSED_SIZE
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
            interpret=interpret,
        )
    padded = tuple(pad_tokens(x, round_up(x.shape[1], ALIGNED)) for x in (q, k, v, d_out))
    common = dict(
        scale=1 / math.sqrt(H) if scale is None else scale,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    statistics = prepared.lse, prepared.delta
    gradients: dict[str, jax.Array] = {}
    together = H + Hv <= MAX_COLUMNS
    for names in (("dk", "dv"),) if together else (("dk",), ("dv",)):
        columns = ColumnsKernel(shape, rule, tiling, results=names, fused=fused, **common)
        lists_by_column = prepared.table, prepared.row_blocks
        operands = (*padded, *statistics, *lists_by_column, *rule_operands(rule, shape))
        with jax.named_scope("dk_dv_dq" if fused else "_".join(names)):
            gradients |= columns(operands, prepared.zeros, prepared.counters, interpret)
    if not fused:
        with jax.named_scope("work_table"):
            table = work_table(lists, B, N, K, shape.kv_bytes, tiling, interpret)
        rule = row_rule or rule
        rows = RowsKernel(shape, rule, tiling, **common)
        lists_by_row = table, lists.kv_index.reshape(-1)
        operands = (*padded, *statistics, *lists_by_row, *rule_operands(rule, shape))
        with jax.named_scope("dq"):
            gradients["dq"] = rows(operands, interpret)
    dk, dv = (_sum_heads(gradients[x][:, :S], shape.group) for x in ("dk", "dv"))
    return gradients["dq"][:, :T], dk, dv


def _sum_heads(x, group):
    """[B, S, N, H] -> [B, S, K, H]: the sum over the query heads of each kv head."""
    if group == 1:
        return x
    B, S, N, H = x.shape
    grouped = x.reshape(B, S, N // group, group, H)
    return grouped.astype(jnp.float32).sum(axis=3).astype(x.dtype)
