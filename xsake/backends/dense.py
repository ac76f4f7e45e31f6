"""Dense attention in plain JAX, on any device: all logits in memory at once, in one product.

    s = scale · q kᵀ ─ soft cap ─ + bias ─ masked        p = exp(s - max)        out = p v / Σ p

It reads no lists and has no loop, so that it starts and compiles quickly: short or nearly dense
calls take less time here than by blocks (costs.py has the estimate). Under a window, rows of
64 queries get the keys that their windows can reach (`Layout`), and the others are not computed.

It keeps the meaning of the other backends. A dropped key cannot leak, although it is multiplied:
where a row of q, k or v is not finite, the products take zeros in its place, and the logits of the
token pairs that see it become NaN. The backward recomputes p, so that a layer saves what the
`xla` backend saves. jax.nn's attention by cuDNN is not used: it rounds the logsumexp to the dtype
of q and has no gradient for it, on which sinks depend.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import _jax
from xsake.backends import Call, Derivatives, Sizes, accumulator
from xsake.backends.cpu_exp import exp
from xsake.backends.products import logits, operand, product, sum_last
from xsake.block_mask import BlockMask
from xsake.masks.rule import Grid, Tokens

# Of one array of logits. The forward has about two such arrays at a time, the backward four.
LIMIT_BYTES = 1 << 30
BAND = 64  # queries that share a range of keys under a window, and the unit of that range
WORTHWHILE = 0.75  # of all keys: a wider range is not worth a copy of k and v for every band


def why_not(call: Call) -> str | None:
    """None, unless the logits need too much memory."""
    needed = pairs(call) * jnp.dtype(accumulator(call.q.dtype)).itemsize
    if needed <= LIMIT_BYTES:
        return None
    B, T, S, N, *_ = call.sizes
    return (
        f"holds all logits at once, of which it takes up to {LIMIT_BYTES / 2**30:.0f} GiB; these "
        f"are {B} × {N} × {T} × {S}, {needed / 2**30:.1f} GiB; 'xla' computes them block by block"
    )


def pairs(call: Call) -> int:
    """Token pairs that are computed."""
    layout = Layout.of(call.sizes, call.mask, call.bias)
    return call.sizes.B * call.sizes.N * layout.bands * layout.queries * layout.keys


def forward(call: Call) -> tuple[Array, Array]:
    """(out [B, T, N, Hv], logsumexp [B, T, N])."""
    return DERIVATIVES.forward(_settings(call), call)


def backward(
    call: Call, out: Array, logsumexp: Array, d_out: Array, d_logsumexp: Array
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of the call's keys; out and logsumexp may cover more keys than the call has."""
    return DERIVATIVES.backward(_settings(call), call, (out, logsumexp), (d_out, d_logsumexp))


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed when a call is compiled."""

    scale: float
    soft_cap: float | None


def _settings(call: Call) -> Settings:
    return Settings(float(call.scale), call.soft_cap)


@functools.partial(jax.jit, static_argnums=0)
@jax.named_scope("xsake_forward")
def _output(
    settings: Settings, q: Array, k: Array, v: Array, bias: Array | None, mask: BlockMask
) -> tuple[Array, Array]:
    """(out, logsumexp), not rounded to q's dtype."""
    layout = Layout.of(Sizes.of(q, k, v), mask, bias)
    given = Given.of(q, k, v, layout)
    s, _ = given.logits(settings, layout, bias, mask)
    m = s.max(-1)
    level = jnp.where(m == -jnp.inf, 0, m)  # an empty row has no maximum: p = exp(-inf) = 0
    p = exp(s - level[..., None])
    l = sum_last(p)
    seen = l != 0
    l = jnp.where(seen, l, 1)
    pv = product("...qk,...kh->...qh", layout.merged(p).astype(given.v.dtype), given.v, s.dtype)
    out = layout.by_token(pv.reshape(*s.shape[:5], -1) / l[..., None])
    logsumexp = jnp.where(seen, level + jnp.log(l), -jnp.inf)
    return out, layout.by_token(logsumexp[..., None])[..., 0]


