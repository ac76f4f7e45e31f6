"""Certified attention: block-sparse attention that reports how far it is from dense attention.

    q, k, v, mask ─ sparse ─ out, L ──────────────┬─ rows that fail: their dropped blocks, merged
    one query in 64 ─ dense ─ out', L' ─┐         ├─ Delta correction of the others (optional)
                                        └─ m, Δ ──┤
    min and max of every key block ─ bound for every query ─ Report

Dense attention is that of the mask's rule over all blocks. For a sampled query the dropped mass is
m = 1 - exp(L - L'), which equals the total variation between sparse and dense attention, and the
error is Δ = out' - out. One query of every group of `every` is sampled, uniformly, so that weighted
means over the sample are unbiased. `bound` is not a sample: no query's dropped mass is larger.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Shaped

from xsake import masks
from xsake.arguments import as_array, check_soft_cap, flag
from xsake.backends import merged
from xsake.block_mask import BlockMask
from xsake.hads import estimates, sampled_by_kernel
from xsake.hads.chunks import Softmax
from xsake.hads.correction import attend, check_mask
from xsake.hads.estimates import WINDOW, Estimate
from xsake.hads.mass_bounds import bounds
from xsake.hads.row_blocks import check_sizes, is_number, plain
from xsake.hads.sampled import EVERY, at_sample, attend_sampled, sample_queries
from xsake.masks.carrying import Documents
from xsake.masks.integers import MAKE_STATIC
from xsake.masks.rule import Grid, Rule, Tokens, conjuncts, cut


@dataclasses.dataclass(frozen=True)
class Certify:
    """How a model's attention is certified; the arguments of `certified_attention`."""

    threshold: float | None = None
    criterion: str = "mass"
    guarantee: float | None = None
    correct: bool = False
    seed: int = 0  # of the samples; every layer has its own


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Report:
    """What `certified_attention` measured; estimates are of the mask as it was given.

    Row blocks done densely have no error left, so for the output the estimates are upper bounds.
    """

    dropped_mass: Estimate  # [B, N, windows]; equals the total variation
    dropped_mass_by_head: Estimate  # [B, N]
    squared_error: Estimate  # ‖sparse - dense output‖², [B, N, windows]
    squared_error_by_head: Estimate
    squared_output: Estimate  # ‖dense output‖², [B, N, windows]
    squared_output_by_head: Estimate
    bound: Any  # float32 [B, N, windows]: mean over queries of the largest possible mass; or None
    largest_bound: Any  # the same, its maximum over queries
    dense_row_blocks: Any  # bool [B, N, row blocks]: done densely
    density_given: Any  # float32 [B, N]: of the mask, ÷ the blocks that its rule allows
    density: Any  # float32 [B, N]: with the blocks that were visited in addition
    sample: Any  # int32 [B, groups]: the sampled queries, the same for all heads

    @property
    def relative_error(self) -> Float[Array, "*axes"]:
        """√(mean ‖sparse - dense output‖² ÷ mean ‖dense output‖²) of every head."""
        size = self.squared_output_by_head.mean
        return jnp.sqrt(self.squared_error_by_head.mean / jnp.where(size > 0, size, 1))

    def __repr__(self) -> str:
        return f"Report({'×'.join(map(str, self.density.shape))} heads)"

    def __str__(self) -> str:
        """A table of heads; axes that `jax.vmap` added are columns before `batch`."""
        if not all(_is_known(x) for x in jax.tree.leaves(self)):
            return repr(self)
        mass, shape = self.dropped_mass_by_head, self.density.shape
        names = [f"axis {i}" for i in range(len(shape) - 2)] + ["batch", "head"]
        names = names[len(names) - len(shape) :]
        title = "density  dense rows  dropped mass     95%              error    bound"
        lines = [f"{' '.join(names)}  {title}"]
        error = self.relative_error
        for at in np.ndindex(*shape):
            bound = "" if self.largest_bound is None else f"{self.largest_bound[at].max():.4f}"
            index = " ".join(f"{i:{len(name)}d}" for i, name in zip(at, names, strict=True))
            lines.append(
                f"{index}  {self.density[at]:7.3f}  "
                f"{self.dense_row_blocks[at].mean():10.3f}  {mass.mean[at]:12.4f}  "
                f"{mass.low[at]:.4f} … {mass.high[at]:.4f}  "
                f"{error[at]:7.4f}  {bound}"
            )
        return "\n".join(lines)


