"""Checks of the arrays: each error names the argument, what was given and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.arguments import check_qkv, number
from xsake.masks.integers import integers, size_of
from xsake.nsa.settings import Settings


def check_arrays(query: Any, key: Any, value: Any, scale: Any) -> tuple[Array, Array, Array, float]:
    """q, k and v of self-attention, and the scale."""
    q, k, v, is_unbatched = check_qkv(query, key, value)
    if is_unbatched:
        raise ValueError(
            f"query must be [B, T, N, H], got shape {list(q.shape[1:])}; add a batch axis"
        )
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"query has {q.shape[1]} tokens but key has {k.shape[1]}; native sparse attention is "
            "self-attention (nsa.decode_step attends to a cache)"
        )
    return q, k, v, check_scale(q, scale)


def check_scale(q: Array, scale: Any) -> float:
    """The scale of the logits; default 1/sqrt(H)."""
    return 1 / math.sqrt(q.shape[3]) if scale is None else number("scale", scale)


def check_gates(q: Array, v: Array, **gates: Any) -> dict[str, Array | None]:
    """The gates as arrays [B, T, N] or [B, T, N, Hv|1]; None stays None."""
    found: dict[str, Array | None] = {}
    for name, gate in gates.items():
        if gate is None:
            found[name] = None
            continue
        gate = jnp.asarray(gate)
        if not jnp.issubdtype(gate.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating, got {gate.dtype}")
        lead, Hv = q.shape[:3], v.shape[3]
        if gate.shape not in (lead, (*lead, 1), (*lead, Hv)):
            raise ValueError(
                f"{name} must be [B, T, N] = {list(lead)}, or that with a last axis of Hv = {Hv} "
                f"or 1, got shape {list(gate.shape)}"
            )
        found[name] = gate
    return found


def check_indices(indices: Any, q: Array, k: Array) -> Array | None:
    """Block indices int32 [B, T, K, C]."""
    if indices is None:
        return None
    indices = integers("block_indices", indices)
    lead = (*q.shape[:2], k.shape[2])
    if indices.ndim != 4 or indices.shape[:3] != lead:
        raise ValueError(
            f"block_indices must be [B, T, K, C] with [B, T, K] = {list(lead)}, "
            f"got shape {list(indices.shape)}"
        )
    return indices


def check_counts(counts: Any, indices: Array | None, q: Array, k: Array) -> Any:
    """How many indices count: a number, int32 [B, T, K], or None for all."""
    if counts is None:
        return None
    if indices is None:
        raise ValueError(
            "block_counts says how many of the block_indices count, and there are none; "
            "num_selected is the number of blocks to select"
        )
    if isinstance(counts, (int, np.integer)) and not isinstance(counts, bool):
        return size_of("block_counts", counts, 0)
    counts = integers("block_counts", counts)
    lead = (*q.shape[:2], k.shape[2])
    if counts.shape not in ((), lead):
        raise ValueError(
            f"block_counts must be a number or [B, T, K] = {list(lead)}, "
            f"got shape {list(counts.shape)}"
        )
    return jnp.broadcast_to(counts, lead)


def check_indexer(
    settings: Settings,
    index_query: Any,
    index_key: Any,
    lead: tuple[int, ...],
    selects: bool = True,
) -> tuple[Array, Array] | None:
    """The indexer's queries [B, T, K, Hi] and keys [B, T, K|1, Hi]; None unless score is "msa".

    `lead` is (B, T, K); `selects`: whether blocks are to be selected.
    """
    given = {"index_query": index_query, "index_key": index_key}
    for name, x in given.items():
        if settings.score != "msa" and x is not None:
            raise ValueError(
                f"{name} is for score='msa', but score is {settings.score!r}; leave it out"
            )
        if not selects and x is not None:
            raise ValueError(
                f"{name} selects blocks, but block_indices are given or the selected branch is "
                "off; leave it out"
            )
        if settings.score == "msa" and selects and x is None:
            raise ValueError(f"score='msa' needs {name}")
    if settings.score != "msa" or not selects:
        return None
    q, k = jnp.asarray(index_query), jnp.asarray(index_key)
    for name, x in (("index_query", q), ("index_key", k)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating, got {x.dtype}")
    if q.ndim != 4 or q.shape[:3] != lead:
        raise ValueError(
            f"index_query must be [B, T, K, Hi] with [B, T, K] = {list(lead)}, "
            f"got shape {list(q.shape)}"
        )
    allowed = [(*lead[:2], heads, q.shape[3]) for heads in (lead[2], 1)]
    if k.shape not in allowed:
        raise ValueError(
            f"index_key must be {' or '.join(str(list(x)) for x in allowed)}, "
            f"got shape {list(k.shape)}"
        )
    return q, k
