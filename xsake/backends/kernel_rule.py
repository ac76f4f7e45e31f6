"""A mask's rule as a kernel evaluates it: a function of index tiles, and int32 arrays per token.

    masks.Rule ─ translate ─ KernelRule ─┬─ allows(b, n, q, k, rows, columns, tiles) -> bool tile
                                         ├─ rows      int32 [B|1, T] each, read with the queries
                                         ├─ columns   int32 [B|1, S] each, read with the keys
                                         └─ tiles     bool [B|1, N|1, T|1, S|1] each, tile by tile

Kernels evaluate a KernelRule, never a Rule. At present Mosaic GPU decides which operations a user's
function may have (`_LOWERS`).

Windows, and masks with intervals, become one or two intervals of keys for each query (`by_query`),
or of queries for each key (`by_key`). A kernel takes the one whose integers it reads once per work
tile. Where the data may be out of order, the translated rule is its `otherwise`. A conjunction of
windows and token arrays is an interval and tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core

from xsake.block_mask import BlockMask
from xsake.masks import carrying, intervals, positional
from xsake.masks.integers import INT_MAX
from xsake.masks.rule import And, Everything, Not, Or, Rule, Tokens


class KernelRule(NamedTuple):
    """What decides inside a partial block.

    allows(b, n, q, k, rows, columns, tiles) -> bool tile: b and n are scalars, q and k int32 tiles
    of token indices, rows, columns and tiles are tiles of the arrays below.
    """

    allows: Callable[..., Array] | None
    rows: tuple[Array, ...] = ()  # int32 [B|1, T] or [B|1, integers, T] each, by query
    columns: tuple[Array, ...] = ()  # int32 [B|1, S] or [B|1, integers, S] each, by key
    # Instead of `allows`: a token is allowed with indices of the other axis from lo to hi - 1, none
    # of them past the last key. (lo, hi) are its two integers of rows or columns, or (lo, hi, lo,
    # hi) of two intervals; windows compute bounds(index).
    is_interval: bool = False
    bounds: Callable[[Any], tuple[Any, Any]] | None = None
    # Token masks, bool [B|1, N|1, T|1, S|1] each. An interval rule allows what they all allow too.
    tiles: tuple[Array, ...] = ()
    # What decides in batch rows where the first integers, of rows or columns, are negative.
    otherwise: KernelRule | None = None


FAR = 1 << 29  # tokens: beyond any sequence, and sums of two of them fit in int32


class UnsupportedRuleError(ValueError):
    """A rule that needs more than integers per query and per key."""


def why_not(rule: Rule | None, T: int, S: int, *, reads_tiles: bool = False) -> str | None:
    """Why a kernel cannot evaluate the rule; None where it can.

    reads_tiles: the kernel reads tiles of token arrays.
    """
    try:
        translate(rule, T, S, reads_tiles=reads_tiles)
    except UnsupportedRuleError as reason:
        return str(reason)
    return None


def translate(rule: Rule | None, T: int, S: int, *, reads_tiles: bool = False) -> KernelRule | None:
    """The rule for T queries and S keys; None where every pair of a partial block is allowed."""
    if rule is None or isinstance(rule, Everything):
        return None
    found = _Values(reads_tiles)
    expression = _translate(rule, found, T, S)

    def allows(b: Any, n: Any, q: Any, k: Any, rows: Any, columns: Any, tiles: Any = ()) -> Any:
        return expression(Tokens.at(b, n, q, k), rows, columns, tiles)

    return KernelRule(allows, tuple(found.rows), tuple(found.columns), tiles=tuple(found.tiles))


def by_query(mask: BlockMask) -> KernelRule | None:
    """The mask's rule for kernels over row blocks: where it can, an interval of keys a query."""
    T, S = mask.shape
    if (pairs := _intervals(mask)) is not None:
        return KernelRule(None, rows=(pairs,), **_given_intervals(mask))
    if (found := _window_and_tiles(mask.rule)) is None:
        return translate(mask.rule, T, S, reads_tiles=True)
    (left, right), tiles = found

    def keys(q: Any) -> tuple[Any, Any]:
        return q - left, jnp.minimum(q + (right + 1), S)

    return KernelRule(None, is_interval=True, bounds=keys, tiles=tiles)


def by_key(mask: BlockMask) -> KernelRule | None:
    """The mask's rule for kernels over kv blocks: where it can, an interval of queries a key."""
    T, S = mask.shape
    if (queries := _intervals(mask, by_key=True)) is not None:
        return KernelRule(None, columns=(queries,), **_given_intervals(mask))
    if (found := _window_and_tiles(mask.rule)) is None:
        return translate(mask.rule, T, S, reads_tiles=True)
    (left, right), tiles = found

    def queries_of(k: Any) -> tuple[Any, Any]:  # none for a key past the last one
        return jnp.where(k < S, k - right, INT_MAX), k + (left + 1)

    return KernelRule(None, is_interval=True, bounds=queries_of, tiles=tiles)


