"""Rules whose visible keys are one or two intervals for each query, two integers each.

    query q sees keys lo[q] … hi[q] - 1;  lo and hi do not decrease with q

causal, windows, chunks, prefixes, lengths, documents in order, rising positions, and their
conjunctions are of this kind; a union of two of them, as first keys and a window, is two intervals,
which may overlap. Because lo and hi do not decrease, the queries that see a key through an interval
are an interval too (`transposed`). Whether documents and positions are in order is known on the
device only: where they are not, the intervals of a batch row are all marked NOT_AN_INTERVAL, and
the rule itself has to decide.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from xsake import _jax
from xsake.masks import carrying, positional
from xsake.masks.integers import INT_MAX
from xsake.masks.rule import And, Everything, Or, Rule

NOT_AN_INTERVAL = -1  # all integers of every query of a batch row that the rule itself decides
MOST = 2  # intervals of a query


def intervals_of(rule: Rule | None, shape: tuple[int, int]) -> Array | None:
    """The rule as (lo, hi) or (lo, hi, lo, hi) of every query, int32 [B|1, 1, 2|4, T].

    None if the rule is not of this kind.
    """
    return None if rule is None else _intervals_of(rule, shape, _shares_ids(rule))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _intervals_of(rule: Rule, shape: tuple[int, int], shares_ids: bool) -> Array | None:
    T, S = shape
    at = _At(T, S, jnp.arange(T, dtype=jnp.int32)[None], shares_ids=shares_ids)
    found = _find(rule, at)
    if found is None:
        return None
    ends = [
        jnp.full((1, T), default, jnp.int32) if x is None else jnp.broadcast_to(x, (x.shape[0], T))
        for run in found
        for x, default in ((run.lo, 0), (run.hi, S))
    ]
    pairs = jnp.stack(jnp.broadcast_arrays(*ends), axis=1)
    in_order = functools.reduce(_both_in_order, (run.in_order for run in found))
    if in_order is not None:
        pairs = jnp.where(in_order[:, None, None], pairs, NOT_AN_INTERVAL)
    return pairs[:, None]


def intervals_with_data(rule: Rule | None, shape: tuple[int, int]) -> Array | None:
    """`intervals_of` a rule that carries int32 arrays, where a kernel would read them.

    Rules without arrays are as fast as their intervals, and kernels take no other integers.
    """
    if rule is None or not rule.has_data or not are_read():
        return None
    integers = (x for x in jax.tree.leaves(rule) if jnp.issubdtype(x.dtype, jnp.integer))
    return intervals_of(rule, shape) if all(x.dtype == jnp.int32 for x in integers) else None


def are_read() -> bool:
    """Whether a kernel reads intervals: on GPUs and TPUs; CPUs do not compute them."""
    return _jax.platform() in ("gpu", "tpu")


def always_intervals(rule: Rule) -> bool:
    """Whether no batch row can be marked NOT_AN_INTERVAL, given that the rule is of this kind."""
    checked = carrying.Documents, carrying.Positioned
    return not any(isinstance(part, checked) for part in _parts(rule))


def intersection(a: Array, b: Array) -> Array | None:
    """The intervals of the conjunction of two rules; None if there are more than two of them."""
    ends = [
        end
        for i in range(0, a.shape[-2], 2)
        for j in range(0, b.shape[-2], 2)
        for end in (
            jnp.maximum(a[..., i, :], b[..., j, :]),
            jnp.minimum(a[..., i + 1, :], b[..., j + 1, :]),
        )
    ]
    if len(ends) > 2 * MOST:
        return None
    is_marked = (a[..., :1, :] < 0) | (b[..., :1, :] < 0)
    return jnp.where(is_marked, NOT_AN_INTERVAL, jnp.stack(ends, axis=-2))


@functools.partial(jax.jit, static_argnums=1)
def transposed(intervals: Array, keys: int) -> Array:
    """For every key the queries that see it, int32 [B|1, 1, 2|4, S]."""
    key = jnp.arange(keys, dtype=jnp.int32)[None]
    # The first query whose hi is beyond the key, and the first one whose lo is.
    ends = [
        _search(intervals[:, 0, i], key, side="right")
        for run in range(0, intervals.shape[2], 2)
        for i in (run + 1, run)
    ]
    is_marked = intervals[..., :1, :1] < 0
    return jnp.where(is_marked, NOT_AN_INTERVAL, jnp.stack(ends, axis=1)[:, None])


class _At(NamedTuple):
    """Where a rule is translated."""

    T: int
    S: int
    q: Array  # positions of the queries, int32 [B|1, T]
    kv_positions: Array | None = None  # int32 [B|1, S]; None: the indices
    has_positions: bool = False  # whether any positions are given
    shares_ids: bool = False  # whether queries and keys of documents have the same ids
    is_causal: bool = False  # whether keys after the query's index are hidden by another rule


class _Found(NamedTuple):
    """An interval of key indices for each query."""

    lo: Array | None  # int32 [B|1, T|1]; None: 0
    hi: Array | None  # int32 [B|1, T|1]; None: S
    # bool [B|1]: whether this is an interval, and neither end decreases; None: always
    in_order: Array | None = None


Runs = tuple[_Found, ...]  # one or two; a key is seen if any of them has it


def _find(rule: Rule, at: _At) -> Runs | None:
    match rule:
        case Everything():
            return (_Found(None, None),)
        case And():
            sides = (rule.a, rule.b), (rule.b, rule.a)
            a, b = (
                _find(one, at._replace(is_causal=at.is_causal or _is_causal(other, at)))
                for one, other in sides
            )
            return None if a is None or b is None else _and(a, b)
        case Or():
            a, b = _find(rule.a, at), _find(rule.b, at)
            return None if a is None or b is None else _or(a, b)
        case carrying.Positioned():
            return _positioned(rule, at)
    found = _find_one(rule, at)
    return None if found is None else (found,)


def _find_one(rule: Rule, at: _At) -> _Found | None:
    match rule:
        case positional.Window():
            first = None if rule.left is None else _add(at.q, -rule.left)
            return _positions(at, first, None if rule.right is None else _add(at.q, rule.right))
        case positional.First():
            return _positions(at, None, _add(jnp.zeros((1, 1), jnp.int32), rule.n - 1))
        case carrying.Prefix():
            return _positions(at, None, _add(rule.lengths[:, None], -1))
        case positional.Chunked() if not at.has_positions:
            size = min(rule.size, INT_MAX)
            first = at.q // size * size
            return _positions(at, first, _add(first, size - 1))
        case carrying.Lengths():
            return _lengths(rule, at)
        case carrying.Documents():
            return _documents(rule, at)
        case carrying.Between():
            return _Found(*(jnp.clip(x, 0, at.S) for x in (rule.lo, rule.hi)))
    return None


def _and(a: Runs, b: Runs) -> Runs | None:
    if len(a) * len(b) > MOST:
        return None
    return tuple(
        _Found(
            _either(jnp.maximum, x.lo, y.lo),
            _either(jnp.minimum, x.hi, y.hi),
            _both_in_order(x.in_order, y.in_order),
        )
        for x in a
        for y in b
    )


def _or(a: Runs, b: Runs) -> Runs | None:
    """The union: one interval if both begin at the first key or both end at the last one."""
    if len(a) == len(b) == 1 and (one := _joined(a[0], b[0])) is not None:
        return (one,)
    return (*a, *b) if len(a) + len(b) <= MOST else None


def _joined(a: _Found, b: _Found) -> _Found | None:
    in_order = _both_in_order(a.in_order, b.in_order)
    if a.lo is None and b.lo is None:
        return _Found(
            None, None if a.hi is None or b.hi is None else jnp.maximum(a.hi, b.hi), in_order
        )
    if a.hi is None and b.hi is None:
        return _Found(
            None if a.lo is None or b.lo is None else jnp.minimum(a.lo, b.lo), None, in_order
        )
    return None


def _both_in_order(a: Array | None, b: Array | None) -> Array | None:
    return _either(jnp.logical_and, a, b)


def _either(combine: Any, a: Array | None, b: Array | None) -> Array | None:
    return b if a is None else a if b is None else combine(a, b)


def _add(x: Array, number: int) -> Array:
    """x + number, which stays within int32."""
    number = max(-INT_MAX, min(number, INT_MAX))
    if number >= 0:
        return jnp.minimum(x, INT_MAX - number) + number
    return jnp.maximum(x, -INT_MAX - 1 - number) + number


def _positions(at: _At, first: Array | None, last: Array | None) -> _Found:
    """The keys at positions first … last; None: no limit on that side."""
    if at.kv_positions is None:
        lo = None if first is None else jnp.clip(first, 0, at.S)
        return _Found(lo, None if last is None else jnp.clip(last, -1, at.S - 1) + 1)
    lo = None if first is None else _search(at.kv_positions, first, side="left")
    hi = None if last is None else _search(at.kv_positions, last, side="right")
    return _Found(lo, hi, _rises(at.kv_positions).all(-1))


def _positioned(rule: carrying.Positioned, at: _At) -> Runs | None:
    at = at._replace(has_positions=True)
    if rule.q_positions is not None:
        at = at._replace(q=rule.q_positions)
    if rule.kv_positions is not None:
        at = at._replace(kv_positions=rule.kv_positions)
    found = _find(rule.a, at)
    if found is None or rule.q_positions is None:
        return found
    return _and(found, (_Found(None, None, _rises(rule.q_positions).all(-1)),))


def _lengths(rule: carrying.Lengths, at: _At) -> _Found:
    lo = hi = None
    if rule.query is not None:  # a query past its length sees keys from S on, which is none
        lo = jnp.where(jnp.arange(at.T)[None] < rule.query[:, None], 0, at.S).astype(jnp.int32)
    if rule.key_value is not None:
        hi = jnp.clip(rule.key_value, 0, at.S)[:, None]
    return _Found(lo, hi)


def _documents(rule: carrying.Documents, at: _At) -> _Found:
    """The run of keys with the query's id; ids in order, padding before or after all of them."""

    def keys(ids: Array) -> Array:
        """The ids, where padding sorts before all documents if it is first, else after them."""
        return jnp.where(ids >= 0, ids, jnp.where(ids[:, :1] < 0, -1, INT_MAX))

    q, kv = keys(rule.q_ids), keys(rule.kv_ids)
    lo = _search(kv, q, side="left")
    if at.shares_ids and at.is_causal:  # the query's own key is in its document: no other search
        hi = jnp.arange(1, at.T + 1, dtype=jnp.int32)[None]
    else:
        hi = _search(kv, q, side="right")
    hi = jnp.where(rule.q_ids >= 0, hi, lo)
    # A document whose id is that of padding would see it.
    q_in_order, kv_in_order = _rises(q) & (rule.q_ids < INT_MAX), _rises(kv)
    if at.T == at.S:  # one reduction; where both are the same ids, XLA drops the second half
        return _Found(lo, hi, (q_in_order & kv_in_order).all(-1))
    return _Found(lo, hi, q_in_order.all(-1) & kv_in_order.all(-1))


