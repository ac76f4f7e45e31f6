"""Attention to selected blocks in plain JAX: every query has its own list of kv blocks.

A kv block is multiplied with the queries that selected it, because gathering queries moves far less
memory than gathering a list of blocks for every query. All (query, block) entries of a kv head are
sorted by block and cut into tiles:

    entries by block   block 0: t0 t1 t2 t3 t4 │ block 1: t2 t4 │ block 2: t4 …
    tiles of 4         └──────────┘ └┘          └────┘           └┘
                       q [4 · G, H] × k [block, H]     G query heads share the kv head

One step of the loop takes the next tile of every batch row and kv head. A tile lists a query at
most once, so that m, l and acc of its queries are read, updated and written back without conflicts;
the order of the sums is fixed. Memory is linear in the number of queries.

A tile multiplies keys that some of its queries may not see, and 0 · NaN is NaN. So a key that is
not finite, or whose value is not, becomes NaN, and its value 0: the logits of the queries that see
it are NaN, those of the others are masked. The backward does the same for queries, by their level.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from xsake import _jax
from xsake.backends import SelectedCall, accumulator
from xsake.backends.cpu_exp import exp
from xsake.backends.products import operand, product, sum_last
from xsake.backends.xla.output import Online, update

# Query rows of a step, summed over the tiles of all batch rows and kv heads: a CPU's step stays in
# cache, a GPU's amortizes its launches. A row is one query of one query head.
ROWS = {"cpu": 1024}
OTHER_ROWS = 1 << 14
LEAST_ROWS = 128  # of a tile, however many batch rows and kv heads there are


def why_not(call: SelectedCall) -> str | None:
    """None: it runs everywhere."""
    return None


class Tiles(NamedTuple):
    """The entries of R = B · K lists of lists, sorted by block and cut into tiles."""

    begin: Array  # int32 [R, E + W]: the first key of the entry's block
    token: Array  # int32 [R, E + W]: the query
    start: Array  # int32 [R, M]: the first entry of every tile
    total: Array  # int32 [R]: the number of tiles
    width: int  # W, entries of a tile at most


def cut_into_tiles(call: SelectedCall) -> Tiles:
    """All tiles of a call. M is the largest number of tiles that any indices can give."""
    B, T, S, N, K, *_ = call.sizes
    C = call.indices.shape[-1]
    E = T * C
    rows = max(LEAST_ROWS, ROWS.get(_jax.platform(), OTHER_ROWS) // (B * K))
    width = min(T, max(1, rows // (N // K)))
    nothing = S + call.block  # sorts after every block
    first = 0 if call.first is None else call.first[:, :, None, None]
    begin = jnp.where(call.indices < 0, nothing, call.indices * call.block + first)
    begin = begin.transpose(0, 2, 1, 3).reshape(B * K, E)
    token = jnp.broadcast_to(jnp.repeat(jnp.arange(T, dtype=jnp.int32), C)[None], begin.shape)
    token = _jax.vary(token, _jax.varying_axes(begin))
    begin, token = lax.sort((begin, token), dimension=1, num_keys=1, is_stable=True)

    blocks = min(E, S if call.first is not None else -(-S // call.block))
    capacity = min(E, (E + blocks * (width - 1)) // width)
    entry = jnp.arange(E, dtype=jnp.int32)[None]
    before = jnp.concatenate([begin[:, :1] - 1, begin[:, :-1]], axis=1)
    rank = entry - lax.cummax(jnp.where(begin != before, entry, 0), axis=1)
    starts_tile = (rank % width == 0) & (begin < nothing)
    number = jnp.cumsum(starts_tile, axis=1, dtype=jnp.int32)
    slot = jnp.where(starts_tile, number - 1, capacity)  # past the end: dropped
    row = jnp.arange(B * K)[:, None]
    start = jnp.zeros_like(begin, shape=(B * K, capacity))
    start = start.at[row, slot].set(jnp.broadcast_to(entry, slot.shape), mode="drop")
    padding = ((0, 0), (0, width))
    return Tiles(
        jnp.pad(begin, padding, constant_values=-1),
        jnp.pad(token, padding),
        start,
        number[:, -1],
        width,
    )


class Tile(NamedTuple):
    """One tile of each of the R lists."""

    begin: Array  # int32 [R]: the first key
    token: Array  # int32 [R, W]
    live: Array  # bool [R, W]
    allowed: Array  # bool [R, W, 1, block]: which token pairs

    def masked(self, x: Array, other: float) -> Array:
        """x [R, W · G, block] where a query may see the key, else the number `other`."""
        by_token = x.reshape(*self.token.shape, -1, x.shape[-1])
        return jnp.where(self.allowed, by_token, other).reshape(x.shape)

    def target(self, T: int) -> Array:
        """The tokens that results are written to; T, which is dropped, for padding."""
        return jnp.where(self.live, self.token, T)


@dataclasses.dataclass(frozen=True)
class Operands:
    """Inputs with one axis R for batch rows and kv heads, keys padded so that every block fits."""

    call: SelectedCall
    q: Array  # [R, T, G · H], scaled if that loses no bits
    k: Array  # [R, S + block, H]; a key is NaN where it or its value is not finite
    v: Array  # [R, S + block, Hv]; 0 there
    last: Array  # int32 [R, T]
    scale: float  # what remains to be applied to the logits

    @classmethod
    def of(cls, call: SelectedCall) -> Operands:
        B, T, _, _, K, *_ = call.sizes
        q = operand(_by_head(call.q, K))
        exact = q.dtype == accumulator(call.q.dtype)
        sound = finite_rows(call.k) & finite_rows(call.v)
        k, v = (
            operand(jnp.pad(_by_head(x, K), ((0, 0), (0, call.block), (0, 0))))
            for x in (jnp.where(sound, call.k, jnp.nan), jnp.where(sound, call.v, 0))
        )
        own = jnp.arange(T, dtype=jnp.int32)[None] if call.last is None else call.last
        last = jnp.repeat(jnp.broadcast_to(own, (B, T)), K, axis=0)
        return cls(call, q * call.scale if exact else q, k, v, last, 1.0 if exact else call.scale)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """R, T, G, H, Hv."""
        B, T, _, N, K, H, Hv = self.call.sizes
        return B * K, T, N // K, H, Hv

    def tile(self, tiles: Tiles, step: Array) -> Tile:
        """The tiles of this step; past the end of a list, a tile without live entries."""
        row = jnp.arange(len(tiles.total))[:, None]
        entry = tiles.start[:, step][:, None] + jnp.arange(tiles.width, dtype=jnp.int32)[None]
        begin, token = tiles.begin[row, entry], tiles.token[row, entry]
        live = (begin == begin[:, :1]) & (step < tiles.total)[:, None]
        key = begin[:, :1, None] + jnp.arange(self.call.block, dtype=jnp.int32)[None, None]
        seen = (key <= self.last[row, token][:, :, None]) & live[:, :, None]
        return Tile(begin[:, 0], token, live, seen[:, :, None])

    def rows(self, x: Array, tile: Tile) -> Array:
        """x [R, T, G · D] of the tile's queries, [R, W · G, D]."""
        R, W = tile.token.shape
        return x[jnp.arange(R)[:, None], tile.token].reshape(R, W * self.sizes[2], -1)

    def keys(self, x: Array, tile: Tile) -> Array:
        """x [R, S + block, D] of the tile's kv block, [R, block, D]."""
        return jax.vmap(lambda x, at: lax.dynamic_slice_in_dim(x, at, self.call.block))(
            x, tile.begin
        )

    def logits(self, q_rows: Array, k_rows: Array, tile: Tile) -> Array:
        """[R, W · G, block], -inf where a query may not see the key."""
        s = product("rqh,rkh->rqk", q_rows, k_rows, accumulator(self.call.q.dtype)) * self.scale
        return tile.masked(s, -jnp.inf)


