"""Profile: the statistics of a model's attention over calibration text, with standard errors.

    documents ─ every layer's q, k, v ─ statistics.measure ─┬─ means over documents
                (one dense pass each)                       ├─ standard errors
                                                            └─ mass of two halves

`static` ranks the blocks of a document by the mean of the documents before it, so that no document
is measured with a ranking that it contributed to.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, PyTree

from xsake import _files
from xsake.hads import budget, files, row_blocks
from xsake.hads.chunks import PLAIN
from xsake.hads.files import hash_of
from xsake.hads.partial import Partial
from xsake.hads.statistics import (
    CURVES,
    DENSITIES,
    POLICIES_WITH_COST,
    POLICIES_WITHOUT_GRADIENT,
    AnyArray,
    Statistics,
    measure,
)
from xsake.parallel import sharding

SCHEMA = 1
NO_LOSS = (
    "the profile has nothing of the policy 'loss'; calibrate with loss=True, which is "
    "`xsake calibrate --loss`"
)


@dataclasses.dataclass(frozen=True)
class Facts:
    """Where a profile comes from."""

    length: int  # tokens of every document
    block: int
    band: int
    documents: int
    model_hash: str
    data_hash: str
    seed: int | None = None
    kinds: str = ""  # how many documents of each kind of text, if there are several
    dtype: str = ""  # the model's compute dtype; "" of profiles from before it was recorded

    def __post_init__(self) -> None:
        row_blocks.check_sizes(
            length=self.length, block=self.block, band=self.band, documents=self.documents
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Profile:
    """Means over documents, with standard errors. Every array has a leading axis of layers."""

    statistics: Statistics  # mean over documents
    # standard errors of mass, entropy, block_entropy, retained; NaN of one document
    errors: Mapping[str, AnyArray]
    mass_halves: Float[AnyArray, "2 layers N n n"]  # of the even and of the odd documents
    facts: Facts = dataclasses.field(metadata={"static": True})

    @property
    def size(self) -> tuple[int, int, int]:
        """(layers, heads, row blocks)."""
        layers, heads, n, _ = self.statistics.mass.shape
        return layers, heads, n

    def __repr__(self) -> str:
        (layers, heads, _), x = self.size, self.facts
        curves = ", ".join(self.statistics.cost["kl"]) or "no selector"
        return (
            f"Profile({layers} layers of {heads} heads, {x.documents} documents of {x.length:,} "
            f"tokens, blocks of {x.block}, cost curves of {curves})"
        )

    def scores(self, policy: str = "kl") -> Float[AnyArray, "layers N n n"]:
        """What `static` ranks by: the sensitivities for `output` and `loss`, else the mass."""
        if policy == "loss":
            if self.statistics.loss_sensitivity is None:
                raise ValueError(NO_LOSS)
            return self.statistics.loss_sensitivity
        if policy == "output" and np.isnan(self.statistics.sensitivity).any():
            raise ValueError(
                "the profile has no sensitivity, which the policy 'output' ranks by; calibrate "
                "with outputs=True"
            )
        return self.statistics.sensitivity if policy == "output" else self.statistics.mass

    def cost(self, policy: str, selector: str) -> Float[np.ndarray, "layers N n n"]:
        """cost[l, h, i, c - 1] of `policy` for the c blocks that `selector` ranks highest."""
        if policy == "loss" and policy not in self.statistics.cost:
            raise ValueError(NO_LOSS)
        curves = self.statistics.cost[policy]
        if selector not in curves:
            raise ValueError(
                f"the profile has no cost curves for {selector!r}, only for {sorted(curves)}; "
                "calibrate with that selector"
            )
        return np.asarray(curves[selector])

    def agreement(self, density: float = 0.43) -> dict[str, float]:
        """How well two halves of the documents agree.

        mass_distance: ½ Σ_j |mass of one half - of the other|, mean over row blocks: 0 to 1.
        budget_correlation: rank correlation of the heads' budgets by `kl` from each half alone, at
          `density`; if that is infeasible, at the midpoint of the smallest feasible density and 1.
        """
        if self.facts.documents < 2:
            return {}
        least = row_blocks.least_density(self.size[2], self.facts.band)
        density = max(density, (1 + least) / 2) if density < least else density
        first, second = (np.asarray(x) for x in self.mass_halves)
        counts = [
            budget.by_cost(budget.surrogate(x, self.facts.band), density, self.facts.band).counts
            for x in (first, second)
        ]
        ranks = [np.argsort(np.argsort(x.sum(-1).reshape(-1))) for x in counts]
        return {
            "mass_distance": float(np.abs(first - second).sum(-1).mean() / 2),
            "budget_correlation": float(np.corrcoef(ranks[0], ranks[1])[0, 1])
            if ranks[0].size > 1
            else 1.0,
        }

    def check_model(self, model_hash: str) -> None:
        """Refuses a model other than the one that was profiled."""
        if self.facts.model_hash != model_hash:
            raise ValueError(
                f"the profile is of model {self.facts.model_hash}, this is {model_hash}; "
                "calibrate this one with `xsake calibrate`"
            )

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file with the facts in its header."""
        arrays = {
            jax.tree_util.keystr(path_in_tree, simple=True, separator="/"): x
            for path_in_tree, x in jax.tree_util.tree_leaves_with_path(self)
        }
        files.save(path, "profile", SCHEMA, dataclasses.asdict(self.facts), arrays)

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Reads what `save` wrote."""
        header, arrays = files.read(path, "profile", SCHEMA)
        _files.check_fields(Facts, header, f"the header of {path}")
        try:
            facts = Facts(**header)
            _check_arrays(arrays, row_blocks.count_blocks(facts.length, facts.block))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}; make the profile again") from error
        tree: dict[str, Any] = {"errors": {}}
        for name, x in arrays.items():
            *folders, leaf = name.split("/")
            node = tree
            for folder in folders:
                node = node.setdefault(folder, {})
            node[leaf] = x
        return Profile(Statistics(**tree["statistics"]), tree["errors"], tree["mass_halves"], facts)


def _check_arrays(arrays: Mapping[str, np.ndarray], n: int) -> None:
    """Raises unless these are the arrays of a profile with n row blocks, by name and shape."""
    mass = arrays.get("statistics/mass")
    if mass is None or mass.ndim != 4 or 0 in mass.shape:
        raise ValueError("it has no array 'statistics/mass' [layers, heads, n, n]")
    layers, heads = mass.shape[:2]
    square, each = (layers, heads, n, n), (layers, heads)
    retained = (*each, len(DENSITIES))
    wanted = {
        "statistics/mass": square,
        "statistics/sensitivity": square,
        "statistics/entropy": each,
        "statistics/block_entropy": each,
        "statistics/retained": retained,
        "statistics/norm": (layers,),
        "mass_halves": (2, *square),
    }
    spread = {"mass": square, "entropy": each, "block_entropy": each, "retained": retained}
    optional = {f"errors/{name}": shape for name, shape in spread.items()}
    optional["statistics/loss_sensitivity"] = square
    optional |= {f"statistics/cost/{x}/{y}": square for x in POLICIES_WITH_COST for y in CURVES}
    for name in wanted:
        if name not in arrays:
            raise ValueError(f"it has no array {name!r}")
    for name, x in arrays.items():
        shape = (wanted | optional).get(name)
        if x.shape != shape or x.dtype.kind != "f":
            raise ValueError(
                f"its array {name!r} is {x.dtype} {list(x.shape)}"
                + (f", not float {list(shape)}" if shape else ", which a profile does not have")
            )


# ---------------------------------------------------------------------------------------- calibrate

# observe(weights, tokens [1, T], fold, carry) -> carry calls fold(layer, attention, carry) for
# every layer, where attention has q, k, v [1, T, …] and kernel [N, Hv, width], and `softmax`, a
# `chunks.Softmax`, unless it is plain; layer may be traced.
Observe = Callable[[Any, Any, Callable[[Any, Any, Any], Any], Any], Any]
# gradients(weights, tokens [1, T]) -> float [layers, T, N, Hv]: of the summed loss of the document,
# with respect to every layer's attention output.
Gradients = Callable[[Any, Any], Array]


def calibrate(
    observe: Observe,
    weights: PyTree,
    documents: Iterable[Int[AnyArray, " T"]],
    *,
    layers: int,
    heads: int,
    block: int = 128,
    band: int = 0,
    curves: tuple[str, ...] = CURVES,
    model_hash: str = "",
    vocab_size: int | None = None,
    seed: int | None = None,
    kinds: str = "",
    report: Callable[[int], None] | None = None,
    partial: Partial | None = None,
    outputs: bool = True,
    gradients: Gradients | None = None,
) -> Profile:
    """Profiles a model over documents of one length, one pass over each.

    Args:
      observe: calls a fold with every layer's q, k, v and output projection, see `Observe`.
      weights: the first argument of `observe`; an argument of the compiled code, not a constant.
      documents: token ids, all of one length.
      layers: of the model; another number than it has raises after the first document.
      heads: query heads.
      block: tokens per block.
      band: forced blocks before the diagonal.
      curves: selectors to measure cost curves for.
      model_hash: of the model, stored in the profile.
      vocab_size: of the model; token ids from there on raise.
      seed: the one that the documents were sampled with; only recorded.
      kinds: of text that the documents are; only recorded.
      report: called with the number of documents done.
      partial: keeps what was measured so far in a file; the same call again starts from it.
      outputs: False measures mass and entropies only, which is enough for the policies `uniform`
        and `entropy`; on a Hopper GPU they are by-products of attention. Then `curves` is ().
      gradients: of the loss, see `Gradients`: the policy `loss` is measured too, which takes a
        backward pass for each document.
    """
    documents = [np.asarray(document) for document in documents]
    row_blocks.check_sizes(layers=layers, heads=heads, block=block, band=band)
    check_documents(documents, vocab_size)
    check_curves(curves, outputs)
    if gradients is not None and not outputs:
        raise ValueError("gradients weigh output errors; pass outputs=True, or leave them out")
    length = len(documents[0])
    n = row_blocks.count_blocks(length, block)
    how = {"observe": observe, "block": block, "band": band, "curves": curves, "outputs": outputs}
    how["gradients"] = gradients
    facts = Facts(length, block, band, len(documents), model_hash, hash_of(documents), seed, kinds)
    state = Running.start(layers, heads, n, curves, gradients is not None)
    if partial is not None:
        # only what is not the default: files from before these options have none
        options = ({} if outputs else {"outputs": False}) | ({"loss": True} if gradients else {})
        known = dataclasses.asdict(facts)
        del known["dtype"]  # not known here; `partial` has that of its caller
        state = partial.load(state, **known, curves=curves, **options)
    state = _beside(weights, state)
    done = int(state.documents)
    if report is not None and done:
        report(done)
    for number, document in enumerate(documents[done:], done):
        mean = state.mean
        ranked = (mean.mass, mean.sensitivity, mean.loss_sensitivity)
        before = tuple(x for x in ranked if x is not None)
        found, visits = _one_document(weights, document, before, **how)
        if not number:
            _check_visits(np.asarray(visits))
        state = _accumulate(state, found)
        if partial is not None:
            partial.save(state)
        if report is not None:
            jax.block_until_ready(state.documents)
            report(number + 1)
    return _finished(state, facts)


def _beside(weights: PyTree, state: Running) -> Running:
    """The state on the mesh of the weights, if any, as passes return it: none is recompiled."""
    for x in jax.tree.leaves(weights):
        if isinstance(x, Array) and isinstance(x.sharding, NamedSharding):
            return sharding.put(state, NamedSharding(x.sharding.mesh, P()))
    return state


def check_curves(curves: Any, outputs: bool) -> None:
    """Raises unless the curves are names of selectors that can be measured."""
    if isinstance(curves, str):
        raise TypeError(f"curves must be a tuple of names, got {curves!r}; pass ({curves!r},)")
    if unknown := [name for name in curves if name not in CURVES]:
        raise ValueError(f"curves has {unknown[0]!r}, which is not one of {list(CURVES)}")
    if curves and not outputs:
        raise ValueError(
            f"curves is {curves}, but outputs=False measures none; pass curves=() or outputs=True"
        )


def check_documents(documents: Sequence[AnyArray], vocab_size: int | None) -> None:
    """Raises unless the documents are token ids of one length."""
    if not documents or any(x.ndim != 1 for x in documents):
        shape = list(documents[0].shape) if documents else "none"
        raise ValueError(
            "calibration needs several documents, each a 1-D array of token ids; the first is "
            f"{shape}"
        )
    if len(lengths := {x.size for x in documents}) > 1:
        raise ValueError(
            f"calibration needs documents of one length, got lengths {sorted(lengths)}"
        )
    for number, x in enumerate(documents):
        if not x.size or x.dtype.kind not in "iu":
            raise ValueError(f"document {number} must be token ids, got {x.dtype} {list(x.shape)}")
        if x.min() < 0 or (vocab_size is not None and x.max() >= vocab_size):
            most = "0 up" if vocab_size is None else f"0 to {vocab_size - 1}"
            raise ValueError(
                f"document {number} has token id {x.min() if x.min() < 0 else x.max()}, but the "
                f"model's ids are from {most}; tokenize the text with the model's own tokenizer"
            )


def _check_visits(visits: np.ndarray) -> None:
    """visits[layer] is how often a layer was observed; the last entry counts those beyond."""
    if (visits != [1] * (len(visits) - 1) + [0]).any():
        raise ValueError(
            f"layers = {len(visits) - 1}, but the model was observed in {visits.sum()} layers, "
            f"{visits[-1]} of them beyond; pass the model's own number of layers"
        )


@functools.partial(
    jax.jit, static_argnames=("observe", "block", "band", "curves", "outputs", "gradients")
)
def _one_document(
    weights: PyTree,
    tokens: Int[Array, " T"],
    before: tuple[Float[Array, "layers N n n"], ...],
    *,
    observe: Observe,
    block: int,
    band: int,
    curves: tuple[str, ...],
    outputs: bool,
    gradients: Gradients | None,
) -> tuple[Statistics, Int[Array, " layers+1"]]:
    """(statistics of one document by layer, how often each layer was observed)."""
    layers, heads, n, _ = before[0].shape
    slopes = None if gradients is None else gradients(weights, tokens[None])
    if slopes is not None and slopes.shape[:3] != (layers, len(tokens), heads):
        raise ValueError(
            f"gradients must return [layers, T, heads, …] = {[layers, len(tokens), heads]}, got "
            f"shape {list(slopes.shape)}"
        )

    def fold(layer: int | Array, seen: Any, carry: Any) -> Any:
        if seen.q.shape[2] != heads:
            raise ValueError(f"heads = {heads}, but the model has {seen.q.shape[2]} query heads")
        known, visits = carry
        statistics = measure(
            seen.q[0],
            seen.k[0],
            seen.v[0],
            seen.kernel,
            block=block,
            band=band,
            curves=curves,
            before=jax.tree.map(lambda x: x[layer], before),
            softmax=getattr(seen, "softmax", PLAIN),
            outputs=outputs,
            gradient=None if slopes is None else slopes[layer],
        )
        known = jax.tree.map(lambda every, x: every.at[layer].set(x), known, statistics)
        return known, visits.at[jnp.minimum(layer, layers)].add(1)

    start = _empty(layers, heads, n, curves, slopes is not None)
    visits = jnp.zeros(layers + 1, jnp.int32)
    return observe(weights, tokens[None], fold, (start, visits))


class Running(NamedTuple):
    """Means and squared deviations of the documents so far, by Welford's algorithm."""

    documents: Int[Array, ""]
    mean: Statistics
    squares: dict[str, Array]  # {name: Σ (x - mean)²}
    halves: Float[Array, "2 layers N n n"]  # sums of mass

    @staticmethod
    def start(
        layers: int, heads: int, n: int, curves: tuple[str, ...], loss: bool = False
    ) -> Running:
        """No documents yet."""
        mean = _empty(layers, heads, n, curves, loss)
        squares = {name: jnp.zeros_like(getattr(mean, name)) for name in SPREAD}
        return Running(jnp.zeros((), jnp.int32), mean, squares, jnp.stack([mean.mass] * 2))


