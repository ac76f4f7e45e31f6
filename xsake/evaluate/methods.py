"""Every method of the table at one density: fixed patterns, HADS in its forms, and the oracle.

    kind      knows             methods
    fixed     nothing           sliding_window, sink_window, longformer, bigbird, strided, random
    seed      entropies         seed_entropy: random blocks, as many as the head's entropy says
    static    calibration       static/uniform (uniform top-k), /entropy, /kl, /output
    run time  this input        vertical_slash, and SELECTOR/POLICY for four selectors
    oracle    this input's p    oracle/kl, oracle/output

A method is given blocks, or scores of the input and counts: the best of each row are kept. The
budgets of an oracle are calibrated as everybody's; its order is this input's true mass for `kl`,
its true sensitivity for `output`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake import block_scores, selection
from xsake.hads import Profile, baselines, budget, make, rows
from xsake.hads.plan import Plan, gains
from xsake.hads.statistics import measure

# Where scores come from; the number of a source is an index into this.
SOURCES = ("given", *block_scores.ESTIMATES, "vertical_slash", "mass", "sensitivity")
ORACLES = {"kl": "mass", "output": "sensitivity"}  # what the oracle of a policy goes by


class Activations(NamedTuple):
    """One sequence in one layer's attention."""

    q: Any  # [T, N, H]
    k: Any  # [T, K, H]
    v: Any  # [T, K, Hv]
    kernel: Any  # [N, Hv, width], the output projection


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """Blocks, given or by scores from `source`; methods differ in arrays alone."""

    counts: Any  # int32 [layers, N, n]
    given: Any  # bool [layers, N, n, n], the blocks if source is 0
    source: Any  # int32 []: index into SOURCES
    name: str = dataclasses.field(metadata={"static": True}, default="")
    kind: str = dataclasses.field(metadata={"static": True}, default="")
    corrected: bool = dataclasses.field(metadata={"static": True}, default=False)

    def anonymous(self) -> Method:
        """Without a name, so that compiled code serves all methods."""
        return dataclasses.replace(self, name="", kind="")

    def blocks(
        self, layer: Any, seen: Activations, block: int, sources: tuple[str, ...] = SOURCES
    ) -> Array:
        """The blocks that one sequence visits, bool [N, n, n]; `sources` has this method's."""

        def looked(source: str, seen: Activations) -> Array:
            return selection.keep_top(scores_of(source, seen, block), self.counts[layer])

        branches = [lambda seen: self.given[layer]]
        branches += [functools.partial(looked, name) for name in sources[1:]]
        return lax.switch(places_in(sources)[self.source], branches, seen)


def sources_of(methods: Sequence[Method]) -> tuple[str, ...]:
    """What these methods need, "given" first, so that no more is compiled or looked at."""
    needed = {SOURCES[int(method.source)] for method in methods}
    return SOURCES[0], *(name for name in SOURCES[1:] if name in needed)


def places_in(sources: tuple[str, ...]) -> Array:
    """Of every one of SOURCES its index in `sources`, 0 for those that are not there."""
    return jnp.array([sources.index(name) if name in sources else 0 for name in SOURCES])


def scores_of(source: str, seen: Activations, block: int) -> Array:
    """Scores of a source that looks at the input, float32 [N, n, n]."""
    if source == "vertical_slash":
        return baselines.vertical_slash(seen.q, seen.k, block)
    if source == "mass":
        return baselines.oracle(seen.q, seen.k, block)
    if source == "sensitivity":
        return measure(*seen, block=block, curves=()).sensitivity
    return block_scores.estimate(source, seen.q, seen.k, block)


def at_density(
    profile: Profile, density: float, length: int, others: dict[str, Profile] | None = None
) -> list[Method]:
    """All methods at one density for texts of `length` tokens.

    Args:
      profile: of the model, at this length or another.
      density: of each method, over all layers and heads.
      length: of the texts that it will be measured on.
      others: more profiles, by what sets them apart: "from wikipedia", "from 2,048 tokens".
    """
    return list(_fixed(profile, density, length)) + [
        method
        for label, each in {"": profile, **(others or {})}.items()
        for method in _planned(each, density, length, label)
    ]


