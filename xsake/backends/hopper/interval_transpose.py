"""Intervals of keys for each query as intervals of queries for each key, on Hopper (sm90).

The same as `masks.intervals.transposed`, where XLA needs several launches: a lane has one key, and
halves the range of the query that it searches in every step.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xsake.backends.hopper.lanes import every_lane, gather, lane_index, scatter
from xsake.backends.hopper.layouts import THREADS, div_rem
from xsake.masks.intervals import NOT_AN_INTERVAL

# Of 128 keys, which a CTA searches for one after another: about as long as the delta pass takes
# beside it. More CTAs would take their places on the multiprocessors.
PARTS = 4


class IntervalTranspose:
    """pairs [B|1, 2|4, T] -> [B|1, 2|4, keys], which some CTAs of a launch compute.

    Without pairs there are no such CTAs, no operands and no results.
    """

    def __init__(self, pairs: jax.Array | None, keys: int):
        self.batch, self.ends, self.queries = (0, 2, 1) if pairs is None else pairs.shape
        self.keys = keys
        self.row_ctas = pl.cdiv(keys, PARTS * THREADS)  # CTAs of a batch row
        self.ctas = self.batch * self.row_ctas
        self.operands = () if pairs is None else (pairs.reshape(-1),)
        size = self.batch * self.ends * keys
        self.out_type = (jax.ShapeDtypeStruct((size,), jnp.int32),) if size else ()

    def result(self, results) -> jax.Array | None:
        """What the launch has computed, in the shape of pairs."""
        return results[0].reshape(self.batch, self.ends, self.keys) if results else None

    def run(self, cta, refs):
        """The keys of CTA number `cta`."""
        if not self.ctas:
            return
        pairs, found = refs
        b, part_of_row = div_rem(cta, self.row_ctas)
        first = b * self.ends * self.queries
        is_marked = gather(pairs, every_lane(0) + first) < 0
        lane = lane_index()

        @pl.loop(0, PARTS)
        def _(part):
            key = (part_of_row * PARTS + part) * THREADS + lane
            for run in range(0, self.ends, 2):
                # The first query whose hi is beyond the key, and the first one whose lo is.
                offsets = [first + end * self.queries for end in (run + 1, run)]
                ends = self._first_beyond(pairs, key, offsets)
                for end, value in enumerate(ends, run):
                    at = (b * self.ends + end) * self.keys + key
                    value = jnp.where(is_marked, NOT_AN_INTERVAL, value)
                    scatter(found, jnp.where(key < self.keys, at, -1), value)

    def _first_beyond(self, pairs, key, offsets):
        """The first query whose value is larger than the key, for values from each offset on."""

        def halve(_, ranges):
            """Queries before `low` are not beyond the key, those from `high` on are."""
            middles = [lax.shift_right_logical(low + high, 1) for low, high in ranges]
            values = [
                gather(pairs, offset + jnp.minimum(middle, self.queries - 1))
                for offset, middle in zip(offsets, middles, strict=True)
            ]
            halves = []
            for (low, high), middle, value in zip(ranges, middles, values, strict=True):
                is_beyond = (value > key) | (middle >= high)
                low = jnp.where(is_beyond, low, middle + 1)
                halves.append((low, jnp.where(is_beyond, middle, high)))
            return halves

        everything = [(every_lane(0), every_lane(self.queries)) for _ in offsets]
        found = lax.fori_loop(0, self.queries.bit_length(), halve, everything)
        return [low for low, _ in found]
