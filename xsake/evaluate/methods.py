"""Every method of the table at one density: fixed patterns, HADS in its forms, and the oracle.

    kind      knows             methods
    fixed     nothing           sliding_window, sink_window, longformer, bigbird, strided, random
    seed      entropies         seed_entropy: random blocks, as many as the head's entropy says
    static    calibration       static/uniform (uniform top-k), /entropy, /kl, /output
    run time  this input        vertical_slash, and SELECTOR/POLICY for three selectors
    oracle    this input's mass oracle/kl

A method is given blocks, or scores of the input and counts: the best of each row are kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake.hads import Profile, baselines, budget, make, rows, select
from xsake.hads.plan import Plan

# Where scores come from; the number of a source is an index into this.
SOURCES = ("given", *select.ESTIMATES, "vertical_slash", "oracle")


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

    def blocks(self, layer: Any, q: Array, k: Array, block: int) -> Array:
        """The blocks of one sequence, q [T, N, H] and k [T, K, H]: bool [N, n, n]."""

        def looked(source: str, q: Array, k: Array) -> Array:
            return select.keep_top(scores_of(source, q, k, block), self.counts[layer])

        branches = [lambda q, k: self.given[layer]]
        branches += [functools.partial(looked, name) for name in SOURCES[1:]]
        return lax.switch(self.source, branches, q, k)


def scores_of(source: str, q: Array, k: Array, block: int) -> Array:
    """Scores of a source that looks at the input, float32 [N, n, n]."""
    if source == "vertical_slash":
        return baselines.vertical_slash(q, k, block)
    if source == "oracle":
        return baselines.oracle(q, k, block)
    return select.estimate(source, q, k, block)


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
    yield _given("seed_entropy", "seed", select.keep_top(draws, counts))
    counts = budget.uniform(density, layers, heads, n).counts
    yield _looking("vertical_slash", "run time", counts, "vertical_slash")


def _planned(profile: Profile, density: float, length: int, label: str) -> Iterator[Method]:
    """The forms of HADS that a profile gives; of another's profile only those that matter."""
    forms = [("static", "kl"), ("gaussian", "kl")]
    if not label:
        forms += [("static", policy) for policy in ("uniform", "entropy", "output")]
        forms += [("pooled", "kl"), ("antidiagonal", "kl"), ("oracle", "kl")]
        forms += [("gaussian", policy) for policy in ("uniform", "entropy", "output")]
    curves = set(profile.statistics.cost["kl"])
    for selector, policy in forms:
        if policy in ("kl", "output") and selector not in curves:
            continue
        name = " ".join([f"{selector}/{policy}", label]).strip()
        if selector == "oracle":
            counts = budget.by_cost(profile.cost(policy, "oracle"), density, profile.facts.band)
            yield _looking(name, "oracle", _at(counts.counts, density, length, profile), "oracle")
            continue
        plan = make(profile, density, policy, selector).at(length)
        if selector == "static":
            yield _given(
                name, "static", select.keep_top(plan.scores, plan.counts, profile.facts.band)
            )
        else:
            yield _looking(name, "run time", plan.counts, selector)
            if (selector, policy, label) == ("gaussian", "kl", ""):
                yield _looking(f"{name} + centroids", "run time", plan.counts, selector, True)


def of_plan(plan: Plan, length: int) -> Method:
    """The method that a plan is, for texts of `length` tokens."""
    terms, plan = plan.terms, plan.at(length)
    if terms.top_p is not None:
        raise ValueError("plans with top_p visit what the input asks for; measure one without it")
    name = f"{terms.selector}/{terms.policy}"
    if terms.selector == "static":
        return _given(name, "static", select.keep_top(plan.scores, plan.counts, terms.band))
    return _looking(name, "run time", plan.counts, terms.selector)


def _at(counts: np.ndarray, density: float, length: int, profile: Profile) -> np.ndarray:
    terms = make(profile, density, "uniform", "static").terms
    return np.asarray(Plan(counts, None, terms).at(length).counts)


def _given(name: str, kind: str, blocks: Any) -> Method:
    blocks = jnp.asarray(blocks)
    return Method(blocks.sum(-1, dtype=jnp.int32), blocks, jnp.int32(0), name, kind)


def _looking(name: str, kind: str, counts: Any, source: str, corrected: bool = False) -> Method:
    counts = jnp.asarray(counts, jnp.int32)
    nothing = jnp.zeros((*counts.shape, counts.shape[-1]), bool)
    return Method(counts, nothing, jnp.int32(SOURCES.index(source)), name, kind, corrected)
