"""Hopper GPUs (sm90): which calls the kernels support, and the custom_vjp that uses them.

    call ─ why_not ─ pad heads ─┬─ forward_kernel.py ──────────────── out, logsumexp
                                └─ prepare.py ─ backward_kernel.py ── dq, dk, dv

    kernel_rule.py         (one level up) the mask's rule as a function of index tiles
    limits.py, shape.py    what the kernels support; the sizes of one call
    tilings/               tile sizes, stages and schedules that were measured on an H200
    transpose.py           transposed lists, for the backward
    work_table.py          one record for each work tile, longest first
    scheduler.py           which CTA computes which work tile
    pipeline.py            TMA copies into rings of shared-memory tiles
    rule_tile.py           the rule inside a tile; interval_tile.py: an interval of columns per row
    token_words.py         token masks as bits; bias_tile.py: a bias in a tile, and its gradient
    kernel.py              launch, roles and steps of the forward and both backward kernels
    barriers.py            which named barrier has which use
    layouts.py, ptx.py     register layouts and shared-memory tiles; inline PTX
    row_store.py, votes.py one value per row to memory; what any thread of a warp says
    lanes.py               helpers of kernels in which every thread has its own value
    handover.py            partial results from compute warpgroup 1 to warpgroup 0
    forward_kernel.py      the forward; its steps are in forward_steps.py
    statistics_tile.py     entropy and block mass, by-products of the forward
    sensitivity.py         what every block gives to the output, for the oracles of `xsake.evaluate`
    prepare.py, delta.py   what the backward needs before its products
    interval_transpose.py  intervals of queries for each key
    backward_kernel.py     the backward: calls the two kernels below
    gradient_kernel.py     what both of them share
    backward_columns.py    dk, dv, fused dq: backward_steps.py, backward_dq.py, dq_cast.py
    backward_rows.py       dq, unless fused
    means.py, outliers.py, scores.py, best_blocks.py
                           scores of blocks and lists of the best, for `xsake.block_scores`
    mass_bounds.py         bounds on the mass that dropped blocks may have, for `xsake.hads`
    sampled/               attention of sampled queries, for `xsake.hads`
    selected/              blocks that every token selects for itself, for `xsake.nsa`

Modules that import Pallas are imported when a kernel is traced: `import xsake` does without them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from xsake import _jax
from xsake.backends import (
    Call,
    Sizes,
    first_order_only,
    kernel_rule,
    reverse_only,
    unaliased,
)
from xsake.backends.hopper import limits, tilings
from xsake.backends.options import Options
from xsake.backends.statistics import Observed, Statistics, joined
from xsake.block_mask import BlockMask

MOST_KNOWN_TILES = 1 << 13  # of a work table that is a constant: 256 KiB


def why_not(call: Call) -> str | None:
    """The first thing that keeps the kernels from running this call."""
    if reason := _jax.why_no_hopper(limits.NEEDS_JAX):
        return reason
    if call.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16; this is {call.q.dtype}"
    H, Hv = call.sizes.H, call.sizes.Hv
    if max(H, Hv) > limits.HEAD_SIZES[-1]:
        return f"takes heads of up to {limits.HEAD_SIZES[-1]}; these are {H} and {Hv}"
    if not set(call.mask.block) <= set(limits.BLOCKS):
        bq, bk = call.mask.block
        return f"takes blocks of 64 and 128; these are {bq} × {bk}"
    return kernel_rule.why_not(call.mask.rule, *call.mask.shape, reads_tiles=True)


def forward(call: Call) -> tuple[Array, Array]:
    """(out [B, T, N, Hv], logsumexp [B, T, N])."""
    settings = Settings(float(call.scale), call.soft_cap, call.options)
    q, k, v, bias = reverse_only("hopper", call.q, call.k, call.v, call.bias)
    q, k, v = map(_pad_head, (q, k, v))
    if bias is None or _is_per_query(bias):
        out, logsumexp = _attention(settings, q, k, v, call.mask, None, None)
        if bias is not None:
            out, logsumexp = _move_rows(out, logsumexp, bias)
    else:
        out, logsumexp = _attention(settings, q, k, v, call.mask, _kernel_bias(bias), None)
    return out[..., : call.sizes.Hv], logsumexp


def why_not_observed(call: Call) -> str | None:
    """What keeps the forward of a call that the kernels support from having statistics."""
    H, Hv = call.sizes.H, call.sizes.Hv
    if max(H, Hv) > limits.OBSERVED_HEAD_SIZE:
        return f"takes heads of up to {limits.OBSERVED_HEAD_SIZE}; these are {H} and {Hv}"
    if call.bias is not None and _is_per_query(call.bias):
        return "takes no bias of one value per query, which the kernels do not read"
    tiling = call.options.hopper_forward
    if tiling is not None and tiling.step is not None and tiling.step < call.mask.block[1]:
        return f"takes steps of whole blocks; hopper_forward has steps of {tiling.step}"
    return None


def observed(
    call: Call, sinks: Array | None, what: Observed
) -> tuple[Array, tuple[Array, Statistics]]:
    """`forward` with statistics; sinks are float32 [N], as by `statistics.total`, or None.

    Sinks join the statistics only; `out` is without them.
    """
    settings = Settings(float(call.scale), call.soft_cap, call.options, what)
    q, k, v, bias = reverse_only("hopper", call.q, call.k, call.v, call.bias)
    q, k, v = map(_pad_head, (q, k, v))
    bias = None if bias is None else _kernel_bias(bias)
    out, logsumexp, *more = _attention(settings, q, k, v, call.mask, bias, sinks)
    found = joined(logsumexp, Statistics(*more), sinks)
    return out[..., : call.sizes.Hv], (logsumexp, found)


def backward(
    call: Call, out: Array, logsumexp: Array, d_out: Array, d_logsumexp: Array
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of the call's keys; out and logsumexp may cover more keys than the call has."""
    settings, sizes = Settings(float(call.scale), call.soft_cap, call.options), call.sizes
    run = first_order_only("hopper", functools.partial(run_backward, settings))
    rows = (out.astype(call.q.dtype), d_out.astype(call.q.dtype))
    q, k, v, out, d_out = map(_pad_head, (call.q, call.k, call.v, *rows))
    bias = call.bias
    if bias is not None:
        if _is_per_query(bias):  # the kernels' logsumexp is that without the bias
            by_row = _by_row(bias)
            logsumexp = jnp.where(by_row == -jnp.inf, -jnp.inf, logsumexp - by_row)
            bias = None
        else:
            bias = _kernel_bias(bias)
    saved = (q, k, v, call.mask, out, jnp.moveaxis(logsumexp, 2, 1), bias)
    dq, dk, dv, _ = run(saved, (d_out, d_logsumexp))
    return dq[..., : sizes.H], dk[..., : sizes.H], dv[..., : sizes.Hv]


