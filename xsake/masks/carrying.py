"""Rules that carry arrays: lengths, documents, token masks, functions, positions, global b, n."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Int

from xsake.masks.integers import int_array, uncut
from xsake.masks.positional import Window, first
from xsake.masks.rule import (
    EVERYTHING,
    Grid,
    Leaf,
    Rule,
    Tokens,
    carries_data,
    combine,
    conjuncts,
    cut,
    leaf,
    value_range,
)


@carries_data
class Prefix(Rule):
    """k < lengths[b]."""

    lengths: Leaf = leaf()  # [B]
    axes = {"lengths": ("b",)}

    def allows(self, tokens: Tokens) -> Array:
        return tokens.k < self.lengths[tokens.b_index]

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        k_lo, k_hi = grid.k_range()
        limit = self.lengths[:, None, None, None]
        return k_lo < limit, k_hi < limit

    def __str__(self) -> str:
        return f"prefix([{self.lengths.shape[0]}])"


def prefix(lengths: int | Int[ArrayLike, ...]) -> Rule:
    """Every query sees the keys before a length: k < length, one number or an int array [B].

    A prefix language model is `prefix(lengths) | causal()`.
    """
    if isinstance(lengths, (int, np.integer)):
        if lengths < 0:
            raise ValueError(f"the prefix length must not be negative, got {lengths}")
        return first(int(lengths))
    return Prefix(int_array("prefix lengths", lengths, 1))


@carries_data
class Lengths(Rule):
    """index of q < query[b], index of k < key_value[b]."""

    query: Leaf = leaf()  # [B]
    key_value: Leaf = leaf()
    axes = {"query": ("b",), "key_value": ("b",)}

    def allows(self, tokens: Tokens) -> Array:
        real = jnp.ones((), bool)
        if self.query is not None:
            real = real & (tokens.q_index < self.query[tokens.b_index])
        if self.key_value is not None:
            real = real & (tokens.k_index < self.key_value[tokens.b_index])
        return real

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        live = full = jnp.ones((1, 1, 1, 1), bool)
        for limit, (lo, hi) in (
            (self.query, grid.q_index_range()),
            (self.key_value, grid.k_index_range()),
        ):
            if limit is not None:
                limit = limit[:, None, None, None]
                live, full = live & (lo < limit), full & (hi < limit)
        return live, full

    def __str__(self) -> str:
        given = [name for name in ("query", "key_value") if getattr(self, name) is not None]
        return f"lengths({', '.join(given)})"


def lengths(
    query: Int[ArrayLike, ...] | None = None, key_value: Int[ArrayLike, ...] | None = None
) -> Rule:
    """Only the first query[b] queries and key_value[b] keys of a batch row count; int [B]."""
    if query is None and key_value is None:
        return EVERYTHING
    given = (
        None if x is None else int_array(f"{name} lengths", x, 1)
        for name, x in (("query", query), ("key_value", key_value))
    )
    return Lengths(*given)


@carries_data
class Documents(Rule):
    """Equal, non-negative ids."""

    q_ids: Leaf = leaf()  # [B|1, T]
    kv_ids: Leaf = leaf()  # [B|1, S]
    axes = {"q_ids": ("b", "q"), "kv_ids": ("b", "k")}

    def allows(self, tokens: Tokens) -> Array:
        q_id = read(self.q_ids, tokens.b_index, tokens.q_index)
        k_id = read(self.kv_ids, tokens.b_index, tokens.k_index)
        return (q_id == k_id) & (q_id >= 0)

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        def summary(ids: Array, block: int) -> tuple[Array, Array, Array]:
            ids = cut(ids, block, -1, -1)
            real = ids >= 0
            # an empty block has lo > hi: it overlaps nothing
            lo = jnp.where(real, ids, jnp.iinfo(ids.dtype).max).min(-1)
            return lo, ids.max(-1), real.all(-1)

        q_lo, q_hi, q_whole = (x[:, None, :, None] for x in summary(self.q_ids, grid.block[0]))
        k_lo, k_hi, k_whole = (x[:, None, None, :] for x in summary(self.kv_ids, grid.block[1]))
        live = (q_lo <= k_hi) & (k_lo <= q_hi)
        same = (q_lo == q_hi) & (k_lo == k_hi) & (q_lo == k_lo)
        return live, same & q_whole & k_whole

    def __str__(self) -> str:
        return f"documents({list(self.q_ids.shape)}, {list(self.kv_ids.shape)})"


def read(values: Array, b: Any, at: Any) -> Array:
    """values[b, at] for values [B|1, L]; past the end the last one again, masked later."""
    return values[0 if values.shape[0] == 1 else b, jnp.minimum(at, values.shape[1] - 1)]


def documents(q_ids: Int[ArrayLike, "*B T"], kv_ids: Int[ArrayLike, "*C S"] | None = None) -> Rule:
    """Tokens see each other only inside a document: equal, non-negative segment ids.

    Args:
      q_ids: int [B|1, T] or [T], in any order; negative = padding, which sees nothing.
      kv_ids: int [B|1, S] or [S]; default q_ids.
    """
    q_ids = int_array("q_ids", q_ids, 2)
    return Documents(q_ids, q_ids if kv_ids is None else int_array("kv_ids", kv_ids, 2))


def remedy_for(fn: Callable[..., Any]) -> str:
    """What to do with a function that was given in place of a rule."""
    if getattr(fn, "__module__", "").startswith("xsake.masks."):
        return f"call it: masks.{fn.__name__}(…)"
    return "wrap it with xsake.masks.rule(fn)"


@carries_data
class Between(Rule):
    """lo[b, q] <= index of k < hi[b, q]; neither decreases with q, which is not checked."""

    lo: Leaf = leaf()  # int32 [B|1, T]
    hi: Leaf = leaf()
    axes = {"lo": ("b", "q"), "hi": ("b", "q")}

    def allows(self, tokens: Tokens) -> Array:
        lo, hi = (read(x, tokens.b_index, tokens.q_index) for x in (self.lo, self.hi))
        return (lo <= tokens.k_index) & (tokens.k_index < hi)

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        (lo, last_lo), (first_hi, hi) = (
            (x[:, None, :, None] for x in value_range(ends, grid.block[0]))
            for ends in (self.lo, self.hi)
        )
        k_lo, k_hi = grid.k_index_range()
        return (lo <= k_hi) & (k_lo < hi), (last_lo <= k_lo) & (k_hi < first_hi)

    def __str__(self) -> str:
        return f"between({list(self.lo.shape)})"


@carries_data
class TokenArray(Rule):
    """mask[b, n, q, k], by index."""

    mask: Leaf = leaf()  # bool [B|1, N|1, T|1, S|1]
    axes = {"mask": ("b", "n", "q", "k")}
    shared = "bnqk"

    def allows(self, tokens: Tokens) -> Array:
        at = (tokens.b_index, tokens.n_index, tokens.q_index, tokens.k_index)
        sizes = self.mask.shape
        return self.mask[
            tuple(0 if d == 1 else jnp.minimum(i, d - 1) for i, d in zip(at, sizes, strict=True))
        ]

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        live = full = self.mask
        for axis, block in ((2, grid.block[0]), (3, grid.block[1])):
            if self.mask.shape[axis] > 1:
                live = cut(live, block, axis, False).any(axis + 1)
                full = cut(full, block, axis, True).all(axis + 1)
        return live, full

    def __str__(self) -> str:
        return f"array({list(self.mask.shape)})"


def array(mask: Bool[ArrayLike, ...]) -> Rule:
    """A bool array broadcastable to [B, N, T, S], True = attend; missing leading axes are added."""
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"a mask array must be bool (an additive mask goes to bias), got {mask.dtype}"
        )
    if mask.ndim > 4:
        raise ValueError(f"a mask array has at most 4 axes [B, N, T, S], got shape {mask.shape}")
    return TokenArray(mask.reshape((1,) * (4 - mask.ndim) + mask.shape))


@dataclasses.dataclass(frozen=True)
class _Function:
    fn: Callable[..., Any]
    reads: str


@carries_data
class Custom(Rule):
    """A function with the arrays that it reads."""

    function: _Function
    arrays: Leaf = leaf()

    def allows(self, tokens: Tokens) -> Array:
        at = tokens[:4] if self.function.reads == "positions" else tokens[4:]
        try:
            found = self.function.fn(*at, *self.arrays)
        except (jax.errors.TracerBoolConversionError, ValueError) as error:
            if isinstance(error, ValueError) and "truth value of an array" not in str(error):
                raise
            raise TypeError(
                f"{self} asks whether an array is true, with `if`, `and`, `or` or `not`; "
                "combine conditions with & | ~ and choose with jnp.where"
            ) from error
        found, pairs = self._bools(found), np.broadcast_shapes(*map(np.shape, at))
        try:
            np.broadcast_shapes(found.shape, pairs)
        except ValueError:
            raise TypeError(
                f"{self} returned {list(found.shape)}, which does not broadcast with b, n, q and "
                f"k, together {list(pairs)} here; make it of them by elementwise operations"
            ) from None
        return found

    def _bools(self, found: Any) -> Any:
        """Integers other than 0 are true; combined bit by bit, 1 & 2 would be 0."""
        if found is None:
            raise TypeError(f"{self} returned None; it must return bools")
        dtype = jnp.result_type(found)
        if dtype == jnp.bool_:
            return jnp.asarray(found)
        if jnp.issubdtype(dtype, jnp.integer):
            return jnp.asarray(found) != 0
        raise TypeError(f"{self} returned {dtype}; it must return bools, such as q - k < 100")

    def upper_bound(self) -> Rule:
        return EVERYTHING

    def check_can_be_split(self) -> None:
        if self.arrays and self.function.reads == "indices":
            raise ValueError(
                f"{self} reads its arrays by local index, and their axes are not known, so they "
                'cannot be sharded; wrap it with reads="positions", which passes global b and n'
            )

    def __eq__(self, other: object) -> bool:
        if self.arrays or not isinstance(other, Custom):
            return self is other
        return not other.arrays and self.function == other.function

    def __hash__(self) -> int:
        return id(self) if self.arrays else hash(self.function)

    def __str__(self) -> str:
        return f"rule({getattr(self.function.fn, '__name__', 'fn')})"


def rule(fn: Callable[..., Any], *arrays: ArrayLike, reads: str | None = None) -> Rule:
    """Wraps a function (b, n, q, k, *arrays) -> bool of arrays that broadcast, as a rule.

    Args:
      fn: e.g. `lambda b, n, q, k: q - k < 100 * (n + 1)`; FlexAttention's mask_mod has this form.
        Conditions are combined with & | ~. Integers other than 0 count as True.
      *arrays: what fn reads; they may be traced, and change without a recompile.
      reads: "positions": q and k are positions, b and n global; "indices": all four are local
        indices into this call's arrays. Default: "indices" if arrays are given, else "positions".
    """
    if not callable(fn):
        raise TypeError(f"masks.rule takes a function of (b, n, q, k), got {type(fn).__name__}")
    _check_arguments(fn, len(arrays))
    reads = reads or ("indices" if arrays else "positions")
    if reads not in ("positions", "indices"):
        raise ValueError(f'reads must be "positions" or "indices", got {reads!r}')
    return Custom(_Function(fn, reads), tuple(uncut("a rule's array", x) for x in arrays))


def _check_arguments(fn: Callable[..., Any], arrays: int) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of some callables Python does not know it
        return
    try:
        signature.bind(*range(4 + arrays))
    except TypeError:
        wanted = "(b, n, q, k)" if not arrays else f"(b, n, q, k) and {arrays} arrays"
        raise TypeError(f"a rule's function takes {wanted}, this one takes {signature}") from None


@carries_data
class Positioned(Rule):
    """Another rule with positions from arrays."""

    a: Rule = leaf()
    q_positions: Leaf = leaf()  # [B|1, T]
    kv_positions: Leaf = leaf()  # [B|1, S]
    axes = {"q_positions": ("b", "q"), "kv_positions": ("b", "k")}

    def allows(self, tokens: Tokens) -> Array:
        if self.q_positions is not None:
            tokens = tokens._replace(q=read(self.q_positions, tokens.b_index, tokens.q_index))
        if self.kv_positions is not None:
            tokens = tokens._replace(k=read(self.kv_positions, tokens.b_index, tokens.k_index))
        return self.a.allows(tokens)

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        given = {"q_positions": self.q_positions, "kv_positions": self.kv_positions}
        given = {name: x for name, x in given.items() if x is not None}
        return self.a.classify(dataclasses.replace(grid, **given))

    def __str__(self) -> str:
        return f"at_positions({self.a})"


def at_positions(
    rule: Rule,
    q_positions: Int[ArrayLike, "*B T"] | None = None,
    kv_positions: Int[ArrayLike, "*C S"] | None = None,
) -> Rule:
    """The same rule over other positions: int [B|1, T] and [B|1, S] (or 1-D); None = arange.

    Only rules that compare positions change (causal, windows, …); segment ids and other arrays are
    read by index as before.
    """
    if q_positions is None and kv_positions is None:
        return rule
    given = (
        None if x is None else int_array(name, x, 2)
        for name, x in (("q_positions", q_positions), ("kv_positions", kv_positions))
    )
    return Positioned(rule, *given)


@carries_data
class Numbered(Rule):
    """Another rule with b and n from arrays."""

    a: Rule = leaf()
    batch: Leaf = leaf()  # [B]
    heads: Leaf = leaf()  # [N]
    axes = {"batch": ("b",), "heads": ("n",)}

    def allows(self, tokens: Tokens) -> Array:
        if self.batch is not None:
            tokens = tokens._replace(b=self.batch[tokens.b_index])
        if self.heads is not None:
            tokens = tokens._replace(n=self.heads[tokens.n_index])
        return self.a.allows(tokens)

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        b_ids = grid.b_ids if self.batch is None else self.batch[:, None, None, None]
        n_ids = grid.n_ids if self.heads is None else self.heads[None, :, None, None]
        return self.a.classify(dataclasses.replace(grid, b_ids=b_ids, n_ids=n_ids))

    @property
    def is_causal(self) -> bool:
        return self.a.is_causal

    def upper_bound(self) -> Rule:
        return self.a.upper_bound()

    def __str__(self) -> str:
        return str(self.a)


def numbered(
    rule: Rule,
    batch: Int[ArrayLike, ...] | None = None,
    heads: Int[ArrayLike, ...] | None = None,
) -> Rule:
    """The same rule with global batch rows int [B] and heads int [N] instead of local indices.

    Inside `shard_map` every device counts from 0; a rule that depends on b or n needs the global
    ones as sharded arguments. `BlockMask.from_rule` adds them by itself.
    """
    given = (
        None if x is None else int_array(f"{name} numbers", x, 1)
        for name, x in (("batch", batch), ("heads", heads))
    )
    return Numbered(rule, *given)


@carries_data
class Picked(Rule):
    """A rule fixed at one batch row and head."""

    a: Rule = leaf()
    b: Leaf = leaf()
    n: Leaf = leaf()

    def allows(self, tokens: Tokens) -> Array:
        return self.a.allows(tokens._replace(b=self.b, n=self.n, b_index=self.b, n_index=self.n))

    @property
    def is_causal(self) -> bool:
        return self.a.is_causal

    def upper_bound(self) -> Rule:
        return self.a.upper_bound()

    def __str__(self) -> str:
        return str(self.a)


@carries_data
class Swapped(Rule):
    """A rule with query and key exchanged: what a transposed BlockMask carries."""

    a: Rule = leaf()

    def allows(self, tokens: Tokens) -> Array:
        b, n, q, k, b_index, n_index, q_index, k_index = tokens
        return self.a.allows(Tokens(b, n, k, q, b_index, n_index, k_index, q_index))

    def __str__(self) -> str:
        return f"transposed({self.a})"


@carries_data
class Chosen(Rule):
    """Another rule for chosen queries: query i is query index[b, i] of that rule."""

    a: Any = leaf()  # (rule,): in a tuple, because its arrays are of all queries, not of these
    index: Leaf = leaf()  # [B|1, T]
    axes = {"index": ("b", "q")}

    def allows(self, tokens: Tokens) -> Array:
        at = read(self.index, tokens.b_index, tokens.q_index)
        return self.a[0].allows(tokens._replace(q=at, q_index=at))

    def __str__(self) -> str:
        return f"at_queries({self.a[0]})"


def at_queries(rule: Rule, index: Int[Array, "B T"]) -> Rule:
    """The rule for the queries index[b], e.g. a sample of all queries; keys stay as they are.

    Windows and documents stay rules of their own kind, which the kernels know.
    """

    def one(rule: Rule) -> Rule:
        if isinstance(rule, Window):
            return at_positions(rule, index)
        if isinstance(rule, Documents):
            ids = jnp.broadcast_to(rule.q_ids, (index.shape[0], rule.q_ids.shape[1]))
            return Documents(jnp.take_along_axis(ids, index, axis=1), rule.kv_ids)
        return Chosen((rule,), index)

    return combine(map(one, conjuncts(rule)))
