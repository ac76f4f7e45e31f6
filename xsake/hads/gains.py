"""Gains of a profile's cost curves, computed once for plans of all densities."""

from __future__ import annotations

import weakref

import numpy as np
from jaxtyping import Float

from xsake.hads import budget
from xsake.hads.profile import Profile

# By policy and selector; they are dropped with their profile, which this does not keep alive.
_known: weakref.WeakKeyDictionary[Profile, dict[tuple[str, str], np.ndarray]]
_known = weakref.WeakKeyDictionary()


def gains(profile: Profile, policy: str, selector: str) -> Float[np.ndarray, "layers heads n n-1"]:
    """`budget.falling_gains` of a cost curve, read-only: later calls return the same array."""
    known = _known.setdefault(profile, {})
    found = known.get((policy, selector))
    if found is None:
        found = budget.falling_gains(profile.cost(policy, selector), profile.facts.band)
        found.flags.writeable = False
        known[policy, selector] = found
    return found
