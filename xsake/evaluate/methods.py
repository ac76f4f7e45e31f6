"""Every method of the table at one density: fixed patterns, HADS variants, and oracles.

    kind      information used  methods
    fixed     none              sliding_window, sink_window, longformer, bigbird, strided, random
    seed      entropies         seed_entropy: random blocks, counts proportional to head entropy
    static    calibration       static/uniform (uniform top-k), /entropy, /kl, /output, /loss
    run time  this input        vertical_slash, and SELECTOR/POLICY for eight selectors
    oracle    this input's p    oracle/kl, oracle/output, oracle/loss

The kind `seed` is the method of the earlier XSAKE. A method either has given blocks, or keeps the
counts[i] blocks of row block i that score highest on the input. Oracles use calibrated budgets,
like the HADS methods with the policies `kl`, `output` and `loss`. They rank blocks by this input's
true mass (for `kl`) or sensitivity (for `output`). That of `loss` ranks by the sensitivity of the
loss, with the gradient of the dense model: it knows the tokens that are to be predicted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import ArrayLike, Bool, Float, Int

from xsake import block_scores, selection
from xsake.block_mask import BlockMask
from xsake.hads import Certify, Profile, baselines, budget, make, row_blocks
from xsake.hads.chunks import PLAIN, Softmax
from xsake.hads.gains import gains
from xsake.hads.plan import Plan
from xsake.hads.statistics import POLICIES_WITH_COST, block_sensitivity, measure
from xsake.hads.subject import Subject, SubjectWithGradients

# Where scores come from; a method stores its source as an index into this.
SOURCES = (
    "given", *block_scores.ESTIMATES, "vertical_slash", "mass", "sensitivity", "loss_sensitivity",
)  # fmt: skip
# the score of each policy's oracle
ORACLES = {"kl": "mass", "output": "sensitivity", "loss": "loss_sensitivity"}


class Activations(NamedTuple):
    """One sequence in one layer's attention."""

    q: Float[Array, "T N H"]
    k: Float[Array, "T K H"]
    v: Float[Array, "T K Hv"]
    kernel: Float[Array, "N Hv width"] | None  # the output projection; only sensitivities read it
    softmax: Softmax = PLAIN
    gradient: Float[Array, "T N Hv"] | None = None  # of the loss; only "loss_sensitivity" reads it

    @classmethod
    def of_layer(
        cls,
        layer: int | Int[Array, ""],
        q: Float[Array, "1 T N H"],
        k: Float[Array, "1 T K H"],
        v: Float[Array, "1 T K Hv"],
        kernel: Float[Array, "N Hv width"] | None,
        softmax: Softmax,
        *,
        gradients: Float[Array, "layers T N Hv"] | None,
    ) -> Activations:
        """From a batch of one, and the gradients of all layers, if there are any."""
        gradient = None if gradients is None else gradients[layer]
        return cls(q[0], k[0], v[0], kernel, softmax, gradient)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """Given blocks or a source of scores.

    Methods with equal static fields differ in arrays only, so they can be stacked.
    """

    counts: Any  # int32 [layers, N, n]
    given: Any  # bool [layers, N, n, n]: the blocks if source is 0
    source: Any  # int32 []: index into SOURCES
    name: str = dataclasses.field(metadata={"static": True}, default="")
    kind: str = dataclasses.field(metadata={"static": True}, default="")
    corrected: bool = dataclasses.field(metadata={"static": True}, default=False)
    certify: Certify | None = dataclasses.field(metadata={"static": True}, default=None)
    band: int = dataclasses.field(metadata={"static": True}, default=0)  # forced before diagonal
    # a row block stops at this share of its estimated mass; counts are then upper limits
    top_p: float | None = dataclasses.field(metadata={"static": True}, default=None)

    def certified(self, certify: Certify) -> Method:
        """This method with certified attention; only tasks are measured with it."""
        settings = []
        if certify.threshold is not None:
            settings.append(f"{certify.criterion} {_exact(certify.threshold)}")
        if certify.guarantee is not None:
            settings.append(f"guarantee {_exact(certify.guarantee)}")
        if certify.correct:
            settings.append("corrected")
        name = f"{self.name} certified, {', '.join(settings)}"
        return dataclasses.replace(self, name=name, certify=certify)

    def anonymous(self) -> Method:
        """This method without its name, so that all methods share compiled code."""
        return dataclasses.replace(self, name="", kind="")

    def blocks(
        self,
        layer: int | Int[Array, ""],
        seen: Activations,
        block: int,
        sources: tuple[str, ...] | None = None,
    ) -> Bool[Array, "N n n"]:
        """The blocks that one sequence visits.

        `sources` must contain this method's source; default its own alone, or all of them inside
        compiled code, where the source is not known.
        """
        if sources is None:
            sources = SOURCES if isinstance(self.source, jax.core.Tracer) else sources_of([self])
        names = sources[1:]

        def selected(source: str, seen: Activations) -> Array:
            scores, counts = scores_of(source, seen, block), self.counts[layer]
            return best_blocks(scores, counts, self.band, self.top_p)

        branches = [lambda seen: self.given[layer]]
        branches += [functools.partial(selected, name) for name in names]
        return lax.switch(indices_in(sources)[self.source], branches, seen)

    def chooser(
        self, block: int, sources: tuple[str, ...], gradients: Float[Array, "layers T N Hv"] | None
    ) -> Callable[..., BlockMask]:
        """`choose` of `Subject.sparse_hidden`: the mask of a layer's `blocks`."""

        def choose(layer: Any, *given: Any) -> BlockMask:
            seen = Activations.of_layer(layer, *given, gradients=gradients)
            return selection.to_mask(self.blocks(layer, seen, block, sources), len(seen.q), block)

        return choose