SPREAD = ("mass", "entropy", "block_entropy", "retained")


@functools.partial(jax.jit, donate_argnums=0)
def _accumulate(state: Running, new: Statistics) -> Running:
    count = state.documents + 1

    def moved(mean: AnyArray, x: AnyArray, count: Array) -> AnyArray:
        return mean + (x - mean) / jnp.maximum(count, 1)

    mean = jax.tree.map(lambda m, x: moved(m, x, count), state.mean, new)
    # `static` has no ranking for the first document: its curves are means from the second on
    cost = {
        policy: {
            name: jnp.where(count == 1, 0, moved(old, new.cost[policy][name], count - 1))
            if name == "static"
            else mean.cost[policy][name]
            for name, old in curves.items()
        }
        for policy, curves in state.mean.cost.items()
    }
    squares = {
        name: state.squares[name]
        + (getattr(new, name) - getattr(state.mean, name))
        * (getattr(new, name) - getattr(mean, name))
        for name in SPREAD
    }
    halves = state.halves.at[state.documents % 2].add(new.mass)
    return Running(count, mean._replace(cost=cost), squares, halves)


def _finished(state: Running, facts: Facts) -> Profile:
    count = facts.documents
    unknown = np.float32(np.nan)  # one document says nothing of the spread
    errors = {
        name: np.sqrt(np.asarray(x) / (count - 1) / count)
        if count > 1
        else np.full(x.shape, unknown)
        for name, x in state.squares.items()
    }
    each = np.array([(count + 1) // 2, max(1, count // 2)]).reshape(2, 1, 1, 1, 1)
    mean = jax.tree.map(np.asarray, state.mean)
    if count == 1 and "static" in mean.cost["kl"]:  # no second document to measure the ranking on
        mean.cost["kl"]["static"] = budget.surrogate(mean.mass, facts.band).astype(np.float32)
        for policy, x in (("output", mean.sensitivity), ("loss", mean.loss_sensitivity)):
            if x is not None:
                mean.cost[policy]["static"] = budget.additive(x, facts.band).astype(np.float32)
    return Profile(mean, errors, np.asarray(state.halves) / each, facts)


def _empty(
    layers: int, heads: int, n: int, curves: tuple[str, ...], loss: bool = False
) -> Statistics:
    def zeros(*shape: int) -> Array:
        return jnp.zeros((layers, *shape), jnp.float32)

    square = functools.partial(zeros, heads, n, n)
    policies = POLICIES_WITH_COST if loss else POLICIES_WITHOUT_GRADIENT
    cost = {policy: {name: square() for name in curves} for policy in policies}
    return Statistics(
        mass=square(),
        sensitivity=square(),
        entropy=zeros(heads),
        block_entropy=zeros(heads),
        retained=zeros(heads, len(DENSITIES)),
        cost=cost,
        norm=zeros(),
        loss_sensitivity=square() if loss else None,
    )


def check_held_out(documents: Iterable[Int[AnyArray, " T"]], data_hash: str) -> None:
    """Refuses the documents that a profile or plan was calibrated on, by its `data_hash`."""
    if hash_of(documents) == data_hash:
        raise ValueError(
            f"these documents (hash {data_hash}) are those of the calibration, and quality must be "
            "measured on text that was not calibrated on; give --text other text"
        )