def _intervals(mask: BlockMask, *, by_key: bool = False) -> Array | None:
    """The mask's own intervals, or those of a rule without arrays, unless it is a window.

    [B|1, 2|4, T]; by_key: the intervals of queries for each key, [B|1, 2|4, S].
    """

    def as_asked(pairs: Array | None) -> Array | None:
        if pairs is None:
            return None
        return (intervals.transposed(pairs, mask.shape[1]) if by_key else pairs)[:, 0]

    if (rule := _with_constant_intervals(mask)) is None:
        return as_asked(mask.intervals)
    with jax.ensure_compile_time_eval():  # constants of the compiled program
        return as_asked(intervals.intervals_of(rule, mask.shape))


def _with_constant_intervals(mask: BlockMask) -> Rule | None:
    """The mask's rule if it has no arrays and is no window, whose bounds kernels compute."""
    rule = mask.rule
    if mask.intervals is not None or rule is None or rule.has_data:
        return None
    is_simpler = isinstance(rule, Everything) or _window_and_tiles(rule) is not None
    return None if is_simpler else rule


def is_causal_alone(mask: BlockMask) -> bool:
    """Whether the mask is a causal rule and nothing else, for all batch rows and heads.

    A query then sees all keys up to its own index, or up to a fixed number of keys after it.
    """
    if not mask.is_rule or mask.kv_count.shape[:2] != (1, 1):
        return False
    match _window_and_tiles(mask.rule):
        case ((left, right), ()):
            return left == FAR and 0 <= right < FAR
    return False


def _given_intervals(mask: BlockMask) -> dict[str, Any]:
    always = intervals.always_intervals(mask.rule)
    otherwise = None if always else translate(mask.rule, *mask.shape)
    return {"is_interval": True, "otherwise": otherwise}


Window = tuple[int, int]  # keys before and after a query; FAR stands for no limit


def _window_and_tiles(rule: Rule | None) -> tuple[Window, tuple[Array, ...]] | None:
    """A window, or a conjunction of windows and token arrays: (left, right), the arrays."""
    match rule:
        case positional.Window():
            left, right = (FAR if x is None else min(x, FAR) for x in (rule.left, rule.right))
            return (left, right), ()
        case carrying.TokenArray():
            return (FAR, FAR), (rule.mask,)
        case And():
            a, b = _window_and_tiles(rule.a), _window_and_tiles(rule.b)
            if a is None or b is None:
                return None
            (left, right), tiles = a
            return (min(left, b[0][0]), min(right, b[0][1])), (*tiles, *b[1])
    return None


def form(mask: BlockMask) -> str:
    """What a kernel evaluates in a partial block, in words."""
    if mask.rule is None or isinstance(mask.rule, Everything):
        return "no rule"
    if (found := _window_and_tiles(mask.rule)) is not None:
        window, tiles = found
        if not tiles:
            return "a window around each query"
        return "a token mask" + ("" if window == (FAR, FAR) else " and a window around each query")
    pairs: Any = mask.intervals
    if (rule := _with_constant_intervals(mask)) is not None:
        pairs = jax.eval_shape(lambda: intervals.intervals_of(rule, mask.shape))
    if pairs is None:
        return "the rule, for every token pair"
    words = "an interval" if pairs.shape[2] == 2 else "two intervals"
    if intervals.always_intervals(mask.rule):
        return f"{words} of keys for each query"
    return f"{words} of keys for each query; the rule in batch rows that are not in order"


@dataclasses.dataclass
class _Values:
    """The arrays that a rule reads, collected while it is translated."""

    reads_tiles: bool = False
    rows: list[Array] = dataclasses.field(default_factory=list)
    columns: list[Array] = dataclasses.field(default_factory=list)
    tiles: list[Array] = dataclasses.field(default_factory=list)

    def row(self, values: Array) -> int:
        """The index of these values among those per query."""
        self.rows.append(_int32(values))
        return len(self.rows) - 1

    def column(self, values: Array) -> int:
        """The index of these values among those per key."""
        self.columns.append(_int32(values))
        return len(self.columns) - 1

    def tile(self, rule: carrying.TokenArray) -> int:
        """The index of a token array among those that are read tile by tile."""
        if not self.reads_tiles:
            raise UnsupportedRuleError(
                f"cannot evaluate {rule}, only rules of positions, segment ids and lengths"
            )
        self.tiles.append(rule.mask)
        return len(self.tiles) - 1


def _int32(values: Array) -> Array:
    if values.dtype == jnp.int64:
        raise UnsupportedRuleError(
            "cannot read int64 ids, positions or lengths that are traced; cast them to int32"
        )
    return values.astype(jnp.int32)