def _is_known(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer)


def certified_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    mask: BlockMask,
    rng: Array,
    *,
    threshold: float | None = None,
    criterion: str = "mass",
    guarantee: float | None = None,
    correct: bool = False,
    bound: bool = True,
    every: int = EVERY,
    window: int = WINDOW,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, N * M] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N Hv"], Report]:
    """Block-sparse attention and a report of its distance to dense attention under mask.rule.

    Gradients of the output are those of attention over the blocks that were visited, with the
    sample and the choice of row blocks as constants; the report has none. With `correct`, they
    flow through the correction too, and so reach all keys and values that a sampled query sees.

    Args:
      query: as for `dot_product_attention`.
      key: likewise.
      value: likewise.
      mask: any BlockMask. What its rule allows outside its blocks counts as dropped.
      rng: a key of `jax.random`, for the sample. A key used twice samples the same queries.
      threshold: a row block is done densely unless all its sampled queries are below this; 0 does
        all row blocks densely. None: none of them.
      criterion: what is compared with the threshold: "mass", a query's dropped mass, or "error",
        ‖sparse - dense output‖ ÷ ‖dense output‖.
      guarantee: a row block is done densely unless the bound of all its queries is below this. No
        query of the output then drops more. None: none of them.
      correct: adds the error of the last sampled query at or before it to each query (Delta
        correction), for causal rules, documents, and both.
      bound: whether the bound is computed and reported.
      every: one query in so many is sampled; divides the block or is a multiple of it.
      window: queries of a window of the report; a multiple of `every`.
      logits_soft_cap: as for `dot_product_attention`.
      sinks: [N] or [N, M], as for `dot_product_attention`; their mass is never dropped.
      implementation: of `dot_product_attention` with the mask; the sampled queries and the bound
        take the fastest that can run.
    """
    query, key, value = as_array("query", query), as_array("key", key), as_array("value", value)
    correct, bound = flag("correct", correct), flag("bound", bound)
    every, window = (plain(x) for x in (every, window))
    threshold, guarantee = (plain(x) for x in (threshold, guarantee))
    _check(query, key, mask, threshold, criterion, guarantee, correct, bound, every, window)
    logits_soft_cap = check_soft_cap(logits_soft_cap)
    _check_key(rng)
    if sinks is not None and jnp.ndim(sinks) == 2:
        sinks = jax.nn.logsumexp(sinks, axis=-1)  # one that stands for all of a head
    rule = masks.everything() if mask.rule is None else mask.rule
    B, T, N, _ = query.shape
    how: Any = {"logits_soft_cap": logits_soft_cap, "implementation": implementation}
    out, logsumexp = attend(query, key, value, mask, sinks=sinks, **how)
    given = query, key, value, sinks
    sample = sample_queries(rng, B, T, every)
    figures, error, measured = _measure_sample(
        given, (out, logsumexp), sample, mask, rule, logits_soft_cap, every, window, correct=correct
    )
    limits = None
    if bound:
        constants = lax.stop_gradient((query, key, logsumexp))
        dropped = _dropped(mask, rule, B, N)
        limits = bounds(*constants, dropped, mask.block, Softmax(logits_soft_cap))
    dense_row_blocks = jnp.zeros((B, N, mask.grid.counts[0]), bool)
    if threshold is not None or guarantee is not None:
        visited, live = _visited_and_live(mask, rule, B, N)
        dense_row_blocks = _failing(figures, criterion, limits, mask, threshold, guarantee, every)
        dense_row_blocks &= visited < live
        out = _done_densely((query, key, value), out, logsumexp, dense_row_blocks, mask, rule, how)
        measured["density"] = _share(jnp.where(dense_row_blocks, live, visited), live)
    if error is not None:
        served = _served(rule, sample, T, N, every)
        served &= ~_by_query(dense_row_blocks, mask.block[0], T)
        out = _corrected(out, error, served, sample, every)
    measured = estimates.with_bounds(measured, limits, window)
    report = Report(**measured, dense_row_blocks=dense_row_blocks, sample=sample)
    return out, lax.stop_gradient(report)


