"""The Rule base class, its inputs (Tokens, Grid) and outputs (Spans), and the operators & | ~."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from xsake.masks.integers import integers

# An Array. Typed Any because JAX puts other objects there while it rebuilds a pytree.
Leaf = Any
T = TypeVar("T")


class Tokens(NamedTuple):
    """Where a rule is evaluated: integer arrays that broadcast against each other."""

    b: Any  # compared by the rule: global batch row, global query head, positions
    n: Any
    q: Any
    k: Any
    b_index: Any  # local indices into the arrays that the rule carries
    n_index: Any
    q_index: Any
    k_index: Any

    @classmethod
    def at(cls, b: Any, n: Any, q: Any, k: Any) -> Tokens:
        """Tokens whose positions are their indices."""
        return cls(b, n, q, k, b, n, q, k)


class Spans(NamedTuple):
    """For every row block, [nq] each: half-open ranges of its live and of its full kv blocks.

    NumPy arrays: only rules without arrays have spans, so they are known while a call is traced.
    """

    live_lo: np.ndarray
    live_hi: np.ndarray
    full_lo: np.ndarray
    full_hi: np.ndarray

    def live(self, nk: int) -> tuple[np.ndarray, np.ndarray]:
        """The range of live blocks among 0 … nk - 1, of every row block; empty ones are lo ≥ hi."""
        return np.clip(self.live_lo, 0, nk), np.clip(self.live_hi, 0, nk)

    def live_counts(self, nk: int) -> np.ndarray:
        """How many of the blocks 0 … nk - 1 are live, of every row block."""
        lo, hi = self.live(nk)
        return np.maximum(hi - lo, 0)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The blocks that a rule classifies: (T, S) tokens cut into (block_q, block_k)."""

    shape: tuple[int, int]
    block: tuple[int, int]
    batch: int = 1
    heads: int = 1
    b_ids: Array | None = None  # [B, 1, 1, 1], default arange
    n_ids: Array | None = None  # [1, N, 1, 1]
    q_positions: Array | None = None  # [B|1, T], default arange
    kv_positions: Array | None = None  # [B|1, S]

    @property
    def counts(self) -> tuple[int, int]:
        """Row blocks and kv blocks, the last of each possibly cut short."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    @property
    def is_contiguous(self) -> bool:
        """Whether positions are indices, so that a block holds a run of them."""
        return self.q_positions is None and self.kv_positions is None

    @property
    def b(self) -> Array:
        """Global batch rows [B, 1, 1, 1]."""
        return jnp.arange(self.batch)[:, None, None, None] if self.b_ids is None else self.b_ids

    @property
    def n(self) -> Array:
        """Global query heads [1, N, 1, 1]."""
        return jnp.arange(self.heads)[None, :, None, None] if self.n_ids is None else self.n_ids

    def q_index_range(self) -> tuple[Array, Array]:
        """First and last query index of every row block, [1, 1, nq, 1]."""
        lo, hi = map(jnp.asarray, index_range(self.shape[0], self.block[0]))
        return lo[None, None, :, None], hi[None, None, :, None]

    def k_index_range(self) -> tuple[Array, Array]:
        """First and last key index of every kv block, [1, 1, 1, nk]."""
        lo, hi = map(jnp.asarray, index_range(self.shape[1], self.block[1]))
        return lo[None, None, None, :], hi[None, None, None, :]

    def q_range(self) -> tuple[Array, Array]:
        """Smallest and largest query position of every row block, [B|1, 1, nq, 1]."""
        if self.q_positions is None:
            return self.q_index_range()
        lo, hi = value_range(self.q_positions, self.block[0])
        return lo[:, None, :, None], hi[:, None, :, None]

    def k_range(self) -> tuple[Array, Array]:
        """Smallest and largest key position of every kv block, [B|1, 1, 1, nk]."""
        if self.kv_positions is None:
            return self.k_index_range()
        lo, hi = value_range(self.kv_positions, self.block[1])
        return lo[:, None, None, :], hi[:, None, None, :]

    def row_tokens(self, i: Any) -> Tokens:
        """Row block i against every key: q [B|1, 1, block_q, 1], k [B|1, 1, 1, S]."""
        q_index = (i * self.block[0] + jnp.arange(self.block[0]))[None, None, :, None]
        k_index = jnp.arange(self.shape[1])[None, None, None, :]
        q, k = q_index, k_index
        if self.q_positions is not None:
            at = jnp.minimum(q_index[0, 0, :, 0], self.shape[0] - 1)
            q = self.q_positions[:, at][:, None, :, None]
        if self.kv_positions is not None:
            k = self.kv_positions[:, None, None, :]
        b_index = jnp.arange(self.batch)[:, None, None, None]
        n_index = jnp.arange(self.heads)[None, :, None, None]
        return Tokens(self.b, self.n, q, k, b_index, n_index, q_index, k_index)


class Rule:
    """A token-level function of (b, n, q, k) -> bool; see `xsake.masks` for the contract."""

    # What each axis of a carried array counts: "b", "n", "q" or "k"; those in `shared` may be 1.
    axes: ClassVar[dict[str, tuple[str, ...]]] = {}
    shared: ClassVar[str] = "bn"

    def allows(self, tokens: Tokens) -> Array:
        """Whether each token pair is allowed, broadcast over `tokens`."""
        raise NotImplementedError

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        """(live, full), broadcastable to [B, N, nq, nk]; by default token by token."""
        return classify_by_tokens(self, grid)

    def spans(self, grid: Grid) -> Spans | None:
        """The live and the full blocks of every row block as ranges; None if not contiguous."""
        return None

    @property
    def is_causal(self) -> bool:
        """Whether no query can ever see a later key."""
        return False

    @property
    def has_data(self) -> bool:
        """Whether the rule carries arrays."""
        return bool(jax.tree.leaves(self))

    def upper_bound(self) -> Rule:
        """A rule without arrays that allows at least as much, for the static capacity of lists."""
        return EVERYTHING if self.has_data else self

    def check_can_be_split(self) -> None:
        """Raises where the rule's arrays cannot be sharded."""

    def __call__(self, b: Any, n: Any, q: Any, k: Any) -> Array:
        """Whether query q of head n in batch row b sees key k; indices are positions here."""
        given = zip("bnqk", (b, n, q, k), strict=True)
        return jnp.asarray(self.allows(Tokens.at(*(integers(name, x) for name, x in given))))

    __array_ufunc__ = None  # NumPy leaves `array & rule` to the rule

    def __and__(self, other: Rule | Array | np.ndarray) -> Rule:
        """Both rules; a bool array is taken as `masks.array` takes it."""
        other = _as_rule(other)
        if not isinstance(other, Rule):
            return NotImplemented
        if other == EVERYTHING:
            return self
        return other if self == EVERYTHING else And(self, other)

    def __or__(self, other: Rule | Array | np.ndarray) -> Rule:
        """Either rule; a bool array is taken as `masks.array` takes it."""
        other = _as_rule(other)
        return Or(self, other) if isinstance(other, Rule) else NotImplemented

    __rand__, __ror__ = __and__, __or__  # array & rule

    def __invert__(self) -> Rule:
        return Not(self)

    def __bool__(self) -> bool:
        return no_truth_value(self)

    def __repr__(self) -> str:
        return str(self)


