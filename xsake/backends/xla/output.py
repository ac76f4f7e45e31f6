"""The forward: chunks of row blocks, each with a loop of its own and an online softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from xsake.backends import Sizes, accumulator, kv_head
from xsake.backends.cpu_exp import exp
from xsake.backends.products import logits, operand, product, scaled, sum_last
from xsake.backends.xla.bias import BiasBlocks
from xsake.backends.xla.chunks import Chunk, Visit, put, take, work_order, zeros
from xsake.backends.xla.settings import Settings
from xsake.block_mask import BlockMask


class Inputs(NamedTuple):
    """What both forms of the forward read."""

    settings: Settings
    sizes: Sizes
    q: Array
    k: Array
    v: Array
    biases: BiasBlocks | None
    mask: BlockMask


class Online(NamedTuple):
    """The running softmax state of R row blocks, or of one without that axis."""

    m: Array  # running maximum of the logits, [R, block_q]
    l: Array  # running sum of exp(s - m)
    acc: Array  # unnormalised output, [R, block_q, Hv]

    @classmethod
    def nothing(cls, shape: tuple[int, ...], Hv: int, dtype: Any) -> Online:
        """The state before the first visit, for queries of this shape."""
        zero = jnp.zeros(shape, dtype)
        return cls(jnp.full(shape, -jnp.inf, dtype), zero, jnp.zeros((*shape, Hv), dtype))

    def result(self) -> tuple[Array, Array]:
        """Output and logsumexp; 0 and -inf where nothing was seen."""
        seen = self.l != 0  # elsewhere acc may be anything: an empty list still reads some block
        l = jnp.where(seen, self.l, 1)
        out = jnp.where(seen[..., None], self.acc / l[..., None], 0)
        return out, jnp.where(seen, self.m + jnp.log(l), -jnp.inf)


def update(before: Online | None, s: Array, v_rows: Array) -> tuple[Online, tuple[Array, Array]]:
    """The state after blocks with logits s and these values, and the intermediate p and p·v."""
    m_new = s.max(-1) if before is None else jnp.maximum(before.m, s.max(-1))
    # A row that has seen nothing yet has no maximum: 0 in its place gives p = exp(-inf) = 0.
    level = jnp.where(m_new == -jnp.inf, 0, m_new)
    p = exp(s - level[..., None])
    pv = product("...qk,...kh->...qh", p.astype(v_rows.dtype), v_rows, s.dtype)
    if before is None:
        return Online(m_new, sum_last(p), pv), (p, pv)
    shrink = jnp.exp(before.m - level)  # rescales what was summed under the old maximum
    l = before.l * shrink + sum_last(p)
    return Online(m_new, l, before.acc * shrink[..., None] + pv), (p, pv)


def masked(s: Array, visit: Visit, mask: BlockMask, biases: BiasBlocks | None) -> Array:
    """The logits of a visit with bias, -inf where the rule forbids."""
    if biases is not None:
        s = s + biases.at(visit).astype(s.dtype)
    allowed = visit.allowed(mask)
    return s if allowed is None else jnp.where(allowed, s, -jnp.inf)


def visit_chunks(inputs: Inputs) -> tuple[Array, Array]:
    """(out [B, T, N, Hv], logsumexp [B, T, N]) by chunks of row blocks."""
    settings, sizes, q, k, v, biases, mask = inputs
    _, T, _, N, K, _, Hv = sizes
    bq, dtype, steps = mask.block[0], accumulator(q.dtype), settings.steps
    order = work_order(mask, sizes, steps, steps.side_by_side)

    def rows(chunk: Chunk) -> tuple[Array, Array]:
        q_rows = operand(take(q, chunk.b, chunk.tokens(bq), chunk.n))
        q_rows, scale = scaled(q_rows, settings.scale, dtype)
        head = kv_head(chunk.n, sizes)

        def step(visit: Visit, state: Online | None) -> Online:
            k_rows, v_rows = (operand(take(x, visit.b, visit.k_tokens(mask), head)) for x in (k, v))
            s = logits(q_rows, k_rows, scale, settings.soft_cap, dtype)
            return update(state, masked(s, visit, mask, biases), v_rows)[0]

        before = Online.nothing((len(chunk.b), bq), Hv, dtype) if steps.one_loop else None
        out, lse = chunk.loop(mask, steps, False, step, before).result()
        return out, lse[..., None]

    def put_rows(done: tuple[Array, ...], chunks: list[Chunk]) -> tuple[tuple[Array, ...], None]:
        for chunk, found in zip(chunks, [rows(chunk) for chunk in chunks], strict=True):
            done = tuple(put(x, chunk, blocks) for x, blocks in zip(done, found, strict=True))
        return done, None

    nothing = tuple(zeros(sizes, T, bq, size, dtype, q) for size in (Hv, 1))
    done: Any
    done, _ = lax.scan(put_rows, nothing, order)
    out, lse = done
    return out[:, :T], lse[:, :T, :, 0]
