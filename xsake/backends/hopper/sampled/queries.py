"""Sampled queries side by side, and the keys that they see in each piece, on Hopper (sm90).

sample [B, G] ─┬─ q [B, T, N, H] ─ 16 bytes per lane ─ queries [B, G, N, H]
               └─ lo, hi clipped to each piece ─ intervals [B · pieces, 2, G]
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
    width: int,
) -> tuple[Array, Array]:
    """(q[b, sample[b]], the intervals of keys lo … hi - 1 of piece p at row b · pieces + p).

    The intervals are int32 [B · pieces, 2, width]: those past G are empty.

    Args:
      q: bfloat16 or float16 [B, T, N, H]; N · H is a multiple of 8.
      sample: int32 [B, G].
      window: query t sees keys t - left … t + right; None: no limit there.
      keys: how many there are, in `pieces` of equal size.
      pieces: of the keys.
      width: at least G.
    """
    B, T, N, H = q.shape
    G = sample.shape[1]
    body = _SampledQueries(B, T, (G, width), N * H // OCTET, window, keys // pieces, pieces)
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
    return queries.reshape(B, G, N, H), intervals.reshape(B * pieces, 2, width)


class _SampledQueries:
    """The kernel body; `self` holds what is static."""

    def __init__(self, B, T, queries, chunks, window, size, pieces):
        self.G, self.width = G, width = queries
        self.T, self.chunks, self.size, self.pieces = T, chunks, size, pieces
        self.left, self.right = window
        self.all_chunks, self.all_ends = B * G * chunks, B * pieces * width
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
        row, chunk = div_rem_lanes(at, self.chunks)
        b, _ = div_rem_lanes(row, self.G)
        source = (b * self.T + gather(sample, row)) * self.chunks + chunk
        copy_eight(q, source, queries, jnp.where(slot < self.all_chunks, slot, -1))

    def write(self, cta, sample, intervals):
        """lo and hi of every lane's query in a piece."""
        slot = cta * THREADS + lane_index()
        at = jnp.minimum(slot, self.all_ends - 1)
        row, g = div_rem_lanes(at, self.width)
        b, piece = div_rem_lanes(row, self.pieces)
        query = gather(sample, b * self.G + jnp.minimum(g, self.G - 1))
        begin = piece * self.size

        def inside(key):
            return jnp.minimum(jnp.maximum(key - begin, 0), self.size)

        lo = every_lane(0) if self.left is None else inside(query - min(self.left, self.T))
        everything = self.size * self.pieces
        right = everything if self.right is None else min(self.right, everything)
        hi = jnp.where(g < self.G, inside(query + (right + 1)), 0)
        first = row * (2 * self.width) + g
        for offset, values in ((0, lo), (self.width, hi)):
            scatter(intervals, jnp.where(slot < self.all_ends, first + offset, -1), values)
