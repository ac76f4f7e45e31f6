"""What a choice of blocks costs, measured two ways.

On the dense model's activations, layer by layer, so that methods are compared on the same q, k, v:

    kl      KL(sparse ‖ dense) of attention = -ln(mass kept), mean over queries
    recall  mass kept, mean over queries
    error   ‖(sparse - dense output) W‖² ÷ ‖dense output W‖², summed over queries before dividing

End to end, where every layer sees what the sparse layers below it made:

    logit_kl        KL(dense ‖ sparse) of the next-token distributions, mean over tokens
    perplexity_gap  exp(mean loss sparse - mean loss dense) - 1
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake.hads import rows
from xsake.hads.statistics import ROWS_AT_ONCE, factors, softmax_rows


class Quality(NamedTuple):
    """Of M choices of blocks in one layer, on one sequence."""

    kl: Any  # [M, N]
    recall: Any  # [M, N]
    head_error: Any  # [M, N]: the head's squared error ÷ the layer's squared output
    error: Any  # [M]: squared error of the layer, all heads together, ÷ its squared output


@functools.partial(jax.jit, static_argnames=("block",))
def compare(
    q: Any, k: Any, v: Any, kernel: Any, blocks: Any, *, block: int, corrected: Any = None
) -> Quality:
    """Quality of many choices at once: the dense rows are computed once for all of them.

    Args:
      q: [T, N, H], as they enter attention.
      k: [T, K, H].
      v: [T, K, Hv].
      kernel: [N, Hv, width], the output projection.
      blocks: bool [M, N, n, n]; the diagonal must be kept, blocks after it are not visited.
      block: tokens per block.
      corrected: bool [M]: centroids stand in for dropped blocks; kl and recall are without them.
    """
    T, N, H = q.shape
    K, Hv = v.shape[1:]
    n, M = rows.count_blocks(T, block), blocks.shape[0]
    at_once = max(1, ROWS_AT_ONCE // block)
    chunks = -(-n // at_once)
    q = jnp.pad(q, ((0, chunks * at_once * block - T), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, n * block - T), (0, 0), (0, 0))) for x in (k, v))
    values = jnp.repeat(v.astype(jnp.float32).reshape(n, block, K, Hv), N // K, axis=2)
    mean_keys = k.astype(jnp.float32).reshape(n, block, K, H).mean(1)
    mean_values = values.mean(1)
    (root, _), kernel = factors(kernel), kernel.astype(jnp.float32)
    blocks = jnp.pad(blocks & rows.allowed(n), ((0, 0), (0, 0), (0, chunks * at_once - n), (0, 0)))
    corrected = jnp.zeros(M) if corrected is None else jnp.asarray(corrected, jnp.float32)

    def rows_of(sums: Quality, chunk: Array) -> tuple[Quality, Array]:
        begins = chunk * at_once
        taken = lax.dynamic_slice_in_dim(q, begins * block, at_once * block)
        p, logsumexp, position = softmax_rows(taken, k, begins * block, T)
        real = (position < T).astype(jnp.float32)
        p = p.reshape(N, -1, n, block)
        mass, parts = p.sum(-1), jnp.einsum("nrjs,jsnh->nrjh", p, values)
        dense = parts.sum(2)
        visited = lax.dynamic_slice_in_dim(blocks, begins, at_once, 2)
        # [M, N, R · block, n] as a row of blocks and its queries
        visited = visited.astype(jnp.float32)
        before = jnp.arange(n) < (begins + jnp.arange(at_once))[:, None]
        stand_in = (1 - visited) * before * corrected[:, None, None, None]

        def by_query(which: Array, what: Array) -> Array:
            """Σ_j which[m, n, row, j] · what[n, query, j, ...]."""
            what = what.reshape(N, at_once, block, *what.shape[2:])
            # sums of shares must not be rounded to what tensor cores take
            precision = "highest" if what.ndim == 4 else None
            out = jnp.einsum("mnrj,nrqj...->mnrq...", which, what, precision=precision)
            return out.reshape(M, N, at_once * block, *out.shape[4:])

        grouped = taken.astype(jnp.float32).reshape(-1, K, N // K, H)
        means = jnp.einsum("rkgh,jkh->kgrj", grouped, mean_keys).reshape(N, -1, n) / math.sqrt(H)
        weight = block * jnp.exp(means - logsumexp[..., None])
        kept = by_query(visited, mass)
        total = kept + by_query(stand_in, weight)
        out = by_query(visited, parts)
        spread = weight[..., None] * jnp.moveaxis(mean_values, 1, 0)[:, None]
        out = out + by_query(stand_in, spread)
        change = (out / jnp.maximum(total, 1e-30)[..., None] - dense) * real[:, None]
        felt = jnp.einsum("mnrh,nhw->mnrw", change, root)
        layer = jnp.einsum("mnrh,nhw->mrw", change, kernel)
        whole = jnp.einsum("nrh,nhw->rw", dense * real[:, None], kernel)
        new = Quality(
            kl=(jnp.maximum(-jnp.log(jnp.maximum(kept, 1e-30)), 0) * real).sum(-1),
            recall=(kept * real).sum(-1),
            head_error=(felt**2).sum((-2, -1)),
            error=(layer**2).sum((-2, -1)),
        )
        return jax.tree.map(jnp.add, sums, new), (whole**2).sum()

    zero = jnp.zeros((M, N))
    sums, squares = lax.scan(rows_of, Quality(zero, zero, zero, jnp.zeros(M)), jnp.arange(chunks))
    norm = jnp.maximum(squares.sum(), 1e-30)
    return Quality(sums.kl / T, sums.recall / T, sums.head_error / norm, sums.error / norm)


class Predictions(NamedTuple):
    """End to end, of one sequence."""

    logit_kl: Any  # []
    loss: Any  # [], of the sparse model, nats per token
    dense_loss: Any  # []


def compare_predictions(
    dense: Array,
    sparse: Array,
    tokens: Array,
    logits: Callable[[Array], Array],
    at_once: int = 512,
) -> Predictions:
    """Next-token distributions of two passes over tokens [T], from their hidden states [T, width].

    `logits` maps [R, width] to [R, vocab]; only `at_once` rows of them are alive at a time.
    """
    T = tokens.shape[0]
    count = -(-(T - 1) // at_once)
    room = count * at_once - (T - 1)
    dense, sparse = (jnp.pad(x[:-1], ((0, room), (0, 0))) for x in (dense, sparse))
    targets = jnp.pad(tokens[1:], (0, room))
    real = (jnp.arange(count * at_once) < T - 1).astype(jnp.float32)

    def some(part: Any) -> Predictions:
        dense, sparse, targets, real = part
        p, r = (jax.nn.log_softmax(logits(x), axis=-1) for x in (dense, sparse))
        said = [-jnp.take_along_axis(x, targets[:, None], 1)[:, 0] for x in (r, p)]
        divergence = (jnp.exp(p) * (p - r)).sum(-1)
        return Predictions(*((x * real).sum() for x in (divergence, *said)))

    parts = [x.reshape(count, at_once, *x.shape[1:]) for x in (dense, sparse, targets, real)]
    return jax.tree.map(lambda x: x.sum() / (T - 1), lax.map(some, tuple(parts)))


def mean_and_error(values: Any) -> tuple[float, float | None]:
    """Mean over documents and its standard error, which one document does not have."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return float(values.mean()), None
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))
