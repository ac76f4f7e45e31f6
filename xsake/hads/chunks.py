"""Dense causal attention of one sequence, a chunk of row blocks at a time: memory linear in T.

q [T, N, H] ─┐
k [T, K, H] ─┴─ cut ─ Chunks ─ chunks.attend(number) ─ Chunk: p of some queries to all keys
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from xsake.hads import row_blocks

QUERIES_AT_ONCE = 256  # queries whose p is in memory: 256 · S floats for each head


class Chunk(NamedTuple):
    """The Q = R · block queries of R row blocks, and their attention to all keys in float32."""

    q: Float[Array, "Q N H"]
    p: Float[Array, "N Q n block"]
    logsumexp: Float[Array, "N Q"]
    positions: Int[Array, " Q"]
    real: Bool[Array, " Q"]  # False for queries that pad the last chunk
    first: Int[Array, ""]  # number of its first row block

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

    def attend(self, number: Int[Array, ""]) -> Chunk:
        """The attention of chunk `number`."""
        first = number * self.per_chunk
        q = lax.dynamic_slice_in_dim(self.q, first * self.block, self.per_chunk * self.block)
        p, logsumexp, positions = attention_weights(q, self.k, first * self.block, self.length)
        p = p.reshape(*p.shape[:2], self.n, self.block)
        return Chunk(q, p, logsumexp, positions, positions < self.length, first)

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
) -> Chunks:
    """Cuts a sequence into chunks of about `queries_at_once` queries, at least one row block."""
    T = q.shape[0]
    n = row_blocks.count_blocks(T, block)
    per_chunk = max(1, queries_at_once // block)
    chunks = -(-n // per_chunk)
    q = jnp.pad(q, ((0, chunks * per_chunk * block - T), (0, 0), (0, 0)))
    return Chunks(q, pad_keys(k, block), T, block, n, per_chunk, chunks)


def pad_keys(x: Float[Array, "T K H"], block: int) -> Float[Array, "keys K H"]:
    """Pads k or v with zeros to whole blocks."""
    return jnp.pad(x, ((0, -x.shape[0] % block), (0, 0), (0, 0)))


def attention_weights(
    q: Float[Array, "Q N H"], k: Float[Array, "S K H"], first: int | Int[Array, ""], T: int
) -> tuple[Float[Array, "N Q S"], Float[Array, "N Q"], Int[Array, " Q"]]:
    """Causal attention weights p, the logsumexp of the logits, and the queries' positions; float32.

    The positions are first … first + Q - 1. Keys from T on are padding.
    """
    Q, N, H = q.shape
    S, K, _ = k.shape
    positions = first + jnp.arange(Q)
    grouped = q.reshape(Q, K, N // K, H)
    logits = jnp.einsum("rkgh,skh->kgrs", grouped, k, preferred_element_type=jnp.float32)
    logits = logits.reshape(N, Q, S) / math.sqrt(H)
    key = jnp.arange(S)
    visible = (key <= positions[:, None]) & (key < T)
    logits = jnp.where(visible, logits, -jnp.inf)
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    return jnp.exp(logits - logsumexp[..., None]), logsumexp, positions