def _fixed(profile: Profile, density: float, length: int) -> Iterator[Method]:
    layers, heads, _ = profile.size
    n = rows.count_blocks(length, profile.facts.block)
    for name in baselines.FIXED:
        kept = baselines.fixed(name, density, layers, heads, n)
        yield _given(name, "fixed", kept)
    counts = budget.entropy(profile.statistics.entropy, density, n).counts
    draws = np.stack([baselines.order("random", n, heads, 100 + i) for i in range(layers)])
    yield _given("seed_entropy", "seed", selection.keep_top(draws, counts))
    counts = budget.uniform(density, layers, heads, n).counts
    yield _looking("vertical_slash", "run time", counts, "vertical_slash")


# SELECTOR, POLICY of HADS; of a profile from elsewhere only TRANSFERRED is measured.
TRANSFERRED = tuple((s, p) for s in ("static", "mean_query") for p in ("kl", "output"))
FORMS = (
    *((s, p) for s in ("static", "mean_query") for p in budget.POLICIES),
    *(
        (s, p)
        for s in ("past_query", "pooled", "antidiagonal", "gaussian", "oracle")
        for p in ("kl", "output")
    ),
)


def left_out(profile: Profile, others: dict[str, Profile] | None = None) -> list[str]:
    """Methods that `at_density` cannot have: the profile has no cost curve for their selector."""
    return [
        _name(selector, policy, label)
        for label, each in {"": profile, **(others or {})}.items()
        for selector, policy in (TRANSFERRED if label else FORMS)
        if not _has(each, selector, policy)
    ]


def _has(profile: Profile, selector: str, policy: str) -> bool:
    return policy in ("uniform", "entropy") or selector in profile.statistics.cost[policy]


def _name(selector: str, policy: str, label: str) -> str:
    return f"{selector}/{policy} {label}".strip()


def _planned(profile: Profile, density: float, length: int, label: str) -> Iterator[Method]:
    """The forms of HADS that a profile gives; of another's profile only those that matter."""
    for selector, policy in TRANSFERRED if label else FORMS:
        if not _has(profile, selector, policy):
            continue
        name = _name(selector, policy, label)
        if selector == "oracle":
            counts = _oracle(profile, density, policy, length)
            yield _looking(name, "oracle", counts, ORACLES[policy])
            continue
        plan = make(profile, density, policy, selector, length=length)
        if selector == "static":
            yield _given(
                name, "static", selection.keep_top(plan.scores, plan.counts, profile.facts.band)
            )
        else:
            yield _looking(name, "run time", plan.counts, selector)
            if selector == "mean_query" and policy in ("kl", "output") and not label:
                yield _looking(f"{name} + centroids", "run time", plan.counts, selector, True)


def of_plan(plan: Plan, length: int) -> Method:
    """The method that a plan is, for texts of `length` tokens."""
    terms, plan = plan.terms, plan.at(length)
    if terms.top_p is not None:
        raise ValueError("plans with top_p visit what the input asks for; measure one without it")
    name = f"{terms.selector}/{terms.policy}"
    if terms.selector == "static":
        return _given(name, "static", selection.keep_top(plan.scores, plan.counts, terms.band))
    return _looking(name, "run time", plan.counts, terms.selector)


def _oracle(profile: Profile, density: float, policy: str, length: int) -> np.ndarray:
    """The budgets of `policy` by the cost curves of the oracle, [layers, N, n]."""
    band, n = profile.facts.band, rows.count_blocks(length, profile.facts.block)
    here = rows.density_at(density, n, profile.size[2], band)
    counts = budget.by_gains(gains(profile, policy, "oracle"), here, band).counts
    terms = make(profile, density, "uniform", "static", length=length).terms
    return np.asarray(Plan(counts, None, terms).at(length).counts)


def _given(name: str, kind: str, blocks: Any) -> Method:
    blocks = jnp.asarray(blocks)
    return Method(blocks.sum(-1, dtype=jnp.int32), blocks, jnp.int32(0), name, kind)


def _looking(name: str, kind: str, counts: Any, source: str, corrected: bool = False) -> Method:
    counts = jnp.asarray(counts, jnp.int32)
    nothing = jnp.zeros((*counts.shape, counts.shape[-1]), bool)
    return Method(counts, nothing, jnp.int32(SOURCES.index(source)), name, kind, corrected)