def no_truth_value(x: Any) -> bool:
    """Refuses `a and b`, of which Python would keep one and drop the other."""
    raise TypeError(
        f"a {type(x).__name__} is neither true nor false; combine rules with & | ~ instead of "
        "`and`, `or`, `not`, and compare with None by `is`"
    )


def _as_rule(x: Any) -> Any:
    """A rule of a token mask; anything else as it is."""
    if isinstance(x, (jax.Array, np.ndarray)):
        from xsake.masks.carrying import array  # which imports this module

        return array(x)
    return x


# ------------------------------------------------------------------------------------------ pieces


def index_range(length: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last index of every block, the last one cut at `length`."""
    lo = np.arange(-(-length // block), dtype=np.int32) * block
    return lo, np.minimum(lo + block, length) - 1


def cut(values: Array, block: int, axis: int, fill: Any) -> Array:
    """Splits one axis into (blocks, block), the last block filled up."""
    axis %= values.ndim
    length = values.shape[axis]
    pads = [(0, 0)] * values.ndim
    pads[axis] = (0, -length % block)
    padded = jnp.pad(values, pads, constant_values=fill)
    return padded.reshape(*values.shape[:axis], -1, block, *values.shape[axis + 1 :])


def value_range(values: Array, block: int) -> tuple[Array, Array]:
    """Smallest and largest value of every block of the last axis."""
    ends = jnp.iinfo(values.dtype)
    lo = cut(values, block, -1, ends.max).min(-1)
    return lo, cut(values, block, -1, ends.min).max(-1)


def classify_by_tokens(rule: Rule, grid: Grid) -> tuple[Array, Array]:
    """Evaluates every token pair, one row block at a time: T·S work, block_q·S memory."""
    (T, S), (_, bk) = grid.shape, grid.block

    def row(i: Array) -> tuple[Array, Array]:
        tokens = grid.row_tokens(i)
        real = tokens.q_index < T
        allowed = jnp.asarray(rule.allows(tokens))
        allowed = jnp.broadcast_to(allowed, np.broadcast_shapes(allowed.shape, (grid.block[0], S)))
        allowed = allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)
        some = cut(allowed & real, bk, -1, False).any((-1, -3))
        return some, cut(allowed | ~real, bk, -1, True).all((-1, -3))

    live, full = lax.map(row, jnp.arange(grid.counts[0]))  # [nq, B|1, N|1, nk]
    return jnp.moveaxis(live, 0, 2), jnp.moveaxis(full, 0, 2)


@dataclass_transform(frozen_default=True, eq_default=False)
def carries_data(cls: type[T]) -> type[T]:
    """A rule that carries arrays: identity decides equality, the arrays are pytree leaves."""
    return _register(dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls))


@dataclass_transform(frozen_default=True)
def plain(cls: type[T]) -> type[T]:
    """A rule of plain numbers: equality and hash by value, no leaves."""
    return _register(dataclasses.dataclass(frozen=True, repr=False)(cls))


def _register(cls: Any) -> Any:
    data: list[str] = []
    meta: list[str] = []
    for field in dataclasses.fields(cls):
        (data if field.metadata.get("leaf") else meta).append(field.name)
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)


def leaf() -> Any:
    """Marks a dataclass field as a pytree child."""
    return dataclasses.field(metadata={"leaf": True})


@plain
class Everything(Rule):
    """Every query sees every key."""

    def allows(self, tokens: Tokens) -> Array:
        return jnp.ones((), bool)

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        yes = jnp.ones((1, 1, *grid.counts), bool)
        return yes, yes

    def spans(self, grid: Grid) -> Spans | None:
        zero = np.zeros(grid.counts[0], np.int32)
        return Spans(zero, zero + grid.counts[1], zero, zero + grid.counts[1])

    def __str__(self) -> str:
        return "everything()"


EVERYTHING = Everything()

# ------------------------------------------------------------------------------------- combinations


@plain
class And(Rule):
    """Both."""

    a: Rule = leaf()
    b: Rule = leaf()

    def allows(self, tokens: Tokens) -> Array:
        return self.a.allows(tokens) & self.b.allows(tokens)

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        (live_a, full_a), (live_b, full_b) = self.a.classify(grid), self.b.classify(grid)
        return live_a & live_b, full_a & full_b

    def spans(self, grid: Grid) -> Spans | None:
        a, b = self.a.spans(grid), self.b.spans(grid)
        if a is None or b is None:
            return None
        starts, ends = np.maximum, np.minimum
        return Spans(*(f(x, y) for f, x, y in zip((starts, ends) * 2, a, b, strict=True)))

    @property
    def is_causal(self) -> bool:
        return self.a.is_causal or self.b.is_causal

    def upper_bound(self) -> Rule:
        return self.a.upper_bound() & self.b.upper_bound()

    def __str__(self) -> str:
        return " & ".join(f"({r})" if isinstance(r, Or) else str(r) for r in (self.a, self.b))


@plain
class Or(Rule):
    """Either."""

    a: Rule = leaf()
    b: Rule = leaf()

    def allows(self, tokens: Tokens) -> Array:
        return self.a.allows(tokens) | self.b.allows(tokens)

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        (live_a, full_a), (live_b, full_b) = self.a.classify(grid), self.b.classify(grid)
        return live_a | live_b, full_a | full_b

    @property
    def is_causal(self) -> bool:
        return self.a.is_causal and self.b.is_causal

    def upper_bound(self) -> Rule:
        a, b = self.a.upper_bound(), self.b.upper_bound()
        return EVERYTHING if EVERYTHING in (a, b) else a | b

    def __str__(self) -> str:
        return f"{self.a} | {self.b}"


@plain
class Not(Rule):
    """The opposite."""

    a: Rule = leaf()

    def allows(self, tokens: Tokens) -> Array:
        return ~self.a.allows(tokens)

    def classify(self, grid: Grid) -> tuple[Array, Array]:
        live, full = self.a.classify(grid)
        return ~full, ~live

    def upper_bound(self) -> Rule:
        # an upper bound of `a` does not bound its complement
        return self if self.a.upper_bound() == self.a else EVERYTHING

    def __str__(self) -> str:
        return f"~{self.a}" if not isinstance(self.a, (And, Or)) else f"~({self.a})"


# ------------------------------------------------------------------------------------ inspection


def result_sizes(rule: Rule, batch: int, heads: int, *, by_number: bool = False) -> tuple[int, int]:
    """The batch and head sizes of the rule's result; 1 if it does not depend on that axis.

    With `by_number`, only dependence on b and n themselves counts, not on arrays read by index.
    """

    def ask(b: Array, n: Array) -> Array:
        one = jnp.zeros((1, 1, 1, 1), jnp.int32)
        at = (one, one) if by_number else (b, n)
        return jnp.asarray(rule.allows(Tokens(b, n, one, one, *at, one, one)))

    sizes = (batch, 1, 1, 1), (1, heads, 1, 1)
    shape = jax.eval_shape(ask, *(jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes)).shape
    shape = (1,) * (4 - len(shape)) + shape
    return shape[0], shape[1]


def partition_spec(rule: Any, batch: Any, heads: Any) -> Any:
    """The rule with a PartitionSpec in place of every array: `in_specs` for `shard_map`."""
    names = {"b": batch, "n": heads, "q": None, "k": None}
    rule.check_can_be_split()
    new = {}
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if not field.metadata.get("leaf") or value is None:
            continue
        if isinstance(value, Rule):
            new[field.name] = partition_spec(value, batch, heads)
        elif field.name in rule.axes:
            axes = zip(value.shape, rule.axes[field.name], strict=True)
            new[field.name] = PartitionSpec(*(None if d == 1 else names[a] for d, a in axes))
        else:
            new[field.name] = jax.tree.map(lambda _: PartitionSpec(), value)
    return dataclasses.replace(rule, **new)


def carried(rule: Any) -> Iterator[tuple[Any, str, tuple[str, ...], tuple[int, ...]]]:
    """(its rule, name, what each axis counts, shape) of every array whose layout is known."""
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if isinstance(value, Rule):
            yield from carried(value)
        elif field.name in rule.axes and value is not None:
            yield rule, field.name, rule.axes[field.name], value.shape


def check_fits(rule: Rule, B: int, N: int, T: int, S: int) -> None:
    """Raises if an array's size is not the call's: reads past its end would go unnoticed."""
    full = {"b": B, "n": N, "q": T, "k": S}
    for own, name, axes, shape in carried(rule):
        if any(
            size != full[axis] and not (size == 1 and axis in own.shared)
            for axis, size in zip(axes, shape, strict=True)
        ):
            raise ValueError(
                f"the rule's {name} has shape {list(shape)}, which does not fit "
                f"B = {B}, N = {N}, T = {T}, S = {S}"
            )


def combine(rules: Any) -> Rule:
    """All of them at once: the & of any number of rules."""
    return functools.reduce(lambda a, b: a & b, rules, EVERYTHING)


def conjuncts(rule: Rule) -> list[Rule]:
    """The rules whose & a rule is, none for `everything()`: `combine` of them is the rule again."""
    if isinstance(rule, And):
        return [*conjuncts(rule.a), *conjuncts(rule.b)]
    return [] if isinstance(rule, Everything) else [rule]
