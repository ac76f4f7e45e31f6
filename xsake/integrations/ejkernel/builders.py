"""mask_builder: functions that return ejkernel's masks, as rules.

    () -> SparseMask, or a tuple of them                                  ─ qkv_layouts
    (q_len, kv_len, num_heads, head_idx, num_reps) -> Mask of one head    ─ a rule of all heads

A Mask has `shape` and `mask[rows, columns]`, as those of ejkernel and of JAX's splash attention do.
Those two libraries use the same class names, by which the known masks become rules that classify
blocks in closed form; a mask with a `mask_function` is evaluated where it is needed; any other is
read as an array of q_len × kv_len bools.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xsake import masks
from xsake.masks.rule import Rule

__all__ = ["layouts_of", "rule_of_heads"]


def layouts_of(builder: Any) -> Any:
    """What a builder without arguments returns; None for one that takes five."""
    if not callable(builder):
        raise TypeError(f"mask_builder must be a function, got {type(builder).__name__}")
    try:
        takes = inspect.signature(builder)
    except ValueError:
        raise TypeError(
            f"mask_builder {builder!r} has no signature to read; wrap it in a function that takes "
            "no arguments, or (q_len, kv_len, num_heads, head_idx, num_reps)"
        ) from None
    if _binds(takes, 0):
        return builder()
    if _binds(takes, 5):
        return None
    raise TypeError(
        "mask_builder must take no arguments, or (q_len, kv_len, num_heads, head_idx, num_reps), "
        f"got {takes}"
    )


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def rule_of_heads(
    builder: Callable[..., Any],
    lengths: tuple[int, int],
    heads: int,
    group: int,
    rows: tuple[Any, int] | None,
) -> Rule:
    """The rule of all heads: each sees what the builder's mask for it allows.

    Args:
      builder: (q_len, kv_len, num_heads, head_idx, num_reps) -> Mask, called for every query head.
      lengths: (q_len, kv_len).
      heads: query heads.
      group: query heads of a kv head.
      rows: (index of the first one, number) of this device's queries; None: all of them.
    """
    groups: list[tuple[Any, Rule, list[int]]] = []
    for head in range(heads):
        mask = builder(*lengths, heads, head, group)
        same = next((x for x in groups if x[0] is mask), None)
        if same is None:
            rule = _rule(mask, lengths, rows)
            same = next((x for x in groups if x[1] == rule), None)
        if same is None:
            groups.append((mask, rule, [head]))
        else:
            same[2].append(head)
    if len(groups) == 1:
        return groups[0][1]
    each = (_only(members, heads) & rule for _, rule, members in groups)
    return functools.reduce(operator.or_, each)


def _only(members: list[int], heads: int) -> Rule:
    return masks.array(np.isin(np.arange(heads), members)[None, :, None, None])


def _rule(mask: Any, lengths: tuple[int, int], rows: tuple[Any, int] | None) -> Rule:
    if isinstance(mask, Rule):
        return mask
    if tuple(getattr(mask, "shape", ())) != lengths:
        raise ValueError(
            f"mask_builder must return a mask of shape {lengths} for a head, got "
            f"{type(mask).__name__} of shape {getattr(mask, 'shape', None)}"
        )
    kind = type(mask).__name__
    if kind in ("LogicalAnd", "LogicalOr"):
        left, right = (_rule(side, lengths, rows) for side in (mask.left, mask.right))
        return left & right if kind == "LogicalAnd" else left | right
    if kind == "FullMask":
        return masks.everything()
    if kind == "CausalMask" and mask.offset == 0:
        return masks.causal()
    if kind == "LocalMask" and mask.offset == 0:
        return masks.sliding_window(*mask.window_size)
    if kind == "ChunkedCausalMask":
        return masks.chunked(mask.chunk_size) & masks.causal()
    function = getattr(mask, "mask_function", None)
    if function is not None:
        return masks.rule(functools.partial(_of_positions, function))
    shown = jnp.asarray(np.asarray(mask[:, :], bool))
    return masks.array(shown if rows is None else lax.dynamic_slice_in_dim(shown, *rows, axis=0))


def _of_positions(function: Callable[..., Any], b: Any, n: Any, q: Any, k: Any) -> Any:
    return function(q, k)