def _pad_head(x: Array) -> Array:
    """x with zeros up to a head size that the kernels have: they add nothing to a product."""
    size = limits.padded_head_size(x.shape[-1])
    return x if size == x.shape[-1] else jnp.pad(x, ((0, 0),) * 3 + ((0, size - x.shape[-1]),))


def _is_per_query(bias: Array) -> bool:
    """Whether a bias has one value per query: it moves the logsumexp of a row and nothing else."""
    return bias.shape[3] == 1


def _by_row(bias: Array) -> Array:
    """A bias [B|1, N|1, T|1, 1] in float32, broadcastable to [B, T, N]."""
    return jnp.moveaxis(bias[..., 0].astype(jnp.float32), 1, 2)


def _move_rows(out: Array, logsumexp: Array, bias: Array) -> tuple[Array, Array]:
    """(out, logsumexp) with a bias per query; one of -inf hides all keys."""
    by_row = _by_row(bias)
    hidden = by_row == -jnp.inf
    seen = (logsumexp != -jnp.inf) & ~hidden
    # Neither sum nor gradient may meet an infinity.
    moved = jnp.where(seen, logsumexp, 0) + jnp.where(hidden, 0, by_row)
    out = jnp.where(hidden[..., None], jnp.zeros((), out.dtype), out)
    return out, jnp.where(seen, moved, -jnp.inf)


