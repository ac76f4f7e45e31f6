"""Plan: a budget for every row of every head and a way to choose blocks, for a whole model.

    Profile ─ make(profile, density, policy, selector) ─ Plan ─┬─ plan.mask(layer, length=…)
                                                               └─ plan.mask(layer, q, k)

A plan is a pytree: its counts may be arguments of a compiled step and change without a recompile.
It is also what a model takes as a mask, plan(layer, q, k) -> BlockMask, for a whole text or, with
`first`, for a part of one.

At another length: a row of blocks sees the same prefix in a short text as in a long one, so shorter
texts use the first rows. Rows past the calibrated ones take the mean share of the last quarter, and
their columns keep their distance in the near half and are stretched in the far half. Counts are
then scaled so that the density asked for is met again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import block_scores, masks, selection
from xsake.block_mask import BlockMask
from xsake.hads import budget, row_blocks
from xsake.hads.profile import Profile, read
from xsake.hads.statistics import SELECTORS

SCHEMA = 1
SHADES = " ░▒▓█"


@dataclasses.dataclass(frozen=True)
class Terms:
    """What was asked for, and what it was made from."""

    density: float  # asked for, of all layers and heads together
    policy: str
    selector: str
    block: int
    length: int  # tokens that it was calibrated at
    band: int = 0
    top_p: float | None = None  # with it, counts are caps and a row stops at this share of mass
    model_hash: str = ""
    data_hash: str = ""
    notes: tuple[str, ...] = ()
    validation: str = "{}"  # JSON: the quality it was measured at, on other text


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """How many blocks, counts[layer, head, row]; which ones, by `terms.selector`."""

    counts: Any  # int32 [layers, N, n]
    scores: Any  # float32 [layers, N, n, n], the order of `static`; None where q and k decide
    terms: Terms = dataclasses.field(metadata={"static": True})

    # --------------------------------------------------------------------------------------- masks

    def __call__(self, layer: Any, q: Any, k: Any, first: Any = None) -> BlockMask:
        """The mask of one layer for this input; `layer` and `first` may be traced."""
        return self.mask(layer, q, k, first=first)

    def mask(
        self,
        layer: Any,
        q: Any = None,
        k: Any = None,
        *,
        length: int | None = None,
        first: Any = None,
    ) -> BlockMask:
        """The BlockMask of a layer, causal: [1, N] lists for `static`, [B, N] for the others.

        Args:
          layer: its number, may be traced.
          q: [B, T, N, H]; selectors that look at the input need it, and k [B, T, K, H].
          k: as they enter attention.
          length: T, where q is not given; default what the plan was calibrated at.
          first: q is a part of the text, in whole blocks from this position on, and k [B, S, K, H]
            all keys from 0 on, those after q not yet written: a mask of shape (T, S), with the
            blocks that the same rows have if the text of S tokens is given at once.
        """
        block = self.terms.block
        length = self._length(q, k, length, first)
        blocks = self.blocks(layer, q, k, length=length, first=first)
        if first is None:
            return selection.to_mask(blocks, length, block)
        T = q.shape[1]
        rule = masks.at_positions(masks.causal(), (first + jnp.arange(T))[None])
        return BlockMask.from_dense(blocks, rule, shape=(T, length), block=block)

    def _length(self, q: Any, k: Any, length: int | None, first: Any) -> int:
        """S: the tokens of the text that a mask is asked for."""
        if q is not None:
            return int((q if first is None else k).shape[1])
        return self.terms.length if length is None else length

    def blocks(
        self,
        layer: Any,
        q: Any = None,
        k: Any = None,
        *,
        length: int | None = None,
        first: Any = None,
    ) -> Array:
        """The blocks that `mask` lists, bool [1|B, N, n, n], or R rows of them."""
        terms = self.terms
        length = self._length(q, k, length, first)
        if row_blocks.count_blocks(length, terms.block) != self.counts.shape[-1]:
            return self.at(length).blocks(layer, q, k, length=length, first=first)
        if first is not None and q.shape[1] % terms.block:
            raise ValueError(
                f"a part of {q.shape[1]} tokens is not whole blocks of {terms.block}; "
                "read the text in chunks of a multiple of that"
            )
        if not isinstance(layer, jax.core.Tracer) and not 0 <= int(layer) < len(self.counts):
            raise ValueError(f"layer {layer} of a plan for {len(self.counts)} layers")
        counts = jnp.asarray(self.counts)[layer]
        row = None if first is None else first // terms.block
        counts = counts if row is None else _rows(counts, row, q.shape[1] // terms.block, 1)
        scores = self.scored(layer, q, k, row)
        row = 0 if row is None else row
        if terms.top_p is not None:
            counts = selection.counts_for_mass(scores, terms.top_p, counts, terms.band, row)
        return selection.keep_top(scores, counts, terms.band, row)

    def scored(self, layer: Any, q: Any = None, k: Any = None, row: Any = None) -> Array:
        """What blocks are chosen by, [1|B, N, n, n]: the calibrated order, or from this q and k.

        With `row`, the rows of q alone, from that one on.
        """
        terms, heads = self.terms, self.counts.shape[1]
        if terms.selector == "static":
            scores = jnp.log(jnp.maximum(jnp.asarray(self.scores)[layer], 1e-30))[None]
            return scores if row is None else _rows(scores, row, q.shape[1] // terms.block, 2)
        if q is None or k is None:
            raise ValueError(
                f"a plan that selects by {terms.selector!r} looks at the input: "
                "call plan.mask(layer, q, k)"
            )
        if q.shape[2] != heads:
            raise ValueError(f"the plan is for {heads} heads, q has {q.shape[2]}")
        row = 0 if row is None else row
        return jax.vmap(lambda q, k: block_scores.estimate(terms.selector, q, k, terms.block, row))(
            q, k
        )

    def stacked(self, length: int | None = None) -> BlockMask:
        """All layers of a static plan in one BlockMask with a leading axis of layers."""
        masks = [self.mask(layer, length=length) for layer in range(len(self.counts))]
        return jax.tree.map(lambda *xs: jnp.stack(xs), *masks)

    def at(self, length: int) -> Plan:
        """This plan for texts of another length, at the same density; see the top of the module.

        Counts are worked out on the host: call it outside jit, or let the plan be a constant.
        """
        n, old = row_blocks.count_blocks(length, self.terms.block), self.counts.shape[-1]
        if n == old:
            return self
        if isinstance(self.counts, jax.core.Tracer):
            raise ValueError(
                f"this plan has {old} rows of blocks and the input {n}: "
                f"make it plan.at({length}) before it enters jit"
            )
        counts = np.asarray(self.counts, np.float64)
        if n > old:
            share = (counts / row_blocks.ceilings(old))[..., -max(1, old // 4) :].mean(
                -1, keepdims=True
            )
            counts = np.concatenate([counts, share * row_blocks.ceilings(n)[old:]], -1)
        terms = self.terms
        # a text so short that its forced blocks exceed the density keeps just those
        density = max(terms.density, row_blocks.least_density(n, terms.band))
        found = budget.filled(counts[..., :n], density, n, terms.band)
        scores = None if self.scores is None else stretched(np.asarray(self.scores), n)
        return dataclasses.replace(self, counts=found.counts, scores=scores)

    # -------------------------------------------------------------------------------- what it says

    @property
    def shares(self) -> np.ndarray:
        """Every head's density, [layers, N]."""
        n = self.counts.shape[-1]
        return np.asarray(self.counts).sum(-1) / (n * (n + 1) / 2)

    @property
    def density(self) -> float:
        """Blocks visited ÷ blocks that causality allows, over all layers and heads."""
        return float(self.shares.mean())

    def __repr__(self) -> str:
        layers, heads, n = self.counts.shape
        terms = self.terms
        return (
            f"Plan({layers} layers × {heads} heads × {n} rows of {terms.block}, "
            f"{terms.policy} / {terms.selector}, density {terms.density})"
        )

    def __str__(self) -> str:
        """A table of layers and a heat map of heads: dark heads keep more."""
        if isinstance(self.counts, jax.core.Tracer):
            return repr(self)
        shares = self.shares
        lines = [
            repr(self),
            f"realised density {self.density:.4f}; heads {shares.min():.2f} to {shares.max():.2f}",
            f"calibrated at {self.terms.length:,} tokens",
            f"layer  mean  least  most  heads ({'  '.join(_legend())})",
        ]
        for layer, row in enumerate(shares):
            marks = "".join(_shade(x) for x in row)
            lines.append(
                f"{layer:5d}  {row.mean():.2f}   {row.min():.2f}  {row.max():.2f}  {marks}"
            )
        validation = json.loads(self.terms.validation)
        lines += [f"{name}: {value}" for name, value in validation.items()]
        return "\n".join([*lines, *self.terms.notes])

    def plot(self, axes: Any = None) -> Any:
        """Pictures the heads' densities, layers down and heads across, on matplotlib axes."""
        import matplotlib.pyplot as plt

        axes = plt.subplots()[1] if axes is None else axes
        image = axes.imshow(self.shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set(xlabel="head", ylabel="layer", title=f"density of each head: {self!r}")
        axes.figure.colorbar(image, ax=axes)
        return axes

    # ------------------------------------------------------------------------------- save and load

    def validated(self, figures: dict[str, Any]) -> Plan:
        """This plan with the quality it was measured at."""
        terms = dataclasses.replace(self.terms, validation=json.dumps(figures))
        return dataclasses.replace(self, terms=terms)

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file whose header is JSON: terms, schema, realised density."""
        from safetensors.numpy import save_file

        header = {"kind": "plan", "schema": SCHEMA, **dataclasses.asdict(self.terms)}
        header["realised_density"] = self.density
        arrays = {"counts": self.counts, "scores": self.scores}
        kept = {name: np.ascontiguousarray(x) for name, x in arrays.items() if x is not None}
        save_file(kept, path, {"xsake": json.dumps(header)})

    @staticmethod
    def load(path: str | Path, model_hash: str | None = None) -> Plan:
        """Reads what `save` wrote; with `model_hash`, refuses a plan made for another model."""
        header, arrays = read(path, "plan", SCHEMA)
        realised = header.pop("realised_density")
        plan = Plan(
            arrays["counts"],
            arrays.get("scores"),
            Terms(**header | {"notes": tuple(header["notes"])}),
        )
        if abs(plan.density - realised) > 1e-9:
            raise ValueError(
                f"{path} says density {realised} but its counts have {plan.density}: it is damaged"
            )
        if model_hash is not None:
            plan.check_model(model_hash)
        return plan

    def check_model(self, model_hash: str) -> None:
        """Refuses a model other than the one the plan was made for."""
        if self.terms.model_hash and self.terms.model_hash != model_hash:
            raise ValueError(
                f"the plan is for model {self.terms.model_hash}, this is {model_hash}; "
                "calibrate this one with `xsake calibrate`"
            )


def make(
    profile: Profile,
    density: float,
    policy: str = "output",
    selector: str = "mean_query",
    *,
    top_p: float | None = None,
    length: int | None = None,
) -> Plan:
    """A plan from a profile.

    Args:
      profile: of the model.
      density: of all layers and heads together, 0 to 1; below the forced blocks is refused.
      policy: one of `budget.POLICIES`. `kl` and `output` use the cost curves of `selector`.
      selector: one of `SELECTORS`.
      top_p: stop a row at this share of its estimated mass; counts are then caps.
      length: of the texts it is for, if not that of the profile. `plan.at` serves any length too,
        but a density that the forced blocks of a short calibration exceed is to be had only here.
    """
    if policy not in budget.POLICIES:
        raise ValueError(f"policy {policy!r} is not one of {list(budget.POLICIES)}")
    if selector not in SELECTORS:
        raise ValueError(f"selector {selector!r} is not one of {list(SELECTORS)}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    (layers, heads, n), facts = profile.size, profile.facts
    asked = density
    if length is not None:
        density = row_blocks.density_at(
            asked, row_blocks.count_blocks(length, facts.block), n, facts.band
        )
    if policy == "uniform":
        found = budget.uniform(density, layers, heads, n, facts.band)
    elif policy == "entropy":
        found = budget.entropy(profile.statistics.entropy, density, n, facts.band)
    else:
        found = budget.by_gains(gains(profile, policy, selector), density, facts.band)
    scores = np.asarray(profile.scores(policy), np.float32) if selector == "static" else None
    terms = Terms(
        density=asked,
        policy=policy,
        selector=selector,
        block=facts.block,
        length=facts.length,
        band=facts.band,
        top_p=top_p,
        model_hash=facts.model_hash,
        data_hash=facts.data_hash,
        notes=found.notes,
    )
    made = Plan(found.counts, scores, terms)
    return made if length is None else made.at(length)


@functools.lru_cache(maxsize=32)
def gains(profile: Profile, policy: str, selector: str) -> np.ndarray:
    """`budget.falling_gains` of a profile's cost curve; kept, because they serve every density."""
    return budget.falling_gains(profile.cost(policy, selector), profile.facts.band)


def _rows(x: Array, first: Any, count: int, axis: int) -> Array:
    """Some rows of x; those past its end, which hold padding, are the last one again."""
    return jnp.take(x, first + jnp.arange(count), axis, mode="clip")


def stretched(scores: np.ndarray, n: int) -> np.ndarray:
    """Scores [..., m, m] for n rows: the first n, or more by stretching the last row.

    Row i ≥ m takes from row m - 1: a column in the near half keeps its distance to the diagonal,
    the others are spread evenly over the far half.
    """
    m = scores.shape[-1]
    if n <= m:
        return scores[..., :n, :n]
    row, column = np.ogrid[:n, :n]
    source = np.minimum(row, m - 1)
    near = source // 2
    away = row - column
    far = column * np.maximum(source - near, 1) // np.maximum(row - near, 1)
    taken = np.where(away <= near, source - away, far)
    taken = np.clip(np.where(row < m, column, taken), 0, m - 1)
    return np.where(column <= row, scores[..., source, taken], 0)


def _shade(share: float) -> str:
    return SHADES[min(len(SHADES) - 1, int(share * len(SHADES)))] * 2


def _legend() -> list[str]:
    step = 1 / len(SHADES)
    return [f"{_shade(i * step + step / 2)}<{(i + 1) * step:.1f}" for i in range(len(SHADES))]
