"""Attention in NumPy float64, written from the formulas: it shares no code with xsake.

A mask is a spec: nested tuples that name a rule and its values, for instance

    ("and", ("causal",), ("documents", ids, ids))

`allowed` spells a spec out as bool [B, N, T, S]; tests/specs.py makes the xsake rule of it.
`attention` and `attention_grads` are the formulas, with nothing clever in them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

Spec = tuple[Any, ...]

# The same sums as without `optimize`, but by matrix products, which are far faster.
_einsum = partial(np.einsum, optimize=True)


# ---------------------------------------------------------------- who sees whom


@dataclass(frozen=True)
class Grid:
    """Coordinates of every (b, n, q, k), each an array that broadcasts to [B, N, T, S]."""

    b_index: np.ndarray
    n_index: np.ndarray
    q_index: np.ndarray
    k_index: np.ndarray
    b: np.ndarray  # global index of the batch row, across shards
    n: np.ndarray  # global index of the head
    q: np.ndarray  # position of the query
    k: np.ndarray  # position of the key


def allowed(spec, B, N, T, S, *, q_positions=None, kv_positions=None) -> np.ndarray:
    """Bool [B, N, T, S]: True where `spec` lets query q of row b, head n see key k."""
    b, n = np.arange(B)[:, None, None, None], np.arange(N)[None, :, None, None]
    q, k = np.arange(T)[None, None, :, None], np.arange(S)[None, None, None, :]
    grid = _moved(Grid(b, n, q, k, b, n, q, k), q_positions, kv_positions)
    return np.broadcast_to(_evaluate(spec, grid), (B, N, T, S))


def _evaluate(spec: Spec, at: Grid) -> np.ndarray:
    name, *values = spec
    return _RULES[name](at, *values)


def _moved(at: Grid, q_positions, kv_positions) -> Grid:
    if q_positions is not None:
        at = replace(at, q=_rows(q_positions)[:, None, :, None])
    if kv_positions is not None:
        at = replace(at, k=_rows(kv_positions)[:, None, None, :])
    return at


def _rows(x) -> np.ndarray:
    """[T] or [B|1, T], as [B|1, T]."""
    return np.atleast_2d(np.asarray(x))


def _per_batch(x) -> np.ndarray:
    """int or [B], ready to broadcast against [B, N, T, S]."""
    return np.asarray(x).reshape(-1, 1, 1, 1)


def _window(at: Grid, left, right, stride=1):
    offset = at.k - at.q
    inside = offset % stride == 0
    if left is not None:
        inside = inside & (offset >= -left * stride)
    if right is not None:
        inside = inside & (offset <= right * stride)
    return inside


def _documents(at: Grid, q_ids, kv_ids=None):
    q_ids = _rows(q_ids)
    kv_ids = q_ids if kv_ids is None else _rows(kv_ids)
    mine, theirs = q_ids[:, None, :, None], kv_ids[:, None, None, :]
    return (mine == theirs) & (mine >= 0)


def _lengths(at: Grid, query, key_value):
    inside = np.bool_(True)
    if query is not None:
        inside = inside & (at.q_index < _per_batch(query))
    if key_value is not None:
        inside = inside & (at.k_index < _per_batch(key_value))
    return inside


def _random(at: Grid, density, seed, block):
    """Murmur3's finaliser over (seed, head, row of blocks, column of blocks), 32 bits wide."""
    low = np.uint64(0xFFFFFFFF)

    def times(x, factor):
        return (np.asarray(x).astype(np.uint64) * np.uint64(factor)) & low

    x = times(seed, 0x9E3779B9) ^ times(at.n, 0x85EBCA6B)
    x = x ^ times(at.q // block, 0xC2B2AE35) ^ times(at.k // block, 0x27D4EB2F)
    x = times(x ^ (x >> np.uint64(16)), 0x85EBCA6B)
    x = times(x ^ (x >> np.uint64(13)), 0xC2B2AE35)
    x = x ^ (x >> np.uint64(16))
    return x.astype(np.float64) < density * 2.0**32


def _blocks(at: Grid, bits, block):
    """bits [B|1, heads, nq, nk]; N // heads query heads share a head of bits."""
    heads = np.asarray(bits).shape[1]
    bits = np.repeat(np.asarray(bits), max(1, at.n_index.size // heads), axis=1)
    bits = bits[:, :, at.q_index.ravel() // block[0], :]
    return bits[:, :, :, at.k_index.ravel() // block[1]]


def _function(at: Grid, fn, arrays=(), reads=None):
    reads = reads or ("indices" if arrays else "positions")
    if reads == "positions":
        return fn(at.b, at.n, at.q, at.k, *arrays)
    return fn(at.b_index, at.n_index, at.q_index, at.k_index, *arrays)


def _numbered(at: Grid, spec, batch, heads):
    if batch is not None:
        at = replace(at, b=np.asarray(batch)[:, None, None, None])
    if heads is not None:
        at = replace(at, n=np.asarray(heads)[None, :, None, None])
    return _evaluate(spec, at)


def _longformer(at: Grid, window, n_global):
    return _window(at, *window) | (at.q < n_global) | (at.k < n_global)


_RULES = {
    "everything": lambda at: np.bool_(True),
    "causal": lambda at: at.k <= at.q,
    "sliding_window": _window,
    "chunked": lambda at, size: at.q // size == at.k // size,
    "first": lambda at, n: at.k < n,
    "prefix": lambda at, lengths: at.k < _per_batch(lengths),
    "lengths": _lengths,
    "documents": _documents,
    "strided": lambda at, stride: (at.q - at.k) % stride == 0,
    "dilated": lambda at, window, dilation: _window(at, *window, stride=dilation),
    "global_tokens": lambda at, n: (at.q < n) | (at.k < n),
    "longformer": _longformer,
    "bigbird": lambda at, window, n_global, density, seed, block: (
        _longformer(at, window, n_global) | _random(at, density, seed, block)
    ),
    "random": _random,
    "array": lambda at, mask: np.asarray(mask),
    "blocks": _blocks,
    "function": _function,
    "positions": lambda at, spec, q, k: _evaluate(spec, _moved(at, q, k)),
    "numbered": _numbered,
    "and": lambda at, a, b: _evaluate(a, at) & _evaluate(b, at),
    "or": lambda at, a, b: _evaluate(a, at) | _evaluate(b, at),
    "not": lambda at, a: ~_evaluate(a, at),
}


# ---------------------------------------------------------------- attention


def attention(q, k, v, *, allowed, bias=None, scale=None, soft_cap=None, sinks=None):
    """Output [B, T, N, Hv] and logsumexp [B, T, N] (sinks left out) in float64.

    A query that sees nothing gets zeros and -inf.
    """
    w = _weights(q, k, allowed, bias, scale, soft_cap, sinks)
    return _mix(w.p, _for_each_query_head(v, w.p)), w.lse.transpose(0, 2, 1)


def attention_grads(
    q, k, v, *, allowed, d_out, d_lse=None, bias=None, scale=None, soft_cap=None, sinks=None
) -> dict[str, np.ndarray]:
    """Gradients of sum(out * d_out) + sum(lse * d_lse): dq, dk, dv, and dbias, dsinks if given.

    A query that sees no key contributes no gradient and gets 0, whatever its d_lse.
    """
    w = _weights(q, k, allowed, bias, scale, soft_cap, sinks)
    return _pull_back(w, *map(_f64, (q, k, v, d_out, d_lse)), bias, sinks, sign=-1)


def gradient_terms(
    q, k, v, *, allowed, d_out, d_lse=None, bias=None, scale=None, soft_cap=None, sinks=None
) -> dict[str, float]:
    """For each gradient, the sum of |terms| of an element, maximised over the elements.

    Rounding errors are proportional to this sum, also where the terms cancel: a query that sees one
    key has dq = 0.
    """
    w = _weights(q, k, allowed, bias, scale, soft_cap, sinks)
    w = replace(w, slope=np.ones_like(w.slope), scale=abs(w.scale))
    sizes = [None if x is None else np.abs(_f64(x)) for x in (q, k, v, d_out, d_lse)]
    grads = _pull_back(w, *sizes, bias, sinks, sign=+1)
    return {name: float(np.abs(x).max(initial=0)) for name, x in grads.items()}


def statistics(q, k, *, allowed, block, bias=None, scale=None, soft_cap=None, sinks=None):
    """(entropy [B, N, T] over keys, over blocks, mass [B, N, row blocks, kv blocks]) in float64.

    All sinks of a head are one outcome. The mass is the mean over a row block's queries.
    """
    w = _weights(q, k, allowed, bias, scale, soft_cap, sinks)
    rows, columns = (np.arange(0, size, at) for size, at in zip(w.p.shape[2:], block, strict=True))
    blocks = np.add.reduceat(w.p, columns, axis=-1)
    mass = np.add.reduceat(blocks, rows, axis=2)
    mass = mass / np.diff(np.append(rows, w.p.shape[2]))[:, None]
    outcomes = [] if w.p_sinks is None else [w.p_sinks.sum(-1, keepdims=True)]

    def entropy(p):
        p = np.concatenate([p, *outcomes], axis=-1)
        return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)

    return entropy(w.p), entropy(blocks), mass


@dataclass(frozen=True)
class Weights:
    """Intermediate results of the softmax, [B, N, T, S] except for the last three."""

    p: np.ndarray  # attention weights, sinks in the denominator
    p_alone: np.ndarray  # the same without sinks: the gradient of the logsumexp
    slope: np.ndarray  # d(logit) / d(scale * q.k), which the soft cap bends
    lse: np.ndarray  # [B, N, T], without sinks
    p_sinks: np.ndarray | None  # [B, N, T, M], 0 in empty rows
    scale: float


def _weights(q, k, allowed, bias, scale, soft_cap, sinks) -> Weights:
    q, k = _f64(q), _f64(k)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    logits = scale * _einsum("btnh,bsnh->bnts", q, k)
    slope = np.ones_like(logits)
    if soft_cap is not None:
        bent = np.tanh(logits / soft_cap)
        logits, slope = soft_cap * bent, 1 - bent**2
    if bias is not None:
        logits = logits + _f64(bias)
    logits = np.where(allowed, logits, -np.inf)
    lse = _logsumexp(logits)
    alone = _exp(logits, lse)
    if sinks is None:
        return Weights(alone, alone, slope, lse, None, scale)
    sinks = _f64(sinks).reshape(q.shape[2], -1)[None, :, None, :]
    total = np.logaddexp(lse, _logsumexp(sinks))
    p_sinks = np.where(np.isfinite(lse)[..., None], np.exp(sinks - total[..., None]), 0.0)
    return Weights(_exp(logits, total), alone, slope, lse, p_sinks, scale)


def _pull_back(w: Weights, q, k, v, d_out, d_lse, bias, sinks, sign) -> dict[str, np.ndarray]:
    """The chain rule; with sign = +1 and absolute inputs, the sum of |terms| instead."""
    group = q.shape[2] // k.shape[2]
    out = _mix(w.p, _for_each_query_head(v, w.p))
    d_p = _einsum("btnv,bsnv->bnts", d_out, _for_each_query_head(v, w.p))
    inner = _einsum("btnv,btnv->bnt", d_out, out)[..., None]
    d_logits = w.p * (d_p + sign * inner)
    if d_lse is not None:
        live = np.isfinite(w.lse)
        d_lse = np.where(live, d_lse.transpose(0, 2, 1), 0.0)[..., None]
        d_logits = d_logits + w.p_alone * d_lse
    d_products = w.scale * w.slope * d_logits
    grads = {
        "dq": _einsum("bnts,bsnh->btnh", d_products, _for_each_query_head(k, w.p)),
        "dk": _sum_groups(_einsum("bnts,btnh->bsnh", d_products, q), group),
        "dv": _sum_groups(_einsum("bnts,btnv->bsnv", w.p, d_out), group),
    }
    if bias is not None:
        grads["dbias"] = _sum_to(d_logits, np.shape(bias))
    if sinks is not None:
        d_sinks = sign * (w.p_sinks * inner).sum((0, 2))
        grads["dsinks"] = d_sinks.reshape(np.shape(sinks))
    return grads


def _f64(x):
    return None if x is None else np.asarray(x).astype(np.float64)


def _logsumexp(x):
    top = x.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(x - top).sum(-1)) + top[..., 0]


def _exp(logits, lse):
    return np.exp(logits - np.where(np.isfinite(lse), lse, 0.0)[..., None])


def _mix(p, v):
    return _einsum("bnts,bsnv->btnv", p, v)


def _for_each_query_head(x, p):
    x = _f64(x)
    return np.repeat(x, p.shape[1] // x.shape[2], axis=2)


def _sum_groups(x, group):
    b, s, n, h = x.shape
    return x.reshape(b, s, n // group, group, h).sum(3)


def _sum_to(x, shape):
    full = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(i for i, size in enumerate(full) if size == 1)
    return x.sum(axes, keepdims=True).reshape(shape)


# ---------------------------------------------------------------- what tests share


def relative_error(actual, expected, floor=0.0) -> float:
    """max |actual - expected| / max(max |expected|, floor); infinite where -inf or NaN differ.

    If everything expected is zero and no floor is given, any error at all counts as infinite.
    """
    actual, expected = _f64(actual), _f64(expected)
    if actual.shape != expected.shape:
        return float("inf")
    settled = ~np.isfinite(expected)
    if np.isnan(actual).any() or (actual[settled] != expected[settled]).any():
        return float("inf")
    error = np.abs(actual[~settled] - expected[~settled]).max(initial=0)
    size = max(np.abs(expected[~settled]).max(initial=0), floor)
    return float(error / size) if size else (float("inf") if error else 0.0)


def random_inputs(rng, B, T, S, N, K, H, Hv=None, magnitude=1.0) -> dict[str, np.ndarray]:
    """Normal q, k, v, and the cotangents d_out, d_lse, in float64."""
    Hv = H if Hv is None else Hv
    shapes = {
        "q": (B, T, N, H),
        "k": (B, S, K, H),
        "v": (B, S, K, Hv),
        "d_out": (B, T, N, Hv),
        "d_lse": (B, T, N),
    }
    return {name: magnitude * rng.standard_normal(shape) for name, shape in shapes.items()}
