"""Means of a sample by window and by head, their intervals, and densities, on Hopper (sm90).

    figures [B, 3, N, G] ─┬─ a CTA per head and figure, a window per lane ─ means of windows
                          └─ a CTA per head and figure ─ means over all groups
    lists ─ a CTA per head: a row block per lane, its blocks that the rule allows ─ densities

The formula is that of `hads.estimates`. Every result is an array of its own: slices of one array
would be launches of their own.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.lanes import (
    every_lane,
    for_each,
    for_each_entry,
    gather,
    lane_index,
    launch,
    scatter,
    sum_of_lanes,
)
from xsake.backends.hopper.layouts import THREADS, div_rem
from xsake.backends.hopper.sampled import Visits, Windows

NUM_FIGURES = 3  # dropped mass, squared error, squared output
FIELDS = 4  # mean, standard error, low, high
# A value that no element has, so that XLA stores the constant instead of computing it.
NO_PATTERN = -7


def means(
    figures: Array,
    windows: Windows,
    widened: tuple[float, ...],
    most: tuple[float, ...],
    visits: Visits,
) -> tuple[Array, ...]:
    """mean, standard error, low and high of figure 0 by window, by head, of figure 1 …; densities.

    Args:
      figures: float32 [B, 3, N, G].
      windows: of the sample.
      widened: how much longer the upper half of an interval is, for each figure.
      most: the largest value of each figure.
      visits: of all heads. The last two results are the blocks visited ÷ the blocks allowed,
        float32 [B, N], twice: XLA copies what is returned twice.
    """
    B, _, N, G = figures.shape
    count = len(windows.tokens) - 1
    # Constants with one unequal number more: XLA computes equal ones, and 0, 1, 2, …, by a kernel.
    by_window = windows.tokens, windows.scale, windows.student
    table = np.concatenate([*by_window, [NO_PATTERN]]).astype(np.float32)
    live = np.concatenate([*visits.live, [NO_PATTERN]]).astype(np.int32)
    lists = visits.kv_start, visits.kv_count, visits.kv_index
    shapes = [(B, N, count)] * FIELDS + [(B, N)] * FIELDS
    shapes = [*shapes * NUM_FIGURES, (B, N), (B, N)]
    body = _Heads(B, N, G, windows, widened, most, visits)
    found = launch(
        body.run,
        "xsake_sampled_means",
        [jax.ShapeDtypeStruct((math.prod(shape),), jnp.float32) for shape in shapes],
        {"part": 2 * NUM_FIGURES + 1, "head": B * N},
        [x.reshape(-1) for x in (figures, jnp.asarray(table), *lists, jnp.asarray(live))],
        shared=plgpu.SMEM((THREADS,), jnp.float32),
        counted=plgpu.SMEM((THREADS,), jnp.int32),
    )
    return tuple(x.reshape(shape) for x, shape in zip(found, shapes, strict=True))


class _Heads:
    """The kernel body; `self` holds what is static."""

    def __init__(self, B, N, G, windows, widened, most, visits):
        self.B, self.N, self.G = B, N, G
        self.windows, self.count = windows, len(windows.tokens) - 1
        self.last = windows.length - (G - 1) * windows.every  # queries of the last group
        self.widened, self.most = widened, most
        self.visits = visits

    def run(self, figures, table, start, count, index, live, *found, shared, counted):
        """A figure of one head by window, or over all groups; or the head's density."""
        part, head = lax.axis_index("part"), lax.axis_index("head")
        b, n = div_rem(head, self.N)
        for figure in range(NUM_FIGURES):
            x = _Figure(self, figures, ((b * NUM_FIGURES + figure) * self.N + n) * self.G)
            given = x, table, head, (self.widened[figure], self.most[figure])
            first = 2 * FIELDS * figure
            by_window = functools.partial(self.by_window, *given, found[first : first + FIELDS])
            refs = found[first + FIELDS : first + 2 * FIELDS]
            by_head = functools.partial(self.by_head, *given, refs, shared)
            pl.when(part == 2 * figure)(by_window)
            pl.when(part == 2 * figure + 1)(by_head)
        lists = start, count, index, live
        density = functools.partial(self.density, head, *lists, found[-2:], counted)
        pl.when(part == 2 * NUM_FIGURES)(density)

    def by_window(self, x, table, head, limits, refs):
        """The means of a window per lane."""
        per = self.windows.per

        @pl.loop(0, math.ceil(self.count / THREADS))
        def _(chunk):
            window = chunk * THREADS + lane_index()
            valid = window < self.count
            at = jnp.minimum(window, self.count - 1)

            def groups(state, add):
                def several(numbers, state):
                    loaded = [x.load(at * per + i) for i in numbers]
                    for i, (value, size) in zip(numbers, loaded, strict=True):
                        is_own = every_lane(0) + i < per
                        state = add(state, value, jnp.where(is_own, size, 0.0))
                    return state

                return for_each(per, several, state)

            values = self.fields(table, at, limits, groups, lambda total: total)
            for ref, value in zip(refs, values, strict=True):
                scatter(ref, jnp.where(valid, head * self.count + window, -1), value)

    def by_head(self, x, table, head, limits, refs, shared):
        """The means over all groups, 128 of them at a time."""

        def groups(state, add):
            def several(chunks, state):
                loaded = [x.load(chunk * THREADS + lane_index()) for chunk in chunks]
                for value, size in loaded:
                    state = add(state, value, size)
                return state

            return for_each(math.ceil(self.G / THREADS), several, state)

        def joined(total):
            return sum_of_lanes(total, shared)

        values = self.fields(table, every_lane(0) + self.count, limits, groups, joined)
        for ref, value in zip(refs, values, strict=True):
            scatter(ref, jnp.where(lane_index() == 0, every_lane(0) + head, -1), value)

    def fields(self, table, at, limits, groups, joined):
        """(mean, standard error, low, high) of the windows `at`, by two sums over their groups.

        groups(0, add) adds up add(state, value, queries of its group); joined(total) is the total
        of all lanes that have groups of a window. limits are those of a figure: (widened, most).
        """
        tokens, scale, student = (gather(table, at + row * (self.count + 1)) for row in range(3))
        widened, most = limits
        zero = every_lane(0).astype(jnp.float32)

        def add(total, value, size):
            return total + jnp.where(size > 0, size / tokens * value, 0.0)

        mean = jnp.minimum(joined(groups(zero, add)), most)

        def add_square(total, value, size):
            off = value - mean
            return total + jnp.where(size > 0, size / tokens * (off * off), 0.0)

        spread = joined(groups(zero, add_square))
        standard_error = jnp.sqrt(scale * spread)
        is_known = student > 0
        half = jnp.where(is_known, student * standard_error, jnp.inf)
        low = jnp.maximum(mean - half, 0.0)
        return mean, standard_error, low, jnp.minimum(mean + widened * half, most)

    def density(self, head, start, count, index, live, refs, counted):
        """The share of the allowed blocks that a head visits; a row block per lane."""
        batch, heads, row_blocks = self.visits.kv_count.shape
        capacity = self.visits.kv_index.shape[-1]
        b, n = div_rem(head, self.N)
        its_list = lax.div(n, jnp.int32(self.N // heads)) + (b * heads if batch > 1 else 0)

        def add(chunk, total):
            row = chunk * THREADS + lane_index()
            valid, row = row < row_blocks, jnp.minimum(row, row_blocks - 1)
            its_start, its_count = (gather(x, its_list * row_blocks + row) for x in (start, count))
            lo, hi = (gather(live, row + offset) for offset in (0, row_blocks))

            def visit(_, entry, is_listed, total):
                return total + jnp.where(is_listed & (lo <= entry) & (entry < hi), 1, 0)

            its_count = jnp.where(valid, its_count, 0)
            given = index, its_list * capacity, its_start, its_count, capacity
            return for_each_entry(*given, visit, total)

        visited = lax.fori_loop(0, math.ceil(row_blocks / THREADS), add, every_lane(0))
        lo, hi = self.visits.live
        allowed = max(int(np.maximum(hi - lo, 0).sum()), 1)
        share = sum_of_lanes(visited, counted).astype(jnp.float32) / float(allowed)
        for ref in refs:
            scatter(ref, jnp.where(lane_index() == 0, every_lane(0) + head, -1), share)


class _Figure:
    """The sampled values of one figure of one head."""

    def __init__(self, heads, figures, first):
        self.heads, self.figures, self.first = heads, figures, first

    def load(self, group):
        """(every lane's value, how many queries it stands for: 0 past the last group)."""
        last = self.heads.G - 1
        value = gather(self.figures, self.first + jnp.minimum(group, last))
        zero = every_lane(0).astype(jnp.float32)
        size = jnp.where(group < last, zero + self.heads.windows.every, zero + self.heads.last)
        return value, jnp.where(group <= last, size, 0.0)
