"""The sample of a certificate by the kernels for Hopper GPUs: few launches.

    q, sample ─ hopper/sampled/queries.py ─ hopper.run_pieces ─ hopper/sampled/compare.py ─ figures
    figures, lists ─ hopper/sampled/means.py ─ Estimates, densities

The definition is plain JAX: `sampled.attend_sampled`, `estimates.of_figures`. `jax.vmap` of these
functions folds the mapped axis into the batch. None of them has a derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake import _jax, masks
from xsake.arguments import block_for
from xsake.backends import hopper, unaliased
from xsake.backends.hopper.limits import BLOCKS, HEAD_SIZES, NEEDS_JAX
from xsake.backends.hopper.sampled import Visits
from xsake.block_mask import MAX_CONSTANT, BlockMask
from xsake.block_mask.lists import known_lists
from xsake.hads import estimates
from xsake.hads.estimates import Estimate
from xsake.hads.sampled import SampledRows, block_classes, number_of_pieces
from xsake.masks.positional import Window
from xsake.masks.rule import Grid, Rule, conjuncts

SMALL_HEAD = 64  # channels of heads whose sample has short row blocks


def why_not(q: Any, k: Any, v: Any, rule: Rule, *, correct: bool) -> str | None:
    """The first reason why the kernels cannot measure a sample of q [B, T, N, H], k and v."""
    if reason := _jax.why_no_hopper(NEEDS_JAX):
        return reason
    if correct:
        return "returns no errors of single elements, which correct = True adds to the output"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"supports bfloat16 and float16; this is {q.dtype}"
    if q.dtype != k.dtype or k.dtype != v.dtype:
        return f"supports arrays of one type; these are {q.dtype}, {k.dtype} and {v.dtype}"
    sizes = q.shape[-1], v.shape[-1]
    if not set(sizes) <= set(HEAD_SIZES):
        return f"supports heads of {', '.join(map(str, HEAD_SIZES))}; these are {sizes}"
    if not all(isinstance(x, Window) for x in conjuncts(rule)):
        return f"supports causal rules and windows; this is {rule}"
    return None


def _window(rule: Rule) -> tuple[int | None, int | None]:
    """(left, right) of the smallest window of a conjunction of windows; None: no limit."""

    def least(numbers: list[int | None]) -> int | None:
        return min((x for x in numbers if x is not None), default=None)

    windows: Any = list(conjuncts(rule))
    return least([x.left for x in windows]), least([x.right for x in windows])


def figures(
    given: tuple[Array, Array, Array, Array | None],
    sparse: tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]],
    sample: Int[Array, "B G"],
    rule: Rule,
    soft_cap: float | None,
    every: int,
) -> Float[Array, "B 3 N G"]:
    """Dropped mass, squared error and squared dense output of every sampled query.

    Args:
      given: query, key, value, and sinks or None.
      sparse: out and logsumexp of all queries, with sinks.
      sample: one query of each group of `every`.
      rule: of all queries.
      soft_cap: of the logits.
      every: tokens of a group.
    """
    *qkv, sinks = given
    out, logsumexp = sparse
    of_heads = () if sinks is None else (sinks.astype(jnp.float32)[None],)
    measure = _measuring(rule, soft_cap, every)
    arrays = (*qkv, sample, out, jnp.moveaxis(logsumexp, 2, 1), *of_heads)
    return measure(*jax.lax.stop_gradient(arrays))


@functools.lru_cache(maxsize=32)
def _measuring(rule: Rule, soft_cap: float | None, every: int) -> Callable[..., Array]:
    """(q, k, v, sample, out, logsumexp [B, N, T], sinks [B|1, N]) -> figures."""

    @jax.custom_batching.custom_vmap
    @_jax.without_x64
    def measured(*given: Array) -> Array:
        from xsake.backends.hopper.sampled import compare, queries

        *qkv, sample, out, logsumexp = given[:6]
        q, k, v = unaliased(*qkv)
        (B, T, N, H), (_, S, K, Hv), G = q.shape, v.shape, sample.shape[1]
        rows = sampled_rows(rule, (T, S), G, every, N // K, (H, Hv))
        heads = N // rows.group
        pieces = number_of_pieces(rows, B * heads)
        width = rows.row_blocks * rows.block
        window = _window(rule)
        gathered, pairs = queries.gather_queries(q, sample, window, S, pieces, heads, width)
        k, v = (x.reshape(-1, S // pieces, *x.shape[2:]) for x in (k, v))
        block = rows.block, BLOCKS[-1]
        classes = block_classes(rows, block[1], pieces)
        assert classes is not None  # why_not: a window has spans
        shape = gathered.shape[1], S // pieces
        lists = known_lists(classes, Grid(shape, block, len(classes), 1))
        of_pieces = hopper.run_pieces(gathered, k, v, pairs, lists, block, soft_cap)
        sparse = unaliased(out, logsumexp)
        found = compare.compare(of_pieces, sparse, sample, *given[6:])
        return _jax.vary(found, _jax.varying_axes(*given))

    @measured.def_vmap
    def by_batch(size: int, is_mapped: Sequence[bool], *given: Array) -> tuple[Array, bool]:
        wide = _jax.mapped(size, is_mapped, given)
        wide[6:] = [
            _jax.by_batch_row(x, wide[0].shape[:2], mapped)
            for x, mapped in zip(wide[6:], is_mapped[6:], strict=True)
        ]
        return _jax.unfolded(size, measured(*_jax.folded(wide))), True

    return measured


def sampled_rows(
    rule: Rule,
    shape: tuple[int, int],
    sampled: int,
    every: int,
    group: int,
    head_sizes: tuple[int, int],
) -> SampledRows:
    """The rows of every kv head: a row for each sampled query and each query head of the group.

    So the keys of a kv head are read for all of its query heads, and a row block stands for fewer
    queries: it skips more of the keys that they do not see. With heads of 64, short row blocks do
    so even more; on an H200 that did not pay with heads of 128.

    The lists are constants of the program. Where they would have more than MAX_CONSTANT blocks,
    each query head has its own rows.
    """
    is_short = max(head_sizes) <= SMALL_HEAD
    block = BLOCKS[0] if is_short else max(BLOCKS[0], block_for(sampled * group))
    rows = SampledRows(rule, shape, sampled, every, block, group)
    if group > 1 and rows.row_blocks * -(-shape[1] // BLOCKS[-1]) > MAX_CONSTANT:
        return sampled_rows(rule, shape, sampled, every, 1, head_sizes)
    return rows


def estimates_and_densities(
    values: Float[Array, "B 3 N G"], length: int, every: int, window: int, mask: BlockMask
) -> dict[str, Any]:
    """`estimates.of_figures`, and the mask's density as "density_given" and as "density".

    It is the number of blocks that are visited ÷ those that the rule allows, float32 [B, N].
    """
    start, count, _, index, _ = mask.lists
    reported = _reporting(length, every, window, (mask.rule, mask.shape, mask.block))
    # two equal arrays: XLA would copy one that is returned under two names
    *found, given, density = reported(*jax.lax.stop_gradient((values, start, count, index)))
    names = [name + suffix for name in estimates.FIGURES for suffix in ("", "_by_head")]
    fields = len(Estimate._fields)
    each = {name: Estimate(*found[i * fields :][:fields]) for i, name in enumerate(names)}
    return each | {"density_given": given, "density": density}


@functools.lru_cache(maxsize=32)
def _reporting(length: int, every: int, window: int, of_mask: Any) -> Callable[..., Any]:
    """(figures, kv_start, kv_count, kv_index) -> fields of all Estimates, densities of a mask."""
    windows = estimates.windows_of(length, every, window)

    @jax.custom_batching.custom_vmap
    @_jax.without_x64
    def reported(values: Array, start: Array, count: Array, index: Array) -> tuple[Array, ...]:
        from xsake.backends.hopper.sampled import means

        rule, shape, block = of_mask
        grid = Grid(shape, block)
        spans = (masks.everything() if rule is None else rule).spans(grid)
        assert spans is not None  # why_not: a window has spans
        visits = Visits(start, count, index, spans.live(grid.counts[1]))
        found = means.means(values, windows, estimates.WIDENED, estimates.MOST, visits)
        return _jax.vary(found, _jax.varying_axes(values, start, count, index))

    @reported.def_vmap
    def by_batch(size: int, is_mapped: Sequence[bool], *given: Array) -> tuple[Any, Any]:
        values, *lists = _jax.mapped(size, is_mapped, given)
        are_mapped = any(is_mapped[1:])  # the kernel reads all three by one index
        lists = [_jax.by_batch_row(x, values.shape[:2], are_mapped) for x in lists]
        found = reported(*_jax.folded((values, *lists)))
        return tuple(_jax.unfolded(size, x) for x in found), (True,) * len(found)

    return reported
