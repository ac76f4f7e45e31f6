"""Kinds of text: one profile from several, in which a head's cost is the largest over the kinds.

    profile of prose ─────┐
    profile of look-ups ──┴─ worst_of ─ Profile      cost[l, h, i, c] = max over kinds

Prose asks few heads for blocks far back, and a mean over texts hides what those heads need when a
text does ask. The maximum of convex curves is convex, so that budgets stay optimal for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from xsake.hads.profile import Facts, Profile


def worst_of(kinds: Mapping[str, Profile]) -> Profile:
    """The profile of several kinds of text, by their names.

    Costs are the largest over the kinds. All other statistics are means over all documents, and
    their standard errors are those of a mean over kinds in these shares. `facts.kinds` names the
    kinds and their documents.
    """
    profiles = list(kinds.values())
    facts = _joined(kinds)
    shares = np.array([x.facts.documents for x in profiles]) / facts.documents

    def mean(*xs: Any) -> np.ndarray:
        total = sum(share * np.asarray(x, np.float64) for share, x in zip(shares, xs, strict=True))
        return np.asarray(total, np.float32)

    def error(*xs: Any) -> np.ndarray:
        return np.sqrt(
            mean(*(s * np.asarray(x, np.float64) ** 2 for s, x in zip(shares, xs, strict=True)))
        )

    def largest(*xs: Any) -> np.ndarray:
        return np.max([np.asarray(x) for x in xs], axis=0)

    statistics = [x.statistics for x in profiles]
    cost = jax.tree.map(largest, *(x.cost for x in statistics))
    rest = jax.tree.map(mean, *(x._replace(cost={}) for x in statistics))
    return Profile(
        rest._replace(cost=cost),
        jax.tree.map(error, *(dict(x.errors) for x in profiles)),
        mean(*(x.mass_halves for x in profiles)),
        facts,
    )


def _joined(kinds: Mapping[str, Profile]) -> Facts:
    """The facts of all kinds; raises unless they are profiles of one model, measured alike."""
    if not kinds:
        raise ValueError("a profile of several kinds of text needs at least one kind, got none")
    (first, reference), *others = kinds.items()
    for name, profile in others:
        for field in ("model_hash", "length", "block", "band"):
            mine, theirs = getattr(profile.facts, field), getattr(reference.facts, field)
            if mine != theirs:
                raise ValueError(
                    f"the kinds {first!r} and {name!r} differ in {field}: {theirs} and {mine}; "
                    "calibrate them alike"
                )
        mine, theirs = (sorted(x.statistics.cost["kl"]) for x in (profile, reference))
        if mine != theirs:
            raise ValueError(
                f"the kinds {first!r} and {name!r} have cost curves for {theirs} and {mine}; "
                "calibrate them with the same selectors"
            )
    hashes = "".join(x.facts.data_hash for x in kinds.values())
    return dataclasses.replace(
        reference.facts,
        documents=sum(x.facts.documents for x in kinds.values()),
        data_hash=hashlib.sha256(hashes.encode()).hexdigest()[:16],
        kinds=", ".join(f"{x.facts.documents} of {name}" for name, x in kinds.items()),
    )