def best_blocks(
    scores: Float[Array, "*batch n n"],
    counts: Int[ArrayLike, "*batch n"],
    band: int,
    top_p: float | None,
) -> Bool[Array, "*batch n n"]:
    """The counts[i] blocks of row block i with the highest scores; with `top_p` at most these."""
    if top_p is not None:
        counts = selection.counts_for_mass(scores, top_p, counts, band)
    return selection.keep_top(scores, counts, band)


def sources_of(methods: Sequence[Method]) -> tuple[str, ...]:
    """The sources that these methods use, "given" first; others need not be compiled."""
    needed = {SOURCES[int(method.source)] for method in methods}
    return SOURCES[0], *(name for name in SOURCES[1:] if name in needed)


def needing_gradients(subject: Subject, names: Sequence[str]) -> list[str]:
    """Those of the methods that need gradients of the loss which the model does not give."""
    if isinstance(subject, SubjectWithGradients):
        return []
    return [name for name in names if name == _name("oracle", "loss", "")]


def gradients_of(
    subject: Subject, weights: Any, tokens: Int[ArrayLike, " T"], sources: tuple[str, ...]
) -> Float[Array, "layers T N Hv"] | None:
    """The gradients that `Activations.gradient` are of, if one of the sources reads them."""
    if "loss_sensitivity" not in sources:
        return None
    if not isinstance(subject, SubjectWithGradients):
        raise ValueError(
            "oracle/loss needs gradients of the model's loss, which this model does not give; "
            "leave it out: at_density(…, names=…)"
        )
    return subject.loss_gradients(weights, jnp.asarray(tokens)[None])


def indices_in(sources: tuple[str, ...]) -> Int[Array, " sources"]:
    """Maps an index into SOURCES to the index into `sources`; 0 for those not in it."""
    return jnp.array([sources.index(name) if name in sources else 0 for name in SOURCES])


def scores_of(source: str, seen: Activations, block: int) -> Float[Array, "N n n"]:
    """Scores of a source that looks at the input, float32."""
    if source == "vertical_slash":
        return baselines.vertical_slash(seen.q, seen.k, block, softmax=seen.softmax)
    if source == "mass":
        return baselines.oracle(seen.q, seen.k, block, seen.softmax)
    if source == "loss_sensitivity" and seen.gradient is None:
        raise ValueError(
            "the scores of oracle/loss need Activations.gradient, which is None; pass the gradient "
            "of the loss, or name the sources without loss_sensitivity"
        )
    if source == "sensitivity" and seen.kernel is None:
        raise ValueError(
            "the scores of oracle/output need Activations.kernel, the output projection, which is "
            "None; pass it, or name the sources without sensitivity"
        )
    if source == "sensitivity":
        return block_sensitivity(*seen[:4], block, seen.softmax)
    if source == "loss_sensitivity":
        how: Any = {"block": block, "curves": (), "softmax": seen.softmax}
        found = measure(*seen[:4], **how, gradient=seen.gradient).loss_sensitivity
        assert found is not None
        return jnp.asarray(found)
    return block_scores.estimate(source, seen.q, seen.k, block)


def why_not_density(density: float, n: int, band: int = 0) -> str | None:
    """Why n row blocks cannot have this density: their forced blocks are more. None if they can.

    >>> why_not_density(0.1, 8)
    'density 0.1 is below 0.417, that of the forced blocks alone of 8 row blocks'
    """
    least = row_blocks.least_density(n, band)
    if density >= least:
        return None
    of = f"of {n} row blocks" + f" with a band of {band}" * (band > 0)
    return (
        f"density {density} is below {np.ceil(1000 * least) / 1000:.3f}, that of the forced blocks "
        f"alone {of}"
    )