def _kernel_bias(bias: Array) -> Array:
    """A bias [B|1, N|1, T|1, S] in a dtype that the kernels read."""
    is_read = bias.shape[2] > 1 and bias.dtype in (jnp.bfloat16, jnp.float16)
    return bias if is_read else bias.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed when the kernels are compiled."""

    scale: float
    soft_cap: float | None
    options: Options
    statistics: Observed | None = None  # the forward returns these, too


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    settings: Settings,
    q: Array,
    k: Array,
    v: Array,
    mask: BlockMask,
    bias: Array | None,
    sinks: Array | None,
) -> tuple[Array, ...]:
    out, logsumexp, *more = run_forward(settings, q, k, v, mask, bias, sinks)
    return out, jnp.moveaxis(logsumexp, 1, 2), *more


def _attention_fwd(settings: Settings, *primals: Any) -> Any:
    q, k, v, mask, bias, sinks = custom_vjp_primal_tree_values(primals)
    run = first_order_only("hopper", functools.partial(run_forward, settings))
    out, logsumexp, *more = run(q, k, v, mask, bias, sinks)
    wants_bias = bias is not None and primals[4].perturbed
    # The logsumexp is saved as the backward reads it, [B, N, T].
    saved = _Saved((q, k, v, mask, out, logsumexp, bias), wants_bias)
    return (out, jnp.moveaxis(logsumexp, 1, 2), *more), saved


def _attention_bwd(settings: Settings, saved: Any, cotangents: Any) -> Any:
    backward = functools.partial(run_backward, settings, wants_bias=saved.wants_bias)
    run = first_order_only("hopper", backward)
    d_out, d_logsumexp = cotangents[:2]  # statistics have no gradient
    if isinstance(d_out, SymbolicZero):
        d_out = jnp.zeros(d_out.shape, d_out.dtype)
    if isinstance(d_logsumexp, SymbolicZero):  # the usual case: nobody asked for the logsumexp
        d_logsumexp = None
    *gradients, d_bias = run(saved.arrays, (d_out, d_logsumexp))
    return (*gradients, None, d_bias, None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Saved:
    """What the forward saves for the backward."""

    arrays: Any
    wants_bias: bool = dataclasses.field(metadata={"static": True})  # its gradient is wanted


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


@_jax.without_x64
@functools.partial(jax.jit, static_argnums=0)
@jax.named_scope("xsake_forward")
def run_forward(
    settings: Settings,
    q: Array,
    k: Array,
    v: Array,
    mask: BlockMask,
    bias: Array | None = None,
    sinks: Array | None = None,
) -> tuple[Array, ...]:
    """(out [B, T, N, Hv], logsumexp [B, N, T]) for head sizes that the kernels have.

    With statistics, also what `forward_kernel.forward` returns for them.
    """
    from xsake.backends.hopper import forward_kernel

    given = settings.options.hopper_forward
    kind = tilings.bias_kind(None if bias is None else bias.shape)
    tiling = given or tilings.measured_forward(Sizes.of(q, k, v), mask, kind)
    if settings.statistics:
        # A grid that is not persistent would keep T · S / 128 logarithms, and statistics have the
        # shared memory that a bias could pass through.
        tiling = dataclasses.replace(tiling, persistent=True, bias_in_shared=False)
        if given is None and max(q.shape[-1], v.shape[-1]) > 64:  # registers spill
            tiling = dataclasses.replace(tiling, lazy_maximum=False)
    mass_block = mask.block[0]
    if bias is None:
        mask = _in_rows(mask, tiling.rows, max(q.shape[-1], v.shape[-1]))
    results = forward_kernel.forward(
        q,
        k,
        v,
        mask.lists,
        block=mask.block,
        rule=kernel_rule.by_query(mask),
        scale=settings.scale,
        soft_cap=settings.soft_cap,
        bias=bias,
        tiling=tiling,
        statistics=settings.statistics,
        sinks=sinks,
        mass_block=mass_block,
    )
    return _jax.vary(unaliased(*results), _jax.varying_axes(q))


@_jax.without_x64
@jax.named_scope("xsake_pieces")
def run_pieces(
    q: Array,
    k: Array,
    v: Array,
    pairs: Array,
    lists: Any,
    block: tuple[int, int],
    soft_cap: float | None,
) -> tuple[Array, Array]:
    """Attention of the same queries to several pieces of keys: out [C, T, N, Hv], lse [C, N, T].

    Args:
      q: [B, T, N, H]; B divides C, and batch row b has the pieces b · C / B and following.
      k: [C, S, K, H].
      v: [C, S, K, Hv].
      pairs: int32 [C, 2, T]: keys lo … hi - 1 of a piece that a query sees.
      lists: of all C pieces, or NumPy lists of the first c; piece i has lists i % c.
      block: of the lists.
      soft_cap: of the logits.
    """
    from xsake.backends.hopper import forward_kernel, work_table

    sizes = Sizes.of(q, k, v)._replace(B=len(k))
    mask = BlockMask.from_lists(lists, None, (sizes.T, sizes.S), block)
    tiling = tilings.measured_forward(sizes, mask)
    table = None
    are_few = sizes.B * sizes.N * mask.grid.counts[0] <= MOST_KNOWN_TILES
    if are_few and isinstance(lists.kv_count, np.ndarray):
        table = work_table.known_table(lists, sizes.B, sizes.N)
        # a counter would be written to the constant
        tiling = dataclasses.replace(tiling, schedule="fixed")
    out, logsumexp = forward_kernel.forward(
        q,
        k,
        v,
        lists,
        block=block,
        rule=kernel_rule.KernelRule(None, rows=(pairs,), is_interval=True),
        soft_cap=soft_cap,
        tiling=tiling,
        table=table,
        rows_per_q=len(k) // len(q),
    )
    return out, logsumexp


def _in_rows(mask: BlockMask, rows: int | None, head_size: int) -> BlockMask:
    """The mask in row blocks of the work tiles that `ForwardTiling.rows` asks for."""
    if rows is None or head_size > limits.TALL_HEAD_SIZE or not kernel_rule.is_causal_alone(mask):
        return mask
    return BlockMask.from_rule(mask.rule, mask.shape, block=(rows, mask.block[1]))


@_jax.without_x64
@functools.partial(jax.jit, static_argnums=0, static_argnames="wants_bias")
@jax.named_scope("xsake_backward")
def run_backward(
    settings: Settings, saved: Any, cotangents: Any, wants_bias: bool = False
) -> tuple[Array, Array, Array, Array | None]:
    """(dq, dk, dv, the bias's gradient or None) from what the forward saved and the cotangents."""
    from xsake.backends.hopper import backward_kernel

    q, k, v, mask, out, logsumexp, bias = saved
    d_out, d_logsumexp = cotangents
    options = settings.options
    tiling = options.hopper_backward or tilings.measured_backward(
        Sizes.of(q, k, v), mask, has_bias=bias is not None
    )
    if options.deterministic:  # the fused form adds to dq in any order
        tiling = dataclasses.replace(tiling, fused=False)
    gradients = backward_kernel.backward(
        q,
        k,
        v,
        out,
        logsumexp,
        d_out,
        None if d_logsumexp is None else jnp.moveaxis(d_logsumexp, 2, 1),
        mask.lists,
        block=mask.block,
        rule=kernel_rule.by_key(mask),
        row_rule=kernel_rule.by_query(mask),
        scale=settings.scale,
        soft_cap=settings.soft_cap,
        bias=bias,
        wants_bias=wants_bias,
        deterministic=options.deterministic,
        tiling=tiling,
    )
    return _jax.vary(unaliased(*gradients), _jax.varying_axes(q))
