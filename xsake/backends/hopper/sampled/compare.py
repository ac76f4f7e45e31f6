"""What sparse attention leaves out of sampled queries, from both outputs, on Hopper (sm90).

    pieces' out, logsumexp ─ merged by logsumexp, with sinks ─ out', L' ─┐
    sparse out, logsumexp at the sample ─ out, L ────────────────────────┴─ 1 - exp(L - L'),
                                                                            ‖out' - out‖², ‖out'‖²

A row is a sampled query of one head: 8, 16 or 32 lanes have 8 of its elements each, in all pieces.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.lanes import (
    OCTET,
    div_rem_lanes,
    every_lane,
    gather,
    gather_eight,
    lane_index,
    launch,
    scatter,
)
from xsake.backends.hopper.layouts import LOG2E, THREADS

LOWEST = -float("inf")
# exp(x) - 1 by its series above this: 1 - exp(x) would lose digits. The first term left out is
# below 2⁻³² of the result.
SERIES = -0.35
TERMS = 8


def compare(
    pieces: tuple[Array, Array],
    sparse: tuple[Array, Array],
    sample: Array,
    sinks: Array | None = None,
) -> Array:
    """Dropped mass, squared error and squared dense output, float32 [B, 3, N, G].

    A query that sees no key has zeros. The outputs are bfloat16 or float16.

    Args:
      pieces: out [B · pieces, G · N / K, K, Hv] and logsumexp float32 [B · pieces, K, G · N / K]
        of the rows of queries.py over each piece of the keys, without sinks. Hv is 64, 128 or 256.
      sparse: out [B, T, N, Hv] and logsumexp float32 [B, N, T] of all queries, with sinks.
      sample: int32 [B, G].
      sinks: float32 [B|1, N]; they join the dense softmax's denominator.
    """
    out, logsumexp = sparse
    B, T, N, Hv = out.shape
    G = sample.shape[1]
    C, _, K, _ = pieces[0].shape
    body = _Comparison(B, T, (N, K), G, Hv, C // B, 0 if sinks is None else len(sinks))
    operands = [*pieces, out, logsumexp, sample, *([] if sinks is None else [sinks])]
    (found,) = launch(
        body.run,
        "xsake_sampled_compare",
        [jax.ShapeDtypeStruct((B * 3 * N * G,), jnp.float32)],
        {"cta": math.ceil(body.rows / body.per_cta)},
        [x.reshape(-1) for x in operands],
        errors=plgpu.SMEM((THREADS,), jnp.float32),
        squares=plgpu.SMEM((THREADS,), jnp.float32),
    )
    return found.reshape(B, 3, N, G)


class _Comparison:
    """The kernel body; `self` holds what is static."""

    def __init__(self, B, T, heads, G, Hv, pieces, sink_batch):
        self.N, self.K = N, K = heads
        self.group = N // K
        self.T, self.G, self.pieces, self.sink_batch = T, G, pieces, sink_batch
        self.lanes = Hv // OCTET  # of a row
        self.per_cta = THREADS // self.lanes
        self.rows = B * G * N

    def run(self, outs, logs, out, logsumexp, sample, *rest, errors, squares):
        """A CTA's rows."""
        sinks, (found,) = (None, rest) if not self.sink_batch else (rest[0], rest[1:])
        lane = lane_index()
        within, part = div_rem_lanes(lane, self.lanes)
        slot = lax.axis_index("cta") * self.per_cta + within
        row = jnp.minimum(slot, self.rows - 1)  # (b · G + g) · N + n
        sampled, n = div_rem_lanes(row, self.N)
        b, g = div_rem_lanes(sampled, self.G)
        query = gather(sample, sampled)
        here = gather_eight(out, ((b * self.T + query) * self.N + n) * self.lanes + part)
        sparse = gather(logsumexp, (b * self.N + n) * self.T + query)
        of_pieces = [b * self.pieces + p for p in range(self.pieces)]
        h, j = div_rem_lanes(n, self.group)
        of_head, own = self.G * self.group, g * self.group + j  # rows
        each = [gather(logs, (x * self.K + h) * of_head + own) for x in of_pieces]
        at = [((x * of_head + own) * self.K + h) * self.lanes + part for x in of_pieces]
        loaded = [gather_eight(outs, x) for x in at]
        if sinks is not None:  # one more piece
            each.append(gather(sinks, (b * self.N if self.sink_batch > 1 else 0) + n))
        weights, total, dense = _weights(each)
        error = square = 0.0
        for i in range(OCTET):
            # no value of a sink, which is 0
            exact = sum(weight * x[i] for weight, x in zip(weights, loaded, strict=False)) / total
            error = error + (exact - here[i]) * (exact - here[i])
            square = square + exact * exact
        errors[...] = error
        squares[...] = square
        plgpu.commit_smem()

        def of_row(shared):
            return sum(gather(shared, within * self.lanes + i) for i in range(self.lanes))

        writes = (part == 0) & (slot < self.rows)
        for kind, value in enumerate((_dropped(sparse, dense), of_row(errors), of_row(squares))):
            to = ((b * 3 + kind) * self.N + n) * self.G + g
            scatter(found, jnp.where(writes, to, -1), value)


def _weights(logs):
    """(the weight of every piece, their sum or 1, the logsumexp of all pieces)."""
    top = logs[0]
    for x in logs[1:]:
        top = jnp.maximum(top, x)
    top = jnp.where(top == LOWEST, 0.0, top)
    weights = [jnp.exp2((x - top) * LOG2E) for x in logs]
    total = sum(weights[1:], weights[0])
    is_blind = total <= 0  # not if it is NaN
    total = jnp.where(is_blind, 1.0, total)
    return weights, total, jnp.where(is_blind, LOWEST, top + jnp.log2(total) * (1 / LOG2E))


def _dropped(sparse, dense):
    """1 - exp(sparse - dense), and 0 where the dense logsumexp is -inf."""
    is_blind = dense <= LOWEST
    change = jnp.where(is_blind, 0.0, sparse - jnp.where(is_blind, 0.0, dense))
    change = jnp.minimum(change, 0.0)
    small = jnp.maximum(change, SERIES)
    series = every_lane(0).astype(jnp.float32) + 1.0
    for term in range(TERMS, 1, -1):
        series = 1.0 + series * small * (1 / term)
    return jnp.where(change < SERIES, 1.0 - jnp.exp2(change * LOG2E), -small * series)
