"""What dense attention does with its blocks on one sequence, streamed over rows of blocks.

    rows of q against all k ─ softmax p ─┬─ block mass [N, n, n], mean over the row's queries
    (a few row blocks at a time,         ├─ token and block entropy [N]
     so memory is linear in T)           ├─ output sensitivity [N, n, n]
                                         └─ cost curves [N, n, n] by count, for each selector

A cost curve is measured, not modelled: cost["kl"]["pooled"][h, i, c - 1] is the mean over queries
of -ln(mass kept) if row i keeps its c best blocks in the order of the selector `pooled`;
cost["output"] is the mean ‖(sparse - dense output) W‖² of the head, relative to that of the layer.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake import block_scores, selection
from xsake.hads import rows

ROWS_AT_ONCE = 256  # queries whose p is in memory: 256 · S floats for each head
DENSITIES = np.arange(1, 21) / 20  # of the retained-mass curves
SELECTORS = ("static", *block_scores.ESTIMATES)  # ways to order the blocks of a row
CURVES = (*SELECTORS, "oracle")  # orders that cost can be measured for


class Statistics(NamedTuple):
    """One document's attention in one layer; n blocks of queries and of keys."""

    mass: Any  # [N, n, n]: share of attention that row block i gives to block j
    sensitivity: Any  # [N, n, n]: ‖(dense output - output without block j) W‖², see `measure`
    entropy: Any  # [N]: of tokens, ÷ ln(keys seen), mean over queries
    block_entropy: Any  # [N]: of blocks, ÷ ln(blocks seen)
    retained: Any  # [N, 20]: mass kept by each row's best blocks at density 0.05, 0.10 … 1
    cost: Any  # {"kl" | "output": {selector: [N, n, n]}}
    norm: Any  # []: mean ‖attention output W‖² of the layer


