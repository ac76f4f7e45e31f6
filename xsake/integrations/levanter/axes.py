"""Axes: what each named axis of a call counts, and arrays with their axes in a fixed order."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array

__all__ = ["Axes", "names_of"]


@dataclasses.dataclass(frozen=True)
class Axes:
    """The names of a call's axes by what they count, and their sizes."""

    q: str
    k: str
    key: str
    feature: str  # of value
    batch: list[str]
    kv_heads: list[str]  # one axis, or none
    groups: list[str]  # query heads of a kv head
    sizes: dict[str, int]

    @property
    def heads(self) -> list[str]:
        return self.kv_heads + self.groups

    @classmethod
    def of(
        cls,
        QPos: Any,
        KPos: Any,
        Key: Any,
        query: Any,
        key: Any,
        value: Any,
        rows: set[str],
        sink: Any = None,
    ) -> Axes:
        """Of a call's arrays.

        Args:
          QPos: axis of queries, or its name.
          KPos: of keys.
          Key: of features.
          query: named array.
          key: named array.
          value: named array.
          rows: axes along which the mask has data of batch rows, which are not heads.
          sink: named array of the heads, or None.
        """
        q, k, features = map(_axis_name, ("QPos", "KPos", "Key"), (QPos, KPos, Key))
        if q == k:
            raise ValueError(f"QPos and KPos must have different names, got {q!r} twice")
        arrays = {"query": query, "key": key, "value": value}
        of_query, of_key, of_value = (names_of(what, x) for what, x in arrays.items())
        shared = [name for name in of_query if name in of_key and name in of_value]
        shared = [name for name in shared if name not in (q, k, features)]
        for what, has, needed in (
            ("query", of_query, {q, features}),
            ("key", of_key, {k, features, *shared}),
            ("value", of_value, {k, *shared}),
        ):
            if missing := needed - set(has):
                raise ValueError(f"{what} has axes {has}, without {sorted(missing)}")
        only_value = [name for name in of_value if name not in (*shared, k)]
        only_key = [name for name in of_key if name not in (*shared, k, features)]
        if only_key or len(only_value) != 1:
            raise ValueError(
                f"key has axes {of_key} and value {of_value}, but besides {[k]} and the axes that "
                f"query shares, {shared}, key may have {features!r} and value one of features"
            )
        if sink is None:
            heads = [name for name in shared if name not in rows][-1:]
        else:
            heads = [name for name in shared if name in names_of("attn_sink", sink)]
        return cls(
            q,
            k,
            features,
            only_value[0],
            [name for name in shared if name not in heads],
            heads,
            [name for name in of_query if name not in (*shared, q, features)],
            _sizes(arrays, (QPos, KPos, Key)),
        )

    def array(self, what: str, x: Any, *groups: list[str]) -> Array:
        """The array with one axis for each group of names."""
        wanted = [name for group in groups for name in group]
        own = names_of(what, x)
        if sorted(own) != sorted(wanted):
            raise ValueError(f"{what} must have axes {wanted}, got {own}")
        self.check_sizes(what, x)
        ordered = jnp.transpose(x.array, [own.index(name) for name in wanted])
        return ordered.reshape([self.size(group) for group in groups])

    def check_sizes(self, what: str, x: Any) -> None:
        """Raises unless an array's axes are as long as those of query, key and value."""
        for axis in x.axes:
            if axis.size != self.sizes[axis.name]:
                raise ValueError(
                    f"{what} has {axis.size} along {axis.name!r}, but query, key and value have "
                    f"{self.sizes[axis.name]}"
                )

    def size(self, names: list[str]) -> int:
        """The product of some axes' sizes."""
        return math.prod(self.sizes[name] for name in names)

    def of_pairs(self, what: str, x: Any) -> Array:
        """[B|1, N|1, T|1, S|1] of an array with any of the axes."""
        return self.broadcast(what, x, self.batch, self.heads, [self.q], [self.k])

    def broadcast(self, what: str, x: Any, *groups: list[str]) -> Array:
        """The array with one axis for each group of names, 1 where it has none of them."""
        own = names_of(what, x)
        wanted = [name for group in groups for name in group]
        if unknown := [name for name in own if name not in wanted]:
            raise ValueError(f"{what} has axis {unknown[0]!r}, but may have {wanted}")
        self.check_sizes(what, x)
        present = [name for name in wanted if name in own]
        ordered = jnp.transpose(x.array, [own.index(name) for name in present])
        spread = ordered.reshape([self.sizes[name] if name in own else 1 for name in wanted])
        full = [
            self.sizes[name] if any(other in own for other in group) else 1
            for group in groups
            for name in group
        ]
        flat = [self.size(group) if set(group) & set(own) else 1 for group in groups]
        return jnp.broadcast_to(spread, full).reshape(flat)

    def named(self, out: Array, query: Any) -> Any:
        """out [B, T, N, Hv] with query's axes, its features those of value."""
        order = [*self.batch, self.q, *self.heads, self.feature]
        out = out.reshape([self.sizes[name] for name in order])
        by_name = {axis.name: axis for axis in query.axes}
        wanted = [self.feature if axis.name == self.key else axis.name for axis in query.axes]
        axis_type = type(query.axes[0])
        axes = [
            axis_type(name, self.sizes[name]) if name == self.feature else by_name[name]
            for name in wanted
        ]
        return type(query)(jnp.transpose(out, [order.index(name) for name in wanted]), tuple(axes))


def _axis_name(what: str, axis: Any) -> str:
    name = getattr(axis, "name", axis)
    if not isinstance(name, str):
        raise TypeError(f"{what} must be an axis or its name, got {type(axis).__name__}")
    return name


def names_of(what: str, x: Any) -> list[str]:
    """The names of an array's axes."""
    axes = getattr(x, "axes", None)
    if not hasattr(x, "array") or not isinstance(axes, (tuple, list)):
        raise TypeError(
            f"{what} must be a named array, with `array` and `axes`, got {type(x).__name__}; for "
            "arrays without names call xsake.dot_product_attention"
        )
    return [axis.name for axis in axes]


def _sizes(arrays: dict[str, Any], given: tuple[Any, ...]) -> dict[str, int]:
    """The size of each axis, which must be the same wherever it is."""
    found: dict[str, tuple[str, int]] = {}
    each = [(what, axis) for what, x in arrays.items() for axis in x.axes]
    each += [(f"axis {x.name!r}", x) for x in given if hasattr(x, "size") and hasattr(x, "name")]
    for what, axis in each:
        other, size = found.setdefault(axis.name, (what, axis.size))
        if size != axis.size:
            raise ValueError(f"{other} has {size} along {axis.name!r}, but {what} has {axis.size}")
    return {name: size for name, (_, size) in found.items()}