@functools.partial(jax.jit, static_argnums=0)
@jax.named_scope("xsake_backward")
def _gradients(settings: Settings, saved: Any, cotangents: Any) -> Any:
    """(dq, dk, dv, dbias) from what the forward saved and the cotangents of its results."""
    q, k, v, bias, mask, out, logsumexp = saved
    layout = Layout.of(Sizes.of(q, k, v), mask, bias)
    given, dtype = Given.of(q, k, v, layout), accumulator(q.dtype)
    d_out, d_logsumexp = cotangents
    empty = logsumexp == -jnp.inf
    # ds = p · (dp - delta); a gradient of the logsumexp only shifts delta.
    delta = jnp.where(empty, 0, sum_last(d_out.astype(dtype) * out) - d_logsumexp)
    level = jnp.where(empty, jnp.inf, logsumexp)  # p = 0, also past the last query
    delta, level = layout.rows(delta[..., None]), layout.rows(level[..., None], past=jnp.inf)
    d_out = jnp.where(empty[..., None], 0, d_out).astype(q.dtype)
    d_rows = layout.merged(layout.rows(operand(d_out)))

    s, capped = given.logits(settings, layout, bias, mask)
    dp = product("...qh,...kh->...qk", d_rows, given.v, dtype).reshape(s.shape)
    hidden = s == -jnp.inf
    p = jnp.where(hidden, 0, exp(s - level))  # of a NaN row too
    ds = jnp.where(hidden, 0, p * (dp - delta))
    dbias = None if bias is None else _summed_to(ds, bias)
    if settings.soft_cap is not None:
        ds = ds * (1 - (capped / settings.soft_cap) ** 2)
    p, ds = (layout.merged(x).astype(given.q.dtype) for x in (p, ds))
    dq = product("...qk,...kh->...qh", ds, given.k, dtype) * settings.scale
    dk = product("...qk,...qh->...kh", ds, given.q, dtype) * settings.scale
    dv = product("...qk,...qh->...kh", p, d_rows, dtype)
    found = layout.by_token(dq.reshape(*s.shape[:5], -1)), layout.by_key(dk), layout.by_key(dv)
    return *(x.astype(q.dtype) for x in found), dbias


