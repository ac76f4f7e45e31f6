"""Plan: how many blocks each head keeps and how they are selected, for a whole model.

    Profile ─ make(profile, density, policy, selector) ─ Plan ─┬─ plan.mask(layer, length=…)
                                                               ├─ plan.mask(layer, q, k)
                                                               └─ plan.decode_budget(density)

A row block is a block of queries; counts[layer, head, i] is how many key blocks row block i keeps.
A plan is a pytree: its counts may be arguments of a compiled step and change without a recompile.
It is also an `InputMask`, which a model takes as `mask=plan`.

At another length: a row block sees the same prefix in a short text as in a long one, so shorter
texts use the first row blocks; `row_blocks.extended` says what the others get. Counts are then
scaled to meet the requested density again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float

from xsake import _files, block_scores, masks, selection
from xsake.block_mask import BlockMask
from xsake.block_mask.input_mask import InputMask, document_rule
from xsake.hads import budget, files, row_blocks
from xsake.hads.documents import shared_blocks
from xsake.hads.gains import gains
from xsake.hads.profile import Profile
from xsake.hads.shades import legend, shade
from xsake.hads.terms import Terms, check_arrays, check_terms
from xsake.masks.rule import Leaf
from xsake.parallel.balance import query_order

SCHEMA = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan(InputMask):
    """How many blocks, counts[layer, head, row block]; which ones, by `terms.selector`."""

    counts: Leaf  # int32 [layers, N, n]
    scores: Leaf  # float32 [layers, N, n, n] of the selector `static`; None for the others
    terms: Terms = dataclasses.field(metadata={"static": True})
    axes: ClassVar[dict[str, tuple[str, ...]]] = {  # logical names, for parallel.sharding
        "counts": ("layers", "heads", "row_blocks"),
        "scores": ("layers", "heads", "row_blocks", "kv_blocks"),
    }

    # --------------------------------------------------------------------------------------- masks

    @property
    def row_block(self) -> int:
        """Queries of a row block."""
        return self.terms.block

    def mask(
        self,
        layer: Any,
        q: Array | None = None,
        k: Array | None = None,
        *,
        length: int | None = None,
        segment_ids: Any = None,
        first: Any = None,
    ) -> BlockMask:
        """The causal BlockMask of a layer, with lists [B, N].

        `static` without segment_ids has lists [1, N].

        Args:
          layer: the layer's number; may be traced.
          q: [B, T, N, H]; every selector but `static` needs q and k.
          k: [B, T, K, H].
          length: T, if q is not given; default `self.length`.
          segment_ids: int [B, T]; each document's tokens are consecutive. Blocks of other
            documents are not candidates for selection, and tokens of different documents do not
            attend to each other.
          first: position of the first query of a chunk. It and T are multiples of the block; k
            [B, S, K, H] holds all S keys, the later ones not yet written; segment_ids are [B, S].
            The mask has shape (T, S) and selects the same blocks as one call with the whole text,
            except under `past_query`: there the first row block of the chunk is scored with its
            own queries.
        """
        length, terms = self._length(q, k, length, first), self.terms
        is_whole = q is not None and k is not None and first is None and segment_ids is None
        if is_whole and terms.selector != "static" and terms.top_p is None:
            assert q is not None
            assert k is not None
            self._check(layer, q, k, first)
            counts = jnp.asarray(self.at(length).counts)[layer]
            return block_scores.select(terms.selector, q, k, counts, terms.block, terms.band)
        blocks = self.blocks(layer, q, k, length=length, segment_ids=segment_ids, first=first)
        T, rule = length, masks.causal()
        if q is not None and first is not None:
            T = q.shape[1]
            rule = masks.at_positions(rule, (first + jnp.arange(T))[None])
        if segment_ids is not None:
            rule = rule & document_rule(segment_ids, T, first)
        return BlockMask.from_dense(blocks, rule, shape=(T, length), block=terms.block)

    def _length(self, q: Array | None, k: Array | None, length: int | None, first: Any) -> int:
        """S, the number of keys."""
        keys = q if first is None else k
        if keys is not None:
            return int(keys.shape[1])
        return self.length if length is None else length

    def blocks(
        self,
        layer: Any,
        q: Array | None = None,
        k: Array | None = None,
        *,
        length: int | None = None,
        segment_ids: Any = None,
        first: Any = None,
    ) -> Bool[Array, "_ N R n"]:
        """The blocks that `mask` lists, [1|B, N, n, n]; with `first`, the R row blocks of q."""
        terms = self.terms
        length = self._length(q, k, length, first)
        n = row_blocks.count_blocks(length, terms.block)
        if n != self.counts.shape[-1]:
            found = self.at(length)
            return found.blocks(layer, q, k, length=length, segment_ids=segment_ids, first=first)
        self._check(layer, q, k, first)
        R = n if q is None or first is None else q.shape[1] // terms.block
        row = 0 if first is None else first // terms.block
        counts = jnp.asarray(self.counts)[layer]
        counts = counts if first is None else _rows(counts, row, R, 1)
        scores = self._scores(layer, q, k, None if first is None else row)
        shared = None
        if segment_ids is not None:
            shared = shared_blocks(jnp.asarray(segment_ids), terms.block)[:, None]
            shared = shared if first is None else _rows(shared, row, R, 2)
            scores = jnp.where(shared, scores, -jnp.inf)
            # forced blocks of other documents must not use up the budget
            forced = selection.is_forced(row + jnp.arange(R)[:, None], jnp.arange(n), terms.band)
            counts = counts + (forced & ~shared).sum(-1, dtype=jnp.int32)
        if terms.top_p is not None:
            counts = selection.counts_for_mass(scores, terms.top_p, counts, terms.band, row)
        kept = selection.keep_top(scores, counts, terms.band, row)
        return kept if shared is None else kept & shared

    def _check(self, layer: Any, q: Array | None, k: Array | None, first: Any) -> None:
        block, layers = self.terms.block, len(self.counts)
        for name, x in (("q", q), ("k", k)):
            if x is not None and x.ndim != 4:
                raise ValueError(f"{name} must be [B, length, heads, H], got {list(x.shape)}")
        if q is not None and k is not None and q.shape[3] != k.shape[3]:
            raise ValueError(f"q has heads of {q.shape[3]}, k of {k.shape[3]}")
        if q is not None and first is not None and q.shape[1] % block:
            raise ValueError(
                f"the chunk length {q.shape[1]} is not a multiple of the plan's block size "
                f"{block}; choose one that is"
            )
        if q is not None and first is not None and not isinstance(first, jax.core.Tracer):
            keys = (q if k is None else k).shape[1]  # a padded chunk may reach past them
            if first % block or not 0 <= first < keys:
                raise ValueError(
                    f"first must be a multiple of the plan's block size {block}, from 0 to below "
                    f"the {keys} keys, got {first}"
                )
        if not isinstance(layer, jax.core.Tracer):
            if np.ndim(layer) or not np.issubdtype(np.asarray(layer).dtype, np.integer):
                raise TypeError(f"layer must be the number of a layer, got {layer!r}")
            if not 0 <= int(layer) < layers:
                raise ValueError(f"layer {layer} is out of range: the plan has {layers} layers")
        heads = self.counts.shape[1]
        if self.terms.selector != "static" and q is not None and q.shape[2] != heads:
            raise ValueError(f"the plan is for {heads} heads, q has {q.shape[2]}")

    def _scores(
        self, layer: Any, q: Array | None, k: Array | None, row: Any
    ) -> Float[Array, "_ N R n"]:
        """Selection scores [1|B, N, n, n].

        If `row` is given, only of the row blocks in q, the first of which is number `row`.
        """
        terms = self.terms
        if terms.selector == "static":
            scores = jnp.log(jnp.maximum(jnp.asarray(self.scores)[layer], 1e-30))[None]
            if row is None or q is None:
                return scores
            return _rows(scores, row, q.shape[1] // terms.block, 2)
        if q is None or k is None:
            raise ValueError(
                f"a plan that selects by {terms.selector!r} looks at the input: "
                "call plan.mask(layer, q, k)"
            )
        begin = 0 if row is None else row

        def one(q: Array, k: Array) -> Array:
            return block_scores.estimate(terms.selector, q, k, terms.block, begin)

        return jax.vmap(one)(q, k)

    def at(self, length: int) -> Plan:
        """This plan for texts of another length, at the same density; see the top of the module.

        Call it on the calibrated plan. A plan already cut to END row blocks or fewer no longer has
        an end that differs from the rest. Counts are computed on the host, so this is called
        outside jit or on a constant plan.
        """
        n, old = row_blocks.count_blocks(length, self.terms.block), self.counts.shape[-1]
        if n == old:
            return self
        if isinstance(self.counts, jax.core.Tracer):
            raise ValueError(
                f"the plan is for {old} row blocks and the input has {n}: "
                f"call plan.at({length}) before the plan enters jit"
            )
        terms, end = self.terms, self._weighted_end(old, n)
        # a text so short that its forced blocks exceed the density keeps just those
        density = max(terms.density, row_blocks.least_density(n, terms.band))
        target = row_blocks.extended(np.asarray(self.counts, np.float64), n, end, terms.band)
        found = budget.filled(target, density, n, terms.band)
        scores = None if self.scores is None else row_blocks.stretched(np.asarray(self.scores), n)
        return dataclasses.replace(self, counts=found.counts, scores=scores)

    def _weighted_end(self, *texts: int) -> int:
        """How many last row blocks have the end weight, in texts of so many row blocks.

        0 without an end weight, or if one of the texts has no other row blocks.
        """
        return row_blocks.END if self.terms.end_weight != 1 and min(texts) > row_blocks.END else 0

    def check_lengths(self, lengths: Iterable[int]) -> None:
        """Refuses a batch whose prompts end in different row blocks, if the plan weighs the end.

        One BlockMask serves the batch, so only the longest prompt's end would have the weight.
        """
        counts = {row_blocks.count_blocks(x, self.terms.block) for x in lengths}
        if len(counts) > 1 and self._weighted_end(max(counts), self.counts.shape[-1]):
            raise ValueError(
                f"these prompts have {sorted(counts)} row blocks of {self.terms.block} tokens, but "
                f"a plan with end_weight = {self.terms.end_weight:g} needs prompts with the same "
                "number of row blocks; pass them in separate calls"
            )

    def padded(self, length: int, capacity: int) -> Plan:
        """`at(length)` with row blocks for `capacity` tokens; those of padding keep the fewest.

        The result is for that length alone: `at` would take its padding for text.
        """
        found, n = self.at(length), row_blocks.count_blocks(capacity, self.terms.block)
        more = n - found.counts.shape[-1]
        if more <= 0:
            return found
        floors = row_blocks.floors(n, self.terms.band)[-more:]
        floors = np.broadcast_to(floors, (*found.counts.shape[:2], more))
        scores = found.scores
        if scores is not None:
            scores = np.pad(np.asarray(scores), ((0, 0), (0, 0), (0, more), (0, more)))
        counts = np.concatenate([np.asarray(found.counts), floors], -1)
        return dataclasses.replace(found, counts=counts, scores=scores)

    def decode_budget(self, density: float) -> np.ndarray:
        """The fraction of the cache that each head may read, [layers, N], with mean `density`.

        It is proportional to the counts of the plan's last row block before its weighted end,
        clipped at 1; of the very last one if all blocks of the former are forced.
        """
        density = row_blocks.plain(density)
        row_blocks.check_density(density)
        n, band = self.counts.shape[-1], self.terms.band
        row = n - 1 - self._weighted_end(n)
        if row_blocks.floors(n, band)[row] == row + 1:  # the same in every head
            row = n - 1
        wanted = np.asarray(self.counts)[..., row].astype(np.float64)
        small, large = 0.0, 1 / wanted.min()
        for _ in range(100):
            middle = (small + large) / 2
            too_much = np.minimum(middle * wanted, 1).mean() > density
            small, large = (small, middle) if too_much else (middle, large)
        return np.minimum(large * wanted, 1).astype(np.float32)

    # ----------------------------------------------------------------------------------- reporting

    @property
    def length(self) -> int:
        """Of the texts that the counts are for: of calibration, unless `at` changed it."""
        n, block = self.counts.shape[-1], self.terms.block
        is_calibrated = row_blocks.count_blocks(self.terms.length, block) == n
        return self.terms.length if is_calibrated else n * block

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
            f"Plan({layers} layers × {heads} heads × {n} row blocks of {terms.block}, "
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
            f"budgets by {self.terms.policy}, blocks chosen by {self.terms.selector}",
            f"for texts of {self.length:,} tokens, calibrated at {self.terms.length:,}",
            f"layer  mean  least  most  heads ({'  '.join(legend())})",
        ]
        for layer, row in enumerate(shares):
            marks = "".join(shade(x) for x in row)
            lines.append(
                f"{layer:5d}  {row.mean():.2f}   {row.min():.2f}  {row.max():.2f}  {marks}"
            )
        if self.terms.end_weight != 1:
            lines.append(f"the last {row_blocks.END} row blocks count {self.terms.end_weight:g} ×")
        if self.terms.top_p is not None:
            lines.append(
                f"top_p {self.terms.top_p:g}: a row block stops at this share of its estimated "
                "mass; these densities are upper limits"
            )
        validation = json.loads(self.terms.validation)
        lines += [f"{name}: {value}" for name, value in validation.items()]
        return "\n".join([*lines, *self.terms.notes])

    def plot(self, axes: Any = None) -> Any:
        """Plots a layers × heads heat map of densities on matplotlib axes, which it returns."""
        import matplotlib.pyplot as plt

        axes = plt.subplots()[1] if axes is None else axes
        image = axes.imshow(self.shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set(xlabel="head", ylabel="layer", title=f"density of each head: {self!r}")
        axes.figure.colorbar(image, ax=axes)
        return axes

    # ------------------------------------------------------------------------------- save and load

    def validated(self, figures: dict[str, Any]) -> Plan:
        """This plan with its metrics on held-out text."""
        terms = dataclasses.replace(self.terms, validation=json.dumps(figures))
        return dataclasses.replace(self, terms=terms)

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file whose header is JSON: terms, schema, realised density."""
        files.save(path, "plan", SCHEMA, *self._contents())

    def to_bytes(self) -> bytes:
        """What `save` writes."""
        return files.encoded("plan", SCHEMA, *self._contents())

    def _contents(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(header, arrays) of the file."""
        header = {**dataclasses.asdict(self.terms), "realised_density": self.density}
        arrays = {"counts": self.counts, "scores": self.scores}
        return header, {name: x for name, x in arrays.items() if x is not None}

    @staticmethod
    def load(path: str | Path, model_hash: str | None = None) -> Plan:
        """Reads what `save` wrote; with `model_hash`, refuses a plan made for another model."""
        header, arrays = files.read(path, "plan", SCHEMA)
        realised = header.pop("realised_density", None)
        _files.check_fields(Terms, header, f"the header of {path}")
        try:
            _files.parse_object(header["validation"], "its validation")
            terms = Terms(**header | {"notes": tuple(header["notes"])})
            check_arrays(arrays, terms)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}; make the plan again") from error
        plan = Plan(arrays["counts"], arrays.get("scores"), terms)
        if not _files.fits(realised, float) or not abs(plan.density - realised) <= 1e-9:
            raise ValueError(
                f"{path} says density {realised} but its counts have {plan.density}: it is damaged"
            )
        if model_hash is not None:
            plan.check_model(model_hash)
        return plan

    def check(self, layers: int, heads: int) -> None:
        """Refuses a model of another number of layers or query heads."""
        if (layers, heads) != self.counts.shape[:2]:
            raise ValueError(
                f"the plan is for a model of {self.counts.shape[0]} layers with "
                f"{self.counts.shape[1]} heads, this one has {layers} with {heads}; "
                "calibrate this one with `xsake calibrate`"
            )

    def check_model(self, model_hash: str) -> None:
        """Refuses a model other than the one the plan was made for."""
        if self.terms.model_hash and self.terms.model_hash != model_hash:
            raise ValueError(
                f"the plan is for model {self.terms.model_hash}, this is {model_hash}; "
                "calibrate this one with `xsake calibrate`, or use plan.for_any_model()"
            )

    def with_head_order(self, order: Any) -> Plan:
        """This plan for a model whose kv heads are in another order, int [layers, K]."""
        heads = query_order(order, self.counts.shape[1])
        layer = np.arange(len(heads))[:, None]
        scores = None if self.scores is None else self.scores[layer, heads]
        plan = dataclasses.replace(self, counts=self.counts[layer, heads], scores=scores)
        return plan.for_any_model()  # its weights have another hash

    def for_any_model(self) -> Plan:
        """This plan without its model's hash, for other weights of the same shape."""
        return dataclasses.replace(self, terms=dataclasses.replace(self.terms, model_hash=""))


def make(
    profile: Profile,
    density: float,
    policy: str = "output",
    selector: str = "mean_query",
    *,
    top_p: float | None = None,
    end_weight: float = 1.0,
    length: int | None = None,
) -> Plan:
    """A plan from a profile.

    Args:
      profile: of the model.
      density: over all layers and heads, 0 to 1; one below that of the forced blocks raises.
      policy: one of `budget.POLICIES`. `kl`, `output` and `loss` use the cost curves of `selector`;
        `loss` needs a profile that measured it.
      selector: one of `SELECTORS`.
      top_p: a row block keeps the fewest blocks that reach this fraction of its estimated mass, at
        most its count.
      end_weight: weight of the last two row blocks of a text in the budget, 1e-6 to 1e6; the
        others have 1. For prompts that end with their question. Of packed documents, only the end
        of the last one has it.
      length: of the texts that the plan is for; default the profile's. `plan.at` adapts the length
        too, but only this argument allows a density that is infeasible at the profile's length.
    """
    if not isinstance(profile, Profile):
        raise TypeError(
            f"profile must be a Profile, got {type(profile).__name__}; hads.Profile.load(path) "
            "reads one from a file"
        )
    density, top_p, end_weight = map(row_blocks.plain, (density, top_p, end_weight))
    check_terms(policy, selector, top_p, end_weight)
    row_blocks.check_density(density)
    asked = density = float(density)  # JSON cannot write a NumPy float32 or int64
    top_p, end_weight = None if top_p is None else float(top_p), float(end_weight)
    (layers, heads, n), facts = profile.size, profile.facts
    if length is not None:
        density = row_blocks.density_at(
            asked, row_blocks.count_blocks(length, facts.block), n, facts.band
        )
    if policy == "uniform":
        found = budget.uniform(density, layers, heads, n, facts.band, end_weight)
    elif policy == "entropy":
        entropies = profile.statistics.entropy
        found = budget.entropy(entropies, density, n, facts.band, end_weight)
    else:
        found = budget.by_gains(gains(profile, policy, selector), density, facts.band, end_weight)
    scores = np.asarray(profile.scores(policy), np.float32) if selector == "static" else None
    terms = Terms(
        density=asked,
        policy=policy,
        selector=selector,
        block=facts.block,
        length=facts.length,
        band=facts.band,
        top_p=top_p,
        end_weight=end_weight,
        model_hash=facts.model_hash,
        data_hash=facts.data_hash,
        notes=(*((f"calibrated on {facts.kinds}",) if facts.kinds else ()), *found.notes),
    )
    made = Plan(found.counts, scores, terms)
    return made if length is None else made.at(length)


def _rows(x: Array, first: Any, count: int, axis: int) -> Array:
    """`count` row blocks of x from `first` on; indices past the end (padding) are clamped."""
    return jnp.take(x, first + jnp.arange(count), axis, mode="clip")