def finite_rows(x: Array) -> Array:
    """Whether the vectors x [..., D] are finite, bool [..., 1]."""
    return jnp.isfinite(x).all(-1, keepdims=True)


def _by_head(x: Array, K: int) -> Array:
    """[B, T, K · G, D] -> [B · K, T, G · D]."""
    B, T, heads, D = x.shape
    grouped = x.reshape(B, T, K, heads // K * D)
    return grouped.transpose(0, 2, 1, 3).reshape(B * K, T, -1)


def _by_token(x: Array, B: int, D: int) -> Array:
    """[B · K, T, G · D] -> [B, T, K · G, D]."""
    T = x.shape[1]
    return x.reshape(B, -1, T, x.shape[2]).transpose(0, 2, 1, 3).reshape(B, T, -1, D)


def _zeros(like: Array, *shape: int, fill: float = 0.0) -> Array:
    """An accumulator that, inside `jax.shard_map`, varies as `like` does."""
    nothing = jnp.full(shape, fill, accumulator(like.dtype))
    return _jax.vary(nothing, _jax.varying_axes(like))


@jax.jit
def forward(call: SelectedCall) -> tuple[Array, Array]:
    """(out [B, T, N, Hv], logsumexp [B, T, N]), both in the accumulator's dtype."""
    given, tiles = Operands.of(call), cut_into_tiles(call)
    R, T, G, _, Hv = given.sizes
    row = jnp.arange(R)[:, None]

    def step(number: Array, state: Online) -> Online:
        tile = given.tile(tiles, number)
        s = given.logits(given.rows(given.q, tile), given.keys(given.k, tile), tile)
        m, l, acc = (given.rows(x, tile) for x in state)
        new, _ = update(Online(m[..., 0], l[..., 0], acc), s, given.keys(given.v, tile))
        at = row, tile.target(T)
        written = (
            x.at[at].set(y.reshape(*tile.token.shape, -1), mode="drop")
            for x, y in zip(state, new, strict=True)
        )
        return Online(*written)

    nothing = Online(
        _zeros(call.q, R, T, G, fill=-jnp.inf),
        _zeros(call.q, R, T, G),
        _zeros(call.q, R, T, G * Hv),
    )
    m, l, acc = lax.fori_loop(0, tiles.total.max(initial=0), step, nothing)
    out, lse = Online(m, l, acc.reshape(R, T, G, Hv)).result()
    B = call.sizes.B
    return _by_token(out.reshape(R, T, -1), B, Hv), _by_token(lse, B, 1)[..., 0]


@jax.jit
def backward(
    call: SelectedCall, out: Array, logsumexp: Array, d_out: Array, d_logsumexp: Array
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) from the results of `forward` and their cotangents."""
    # A query that is not finite, or whose cotangent is not, is multiplied with keys that it does
    # not see: zeros take its place in the products, and its weights are NaN where it sees a key.
    sound = finite_rows(call.q) & finite_rows(d_out)
    d_rows = operand(_by_head(jnp.where(sound, d_out, 0).astype(call.q.dtype), call.sizes.K))
    call = dataclasses.replace(call, q=jnp.where(sound, call.q, 0))
    given, tiles = Operands.of(call), cut_into_tiles(call)
    B, _, S, _, K, H, Hv = call.sizes
    R, T, G, *_ = given.sizes
    dtype = accumulator(call.q.dtype)
    # ds = p · (dp - delta); a gradient of the logsumexp only shifts delta.
    empty = logsumexp == -jnp.inf
    delta = jnp.where(empty, 0, sum_last(d_out.astype(dtype) * out) - d_logsumexp)
    level = jnp.where(empty, jnp.inf, logsumexp)  # p = exp(s - level) is 0 for an empty query
    level = jnp.where(sound[..., 0], level, jnp.nan)
    delta, level = (_by_head(x[..., None], K) for x in (delta, level))
    row = jnp.arange(R)[:, None]

    def step(number: Array, sums: Any) -> Any:
        dq, dk, dv = sums
        tile = given.tile(tiles, number)
        q, k, v = given.rows(given.q, tile), given.keys(given.k, tile), given.keys(given.v, tile)
        d = given.rows(d_rows, tile)
        p = tile.masked(exp(given.logits(q, k, tile) - given.rows(level, tile)), 0.0)
        dp = product("rqh,rkh->rqk", d, v, dtype)
        # masked again: a value that no query sees may be so large that dp is infinite
        ds = tile.masked(p * (dp - given.rows(delta, tile)), 0.0)
        p, ds = p.astype(q.dtype), ds.astype(q.dtype)
        k = jnp.where(jnp.isnan(k), 0, k)  # its ds are NaN where it is seen
        dq_rows = product("rqk,rkh->rqh", ds, k, dtype).reshape(*tile.token.shape, -1)
        dq = dq.at[row, tile.target(T)].add(dq_rows, mode="drop")
        dk = _add_block(dk, tile.begin, product("rqk,rqh->rkh", ds, q, dtype))
        return dq, dk, _add_block(dv, tile.begin, product("rqk,rqh->rkh", p, d, dtype))

    length = S + call.block
    nothing = (
        _zeros(call.q, R, T, G * H),
        _zeros(call.q, R, length, H),
        _zeros(call.q, R, length, Hv),
    )
    dq, dk, dv = lax.fori_loop(0, tiles.total.max(initial=0), step, nothing)
    dq, dk = dq * call.scale, dk * given.scale
    results = _by_token(dq, B, H), *(_by_token(x[:, :S], B, x.shape[-1]) for x in (dk, dv))
    dq, dk, dv = (x.astype(call.q.dtype) for x in results)
    return dq, dk, dv


def _add_block(x: Array, begin: Array, blocks: Array) -> Array:
    """Adds blocks [R, block, D] to x [R, L, D] from key `begin` [R] on."""

    def one(x: Array, at: Array, block: Array) -> Array:
        old = lax.dynamic_slice_in_dim(x, at, len(block))
        return lax.dynamic_update_slice_in_dim(x, old + block, at, axis=0)

    return jax.vmap(one)(x, begin, blocks)
