"""Sampled queries side by side, and the keys that they see in each piece, on Hopper (sm90).

sample [B, G] ─┬─ q [B, T, N, H] ─ 16 bytes per lane ─ rows [B, G · N / K, K, H]
               └─ lo, hi clipped to each piece ─ intervals [B · pieces, 2, G · N / K]

The query heads of a kv head become rows one after another: attention of K heads, each of which
reads its keys for all of them.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from xsake.backends.hopper.lanes import (
    OCTET,
    copy_eight,
    div_rem_lanes,
    every_lane,
    gather,
    lane_index,
    launch,
    scatter,
)
from xsake.backends.hopper.layouts import THREADS


def gather_queries(
    q: Array,
    sample: Array,
    window: tuple[int | None, int | None],
    keys: int,
    pieces: int,
    heads: int,
    width: int,
) -> tuple[Array, Array]:
    """(rows of q[b, sample[b]], intervals of the keys lo … hi - 1 that they see of each piece).

    With K = `heads`, row g · N / K + j of head h is query head h · N / K + j of sampled query g.
    The intervals of piece p are at b · pieces + p, int32 [B · pieces, 2, width]: those past the
    last row are empty.

    Args:
      q: bfloat16 or float16 [B, T, N, H]; H is a multiple of 8.
      sample: int32 [B, G].
      window: query t sees keys t - left … t + right; None: no limit there.
      keys: how many there are, in `pieces` of equal size.
      pieces: of the keys.
      heads: of the rows; K divides N.
      width: at least G · N / K.
    """
    B, T, N, H = q.shape
    G, group = sample.shape[1], N // heads
    chunks = group, heads, H // OCTET
    body = _SampledQueries(B, T, (G, width), chunks, window, keys // pieces, pieces)
    queries, intervals = launch(
        body.run,
        "xsake_sampled_queries",
        [
            jax.ShapeDtypeStruct((B * G * N * H,), q.dtype),
            jax.ShapeDtypeStruct((B * pieces * 2 * width,), jnp.int32),
        ],
        {"cta": body.copies + body.intervals},
        (q.reshape(-1), sample.reshape(-1)),
    )
    return queries.reshape(B, -1, heads, H), intervals.reshape(B * pieces, 2, width)


class _SampledQueries:
    """The kernel body; `self` holds what is static."""

    def __init__(self, B, T, queries, chunks, window, size, pieces):
        self.G, self.width = G, width = queries
        self.group, self.heads, self.octets = chunks  # of a query
        self.T, self.chunks, self.size, self.pieces = T, math.prod(chunks), size, pieces
        self.left, self.right = window
        self.all_chunks, self.all_ends = B * G * self.chunks, B * pieces * width
        self.copies = math.ceil(self.all_chunks / THREADS)  # CTAs that copy
        self.intervals = math.ceil(self.all_ends / THREADS)  # CTAs that write intervals

    def run(self, q, sample, queries, intervals):
        """One CTA: 128 chunks of queries, or the intervals of 128 queries of pieces."""
        cta = lax.axis_index("cta")
        pl.when(cta < self.copies)(lambda: self.copy(cta, q, sample, queries))
        pl.when(cta >= self.copies)(lambda: self.write(cta - self.copies, sample, intervals))

    def copy(self, cta, q, sample, queries):
        """A chunk of 16 bytes of every lane."""
        slot = cta * THREADS + lane_index()
        at = jnp.minimum(slot, self.all_chunks - 1)
        query, chunk = div_rem_lanes(at, self.chunks)
        b, _ = div_rem_lanes(query, self.G)
        head, octet = div_rem_lanes(chunk, self.octets)
        j, h = div_rem_lanes(head, self.heads)
        source = (b * self.T + gather(sample, query)) * self.chunks
        source += (h * self.group + j) * self.octets + octet
        copy_eight(q, source, queries, jnp.where(slot < self.all_chunks, slot, -1))

    def write(self, cta, sample, intervals):
        """lo and hi of every lane's query in a piece."""
        slot = cta * THREADS + lane_index()
        at = jnp.minimum(slot, self.all_ends - 1)
        row, own = div_rem_lanes(at, self.width)
        b, piece = div_rem_lanes(row, self.pieces)
        g, _ = div_rem_lanes(own, self.group)
        query = gather(sample, b * self.G + jnp.minimum(g, self.G - 1))
        begin = piece * self.size

        def inside(key):
            return jnp.minimum(jnp.maximum(key - begin, 0), self.size)

        lo = every_lane(0) if self.left is None else inside(query - min(self.left, self.T))
        everything = self.size * self.pieces
        right = everything if self.right is None else min(self.right, everything)
        hi = jnp.where(g < self.G, inside(query + (right + 1)), 0)
        first = row * (2 * self.width) + own
        for offset, values in ((0, lo), (self.width, hi)):
            scatter(intervals, jnp.where(slot < self.all_ends, first + offset, -1), values)
