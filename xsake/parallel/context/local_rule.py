"""A rule of a whole sequence for some of its tokens: the tokens of a device, or gathered blocks.

rule over (T, S)     local query i is query q_index[i] of the text, local key j is k_index[j]
      └─ localized ─ rule over (T', S'), made of the same kinds of rules, so that kernels that
                     evaluate the one evaluate the other
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from xsake import masks
from xsake.masks import carrying
from xsake.masks.rule import Leaf, Rule, Tokens, carries_data, combine, leaf, result_sizes


def localized(
    rule: Rule,
    q_index: Array | None = None,
    k_index: Array | None = None,
    heads: Array | None = None,
) -> Rule:
    """The rule for some queries, keys and heads of those that it is about.

    Args:
      rule: of the whole sequence.
      q_index: int [B|1, T'], queries of the text; None: all of them, in order.
      k_index: int [B|1, S'], likewise; needed beside q_index.
      heads: int [N'], query heads; None: all.
    """
    at = {"q": q_index, "k": k_index, "n": None if heads is None else heads[None]}
    found = masks.at_positions(_taken(rule, at), q_index, k_index)
    if heads is not None and result_sizes(rule, 2, 2, by_number=True)[1] > 1:
        found = masks.numbered(found, None, heads)
    return found


def _taken(rule: Any, at: dict[str, Array | None]) -> Any:
    """The rule with its arrays cut down to the tokens and heads in `at`."""
    if isinstance(rule, carrying.Lengths):
        return _lengths(rule, at)
    if isinstance(rule, carrying.Custom) and rule.function.reads == "indices":
        return Reindexed(rule, at["q"], at["k"], None if at["n"] is None else at["n"][0])
    if isinstance(rule, carrying.Swapped):
        return dataclasses.replace(rule, a=_taken(rule.a, {**at, "q": at["k"], "k": at["q"]}))
    new = {}
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if isinstance(value, Rule):
            new[field.name] = _taken(value, at)
        elif field.name in rule.axes and value is not None:
            for axis, letter in enumerate(rule.axes[field.name]):
                if (index := at.get(letter)) is not None and value.shape[axis] > 1:
                    value = take(value, index, axis)
            new[field.name] = value
    return dataclasses.replace(rule, **new) if new else rule


def sent_rule(rule: Any, send: Callable[[Array, int], Array]) -> Any:
    """A rule of this device's queries with its arrays of queries sent by send(array, axis)."""
    if rule is None:
        return None
    if isinstance(rule, carrying.Custom) and rule.function.reads == "indices":
        raise ValueError(
            f"balance=True moves queries, but {rule} reads them by their index on a device; give "
            "the mask of the whole text"
        )
    new = {}
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if isinstance(value, Rule):
            new[field.name] = sent_rule(value, send)
        elif value is not None and "q" in (axes := rule.axes.get(field.name, ())):
            at = axes.index("q")
            new[field.name] = send(value, at) if value.shape[at] > 1 else value
    return dataclasses.replace(rule, **new) if new else rule


def take(values: Array, at: Array, axis: int) -> Array:
    """values[..., at, ...] along an axis; at [B, L] has its own entries for batch row b, axis 0."""
    if at.shape[0] == 1:
        return jnp.take(values, at[0], axis)
    shape = [1] * values.ndim
    shape[0], shape[axis] = at.shape
    return jnp.take_along_axis(values, at.reshape(shape), axis)


def _lengths(rule: carrying.Lengths, at: dict[str, Array | None]) -> Rule:
    """Lengths count tokens of the text, by index and not by position."""
    parts: list[Rule] = []
    q, k = at["q"], at["k"]
    if rule.key_value is not None:
        whole = carrying.Lengths(None, rule.key_value)
        parts.append(
            whole if k is None else masks.at_positions(carrying.Prefix(rule.key_value), None, k)
        )
    if rule.query is not None:
        if q is None or k is None:
            parts.append(carrying.Lengths(rule.query, None))
        else:
            ids = jnp.where(q < rule.query[:, None], 0, -1)  # 0 sees every key, -1 none
            parts.append(carrying.Documents(ids, jnp.zeros_like(k)))
    return combine(parts)


@carries_data
class Reindexed(Rule):
    """A rule that reads its arrays by index, for some tokens and heads."""

    a: Rule = leaf()
    q_index: Leaf = leaf()  # [B|1, T]
    k_index: Leaf = leaf()  # [B|1, S]
    heads: Leaf = leaf()  # [N]
    axes = {"q_index": ("b", "q"), "k_index": ("b", "k"), "heads": ("n",)}

    def allows(self, tokens: Tokens) -> Array:
        new = {}
        if self.q_index is not None:
            new["q_index"] = carrying.read(self.q_index, tokens.b_index, tokens.q_index)
        if self.k_index is not None:
            new["k_index"] = carrying.read(self.k_index, tokens.b_index, tokens.k_index)
        if self.heads is not None:
            new["n_index"] = self.heads[tokens.n_index]
        return self.a.allows(tokens._replace(**new))

    def __str__(self) -> str:
        return str(self.a)
