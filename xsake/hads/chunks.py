"""Dense causal attention of one sequence, a chunk of row blocks at a time: memory linear in T.

q [T, N, H] ─┐
k [T, K, H] ─┴─ cut ─ Chunks ─ chunks.attend(number) ─ Chunk: p of some queries to all keys

A sink is one more key, whose value is 0 and which is never dropped: p of the keys and the mass of
the sinks add up to 1.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from xsake.hads import row_blocks

QUERIES_AT_ONCE = 256  # queries whose p is in memory: 256 · S floats for each head


class Softmax(NamedTuple):
    """What a layer's attention has beyond causal softmax(q kᵀ / √H); by default nothing."""

    soft_cap: Any = None  # float32 []: logits become cap · tanh(logits / cap)
    window: Any = None  # int32 []: a query sees itself and window - 1 keys before it
    sinks: Any = None  # float [N]: a logit for each head that joins the denominator

    def capped(self, logits: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
        """The logits after the soft cap."""
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def sees(self, positions: Int[Array, " Q"], keys: Int[Array, " S"]) -> Bool[Array, "Q S"]:
        """Which keys are not after a query, and inside its window."""
        seen = keys <= positions[:, None]
        return seen if self.window is None else seen & (keys > positions[:, None] - self.window)

    def outcomes(self, positions: Int[Array, " Q"], block: int = 1) -> Float[Array, " Q"]:
        """How many blocks of keys a query sees, and one more for sinks; at least 2."""
        first = 0 if self.window is None else jnp.maximum(positions - self.window + 1, 0) // block
        count = positions // block - first + (1 if self.sinks is None else 2)
        return jnp.maximum(count, 2).astype(jnp.float32)


PLAIN = Softmax()


class Chunk(NamedTuple):
    """The Q = R · block queries of R row blocks, and their attention to all keys in float32."""

    q: Float[Array, "Q N H"]
    p: Float[Array, "N Q n block"]
    logsumexp: Float[Array, "N Q"]  # of logits and sinks
    positions: Int[Array, " Q"]
    real: Bool[Array, " Q"]  # False for queries that pad the last chunk
    first: Int[Array, ""]  # number of its first row block
    sinks: Float[Array, "N Q"] | None = None  # their mass, if there are any

    def with_sinks(self, mass: Float[Array, "*lead N Q"]) -> Float[Array, "*lead N Q"]:
        """The mass of some keys and that of the sinks, which are always kept."""
        return mass if self.sinks is None else mass + self.sinks

    def entropy(self, p: Float[Array, "N Q outcomes"]) -> Float[Array, "N Q"]:
        """-Σ p ln p over keys or blocks, and the sinks."""
        found = entropy(p)
        return found if self.sinks is None else found + entropy(self.sinks[..., None])

    def mean(self, x: Float[Array, "N Q *rest"]) -> Float[Array, "N R *rest"]:
        """The mean over the queries of each row block; 0 for a row block of padding."""
        N, block = x.shape[0], self.p.shape[-1]
        real = self.real.reshape(-1, block)
        R, ones = len(real), [1] * (x.ndim - 2)
        x = x.reshape(N, R, block, *x.shape[2:]) * real.reshape(1, R, block, *ones)
        return x.sum(2) / jnp.maximum(real.sum(-1), 1).reshape(1, R, *ones)


class Chunks(NamedTuple):
    """One sequence, padded to whole chunks of queries and whole blocks of keys."""

    q: Float[Array, "queries N H"]
    k: Float[Array, "keys K H"]
    length: int  # T, without padding
    block: int
    n: int  # blocks of the sequence
    per_chunk: int  # R, row blocks of a chunk
    chunks: int  # how many
    softmax: Softmax

    def attend(self, number: Int[Array, ""]) -> Chunk:
        """The attention of chunk `number`."""
        first = number * self.per_chunk
        q = lax.dynamic_slice_in_dim(self.q, first * self.block, self.per_chunk * self.block)
        p, logsumexp, positions = attention_weights(
            q, self.k, first * self.block, self.length, self.softmax
        )
        p = p.reshape(*p.shape[:2], self.n, self.block)
        sinks = self.softmax.sinks
        mass = None if sinks is None else jnp.exp(_by_head(sinks) - logsumexp)
        return Chunk(q, p, logsumexp, positions, positions < self.length, first, mass)

    def pad(self, x: Array, axis: int) -> Array:
        """Pads an axis of n row blocks to the row blocks of all chunks, with zeros."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, self.chunks * self.per_chunk - self.n)
        return jnp.pad(x, widths)

    def part(self, x: Array, chunk: Chunk, axis: int) -> Array:
        """The row blocks of one chunk out of an axis that `pad` padded."""
        return lax.dynamic_slice_in_dim(x, chunk.first, self.per_chunk, axis)


def cut(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    block: int,
    queries_at_once: int = QUERIES_AT_ONCE,
    softmax: Softmax = PLAIN,
) -> Chunks:
    """Cuts a sequence into chunks of about `queries_at_once` queries, at least one row block."""
    T = q.shape[0]
    n = row_blocks.count_blocks(T, block)
    per_chunk = max(1, queries_at_once // block)
    chunks = -(-n // per_chunk)
    q = jnp.pad(q, ((0, chunks * per_chunk * block - T), (0, 0), (0, 0)))
    return Chunks(q, pad_keys(k, block), T, block, n, per_chunk, chunks, softmax)


def pad_keys(x: Float[Array, "T K H"], block: int) -> Float[Array, "keys K H"]:
    """Pads k or v with zeros to whole blocks."""
    return jnp.pad(x, ((0, -x.shape[0] % block), (0, 0), (0, 0)))


def attention_weights(
    q: Float[Array, "Q N H"],
    k: Float[Array, "S K H"],
    first: int | Int[Array, ""],
    T: int,
    softmax: Softmax = PLAIN,
) -> tuple[Float[Array, "N Q S"], Float[Array, "N Q"], Int[Array, " Q"]]:
    """Causal attention weights p, the logsumexp of the logits, and the queries' positions; float32.

    The positions are first … first + Q - 1. Keys from T on are padding, and queries from T on see
    what the last one sees. The logsumexp includes the sinks.
    """
    Q, N, H = q.shape
    S, K, _ = k.shape
    positions = first + jnp.arange(Q)
    grouped = q.reshape(Q, K, N // K, H)
    logits = jnp.einsum("rkgh,skh->kgrs", grouped, k, preferred_element_type=jnp.float32)
    logits = softmax.capped(logits.reshape(N, Q, S) / math.sqrt(H))
    visible = softmax.sees(jnp.minimum(positions, T - 1), jnp.arange(S))
    logits = jnp.where(visible, logits, -jnp.inf)
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    if softmax.sinks is not None:
        logsumexp = jnp.logaddexp(logsumexp, _by_head(softmax.sinks))
    return jnp.exp(logits - logsumexp[..., None]), logsumexp, positions


def entropy(p: Float[Array, "*batch outcomes"]) -> Float[Array, "*batch"]:
    """-Σ p ln p over the last axis, 0 ln 0 = 0."""
    return -(p * jnp.log(jnp.maximum(p, 1e-37))).sum(-1)


def _by_head(sinks: Float[Array, " N"]) -> Float[Array, "N 1"]:
    return sinks.astype(jnp.float32)[:, None]