# (tokens, integers per query, integers per key, token arrays) -> bool tile
Expression = Callable[[Tokens, Any, Any, Any], Any]

# Operations on index tiles that Mosaic GPU lowers inside a kernel.
_LOWERS = frozenset(
    "add sub mul neg max min sign abs and or eq ne lt le gt ge select_n copy div rem "
    "convert_element_type broadcast_in_dim pjit jit integer_pow squeeze reshape".split()
)


def _translate(rule: Rule, found: _Values, T: int, S: int) -> Expression:
    inner = functools.partial(_translate, found=found, T=T, S=S)
    match rule:
        case And():
            a, b = inner(rule.a), inner(rule.b)
            return lambda *at: a(*at) & b(*at)
        case Or():
            a, b = inner(rule.a), inner(rule.b)
            return lambda *at: a(*at) | b(*at)
        case Not():
            a = inner(rule.a)
            # Mosaic GPU cannot negate a bool tile
            return lambda *at: jnp.where(a(*at), jnp.int32(0), jnp.int32(1)) > 0
        case carrying.Documents():
            i, j = found.row(rule.q_ids), found.column(rule.kv_ids)
            return lambda tokens, rows, columns, tiles: (rows[i] == columns[j]) & (rows[i] >= 0)
        case carrying.Between():
            lo, hi = found.row(rule.lo), found.row(rule.hi)
            return lambda tokens, rows, columns, tiles: (
                (rows[lo] <= tokens.k_index) & (tokens.k_index < rows[hi])
            )
        case carrying.TokenArray():
            at = found.tile(rule)
            return lambda tokens, rows, columns, tiles: tiles[at]
        case carrying.Lengths():
            return _translate_lengths(rule, found, T, S)
        case carrying.Prefix():
            j = found.column(jnp.broadcast_to(rule.lengths[:, None], (rule.lengths.shape[0], S)))
            return lambda tokens, rows, columns, tiles: tokens.k < columns[j]
        case carrying.Positioned():
            return _translate_positions(rule, found, inner(rule.a))
        case positional.Window() | positional.First() | positional.GlobalTokens():
            return lambda tokens, rows, columns, tiles: rule.allows(tokens)
        case positional.Chunked():
            return lambda tokens, rows, columns, tiles: rule.allows(tokens)
        case positional.Strided():
            return lambda tokens, rows, columns, tiles: _strided(rule, tokens)
        case carrying.Custom() if not rule.arrays:
            _check_function(rule)
            return lambda tokens, rows, columns, tiles: rule.allows(tokens)
    more = ", token arrays" if found.reads_tiles else ""
    raise UnsupportedRuleError(
        f"cannot evaluate {rule}, only rules of positions, segment ids and lengths{more}"
    )


def _strided(rule: positional.Strided, tokens: Tokens) -> Any:
    """One remainder of a difference where q and k are indices, which cannot wrap round."""
    if tokens.q is tokens.q_index and tokens.k is tokens.k_index:
        return (tokens.q - tokens.k) % rule.stride == 0
    return rule.allows(tokens)


def _translate_lengths(rule: carrying.Lengths, found: _Values, T: int, S: int) -> Expression:
    """Lengths per batch row become a flag, 0 or 1, for every query and key."""
    parts: list[Expression] = []
    if rule.query is not None:
        i = found.row(jnp.arange(T) < rule.query[:, None])
        parts.append(lambda tokens, rows, columns, tiles: rows[i] > 0)
    if rule.key_value is not None:
        j = found.column(jnp.arange(S) < rule.key_value[:, None])
        parts.append(lambda tokens, rows, columns, tiles: columns[j] > 0)
    return lambda *at: parts[0](*at) & parts[-1](*at)


def _translate_positions(
    rule: carrying.Positioned, found: _Values, inner: Expression
) -> Expression:
    i = None if rule.q_positions is None else found.row(rule.q_positions)
    j = None if rule.kv_positions is None else found.column(rule.kv_positions)

    def expression(tokens: Tokens, rows: Any, columns: Any, tiles: Any) -> Any:
        if i is not None:
            tokens = tokens._replace(q=rows[i])
        if j is not None:
            tokens = tokens._replace(k=columns[j])
        return inner(tokens, rows, columns, tiles)

    return expression


def _check_function(rule: carrying.Custom) -> None:
    """A user's function may go into the kernel if every operation it uses lowers there."""
    tile, one = jax.ShapeDtypeStruct((64, 128), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda b, n, q, k: rule.allows(Tokens.at(b, n, q, k)))(
        one, one, tile, tile
    )
    used = {equation.primitive.name for equation in _equations(jaxpr.jaxpr)}
    if foreign := sorted(used - _LOWERS):
        raise UnsupportedRuleError(f"cannot trace {rule} into a kernel: it uses {foreign}")


def _equations(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from _equations(inner)