@functools.partial(jax.jit, static_argnames=("block", "band", "curves"))
def measure(
    q: Any,
    k: Any,
    v: Any,
    kernel: Any,
    *,
    block: int = 128,
    band: int = 0,
    curves: tuple[str, ...] = ("oracle",),
    before: Any = None,
) -> Statistics:
    """Statistics of one sequence in one layer; causal, any length, streamed over row blocks.

    Dropping block j and renormalising changes a query's output by (m_j out - u_j) / (1 - m_j), with
    u_j = Σ_{k in j} p_k v_k; sensitivity[i, j] is the mean over the row of ‖(u_j - m_j out) W‖².

    Args:
      q: [T, N, H], as they enter attention.
      k: [T, K, H].
      v: [T, K, Hv].
      kernel: [N, Hv, width], the output projection.
      block: tokens per block.
      band: forced blocks before the diagonal, in the orders of `cost`.
      curves: selectors to measure `cost` for; "oracle" is the order of this input's own mass (of
        its own sensitivity for "output").
      before: (mass, sensitivity), each [N, n, n]: the order of "static".
    """
    T, N, H = q.shape
    K, Hv = v.shape[1:]
    n = rows.count_blocks(T, block)
    S = n * block
    at_once = max(1, ROWS_AT_ONCE // block)
    chunks = -(-n // at_once)
    q = jnp.pad(q, ((0, chunks * at_once * block - T), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, S - T), (0, 0), (0, 0))) for x in (k, v))
    # values as the residual stream feels them: ‖x W‖ = ‖x root‖, in Hv numbers instead of width
    root, unit = factors(kernel)
    felt = jnp.einsum("skh,kghw->kgsw", v.astype(jnp.float32), root.reshape(K, N // K, Hv, Hv))
    felt = felt.reshape(N, n, block, Hv)
    # from the tokens that are there: padding would enter the means of a short last block
    orders = {
        name: block_scores.estimate(name, q[:T], k[:T], block)
        for name in curves
        if name in block_scores.ESTIMATES
    }
    if before is not None:
        orders |= {"static": before[0], "static output": before[1]}
    place = {name: selection.ranks(scores, band) for name, scores in orders.items()}
    place = {name: _pad_rows(x, chunks * at_once) for name, x in place.items()}

    def rows_of(chunk: Array) -> Any:
        begins = chunk * at_once
        taken = lax.dynamic_slice_in_dim(q, begins * block, at_once * block)
        p, _, position = softmax_rows(taken, k, begins * block, T)
        real = (position < T).reshape(at_once, block)
        count = jnp.maximum(real.sum(-1), 1)

        def mean(x: Array) -> Array:
            """Over the queries of each row block: [N, R · block, ...] -> [N, R, ...]."""
            x = x.reshape(N, at_once, block, *x.shape[2:])
            weight = real.reshape(1, at_once, block, *[1] * (x.ndim - 3))
            return (x * weight).sum(2) / count.reshape(1, at_once, *[1] * (x.ndim - 3))

        blocks = p.reshape(N, -1, n, block)
        mass = blocks.sum(-1)  # [N, R · block, n]
        parts = jnp.einsum("nrjs,njsh->nrjh", blocks, felt)
        out = parts.sum(2)
        sensitivity = mean(((parts - mass[..., None] * out[:, :, None]) ** 2).sum(-1))
        mean_mass = mean(mass)
        keys = jnp.maximum(position + 1, 2).astype(jnp.float32)
        seen = jnp.maximum(position // block + 1, 2).astype(jnp.float32)
        found: dict[str, Any] = {
            "mass": mean_mass,
            "sensitivity": sensitivity,
            "entropy": entropy_of(p) / jnp.log(keys),
            "block_entropy": entropy_of(mass) / jnp.log(seen),
            "cost": {"kl": {}, "output": {}},
        }
        own = {
            "kl": selection.ranks(mean_mass, band, begins),
            "output": selection.ranks(sensitivity, band, begins),
        }
        for name in curves:
            for kind in ("kl", "output"):
                if name == "oracle":
                    order = own[kind]
                else:
                    named = "static output" if (name, kind) == ("static", "output") else name
                    order = lax.dynamic_slice_in_dim(place[named], begins, at_once, 1)
                taken_by = order[:, :, None, :] <= jnp.arange(n)[:, None]  # [N, R, count, block j]
                taken_by = taken_by.astype(jnp.float32)
                # a sum of shares must not be rounded to what tensor cores take
                kept = jnp.einsum(
                    "nrqj,nrcj->nrqc",
                    mass.reshape(N, at_once, block, n),
                    taken_by,
                    precision="highest",
                )
                kept = jnp.maximum(kept.reshape(N, -1, n), 1e-30)
                if kind == "kl":
                    found["cost"]["kl"][name] = mean(jnp.maximum(-jnp.log(kept), 0))
                    continue
                sums = jnp.einsum(
                    "nrqjh,nrcj->nrqch", parts.reshape(N, at_once, block, n, Hv), taken_by
                ).reshape(N, -1, n, Hv)
                error = sums / kept[..., None] - out[:, :, None]
                found["cost"]["output"][name] = mean((error**2).sum(-1))
        found["norm"] = (jnp.einsum("nrh,nhw->rw", out, unit) ** 2).sum(-1)
        return found

    found = lax.map(rows_of, jnp.arange(chunks))
    by_row = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found)  # [N, chunks, R, ...]

    def rejoined(x: Array) -> Array:
        return x.reshape(N, -1, *x.shape[3:])[:, :n]

    norm = found["norm"].reshape(-1)[:T].mean()
    entropies = {
        # the first query (block) sees one key (block): its entropy is 0 of 0
        name: by_row[name].reshape(N, -1)[:, least:T].mean(-1) if least < T else jnp.zeros(N)
        for name, least in (("entropy", 1), ("block_entropy", block))
    }
    mass = rejoined(by_row["mass"])
    cost = jax.tree.map(rejoined, by_row["cost"])
    cost["output"] = {name: x / jnp.maximum(norm, 1e-30) for name, x in cost["output"].items()}
    return Statistics(
        mass=mass,
        sensitivity=rejoined(by_row["sensitivity"]) / jnp.maximum(norm, 1e-30),
        retained=retained_mass(mass),
        cost=cost,
        norm=norm,
        **entropies,
    )


def softmax_rows(q: Any, k: Any, begins: Any, T: int) -> tuple[Array, Array, Array]:
    """Attention of some queries to all keys, causal, in float32.

    q [R, N, H] holds positions begins … begins + R - 1; k [S, K, H]; keys from T on are padding.

    Returns:
      p [N, R, S], its logsumexp [N, R], and the queries' positions [R].
    """
    R, N, H = q.shape
    S, K, _ = k.shape
    position = begins + jnp.arange(R)
    grouped = q.reshape(R, K, N // K, H)
    logits = jnp.einsum("rkgh,skh->kgrs", grouped, k, preferred_element_type=jnp.float32)
    logits = logits.reshape(N, R, S) / math.sqrt(H)
    key = jnp.arange(S)
    sees = (key <= position[:, None]) & (key < T)
    logits = jnp.where(sees, logits, -jnp.inf)
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    return jnp.exp(logits - logsumexp[..., None]), logsumexp, position


def factors(kernel: Any) -> tuple[Array, Array]:
    """W = root · unit for each head: kernel [N, H, width] -> root [N, H, H], unit [N, H, width].

    The rows of unit are orthonormal (or 0, where W has no such direction): ‖x W‖ = ‖x root‖.
    """
    kernel = kernel.astype(jnp.float32)
    values, vectors = jnp.linalg.eigh(jnp.einsum("nhw,ngw->nhg", kernel, kernel))
    live = values > 1e-6 * values[:, -1:]
    length = jnp.sqrt(jnp.where(live, values, 1))
    root = vectors * jnp.where(live, length, 0)[:, None, :]
    unit = jnp.einsum("nhg,nhw->ngw", vectors, kernel) / length[..., None]
    return root, unit * live[..., None]


def retained_mass(mass: Array, densities: Any = DENSITIES) -> Array:
    """Mean mass that rows keep in their best ceil(d · (i + 1)) blocks: [..., n, n] -> [..., D]."""
    n = mass.shape[-1]
    best = jnp.cumsum(-jnp.sort(-mass, axis=-1), axis=-1)
    counts = np.ceil(np.asarray(densities) * rows.ceilings(n)[:, None] - 1e-9).astype(np.int32)
    places = jnp.broadcast_to(counts - 1, (*mass.shape[:-1], len(densities)))
    return jnp.take_along_axis(best, places, -1).mean(-2)


def entropy_of(p: Array) -> Array:
    """-Σ p ln p over the last axis, 0 ln 0 = 0."""
    return -(p * jnp.log(jnp.maximum(p, 1e-37))).sum(-1)


def _pad_rows(x: Array, count: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, count - x.shape[1]), (0, 0)))