DERIVATIVES = Derivatives("dense", _output, _gradients)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Bands of queries, each with its keys. Arrays of logits are [B, K, bands, G, queries, keys].

    G = N / K query heads of a kv head are rows of one product. Without a window there is one band:
    all queries, all keys.
    """

    sizes: Sizes
    bands: int
    queries: int  # of a band; bands · queries may be more than T
    keys: int  # of a band
    starts: tuple[int, ...] | None = None  # the first key of every band; None: 0, of the only one

    @classmethod
    def of(cls, sizes: Sizes, mask: BlockMask, bias: Array | None) -> Layout:
        """Bands where the rule is the whole mask, is a window for any data, and there is no bias.

        All bands have as many keys as the widest one.
        """
        whole = cls(sizes, 1, sizes.T, sizes.S)
        if bias is not None or not mask.is_rule or min(sizes.T, sizes.S) <= BAND:
            return whole
        grid = Grid((sizes.T, sizes.S), (BAND, BAND))
        spans = mask.rule.upper_bound().spans(grid)
        if spans is None:
            return whole
        rows, columns = grid.counts
        first, last = np.clip(spans.live_lo, 0, columns), np.clip(spans.live_hi, 0, columns)
        width = max(1, int((last - first).max()))
        if width * BAND > WORTHWHILE * sizes.S:
            return whole
        starts = np.minimum(first, columns - width) * BAND
        return cls(sizes, rows, BAND, width * BAND, tuple(map(int, starts)))

    # Queries

    def rows(self, x: Array, past: float = 0) -> Array:
        """[B, T, N, D] -> [B, K, bands, G, queries, D], with `past` for queries past the last."""
        B, T, N, D = x.shape
        ends = ((0, 0), (0, self.bands * self.queries - T), (0, 0), (0, 0))
        x = x if ends[1][1] == 0 else jnp.pad(x, ends, constant_values=past)
        x = x.reshape(B, self.bands, self.queries, self.sizes.K, -1, D)
        return x.transpose(0, 3, 1, 4, 2, 5)

    def by_token(self, x: Array) -> Array:
        """The inverse of `rows`."""
        x = x.transpose(0, 2, 4, 1, 3, 5)
        return x.reshape(x.shape[0], -1, self.sizes.N, x.shape[-1])[:, : self.sizes.T]

    def merged(self, x: Array) -> Array:
        """[B, K, bands, G, queries, …] -> [B, K, bands, G · queries, …], rows of one product."""
        return x.reshape(*x.shape[:3], -1, x.shape[-1])

    # Keys

    def of_bands(self, x: Array) -> Array:
        """[B, S, K, D] -> [B, K, bands, keys, D]; past the last key zeros."""
        x = jnp.moveaxis(x, 1, 2)
        if self.starts is None:
            return x[:, :, None]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % BAND), (0, 0)))
        return x[:, :, self.key_index()]

    def by_key(self, x: Array) -> Array:
        """[B, K, bands, keys, D] -> [B, S, K, D]: the sum over all bands that have a key."""
        if self.starts is None:
            return jnp.moveaxis(x[:, :, 0], 1, 2)
        S = self.sizes.S
        total = jnp.zeros((*x.shape[:2], S + -S % BAND, x.shape[-1]), x.dtype)
        total = _jax.vary(total, _jax.varying_axes(x)).at[:, :, self.key_index()].add(x)
        return jnp.moveaxis(total[:, :, :S], 1, 2)

    def key_index(self) -> np.ndarray:
        """Key numbers [bands, keys], past S too."""
        starts = np.zeros(1, np.int32) if self.starts is None else np.asarray(self.starts, np.int32)
        return starts[:, None] + np.arange(self.keys, dtype=np.int32)[None]

    # Token pairs

    def tiled(self, x: Array) -> Array:
        """[B|1, N|1, T|1, S|1] -> an array that broadcasts to the logits of one band."""
        K = self.sizes.K if x.shape[1] > 1 else 1
        return x.reshape(x.shape[0], K, 1, -1, *x.shape[2:])

    def allowed(self, mask: BlockMask) -> Array:
        """Which token pairs, broadcastable to the logits."""
        B, _, S, N, K, *_ = self.sizes
        if self.starts is None:
            return self.tiled(mask.to_dense(B, N))
        b = np.arange(B, dtype=np.int32).reshape(B, 1, 1, 1, 1, 1)
        n = np.arange(N, dtype=np.int32).reshape(1, K, 1, N // K, 1, 1)
        q = np.arange(self.bands * self.queries, dtype=np.int32)
        q = q.reshape(1, 1, self.bands, 1, self.queries, 1)
        k = self.key_index().reshape(1, 1, self.bands, 1, 1, self.keys)
        return mask.rule.allows(Tokens.at(*map(jnp.asarray, (b, n, q, k)))) & (k < S)


class Given(NamedTuple):
    """Operands of the products; rows of q, k and v that are not finite are zeros."""

    q: Array  # [B, K, bands, G · queries, H]
    k: Array  # [B, K, bands, keys, H]
    v: Array  # [B, K, bands, keys, Hv]
    q_flaw: Array  # [B, K, bands, G, queries, 1]: 0, or NaN where q is not finite
    k_flaw: Array  # [B, K, bands, 1, 1, keys]: 0, or NaN where k or v is not finite

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, layout: Layout) -> Given:
        """The operands of q [B, T, N, H], k [B, S, K, H] and v [B, S, K, Hv]."""
        sound = [jnp.isfinite(x).all(-1, keepdims=True) for x in (q, k, v)]
        q, k, v = (operand(jnp.where(ok, x, 0)) for ok, x in zip(sound, (q, k, v), strict=True))
        q_flaw, k_flaw = (
            jnp.where(ok, 0, jnp.nan).astype(accumulator(q.dtype))
            for ok in (sound[0], sound[1] & sound[2])
        )
        k_flaw = layout.of_bands(k_flaw)[..., None, None, :, 0]
        k, v = layout.of_bands(k), layout.of_bands(v)
        return cls(layout.merged(layout.rows(q)), k, v, layout.rows(q_flaw), k_flaw)

    def logits(
        self, settings: Settings, layout: Layout, bias: Array | None, mask: BlockMask
    ) -> tuple[Array, Array]:
        """(s, capped): all logits, -inf where nothing is seen; and the same before the bias."""
        dtype = self.q_flaw.dtype
        capped = logits(self.q, self.k, settings.scale, settings.soft_cap, dtype)
        capped = capped.reshape(*self.q_flaw.shape[:5], layout.keys)
        s = capped + self.q_flaw + self.k_flaw
        s = s if bias is None else s + layout.tiled(bias.astype(dtype))
        return jnp.where(layout.allowed(mask), s, -jnp.inf), capped


def _summed_to(x: Array, like: Array) -> Array:
    """x [B, K, 1, G, T, S] summed over the axes that `like` [B|1, N|1, T|1, S|1] shares."""
    x = x.reshape(x.shape[0], -1, *x.shape[4:])
    shared = [axis for axis, size in enumerate(like.shape) if size == 1 < x.shape[axis]]
    return x.sum(shared, keepdims=True).astype(like.dtype)