def _check(
    query: Array,
    key: Array,
    mask: BlockMask,
    threshold: float | None,
    criterion: str,
    guarantee: float | None,
    correct: bool,
    bound: bool,
    every: int,
    window: int,
) -> None:
    if query.ndim != 4:
        raise ValueError(f"query must be [B, T, N, H], got shape {list(query.shape)}; add a batch")
    check_mask(mask)
    check_sizes(every=every, window=window)
    if every % mask.block[0] and mask.block[0] % every:
        raise ValueError(
            f"every = {every} must divide the row blocks of {mask.block[0]} queries or be a "
            "multiple of them"
        )
    if window < every or window % every:
        raise ValueError(f"window = {window} must be a multiple of every = {every}")
    if criterion not in ("mass", "error"):
        raise ValueError(f'criterion must be "mass" or "error", got {criterion!r}')
    most = 1.0 if criterion == "mass" else np.inf  # an error can be larger than the output
    _check_share("guarantee", guarantee, "mass", 1.0)
    _check_share("threshold", threshold, criterion, most)
    if guarantee is not None and not bound:
        raise ValueError("guarantee needs the bound; leave bound = True")
    if correct and (query.shape[1] != key.shape[1] or not _passes_on(mask.rule)):
        raise ValueError(
            "correct = True needs T = S and a mask whose rule is causal(), documents(…) or both, "
            f"so that no key leaks; got T = {query.shape[1]}, S = {key.shape[1]} and the rule "
            f"{mask.rule}; leave it out"
        )


def _check_share(name: str, share: Any, of: str, most: float) -> None:
    if isinstance(share, jax.core.Tracer):
        raise TypeError(f"{name} must be a plain number, got a traced array; {MAKE_STATIC}")
    if share is not None and not (is_number(share) and 0 <= share <= most):
        raise ValueError(f"{name} is a share of the {of}, 0 to {most:g}, got {share!r}")


def _check_key(rng: Any) -> None:
    is_new = hasattr(rng, "dtype") and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    is_old = (getattr(rng, "dtype", None), jnp.shape(rng)) == (jnp.uint32, (2,))
    if not is_old and not (is_new and rng.shape == ()):
        raise TypeError(f"rng must be one key, such as jax.random.key(0), got {rng!r}")


def _passes_on(rule: Rule | None) -> bool:
    """Whether a query sees all that the queries see which it sees as keys.

    Then the error of an earlier query, which contains keys that this one has seen, may be added.
    """
    each = [] if rule is None else conjuncts(rule)
    return all(x == masks.causal() or isinstance(x, Documents) for x in each)


# ------------------------------------------------------------------------------------------- sample


