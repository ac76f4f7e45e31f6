"""The most important blocks of each token on Hopper (sm90): one thread for each token.

(A, E) of every block (importance.py) ─ 2 A_j - E_j + E_{j-1} ─ insertion into a short sorted
list in registers ─▶ indices [B, T, K, n]: first blocks, last blocks, the best of the others
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xsake.backends.hopper.lanes import every_lane, gather, lane_index, launch, scatter
from xsake.backends.hopper.layouts import THREADS, div_rem

INT_MAX = 2**31 - 1


def top(
    sums: jax.Array, first: jax.Array, *, block_size: int, count: int, initial: int, local: int
) -> jax.Array:
    """Indices int32 [B, K, T, count] of `count` blocks of each token, ascending, then -1.

    sums [B, K, T, blocks, 2] of the tokens from `first` on; T is a multiple of 128. The first
    `initial` and the last `local` blocks are always taken, then others by importance; ties go to
    the earlier block.
    """
    B, K, T, blocks, _ = sums.shape
    free = count - initial - local
    runs = T // THREADS

    def body(sums_gmem, first_gmem, out_gmem):
        head, run = div_rem(lax.axis_index("cta"), runs)
        run = runs - 1 - run
        row = head * T + run * THREADS + lane_index()
        token = first_gmem[0] + run * THREADS + lane_index()
        current = token // block_size
        # candidates: initial … current - local
        end = lax.div(first_gmem[0] + (run + 1) * THREADS - 1, jnp.int32(block_size)) - local + 1

        def step(j, carry):
            before, values, indices = carry
            own, edge = (gather(sums_gmem, (row * blocks + j) * 2 + i) for i in range(2))
            x = 2 * own - edge + before
            x = jnp.where(j <= current - local, x, -1.0)
            at = every_lane(j)
            # The values descend: x comes before the first that it exceeds, and behind its equals.
            smaller = [value < x for value in values]
            return edge, _inserted(x, values, smaller), _inserted(at, indices, smaller)

        zero = every_lane(0).astype(jnp.float32)
        nothing = every_lane(-1)
        edge = gather(sums_gmem, (row * blocks + initial - 1) * 2 + 1) if initial else zero
        carry = edge, (zero - 0.5,) * free, (nothing,) * free
        _, _, found = lax.fori_loop(initial, jnp.maximum(end, initial), step, carry)
        chosen = [jnp.where(every_lane(i) <= current, i, -1) for i in range(initial)]
        for i in range(local):
            at = current - i
            chosen.append(jnp.where(at >= initial, at, -1))
        none = every_lane(INT_MAX)
        chosen = [jnp.where(x < 0, none, x) for x in (*chosen, *found)]
        for i, x in enumerate(_ascending(chosen, none)):
            scatter(out_gmem, row * count + i, jnp.where(x == INT_MAX, -1, x))

    (out,) = launch(
        body,
        "xsake_top",
        [jax.ShapeDtypeStruct((B * K * T * count,), jnp.int32)],
        {"cta": B * K * runs},
        (sums.reshape(-1), first.reshape(1)),
    )
    return out.reshape(B, K, T, count)


def _inserted(new, old, moves):
    """The old values, of which those that move do so by one; the new one before the first."""
    before = [new, *(jnp.where(moved, x, new) for moved, x in zip(moves, old, strict=True))]
    found = zip(moves, before[:-1], old, strict=True)
    return tuple(jnp.where(moved, x, own) for moved, x, own in found)


def _ascending(values, largest):
    """The values of every lane in ascending order, by Batcher's sorting network."""
    count = len(values)
    size = 1 << (count - 1).bit_length()
    values = [*values, *[largest] * (size - count)]
    span = 1
    while span < size:
        distance = span
        while distance:
            for i in range(distance % span, size - distance, 2 * distance):
                for at in range(i, min(i + distance, size - distance)):
                    if at // (2 * span) == (at + distance) // (2 * span):
                        a, b = values[at], values[at + distance]
                        values[at], values[at + distance] = jnp.minimum(a, b), jnp.maximum(a, b)
            distance //= 2
        span *= 2
    return values[:count]