def at_density(
    profile: Profile,
    density: float,
    length: int,
    others: dict[str, Profile] | None = None,
    names: Sequence[str] | None = None,
    end_weight: float = 1.0,
) -> list[Method]:
    """All methods at one density for texts of `length` tokens.

    Args:
      profile: of the model, at this length or another.
      density: of each method, over all layers and heads.
      length: of the texts that the methods are measured on.
      others: more profiles by their labels, such as "from wikipedia" or "from 2,048 tokens".
      names: only these methods; others are not even built. One that does not exist raises.
      end_weight: of the plans. 1: all methods. Otherwise only methods that have a plan, and their
        names end with ", end × WEIGHT".
    """
    labelled = {"": profile, **(others or {})}
    if names is not None:
        check_names(names, labelled)
    fixed = _fixed(profile, density, length, names) if end_weight == 1 else ()
    return list(fixed) + [
        dataclasses.replace(method, name=method.name + _weight_suffix(end_weight))
        for label, each in labelled.items()
        for method in _planned(each, density, length, label, names, end_weight)
    ]


def _weight_suffix(end_weight: float) -> str:
    """How a method's name ends."""
    return "" if end_weight == 1 else f", end × {_exact(end_weight)}"


def _exact(x: float) -> str:
    """x as names have it: without loss, so that other numbers have other names; 16, not 16.0."""
    return repr(float(x)).removesuffix(".0")


def names_of(profile: Profile, others: dict[str, Profile] | None = None) -> list[str]:
    """The methods that `at_density` can build from these profiles."""
    found = [*baselines.FIXED, "seed_entropy", "vertical_slash"]
    for label, each in {"": profile, **(others or {})}.items():
        for selector, policy in TRANSFERRED if label else FORMS:
            if _has(each, selector, policy):
                found.append(_name(selector, policy, label))
                if _is_corrected(selector, policy, label):
                    found.append(f"{found[-1]} + centroids")
    return found


def check_others(profile: Profile, others: dict[str, Profile]) -> None:
    """Raises if one of the others cannot be compared with the profile, or has no method."""
    for label, other in others.items():
        where = f"the profile of the label {label!r}"
        for name, words in (("model_hash", "of another model"), ("block", "in blocks of")):
            found, wanted = getattr(other.facts, name), getattr(profile.facts, name)
            if found != wanted:
                raise ValueError(
                    f"{where} is {words} ({found}, the first profile's is {wanted}); "
                    "calibrate the same model with blocks of the same size"
                )
        if not any(_has(other, *form) for form in TRANSFERRED):
            raise ValueError(
                f"{where} has no method that is compared: it lacks the cost curves of "
                f"{', '.join(dict.fromkeys(selector for selector, _ in TRANSFERRED))}"
            )


def check_names(names: Sequence[str], labelled: dict[str, Profile]) -> None:
    """Raises for a method that `at_density` cannot build; the label of the main profile is ""."""
    others = {label: each for label, each in labelled.items() if label}
    known = names_of(labelled[""], others)
    for name in names:
        if name not in known:
            reason = "does not exist"
            for label, profile in labelled.items():
                if name in _lacking(profile, label, POLICIES_WITH_COST):
                    reason = "needs a cost curve that the profile lacks"
                    if "/loss" in name and "loss" not in profile.statistics.cost:
                        reason += " (calibrate with --loss)"
            raise ValueError(f"method {name!r} {reason}; those that can be measured are {known}")


def _fixed(
    profile: Profile, density: float, length: int, names: Sequence[str] | None
) -> Iterator[Method]:
    layers, heads, _ = profile.size
    n = row_blocks.count_blocks(length, profile.facts.block)
    for name in baselines.FIXED:
        if _wanted(name, names):
            yield _given(name, "fixed", baselines.fixed(name, density, layers, heads, n))
    if _wanted("seed_entropy", names):
        counts = budget.entropy(profile.statistics.entropy, density, n).counts
        scores = np.stack([baselines.order("random", n, heads, 100 + i) for i in range(layers)])
        yield _given("seed_entropy", "seed", selection.keep_top(scores, counts))
    if _wanted("vertical_slash", names):
        counts = budget.uniform(density, layers, heads, n).counts
        yield _scored("vertical_slash", "run time", counts, "vertical_slash")


def _wanted(name: str, names: Sequence[str] | None) -> bool:
    return names is None or name in names


# (selector, policy) pairs of HADS. For the additional profiles (`others`) only the pairs in
# TRANSFERRED are measured.
OTHER_SELECTORS = (
    "past_query", "pooled", "antidiagonal", "gaussian", "part_queries", "outlier_queries",
    "every_query",
)  # fmt: skip
TRANSFERRED = tuple(
    (s, p) for s in ("static", "mean_query", "outlier_queries") for p in POLICIES_WITH_COST
)
FORMS = (
    *((s, p) for s in ("static", "mean_query") for p in budget.POLICIES),
    *((s, p) for s in (*OTHER_SELECTORS, "oracle") for p in POLICIES_WITH_COST),
)


