"""context_attention: attention over a sequence that is split over the devices of a mesh axis.

inside shard_map, on every device of the axis:
q [B, T / c, N, H] ─┐            ┌─ ring    keys of one device after the other, steps without
k [B, S / c, K, H] ─┤            │          a live block are neither sent nor computed
v [B, S / c, K, Hv]─┼─ choose ───┤
any mask, rule ─────┤            ├─ gather  only the kv blocks that a local row block visits
ids, positions ─────┘            └─ halo    windows: the ends of the neighbours' keys

layout.py        which tokens a device holds: contiguous or zigzag
local_rule.py    a rule of the whole text for some of its tokens
local_mask.py    the mask of one device's queries, for keys of any device
steps.py         which devices need which keys, known before any run
ring.py          the ring and its derivative
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from xsake import _jax, masks
from xsake.attention import (
    Mask,
    Tensor,
    Window,
    block_for,
    check_qkv,
    check_sinks,
    choose,
    number,
    per_token,
)
from xsake.backends import Sizes, scale_gradient, with_sinks
from xsake.backends.options import Options
from xsake.block_mask import BlockMask
from xsake.masks.rule import Rule, check_fits
from xsake.parallel.context import ring, steps
from xsake.parallel.context.layout import Layout, LayoutName, token_order
from xsake.parallel.context.local_mask import (
    LocalMask,
    check_block_mask,
    gathered,
    row_classes,
)

__all__ = ["context_attention", "token_order"]


def context_attention(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B S K H"],
    value: Float[Tensor, "B S K Hv"],
    mask: Mask | None = None,
    *,
    axis: str = "context",
    layout: LayoutName = "contiguous",
    method: str | None = None,
    capacity: int | None = None,
    balance: bool = False,
    scale: float | None = None,
    is_causal: bool = False,
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
    """`dot_product_attention` over a sequence that is split over a mesh axis; inside `shard_map`.

    All devices of the axis hold equally many queries and keys. Together their results are those of
    one device with the whole sequence. Reverse-mode derivatives only, except by
    implementation="reference".

    Args:
      query: this device's queries, [B, T, N, H].
      key: its keys, [B, S, K, H].
      value: [B, S, K, Hv].
      mask: a rule of the whole text, which reads its arrays by a token's place in the text; a
        BlockMask of the whole text; a BlockMask of this device's queries and all keys, as
        `plan.mask(layer, q, keys, first=…)` returns it; or a bool array of the whole text. Blocks
        are numbered by their place in the text.
      axis: the mesh axis over which the sequence is split.
      layout: how the text lies on the devices; see `token_order`.
      method: "ring", "gather" or "halo"; default the one with the least traffic that can run.
      capacity: of "gather": kv blocks that a device may receive from each other one. With more, the
        output and the gradients of this device are NaN. Default: enough for every mask.
      balance: send query blocks to other devices so that all have equal work under this mask, and
        the results back; for masks whose work is unequal in a way that no layout knows.
      scale: of the logits; default 1/sqrt(H).
      is_causal: a query sees keys at its own place and before.
      local_window_size: w or (left, right), as in `dot_product_attention`.
      implementation: a backend by name.
      return_residual: also return the logsumexp [B, T, N].
      logits_soft_cap: cap · tanh(logits / cap).
      sinks: [N] or [N, M], the same on all devices of the axis.
      q_segment_ids: int [B, T], of this device's queries.
      kv_segment_ids: int [B, S], of its keys; default q_segment_ids.
      q_positions: int [B, T], what causal and window rules compare; default the place in the text.
      kv_positions: int [B, S].
      options: settings of the backends.

    Returns:
      [B, T, N, Hv] in query's dtype; with return_residual, that and the logsumexp.
    """
    if method not in (None, "ring") or capacity is not None or balance:
        raise ValueError("method 'ring' is the only one so far; leave capacity and balance out")
    q, k, v, is_unbatched = check_qkv(query, key, value)
    if is_unbatched:
        raise ValueError(f"query must be [B, T, N, H], got shape {list(q.shape[1:])}")
    sizes, devices = Sizes.of(q, k, v), _axis_size(axis)
    queries, keys = Layout(layout, devices, sizes.T), Layout(layout, devices, sizes.S)
    queries.check("queries")
    keys.check("keys")
    limits = masks.causal() if is_causal else masks.everything()
    if local_window_size is not None:
        limits = limits & masks.sliding_window(local_window_size)
    local = _local_mask(
        mask, limits, sizes, queries, keys, axis,
        ids=(q_segment_ids, kv_segment_ids), positions=(q_positions, kv_positions),
    )  # fmt: skip
    checked_sinks = check_sinks(sizes, sinks)
    q, k, v = _jax.vary((q, k, v), _jax.varying_axes(*jax.tree.leaves((q, k, v, local))))
    factor = None if local.overflow is None else jnp.where(local.overflow, jnp.nan, 1.0)
    if factor is not None:
        q, k, v = (scale_gradient(x, factor) for x in (q, k, v))

    settings = ring.Settings(
        axis, devices, "", 1 / math.sqrt(sizes.H) if scale is None else number("scale", scale),
        None if logits_soft_cap is None else number("logits_soft_cap", logits_soft_cap, above=0.0),
        Options.of(options),
        steps.live_steps(steps.live_pairs(local.bound, queries, keys)),
        local.is_static,
    )  # fmt: skip
    settings = _with_backend(settings, implementation, q, k, v, local)
    out, logsumexp = ring.attend(settings, q, k, v, local)
    if factor is not None:
        out, logsumexp = out * factor.astype(out.dtype), logsumexp * factor
    if checked_sinks is not None:
        out = with_sinks(out, logsumexp, checked_sinks)
    out = out.astype(q.dtype)
    return (out, logsumexp) if return_residual else out


def _axis_size(axis: str) -> int:
    try:
        return lax.axis_size(axis)
    except NameError as error:
        raise ValueError(
            f"axis {axis!r} is not a mesh axis here; call context_attention inside jax.shard_map "
            "over a mesh that has it"
        ) from error


def _with_backend(
    settings: ring.Settings, asked: str | None, q: Array, k: Array, v: Array, local: LocalMask
) -> ring.Settings:
    """The settings with the backend's name; a named one that cannot run the call raises."""
    found = choose(asked, settings.call(q, k, v, ring.step_mask(settings, local, 0)))
    if found.chosen is None:
        raise ValueError(
            f"implementation {asked!r} cannot run this call: it {found.reasons[str(asked)]}"
        )
    return dataclasses.replace(settings, backend=found.chosen)


