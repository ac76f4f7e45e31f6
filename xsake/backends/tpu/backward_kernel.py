"""The backward: dq by the lists, dk and dv by the transposed lists.

    p = exp(s - lse), recomputed       dv += pᵀ d_out
    ds = p · (d_out vᵀ - delta)        dk += dsᵀ q       dq += ds k

The tiles of the pass over kv blocks are transposed, sᵀ = k qᵀ: what belongs to a query then lies
along lanes, and pᵀ is the left operand of its product as it is.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsake.backends import Sizes
from xsake.backends.tpu.kernel import Problem, Settings, along, product
from xsake.backends.tpu.visits import FULL


def backward(settings: Settings, saved: Any, cotangents: Any) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) from what the forward saved and the cotangents of out and logsumexp."""
    q, k, v, mask, out, lse = saved
    d_out, d_lse = cotangents
    sizes = Sizes.of(q, k, v)
    problem = Problem(settings, sizes, mask)
    # ds = p · (dp - delta); a gradient of the logsumexp only shifts delta.
    empty = lse == -jnp.inf
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - d_lse
    delta = problem.row_scalars(jnp.where(empty, 0.0, delta), past=0.0)
    # p = exp(s - lse) is 0 for an empty query, and past the last one
    lse = problem.row_scalars(jnp.where(empty, jnp.inf, lse), past=jnp.inf)
    operands = [
        (problem.rows(q), "rows"),
        (problem.keys(k), "keys"),
        (problem.keys(v), "keys"),
        (problem.rows(d_out.astype(q.dtype)), "rows"),
        (lse, "row scalars"),
        (delta, "row scalars"),
    ]
    dq = _by_rows(problem, operands)
    dk, dv = _by_columns(problem, operands)
    gradients = problem.from_rows(dq, sizes.H), *map(problem.from_keys, (dk, dv), sizes[-2:])
    return gradients[0], gradients[1], gradients[2]


def _by_rows(problem: Problem, operands: Any) -> Array:
    """dq."""
    size, dtype = operands[0][0].shape[-1], operands[0][0].dtype

    def body(visit, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, *refs):
        rule_refs, (dq_ref, acc_ref) = problem.split(refs)

        @pl.when(visit.is_first)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        def step(kind: int) -> None:
            capped = problem.logits(q_ref[...], k_ref[...])
            dp = product(d_out_ref[...], v_ref[...], (1, 1))
            at = visit, kind, rule_refs, (0, 1)
            _, ds = _p_and_ds(problem, at, capped, dp, lse_ref, delta_ref)
            acc_ref[...] += product(ds.astype(dtype), k_ref[...], (1, 0))

        problem.by_kind(visit, step)

        @pl.when(visit.is_last)
        def _():
            dq_ref[...] = (acc_ref[...] * problem.settings.scale).astype(dtype)

    (dq,) = problem.launch(
        "xsake_tpu_dq",
        body,
        operands,
        results=[(size, dtype)],
        scratch=[pltpu.VMEM((problem.bq, size), jnp.float32)],
    )
    return dq


def _by_columns(problem: Problem, operands: Any) -> tuple[Array, Array]:
    """(dk, dv), summed over the query heads of a kv head."""
    (k, _), (v, _) = operands[1:3]
    sizes, dtype = (k.shape[-1], v.shape[-1]), k.dtype

    def body(visit, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, *refs):
        rule_refs, (dk_ref, dv_ref, dk_acc, dv_acc) = problem.split(refs)

        @pl.when(visit.is_first)
        def _():
            dk_acc[...] = jnp.zeros_like(dk_acc)
            dv_acc[...] = jnp.zeros_like(dv_acc)

        def step(kind: int) -> None:
            capped = problem.logits(k_ref[...], q_ref[...])
            dp = product(v_ref[...], d_out_ref[...], (1, 1))
            at = visit, kind, rule_refs, (1, 0)
            p, ds = _p_and_ds(problem, at, capped, dp, lse_ref, delta_ref)
            dv_acc[...] += product(p.astype(dtype), d_out_ref[...], (1, 0))
            dk_acc[...] += product(ds.astype(dtype), q_ref[...], (1, 0))

        problem.by_kind(visit, step)

        @pl.when(visit.is_last)
        def _():
            dk_ref[...] = (dk_acc[...] * problem.settings.scale).astype(dtype)
            dv_ref[...] = dv_acc[...].astype(dtype)

    dk, dv = problem.launch(
        "xsake_tpu_dkdv",
        body,
        operands,
        results=[(size, dtype) for size in sizes],
        scratch=[pltpu.VMEM((problem.bk, size), jnp.float32) for size in sizes],
        by_column=True,
    )
    return dk, dv


def _p_and_ds(problem: Problem, at: Any, capped: Array, dp: Array, lse_ref, delta_ref):
    """(p, ds) of a tile, 0 where nothing is seen; ds is the gradient before the soft cap."""
    visit, kind, rule_refs, dims = at
    p = jnp.exp(capped - along(lse_ref, dims[0]))
    if kind != FULL:
        p = jnp.where(problem.allowed(visit, kind, rule_refs, capped.shape, dims), p, 0.0)
    ds = p * (dp - along(delta_ref, dims[0]))
    cap = problem.settings.soft_cap
    return p, ds if cap is None else ds * (1 - (capped / cap) ** 2)
