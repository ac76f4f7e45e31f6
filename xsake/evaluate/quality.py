"""What a selection of blocks costs, measured in two ways.

On the dense model's activations, layer by layer, so that methods are compared on the same q, k, v:

    kl      KL(sparse ‖ dense) of attention = -ln(mass kept), mean over queries
    recall  mass kept, mean over queries; sinks are always kept
    error   ‖(sparse - dense output) W‖² ÷ ‖dense output W‖², summed over queries before dividing

End to end, where the input of every layer comes from the sparse layers below it:

    logit_kl        KL(dense ‖ sparse) of the next-token distributions, mean over tokens
    perplexity_gap  exp(mean loss sparse - mean loss dense) - 1
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import ArrayLike, Bool, Float, Int

from xsake.hads import chunks, row_blocks
from xsake.hads.chunks import PLAIN, Chunk, Chunks, Softmax
from xsake.hads.statistics import AnyArray, factors


class Quality(NamedTuple):
    """Metrics of M block selections in one layer, on one sequence."""

    kl: Float[AnyArray, "*layers M N"]
    recall: Float[AnyArray, "*layers M N"]
    head_error: Float[AnyArray, "*layers M N"]  # head's squared error ÷ layer's squared output
    error: Float[AnyArray, "*layers M"]  # squared error of all heads together ÷ squared output


class _Sequence(NamedTuple):
    """Arrays shared by all chunks of a comparison."""

    visited: Bool[Array, "M N row_blocks n"]  # padded to the row blocks of all chunks
    corrected: Float[Array, " M"]  # 1 where centroids replace dropped blocks
    values: Float[Array, "n block N Hv"]
    mean_keys: Float[Array, "n K H"]
    mean_values: Float[Array, "n N Hv"]
    root: Float[Array, "N Hv Hv"]  # see `statistics.factors`
    kernel: Float[Array, "N Hv width"]


@functools.partial(jax.jit, static_argnames=("block",))
def compare(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K Hv"],
    kernel: Float[Array, "N Hv width"],
    blocks: Bool[Array, "M N n n"],
    *,
    block: int,
    corrected: Bool[Array, " M"] | None = None,
    softmax: Softmax = PLAIN,
) -> Quality:
    """Quality of M block selections; dense attention is computed once for all of them.

    Args:
      q: as it enters attention.
      k: likewise.
      v: likewise.
      kernel: the output projection W.
      blocks: the selections; they keep the diagonal, and blocks after it are not visited.
      block: tokens per block.
      corrected: selections whose dropped blocks are replaced by their centroids; kl and recall
        are computed without this correction.
      softmax: the layer's soft cap, window and sinks.
    """
    T, N, _ = q.shape
    M = blocks.shape[0]
    cut = chunks.cut(q, k, block, softmax=softmax)
    sequence = _prepare(cut, v, kernel, blocks, corrected)

    def add_chunk(sums: Quality, number: Array) -> tuple[Quality, Array]:
        new, squares = _compare_chunk(cut, sequence, number)
        return jax.tree.map(jnp.add, sums, new), squares

    zero = jnp.zeros((M, N))
    start = Quality(zero, zero, zero, jnp.zeros(M))
    sums, squares = lax.scan(add_chunk, start, jnp.arange(cut.chunks))
    norm = jnp.maximum(squares.sum(), 1e-30)
    return Quality(sums.kl / T, sums.recall / T, sums.head_error / norm, sums.error / norm)


def _prepare(
    cut: Chunks, v: Array, kernel: Array, blocks: Array, corrected: Array | None
) -> _Sequence:
    n, block = cut.n, cut.block
    N, (K, Hv) = cut.q.shape[1], v.shape[1:]
    v = chunks.pad_keys(v, block).astype(jnp.float32)
    values = jnp.repeat(v.reshape(n, block, K, Hv), N // K, axis=2)
    keys = cut.k.astype(jnp.float32).reshape(n, block, K, -1)
    return _Sequence(
        visited=cut.pad(blocks & row_blocks.allowed(n), 2),
        corrected=jnp.zeros(len(blocks)) if corrected is None else corrected.astype(jnp.float32),
        values=values,
        mean_keys=keys.mean(1),
        mean_values=values.mean(1),
        root=factors(kernel)[0],
        kernel=kernel.astype(jnp.float32),
    )


def _compare_chunk(
    cut: Chunks, sequence: _Sequence, number: Int[Array, ""]
) -> tuple[Quality, Float[Array, ""]]:
    """Sums of the metrics over the queries of one chunk, and its sum of squared dense outputs."""
    chunk = cut.attend(number)
    real = chunk.real.astype(jnp.float32)
    mass = chunk.p.sum(-1)
    parts = jnp.einsum("nrjs,jsnh->nrjh", chunk.p, sequence.values)
    dense = parts.sum(2)
    visited = cut.part(sequence.visited, chunk, 2).astype(jnp.float32)
    replaced = (1 - visited) * _whole(cut, chunk) * sequence.corrected[:, None, None, None]
    weight = _centroid_weights(chunk, sequence, cut.softmax)
    kept = chunk.with_sinks(_sum_blocks(visited, mass))
    total = kept + _sum_blocks(replaced, weight)
    out = _sum_blocks(visited, parts)
    centroids = weight[..., None] * jnp.moveaxis(sequence.mean_values, 1, 0)[:, None]
    out = out + _sum_blocks(replaced, centroids)
    change = (out / jnp.maximum(total, 1e-30)[..., None] - dense) * real[:, None]
    by_head = jnp.einsum("mnrh,nhw->mnrw", change, sequence.root)
    by_layer = jnp.einsum("mnrh,nhw->mrw", change, sequence.kernel)
    layer = jnp.einsum("nrh,nhw->rw", dense * real[:, None], sequence.kernel)
    sums = Quality(
        kl=(jnp.maximum(-jnp.log(jnp.maximum(kept, 1e-30)), 0) * real).sum(-1),
        recall=(kept * real).sum(-1),
        head_error=(by_head**2).sum((-2, -1)),
        error=(by_layer**2).sum((-2, -1)),
    )
    return sums, (layer**2).sum()


def _whole(cut: Chunks, chunk: Chunk) -> Bool[Array, "R n"]:
    """The blocks that all queries of a row block see as a whole: before it, and in the window."""
    row, column = chunk.first + jnp.arange(cut.per_chunk)[:, None], jnp.arange(cut.n)
    before = column < row
    if cut.softmax.window is None:
        return before
    end = jnp.minimum((row + 1) * cut.block, cut.length)
    return before & (end - column * cut.block <= cut.softmax.window)


def _centroid_weights(chunk: Chunk, sequence: _Sequence, softmax: Softmax) -> Float[Array, "N Q n"]:
    """What each block's centroid adds to the softmax: block · exp(q · k̄ / √H - logsumexp)."""
    Q, N, H = chunk.q.shape
    n, K, _ = sequence.mean_keys.shape
    grouped = chunk.q.astype(jnp.float32).reshape(Q, K, N // K, H)
    logits = jnp.einsum("rkgh,jkh->kgrj", grouped, sequence.mean_keys).reshape(N, Q, n)
    logits = softmax.capped(logits / math.sqrt(H))
    return chunk.p.shape[-1] * jnp.exp(logits - chunk.logsumexp[..., None])


def _sum_blocks(
    which: Float[Array, "M N R n"], what: Float[Array, "N Q n *rest"]
) -> Float[Array, "M N Q *rest"]:
    """Σ_j which[m, n, row block, j] · what[n, query, j, …].

    Sums of mass are in full float32, not TF32.
    """
    M, N, R, _ = which.shape
    what = what.reshape(N, R, -1, *what.shape[2:])
    precision = "highest" if what.ndim == 4 else None
    out = jnp.einsum("mnrj,nrqj...->mnrq...", which, what, precision=precision)
    return out.reshape(M, N, -1, *out.shape[4:])


class Predictions(NamedTuple):
    """End-to-end metrics of one sequence."""

    logit_kl: Float[Array, ""]
    loss: Float[Array, ""]  # of the sparse model, nats per token
    dense_loss: Float[Array, ""]


def compare_predictions(
    dense: Float[Array, "T width"],
    sparse: Float[Array, "T width"],
    tokens: Int[Array, " T"],
    logits: Callable[[Array], Array],
    at_once: int = 512,
) -> Predictions:
    """Compares the next-token distributions of two passes, from their hidden states.

    `logits` maps [R, width] to [R, vocab]; it is called with R = `at_once` tokens at a time.
    """
    T = tokens.shape[0]
    count = -(-(T - 1) // at_once)
    padding = count * at_once - (T - 1)
    dense, sparse = (jnp.pad(x[:-1], ((0, padding), (0, 0))) for x in (dense, sparse))
    targets = jnp.pad(tokens[1:], (0, padding))
    real = (jnp.arange(count * at_once) < T - 1).astype(jnp.float32)

    def sums(part: tuple[Array, Array, Array, Array]) -> Predictions:
        dense, sparse, targets, real = part
        p, r = (jax.nn.log_softmax(logits(x), axis=-1) for x in (dense, sparse))
        losses = [-jnp.take_along_axis(x, targets[:, None], 1)[:, 0] for x in (r, p)]
        divergence = (jnp.exp(p) * (p - r)).sum(-1)
        return Predictions(*((x * real).sum() for x in (divergence, *losses)))

    parts = [x.reshape(count, at_once, *x.shape[1:]) for x in (dense, sparse, targets, real)]
    return jax.tree.map(lambda x: x.sum() / (T - 1), lax.map(sums, tuple(parts)))


def mean_and_error(
    values: Float[ArrayLike, " documents"] | list[float],
) -> tuple[float, float | None]:
    """Mean over documents and its standard error, None for one document."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return float(values.mean()), None
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def paired_gap(
    losses: Float[ArrayLike, " documents"] | list[float],
    others: Float[ArrayLike, " documents"] | list[float],
) -> tuple[float, float | None]:
    """How much higher the perplexity is than the other one on the same document: mean and error.

    exp(loss - other loss) - 1 for each document, then the mean over documents and its standard
    error. Documents differ much more from each other than two methods do on one document, so that
    this error is much smaller than the errors of two means.

    >>> paired_gap([2.0, 3.0, 4.0], [2.0, 3.0, 4.0])
    (0.0, 0.0)
    """
    return mean_and_error(np.expm1(np.asarray(losses, np.float64) - np.asarray(others, np.float64)))
