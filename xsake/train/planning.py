"""HADS while training: plans are calibrated on the training text with the current weights.

    dense ──── warmup_steps ──┬── plan ── every ──┬── plan ── every ──┬── …
                              └ calibrate, swap   └ calibrate, swap

A plan is made between two updates: the same step, weights and seed give the same plan. Its arrays
are arguments of the compiled step, so that another plan does not recompile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from xsake import _files
from xsake.block_mask import BLOCK
from xsake.data.stream import Stream
from xsake.hads import Plan, calibrate, make, row_blocks
from xsake.hads.documents import shared_blocks
from xsake.hads.files import hash_of
from xsake.hads.statistics import POLICIES_WITH_COST
from xsake.hads.terms import Terms
from xsake.parallel import sharding
from xsake.train.config import Config
from xsake.train.step import transformer


def new_plan(
    config: Config, parameters: Any, stream: Stream, step: int, mesh: Mesh | None = None
) -> Plan:
    """Calibrates and makes the plan that is due after `step` updates.

    On a mesh the parameters stay sharded, and every device has the statistics of all documents.
    """
    hads = config.hads
    density = hads.density_at(step)
    if density is None:
        raise ValueError(f"no plan is due at step {step}: attention is dense")
    has_curves = hads.policy in POLICIES_WITH_COST
    profile = calibrate(
        _observer(config.static, mesh),
        parameters,
        list(stream.long_windows(hads.documents, step)),
        layers=config.model.layers,
        heads=config.model.heads,
        block=hads.block,
        band=hads.band,
        curves=(hads.selector,) if has_curves else (),
        outputs=has_curves,
        vocab_size=config.model.vocab_size,
        seed=config.seed,
    )
    return make(profile, density, hads.policy, hads.selector)


@functools.lru_cache(maxsize=1)
def _observer(config: Config, mesh: Mesh | None = None) -> Callable[..., Any]:
    """The `observe` function for `calibrate`; cached, because jit compares it by identity."""

    def observe(weights: Any, tokens: Any, fold: Any, carry: Any) -> Any:
        # documents are text as it is read, and the pass is dense
        return transformer(config, weights, mesh, "contiguous").observe(tokens, fold, carry)

    return observe


def argument(plan: Plan | None, mesh: Mesh | None = None) -> Plan | None:
    """The plan on the devices, with metadata reset so that all plans share one compiled step."""
    if plan is None:
        return None
    terms = dataclasses.replace(
        plan.terms, density=1.0, model_hash="", data_hash="", notes=(), validation="{}"
    )
    plan = dataclasses.replace(plan, terms=terms)
    where = sharding.replicated(None) if mesh is None else sharding.shardings_of(plan, mesh)
    return sharding.put(plan, where)


def density(plan: Plan | None) -> float:
    """The realised density of a plan, 0 to 1; 1 without a plan."""
    return 1.0 if plan is None else plan.density


def used_density(config: Config, plan: Plan | None) -> float:
    """The density of the attention in use, 0 to 1: of the plan, or of the model's own selection.

    With sparse attention: blocks that the selected branch visits ÷ blocks that causality allows.
    """
    if not config.model.is_sparse:
        return density(plan)
    settings = config.model.settings
    allowed = row_blocks.ceilings(row_blocks.count_blocks(config.data.length, settings.block_size))
    return float(np.minimum(allowed, settings.num_selected).sum() / allowed.sum())


def visited_density(config: Config, plan: Plan | None, segment_ids: np.ndarray) -> float | None:
    """Blocks that a batch visits ÷ blocks that causality allows, 0 to 1.

        Σ min(counts[l, h, i], own[b, i]) ÷ (layers · N · B · n (n + 1) / 2)

    over layers, heads, batch rows and row blocks; own[b, i] is how many blocks up to i share a
    document with block i. Without a plan counts[l, h, i] = i + 1. None for sliding-window models,
    where this would be too large, and for models with sparse attention.
    """
    if config.model.window is not None or config.model.is_sparse:
        return None
    block = BLOCK if plan is None else plan.terms.block
    ids = segment_ids if config.data.separate else np.zeros_like(segment_ids)
    own = np.asarray(shared_blocks(jnp.asarray(ids), block))
    n = own.shape[-1]
    own = np.tril(own).sum(-1)[:, None, None]
    counts = row_blocks.ceilings(n) if plan is None else np.asarray(plan.counts)
    return float(np.minimum(counts, own).mean() / ((n + 1) / 2))


def arrays(plan: Plan | None) -> dict[str, np.ndarray]:
    """The plan's arrays, for a checkpoint."""
    if plan is None:
        return {}
    found = {"counts": plan.counts, "scores": plan.scores}
    return {name: np.asarray(x) for name, x in found.items() if x is not None}


def rebuilt(found: dict[str, np.ndarray], terms: dict[str, Any]) -> Plan:
    """Rebuilds a plan from the output of `arrays` and `dataclasses.asdict(plan.terms)`."""
    _files.check_fields(Terms, terms, "the plan's terms")
    kept = Terms(**terms | {"notes": tuple(terms["notes"])})
    return Plan(found["counts"], found.get("scores"), kept)


def plan_hash(plan: Plan) -> str:
    """The hash of a plan's arrays."""
    found = arrays(plan)
    return hash_of(found[name] for name in sorted(found))
