"""The forward: online softmax over the visits of each row block."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsake.backends import Sizes
from xsake.backends.tpu.kernel import LANES, Problem, Settings, product
from xsake.backends.tpu.visits import FULL
from xsake.block_mask import BlockMask

LOWEST = -1e30  # instead of -inf, whose differences are NaN


def forward(
    settings: Settings, q: Array, k: Array, v: Array, mask: BlockMask
) -> tuple[Array, Array]:
    """(out [B, T, N, Hv], logsumexp [B, T, N])."""
    sizes = Sizes.of(q, k, v)
    problem = Problem(settings, sizes, mask)
    shape = problem.bq, problem.bk

    def body(visit, q_ref, k_ref, v_ref, *refs):
        rule_refs, (out_ref, lse_ref, m_ref, l_ref, acc_ref) = problem.split(refs)

        @pl.when(visit.is_first)
        def _():
            m_ref[...] = jnp.full_like(m_ref, LOWEST)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        def step(kind: int) -> None:
            s = problem.logits(q_ref[...], k_ref[...])
            if kind != FULL:
                seen = problem.allowed(visit, kind, rule_refs, shape, (0, 1))
                s = jnp.where(seen, s, LOWEST)
            m = m_ref[...]
            m_new = jnp.maximum(m, s.max(axis=1, keepdims=True))
            p = jnp.exp(s - m_new[:, :1])
            if kind != FULL:  # a row that has seen nothing yet has s = m_new = LOWEST
                p = jnp.where(seen, p, 0.0)
            shrink = jnp.exp(m - m_new)  # rescales what was summed under the old maximum
            m_ref[...] = m_new
            l_ref[...] = l_ref[...] * shrink + p.sum(axis=1, keepdims=True)
            values = product(p.astype(v_ref.dtype), v_ref[...], (1, 0))
            acc_ref[...] = acc_ref[...] * shrink[:, :1] + values

        problem.by_kind(visit, step)

        @pl.when(visit.is_last)
        def _():
            l = l_ref[...]
            some = l > 0
            total = jnp.where(some, l, 1.0)
            out_ref[...] = (acc_ref[...] / total[:, :1]).astype(out_ref.dtype)
            lse_ref[...] = jnp.where(some, m_ref[...] + jnp.log(total), -jnp.inf)

    inputs = problem.rows(q), problem.keys(k), problem.keys(v)
    Hv = inputs[2].shape[-1]
    out, lse = problem.launch(
        "xsake_tpu_forward",
        body,
        list(zip(inputs, ("rows", "keys", "keys"), strict=True)),
        # Every lane of a row has its logsumexp: a vector of rows cannot become one of lanes here.
        results=[(Hv, q.dtype), (LANES, jnp.float32)],
        scratch=[
            pltpu.VMEM((problem.bq, LANES), jnp.float32),
            pltpu.VMEM((problem.bq, LANES), jnp.float32),
            pltpu.VMEM((problem.bq, Hv), jnp.float32),
        ],
    )
    return problem.from_rows(out, sizes.Hv), problem.from_rows(lse, 1)[..., 0]
