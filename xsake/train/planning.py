"""HADS while training: a plan from the training text and the weights of this step.

    dense ──── warmup_steps ──┬── plan ── every ──┬── plan ── every ──┬── …
                              └ calibrate, swap   └ calibrate, swap

A plan is made after an update and before the next: the same step, weights and seed give the same
plan. Its arrays are arguments of the compiled step, so that swapping it compiles nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xsake.data.stream import Stream
from xsake.hads import Plan, calibrate, make
from xsake.hads.plan import Terms
from xsake.hads.profile import hash_of
from xsake.train.config import Config
from xsake.train.step import transformer


def new_plan(config: Config, parameters: Any, stream: Stream, step: int) -> Plan:
    """The plan that is due after `step` updates."""
    hads = config.hads
    density = hads.density_at(step)
    if density is None:
        raise ValueError(f"no plan is due at step {step}: attention is dense")
    profile = calibrate(
        _observer(config.static),
        parameters,
        list(stream.long_windows(hads.documents, step)),
        layers=config.model.layers,
        heads=config.model.heads,
        block=hads.block,
        band=hads.band,
        curves=(hads.selector,) if hads.policy in ("kl", "output") else (),
        seed=config.seed,
    )
    return make(profile, density, hads.policy, hads.selector)


@functools.lru_cache(maxsize=1)
def _observer(config: Config) -> Callable[..., Any]:
    """What `calibrate` sees a model through; the same object each time, as jit goes by identity."""

    def observe(weights: Any, tokens: Any, fold: Any, carry: Any) -> Any:
        return transformer(config, weights).observe(tokens, fold, carry)

    return observe


def argument(plan: Plan | None, sharding: Any = None) -> Plan | None:
    """The plan as the compiled step takes it: on the devices, without what sets it apart."""
    if plan is None:
        return None
    terms = dataclasses.replace(
        plan.terms, density=1.0, model_hash="", data_hash="", notes=(), validation="{}"
    )
    return jax.device_put(dataclasses.replace(plan, terms=terms), sharding)


def density(plan: Plan | None) -> float:
    """What a plan realises, 0 to 1; 1 without one."""
    return 1.0 if plan is None else plan.density


def arrays(plan: Plan | None) -> dict[str, np.ndarray]:
    """What of a plan is an array, for a checkpoint."""
    if plan is None:
        return {}
    found = {"counts": plan.counts, "scores": plan.scores}
    return {name: np.asarray(x) for name, x in found.items() if x is not None}


def rebuilt(found: dict[str, np.ndarray], terms: dict[str, Any]) -> Plan:
    """The inverse of `arrays`, with the terms as plain values."""
    kept = Terms(**terms | {"notes": tuple(terms["notes"])})
    return Plan(found["counts"], found.get("scores"), kept)


def plan_hash(plan: Plan) -> str:
    """Of a plan's arrays."""
    found = arrays(plan)
    return hash_of(found[name] for name in sorted(found))