def left_out(profile: Profile, others: dict[str, Profile] | None = None) -> list[str]:
    """Methods that `at_density` skips: the profile has no cost curve for their selector.

    Those of a policy that was not measured at all, `loss`, are not listed.
    """
    policies = tuple(profile.statistics.cost)
    labelled = {"": profile, **(others or {})}
    return [name for label, each in labelled.items() for name in _lacking(each, label, policies)]


def _lacking(profile: Profile, label: str, policies: tuple[str, ...]) -> list[str]:
    """Methods of these policies that a profile has no cost curve for."""
    return [
        _name(selector, policy, label)
        for selector, policy in (TRANSFERRED if label else FORMS)
        if policy in policies and not _has(profile, selector, policy)
    ]


def _has(profile: Profile, selector: str, policy: str) -> bool:
    return policy in ("uniform", "entropy") or selector in profile.statistics.cost.get(policy, {})


def _name(selector: str, policy: str, label: str) -> str:
    return f"{selector}/{policy} {label}".strip()


def _is_corrected(selector: str, policy: str, label: str) -> bool:
    """Whether this variant is measured with centroids for dropped blocks, too."""
    return selector == "mean_query" and policy in ("kl", "output") and not label


def _planned(
    profile: Profile,
    density: float,
    length: int,
    label: str,
    names: Sequence[str] | None,
    end_weight: float,
) -> Iterator[Method]:
    """HADS variants that a profile has cost curves for; with a label only those in TRANSFERRED."""
    band = profile.facts.band
    for selector, policy in TRANSFERRED if label else FORMS:
        name = _name(selector, policy, label)
        centroids = f"{name} + centroids"
        if not _has(profile, selector, policy):
            continue
        if not (_wanted(name, names) or _wanted(centroids, names)):
            continue
        if selector == "oracle":  # it has counts, but no plan
            if end_weight == 1:
                counts = oracle_counts(profile, density, policy, length)
                yield _scored(name, "oracle", counts, ORACLES[policy], band)
            continue
        plan = make(profile, density, policy, selector, end_weight=end_weight, length=length)
        if selector == "static":
            yield _given(name, "static", selection.keep_top(plan.scores, plan.counts, band))
            continue
        if _wanted(name, names):
            yield _scored(name, "run time", plan.counts, selector, band)
        if _is_corrected(selector, policy, label) and _wanted(centroids, names):
            yield _scored(centroids, "run time", plan.counts, selector, band, True)


def of_plan(plan: Plan, length: int) -> Method:
    """Converts a plan to a method, for texts of `length` tokens.

    With `top_p` and a selector that looks at the input, its density depends on the input.
    """
    terms, plan = plan.terms, plan.at(length)
    name = name_of(plan)
    if terms.selector == "static":
        layers = range(len(plan.counts))
        blocks = jnp.stack([plan.blocks(layer, length=length)[0] for layer in layers])
        return _given(name, "static", blocks)
    method = _scored(name, "run time", plan.counts, terms.selector, terms.band)
    return dataclasses.replace(method, top_p=terms.top_p)


def name_of(plan: Plan) -> str:
    """The name of the method that selects as the plan does."""
    terms = plan.terms
    limit = "" if terms.top_p is None else f", top_p {_exact(terms.top_p)}"
    return f"{terms.selector}/{terms.policy}{_weight_suffix(terms.end_weight)}{limit}"


def oracle_counts(
    profile: Profile, density: float, policy: str, length: int
) -> Int[np.ndarray, "layers N n"]:
    """The counts of `policy` by the cost curves of the oracle."""
    band, n = profile.facts.band, row_blocks.count_blocks(length, profile.facts.block)
    here = row_blocks.density_at(density, n, profile.size[2], band)
    counts = budget.by_gains(gains(profile, policy, "oracle"), here, band).counts
    terms = make(profile, density, "uniform", "static", length=length).terms
    return np.asarray(Plan(counts, None, terms).at(length).counts)


def _given(name: str, kind: str, blocks: Bool[ArrayLike, "layers N n n"]) -> Method:
    blocks = jnp.asarray(blocks)
    return Method(blocks.sum(-1, dtype=jnp.int32), blocks, jnp.int32(0), name, kind)


def _scored(
    name: str,
    kind: str,
    counts: Int[ArrayLike, "layers N n"],
    source: str,
    band: int = 0,
    corrected: bool = False,
) -> Method:
    counts = jnp.asarray(counts, jnp.int32)
    nothing = jnp.zeros((*counts.shape, counts.shape[-1]), bool)
    index = jnp.int32(SOURCES.index(source))
    return Method(counts, nothing, index, name, kind, corrected, band=band)
