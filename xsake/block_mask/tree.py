"""A dataclass as a pytree that is not made by its constructor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax


def register(cls: Any) -> None:
    """Makes a dataclass a pytree, with the fields as leaves that are not marked as static.

    Unlike `jax.tree_util.register_dataclass` this does not call __init__, which for a BlockMask
    makes masks by hand.
    """
    fields = dataclasses.fields(cls)
    static = [x.name for x in fields if x.metadata.get("static")]
    leaves = [x.name for x in fields if x.name not in static]

    def flatten(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        values, constants = ([getattr(x, name) for name in names] for names in (leaves, static))
        return tuple(values), tuple(constants)

    def flatten_with_keys(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        values, constants = flatten(x)
        return tuple(zip(map(jax.tree_util.GetAttrKey, leaves), values, strict=True)), constants

    def unflatten(constants: tuple[Any, ...], values: Iterable[Any]) -> Any:
        x = object.__new__(cls)
        x.__dict__.update(zip(leaves, values, strict=True))
        x.__dict__.update(zip(static, constants, strict=True))
        return x

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
