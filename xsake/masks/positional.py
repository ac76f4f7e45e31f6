"""Rules of plain numbers that compare positions; each classifies blocks in closed form."""

from __future__ import annotations

from typing import Any, Final, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.masks.integers import minus, size_of
from xsake.masks.rule import (
    EVERYTHING,
    Grid,
    Rule,
    Spans,
    Tokens,
    classify_by_tokens,
    index_range,
    plain,
)


def everything() -> Rule:
    """Every query sees every key."""
    return EVERYTHING


@plain
class Window(Rule):
    """q - left <= k <= q + right; None = no limit, on one side at most. causal() is (None, 0)."""

    left: int | None
    right: int | None

    def allows(self, tokens: Tokens) -> Array:
        sides = []
        if self.left is not None:
            sides.append(tokens.k >= minus(tokens.q, self.left))
        if self.right is not None:
            sides.append(minus(tokens.k, self.right) <= tokens.q)
        return sides[0] & sides[-1]

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        (q_lo, q_hi), (k_lo, k_hi) = grid.q_range(), grid.k_range()
        live = full = jnp.ones((1, 1, *grid.counts), bool)
        if self.left is not None:
            live = live & (k_hi >= minus(q_lo, self.left))
            full = full & (k_lo >= minus(q_hi, self.left))
        if self.right is not None:
            live = live & (minus(k_lo, self.right) <= q_hi)
            full = full & (minus(k_hi, self.right) <= q_lo)
        return live, full

    def spans(self, grid: Grid) -> Spans | None:
        (T, S), bk, nk = grid.shape, grid.block[1], grid.counts[1]
        q_lo, q_hi = index_range(T, grid.block[0])
        live_lo = full_lo = np.zeros_like(q_lo)
        live_hi = full_hi = np.full_like(q_lo, nk)
        if self.left is not None:
            left = min(self.left, T)  # a wider window shows no more, and sums do not wrap
            # the block that holds the first key seen by any query; past S there is none
            live_lo = np.where(q_lo - left < S, (q_lo - left) // bk, nk)
            # the first kv block whose first key every query of the row block sees
            full_lo = -((left - q_hi) // bk)
        if self.right is not None:
            right = min(self.right, S)
            live_hi = (q_hi + right) // bk + 1
            full_hi = (q_lo + right + 1) // bk
        return Spans(live_lo, live_hi, full_lo, full_hi)

    @property
    def is_causal(self) -> bool:
        return self.right == 0

    def __str__(self) -> str:
        causal_only = self.left is None and self.right == 0
        return "causal()" if causal_only else f"sliding_window({self.left}, {self.right})"


def causal() -> Rule:
    """A query sees keys at its own position and before: k <= q."""
    return Window(None, 0)


Side = int | None
SAME: Final = "same"  # the right side is as wide as the left


def window_sides(left: Any, right: Any) -> tuple[int | None, int | None]:
    """(left, right) from two numbers, one number for both, or a pair."""
    if isinstance(left, (tuple, list)):
        if len(left) != 2 or right != SAME:
            raise ValueError(f"a window is (left, right), got {left!r}")
        left, right = left
    right = left if right == SAME else right
    left = None if left is None else size_of("window left", left, 0)
    return left, None if right is None else size_of("window right", right, 0)


def _window_rule(left: int | None, right: int | None) -> Rule:
    return EVERYTHING if left is None and right is None else Window(left, right)


def sliding_window(left: Side | tuple[Side, Side], right: Side | Literal["same"] = SAME) -> Rule:
    """A query sees keys q - left … q + right, both ends included; None = no limit on that side.

    One number w means (w, w), as `local_window_size` of jax.nn; a pair (left, right) is taken too.
    """
    return _window_rule(*window_sides(left, right))


@plain
class Chunked(Rule):
    """q // size == k // size."""

    size: int

    def allows(self, tokens: Tokens) -> Array:
        return tokens.q // self.size == tokens.k // self.size

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        q_lo, q_hi = (x // self.size for x in grid.q_range())
        k_lo, k_hi = (x // self.size for x in grid.k_range())
        live = (k_lo <= q_hi) & (k_hi >= q_lo)
        return live, (q_lo == q_hi) & (k_lo == k_hi) & (q_lo == k_lo)

    def spans(self, grid: Grid) -> Spans | None:
        bk, size = grid.block[1], min(self.size, max(grid.shape))  # so that products do not wrap
        q_lo, q_hi = index_range(grid.shape[0], grid.block[0])
        first, last = q_lo // size, q_hi // size
        live_hi = -(-np.minimum((last + 1) * size, grid.shape[1]) // bk)
        full_lo = -(-(first * size) // bk)
        full_hi = np.where(first == last, (first + 1) * size // bk, full_lo)
        # the last block may be cut at S inside the chunk: all tokens that it has are allowed
        ends = (first == last) & ((first + 1) * size >= grid.shape[1])
        full_hi = np.where(ends, grid.counts[1], full_hi)
        begins = first * size
        live_lo = np.where(begins < grid.shape[1], begins // bk, grid.counts[1])
        return Spans(live_lo, live_hi, full_lo, full_hi)

    def __str__(self) -> str:
        return f"chunked({self.size})"


def chunked(size: int) -> Rule:
    """Tokens see each other within consecutive chunks: q // size == k // size.

    Llama 4's local layers are `chunked(8192) & causal()`.
    """
    return Chunked(size_of("chunk size", size, 1))


@plain
class First(Rule):
    """k < n."""

    n: int

    def allows(self, tokens: Tokens) -> Array:
        return tokens.k < self.n

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        k_lo, k_hi = grid.k_range()
        return k_lo < self.n, k_hi < self.n

    def spans(self, grid: Grid) -> Spans | None:
        zero = np.zeros(grid.counts[0], np.int32)
        full = grid.counts[1] if self.n >= grid.shape[1] else self.n // grid.block[1]
        return Spans(zero, zero + -(-self.n // grid.block[1]), zero, zero + full)

    def __str__(self) -> str:
        return f"first({self.n})"


def first(n: int) -> Rule:
    """Every query sees the first n keys: k < n (StreamingLLM's attention sinks)."""
    return First(size_of("first n", n, 0))


@plain
class Strided(Rule):
    """(q - k) % stride == 0."""

    stride: int

    def allows(self, tokens: Tokens) -> Array:
        return tokens.q % self.stride == tokens.k % self.stride  # q - k could wrap

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        if self.stride == 1:
            return EVERYTHING.classify(grid)
        (q_lo, q_hi), (k_lo, k_hi) = grid.q_range(), grid.k_range()
        # q - k takes every value from q_lo - k_hi to q_hi - k_lo: is one a multiple of the stride?
        # Differences of quotients and of rests do not wrap round, unlike those of positions.
        largest = q_hi // self.stride - k_lo // self.stride
        largest = largest - (q_hi % self.stride < k_lo % self.stride)
        smallest = q_lo // self.stride - k_hi // self.stride
        smallest = smallest + (q_lo % self.stride > k_hi % self.stride)
        live = largest >= smallest
        return live, live & (q_lo == q_hi) & (k_lo == k_hi)

    def __str__(self) -> str:
        return f"strided({self.stride})"


def strided(stride: int) -> Rule:
    """Every stride-th key, counted from the query: (q - k) % stride == 0."""
    return Strided(size_of("stride", stride, 1))


def dilated(window: Side | tuple[Side, Side], dilation: int) -> Rule:
    """A window with gaps: keys q + t·dilation for t from -left to right."""
    left, right = window_sides(window, SAME)
    step = size_of("dilation", dilation, 1)
    reach = [
        None if side is None else size_of(f"window {side} · dilation {step}", side * step, 0)
        for side in (left, right)
    ]
    return _window_rule(*reach) & strided(step)


@plain
class GlobalTokens(Rule):
    """q < n or k < n."""

    n: int

    def allows(self, tokens: Tokens) -> Array:
        return (tokens.q < self.n) | (tokens.k < self.n)

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        (q_lo, q_hi), (k_lo, k_hi) = grid.q_range(), grid.k_range()
        return (q_lo < self.n) | (k_lo < self.n), (q_hi < self.n) | (k_hi < self.n)

    def __str__(self) -> str:
        return f"global_tokens({self.n})"


def global_tokens(n: int) -> Rule:
    """The first n tokens see all keys and are seen by all queries: q < n or k < n."""
    return GlobalTokens(size_of("global n", n, 0))


@plain
class Random(Rule):
    """Cells kept by a hash of (seed, n, q // block, k // block)."""

    density: float
    seed: int
    block: int

    def _keeps(self, n: Any, q_cell: Any, k_cell: Any) -> Array:
        n, q_cell, k_cell = (jnp.asarray(x).astype(jnp.uint32) for x in (n, q_cell, k_cell))
        x = jnp.uint32(self.seed * 0x9E3779B9 & 0xFFFFFFFF) ^ n * jnp.uint32(0x85EBCA6B)
        x = x ^ q_cell * jnp.uint32(0xC2B2AE35) ^ k_cell * jnp.uint32(0x27D4EB2F)
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)  # murmur3's finaliser
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        x = x ^ (x >> 16)
        limit = int(self.density * 2**32)
        return x < jnp.uint32(limit) if limit < 2**32 else jnp.ones_like(x, dtype=bool)

    def allows(self, tokens: Tokens) -> Array:
        return self._keeps(tokens.n, tokens.q // self.block, tokens.k // self.block)

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        if not grid.is_contiguous or max(grid.block) > 8 * self.block:
            return classify_by_tokens(self, grid)
        (q_lo, q_hi), (k_lo, k_hi) = grid.q_range(), grid.k_range()
        live, full = jnp.zeros((1, 1, 1, 1), bool), jnp.ones((1, 1, 1, 1), bool)
        for dq in range((grid.block[0] - 1) // self.block + 2):
            for dk in range((grid.block[1] - 1) // self.block + 2):
                q_cell, k_cell = q_lo // self.block + dq, k_lo // self.block + dk
                touched = (q_cell <= q_hi // self.block) & (k_cell <= k_hi // self.block)
                keeps = self._keeps(grid.n, q_cell, k_cell)
                live, full = live | touched & keeps, full & (~touched | keeps)
        return live, full

    def upper_bound(self) -> Rule:
        return EVERYTHING

    def __str__(self) -> str:
        return f"random({self.density}, seed={self.seed}, block={self.block})"


def random(density: float, seed: int = 0, block: int = 64) -> Rule:
    """Keeps each block × block cell of tokens with probability `density`, independently per head.

    A cell (n, q // block, k // block) is kept when its 32-bit hash is below density · 2**32, so the
    same seed gives the same mask on every machine.
    """
    if not 0 <= density <= 1:
        raise ValueError(f"random density must be from 0 to 1, got {density!r}")
    return Random(float(density), size_of("seed", seed, 0, None), size_of("random block", block, 1))


def longformer(window: Side | tuple[Side, Side], n_global: int) -> Rule:
    """sliding_window(window) | global_tokens(n_global)."""
    return sliding_window(window) | global_tokens(n_global)


def bigbird(
    window: Side | tuple[Side, Side],
    n_global: int,
    density: float,
    seed: int = 0,
    block: int = 64,
) -> Rule:
    """longformer(window, n_global) | random(density, seed, block)."""
    return longformer(window, n_global) | random(density, seed, block)
