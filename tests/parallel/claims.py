"""Claims of a process with 8 CPU devices, one printed line each: how `*_on_eight` modules end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

LIMIT = 1e-5  # of relative errors, float32
Claim = Callable[[], bool | float]  # whether it holds, or an error that must be at most LIMIT


def name_of(case: Any) -> str:
    """The name of a case and of its mesh."""
    return f"{case.name}, {' × '.join(f'{axis} {size}' for axis, size in case.mesh.items())}"


def named(*functions: Callable[[], bool]) -> dict[str, Claim]:
    """Functions by their names in words."""
    return {function.__name__.replace("_", " "): function for function in functions}


def run_claims(
    claims: dict[str, Claim], only: str = "", by_default: Iterable[str] | None = None
) -> int:
    """Runs and prints the claims with `only` in their name; 1 if any does not hold.

    Without a text those of `by_default` run, all if it is None; "--all" runs all.
    """
    assert len(jax.devices()) == 8
    if only == "--all":
        asked = list(claims)
    elif only or by_default is None:
        asked = [name for name in claims if only in name]
    else:
        asked = [name for name in claims if name in set(by_default)]
    wrong = 0
    for name in asked:
        found = claims[name]()
        holds = found if isinstance(found, bool) else found <= LIMIT
        shown = name if isinstance(found, bool) else f"{name}, {found:.1e}"
        wrong += not holds
        print(f"{shown}: {'ok' if holds else 'WRONG'}", flush=True)
    return 1 if wrong else 0