def _measure_sample(
    given: tuple[Array, Array, Array, Array | None],
    sparse: tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]],
    sample: Int[Array, "B G"],
    mask: BlockMask,
    rule: Rule,
    soft_cap: float | None,
    every: int,
    window: int,
    *,
    correct: bool,
) -> tuple[Float[Array, "B 3 N G"], Float[Array, "B G N Hv"] | None, dict[str, Any]]:
    """Compares dense with sparse attention of the sample: (figures, error, fields of a Report).

    figures are the dropped mass, squared error and squared dense output of every sampled query;
    error is their dense outputs minus the sparse ones if `correct`, else None. The fields are all
    estimates and both densities, of the mask as it was given.
    """
    query, key, value, _ = given
    B, T, N, _ = query.shape
    if sampled_by_kernel.why_not(query, key, value, rule, correct=correct) is None:
        figures = sampled_by_kernel.figures(given, sparse, sample, rule, soft_cap, every)
        how = T, every, window, mask
        return figures, None, sampled_by_kernel.estimates_and_densities(figures, *how)
    constants = given if correct else lax.stop_gradient(given)
    exact, dense = attend_sampled(constants, sample, rule, soft_cap, every=every)
    out, logsumexp = (at_sample(x, sample) for x in sparse)
    error = exact - out.astype(jnp.float32)
    each = dropped_mass(logsumexp, dense), (error**2).sum(-1), (exact**2).sum(-1)
    figures = jnp.swapaxes(jnp.stack(each, 1), 2, 3).astype(jnp.float32)
    density = _share(*_visited_and_live(mask, rule, B, N))
    found: dict[str, Any] = {**estimates.of_figures(figures, T, every, window)}
    found |= {"density_given": density, "density": density}
    return figures, error if correct else None, found


def dropped_mass(
    sparse: Float[Array, "*axes"], dense: Float[Array, "*axes"]
) -> Float[Array, "*axes"]:
    """1 - exp(sparse - dense) of two logsumexps; 0 for a query that sees no key, NaN stays NaN."""
    is_blind = dense <= -jnp.inf
    change = jnp.where(is_blind, 0, sparse - jnp.where(is_blind, 0, dense))
    return -jnp.expm1(jnp.minimum(change, 0))


# ---------------------------------------------------------------------- row blocks done densely


def _visited_and_live(
    mask: BlockMask, rule: Rule, batch: int, heads: int
) -> tuple[Int[Array, "B N nq"], Int[Array | np.ndarray, ...]]:
    """How many blocks of the rule each row block visits, and how many there are.

    The second broadcasts to the first, and is known while a call is traced if the rule has spans.
    """
    grid = Grid(mask.shape, mask.block, batch, heads)
    if (spans := rule.spans(grid)) is None:
        live = _live(rule, grid)
        return (live & ~_dropped(mask, rule, batch, heads)).sum(-1), live.sum(-1)
    lo, hi = spans.live(grid.counts[1])
    lists = mask.lists
    rank = jnp.arange(grid.counts[1])
    at = (lists.kv_start[..., None] + rank).reshape(*lists.kv_start.shape[:2], -1)
    column = jnp.take_along_axis(lists.kv_index, at, axis=-1, mode="clip")
    column = column.reshape(*lists.kv_start.shape, -1)
    listed = (rank < lists.kv_count[..., None]) & (lo[:, None] <= column) & (column < hi[:, None])
    return _by_head(listed.sum(-1), batch, heads), spans.live_counts(grid.counts[1])


def _live(rule: Rule, grid: Grid) -> Bool[Array, "B N nq nk"]:
    """The blocks in which the rule may allow a pair."""
    return jnp.broadcast_to(rule.classify(grid)[0], (grid.batch, grid.heads, *grid.counts))


def _dropped(mask: BlockMask, rule: Rule, batch: int, heads: int) -> Bool[Array, "B N nq nk"]:
    """The blocks in which the rule may allow a pair, and which the mask leaves out."""
    live = _live(rule, Grid(mask.shape, mask.block, batch, heads))
    return live & (_by_head(mask.blocks(), batch, heads) == 0)