def _local_mask(
    mask: Any,
    limits: Rule,
    sizes: Sizes,
    queries: Layout,
    keys: Layout,
    axis: str,
    ids: tuple[Any, Any],
    positions: tuple[Any, Any],
) -> LocalMask:
    q_slot = lax.axis_index(axis) * sizes.T + jnp.arange(sizes.T, dtype=jnp.int32)
    q_ids = per_token("q_segment_ids", ids[0], sizes.B, sizes.T)
    if q_ids is None and ids[1] is not None:
        raise ValueError("kv_segment_ids needs q_segment_ids beside it")
    if q_ids is not None and ids[1] is None and sizes.T != sizes.S:
        raise ValueError(
            f"q_segment_ids alone is enough only if T = S, got T = {sizes.T} and S = {sizes.S}; "
            "give kv_segment_ids too"
        )
    own_ids = q_ids if ids[1] is None else per_token("kv_segment_ids", ids[1], sizes.B, sizes.S)
    q_positions = per_token("q_positions", positions[0], sizes.B, sizes.T)
    kv_positions = per_token("kv_positions", positions[1], sizes.B, sizes.S)
    kv_ids, kv_positions = (
        None if x is None else gathered(x, axis) for x in (own_ids, kv_positions)
    )
    common: dict[str, Any] = {
        "q_ids": q_ids, "kv_ids": kv_ids, "q_positions": q_positions, "kv_positions": kv_positions,
        "queries": queries, "keys": keys, "batch": sizes.B, "heads": sizes.N, "q_slot": q_slot,
    }  # fmt: skip
    if isinstance(mask, BlockMask):
        if positions != (None, None):
            raise ValueError(
                "positions cannot be applied to a BlockMask, whose blocks are already chosen; "
                "give them to BlockMask.from_rule(rule, shape, q_positions=…, kv_positions=…)"
            )
        check_block_mask(mask, sizes, queries, keys)
        is_local = mask.shape[0] == queries.local and queries.devices > 1
        row = jnp.arange(sizes.T // mask.block[0])
        if not is_local:
            row = queries.index(q_slot[:: mask.block[0]]) // mask.block[0]
        return LocalMask(
            rule=mask.rule, limits=limits, classes=row_classes(mask, row), overflow=mask.overflow,
            rows_are_local=is_local, block=mask.block, **common,
        )  # fmt: skip
    if isinstance(mask, Rule):
        limits = mask & limits
    elif mask is not None:
        if callable(mask):
            raise TypeError("mask is a function; wrap it with xsake.masks.rule(fn)")
        limits = masks.array(jnp.asarray(mask)) & limits
    check_fits(limits, sizes.B, sizes.N, queries.length, keys.length)
    block = (block_for(queries.run), block_for(keys.run))
    return LocalMask(
        rule=None, limits=limits, classes=None, overflow=None, rows_are_local=False, block=block,
        **common,
    )  # fmt: skip