def _is_causal(rule: Rule, at: _At) -> bool:
    """Whether the rule hides the keys after a query's own index."""
    match rule:
        case positional.Window():
            return not at.has_positions and rule.right is not None and rule.right <= 0
        case And():
            return _is_causal(rule.a, at) or _is_causal(rule.b, at)
    return False


def _shares_ids(rule: Rule) -> bool:
    """Whether the ids of queries and keys are one array in all documents of the rule."""
    of_ids = (part for part in _parts(rule) if isinstance(part, carrying.Documents))
    return all(part.q_ids is part.kv_ids for part in of_ids)


def _rises(x: Array) -> Array:
    """Whether each element of the last axis is at least as large as the one before it."""
    before = lax.pad(x, jnp.int32(-INT_MAX - 1), [(0, 0, 0)] * (x.ndim - 1) + [(1, -1, 0)])
    return x >= before


def _search(rising: Array, values: Array, side: str) -> Array:
    """np.searchsorted for every batch row: [B|1, L], [B|1, V] -> int32 [B|1, V].

    Unrolled: a loop costs a GPU a launch for each of its steps.
    """
    search = functools.partial(jnp.searchsorted, side=side, method="scan_unrolled")
    shared = [x.shape[0] == 1 for x in (rising, values)]
    arrays = [x[0] if one else x for x, one in zip((rising, values), shared, strict=True)]
    if all(shared):
        return search(*arrays)[None].astype(jnp.int32)
    axes = tuple(None if one else 0 for one in shared)
    return jax.vmap(search, in_axes=axes)(*arrays).astype(jnp.int32)


def _parts(rule: Rule) -> Iterator[Rule]:
    """The rule and all rules that it is made of."""
    yield rule
    for field in dataclasses.fields(rule):  # type: ignore[arg-type]
        if isinstance(part := getattr(rule, field.name), Rule):
            yield from _parts(part)