def _by_head(x: Shaped[Array, "b n *rest"], batch: int, heads: int) -> Shaped[Array, "B N *rest"]:
    """What a mask has for its own batch rows and heads, for all of them."""
    own = x.shape[1]
    if 1 < own < heads:
        x = jnp.repeat(x, heads // own, axis=1)
    return jnp.broadcast_to(x, (batch, heads, *x.shape[2:]))


def _share(blocks: Int[Array, "B N nq"], live: Any) -> Float[Array, "B N"]:
    return blocks.sum(-1).astype(jnp.float32) / jnp.maximum(live.sum(-1), 1)


def _failing(
    figures: Float[Array, "B 3 N G"],
    criterion: str,
    limits: Float[Array, "B N T"] | None,
    mask: BlockMask,
    threshold: float | None,
    guarantee: float | None,
    every: int,
) -> Bool[Array, "B N nq"]:
    """Row blocks that are not below the threshold, or not below the guarantee; NaN is not."""
    nq, bq = mask.grid.counts[0], mask.block[0]
    fails = jnp.zeros((), bool)
    if threshold is not None:
        compared, error, size = jnp.unstack(figures, axis=1)  # [B, N, G] each
        if criterion == "error":
            compared = jnp.sqrt(error / jnp.where(size > 0, size, 1))
        over = ~(compared < threshold)
        if bq >= every:
            fails |= cut(over, bq // every, -1, False).any(-1)
        else:
            fails |= jnp.repeat(over, every // bq, axis=-1)[..., :nq]
    if guarantee is not None:
        assert limits is not None
        fails |= ~(cut(limits, bq, -1, 0.0) < guarantee).all(-1)
    return fails


def _done_densely(
    given: tuple[Array, Array, Array],
    out: Float[Array, "B T N Hv"],
    logsumexp: Float[Array, "B T N"],
    rows: Bool[Array, "B N nq"],
    mask: BlockMask,
    rule: Rule,
    how: dict[str, Any],
) -> Float[Array, "B T N Hv"]:
    """`out` with the dropped blocks of these row blocks merged into it; nothing without any."""

    def more(operands: Any) -> Array:
        (query, key, value), out, logsumexp, rows = operands
        blocks = _dropped(mask, rule, *rows.shape[:2]) & rows[..., None]
        rest = BlockMask.from_dense(blocks, mask.rule, shape=mask.shape, block=mask.block)
        found = merged((out, logsumexp), attend(query, key, value, rest, **how))[0]
        return found.astype(out.dtype)

    operands = (given, out, logsumexp, rows)
    return lax.cond(rows.any(), more, lambda operands: operands[1], operands)


# ------------------------------------------------------------------------------------------- delta


def _by_query(rows: Bool[Array, "B N nq"], block: int, T: int) -> Bool[Array, "B T N"]:
    return jnp.swapaxes(jnp.repeat(rows, block, axis=-1)[..., :T], 1, 2)


def _last_sampled(sample: Int[Array, "B G"], T: int, every: int) -> Int[Array, "B T"]:
    """The group whose sampled query is the last one at or before each query; -1 without one."""
    group = jnp.arange(T)[None] // every
    return group - (jnp.take_along_axis(sample, group, axis=1) > jnp.arange(T)[None])


def _served(
    rule: Rule, sample: Int[Array, "B G"], T: int, N: int, every: int
) -> Bool[Array, "B T N"]:
    """Whether each query sees the last sampled query at or before it as a key."""
    group = _last_sampled(sample, T, every)
    source = jnp.take_along_axis(sample, jnp.maximum(group, 0), axis=1)[:, None, :]
    b, n, q = jnp.ogrid[: len(sample), :N, :T]
    sees = rule.allows(Tokens.at(b, n, q, source))
    sees = jnp.broadcast_to(sees & (group >= 0)[:, None, :], (len(sample), N, T))
    return jnp.swapaxes(sees, 1, 2)


def _corrected(
    out: Float[Array, "B T N Hv"],
    error: Float[Array, "B G N Hv"],
    served: Bool[Array, "B T N"],
    sample: Int[Array, "B G"],
    every: int,
) -> Float[Array, "B T N Hv"]:
    """out + the error of the last sampled query, for the queries that are served."""
    group = jnp.maximum(_last_sampled(sample, out.shape[1], every), 0)
    added = jnp.where(served[..., None], at_sample(error, group), 0)
    return (out.astype(jnp.float32) + added).astype(out.dtype)
