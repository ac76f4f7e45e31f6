"""Converts specs, the nested tuples that tests/oracle.py evaluates, to xsake rules.

A spec may hold a Slot in place of an array, so that its structure is hashable and its contents
travel through jit as arguments: `to_rule(fill(spec, arrays))`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from xsake import masks


@dataclass(frozen=True)
class Slot:
    """A placeholder for an array; `axes` names its dimensions: "BT", "1S", "BN", "1NTS" …"""

    name: str
    axes: str

    @property
    def key(self) -> str:
        return f"{self.name}[{self.axes}]"


def fill(spec, arrays: dict[str, Any]):
    """The spec with every Slot replaced by its array."""
    if isinstance(spec, Slot):
        return arrays[spec.key]
    return tuple(fill(part, arrays) for part in spec) if isinstance(spec, tuple) else spec


def slots(spec) -> set[Slot]:
    """The arrays that a spec needs."""
    if isinstance(spec, Slot):
        return {spec}
    return set().union(*map(slots, spec)) if isinstance(spec, tuple) else set()


def to_rule(spec):
    """The xsake rule that is equivalent to the spec."""
    name, *values = spec
    values = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in values]
    match name:
        case "and":
            return to_rule(values[0]) & to_rule(values[1])
        case "or":
            return to_rule(values[0]) | to_rule(values[1])
        case "not":
            return ~to_rule(values[0])
        case "positions":
            return masks.at_positions(to_rule(values[0]), values[1], values[2])
        case "numbered":
            return masks.numbered(to_rule(values[0]), batch=values[1], heads=values[2])
        case "lengths":
            return masks.lengths(query=values[0], key_value=values[1])
        case "function":
            fn, arrays, reads = (*values, *((), None)[len(values) - 1 :])
            return masks.rule(fn, *map(jnp.asarray, arrays), reads=reads)
        case _:
            return getattr(masks, name)(*values)


def later_heads_look_further(b, n, q, k):
    """A function of n that NumPy and JAX both run."""
    return (k <= q) & (q - k < 10 * (n + 1))


def rows_differ(b, n, q, k):
    """A function of b."""
    return (q + k + b) % 3 != 0


def shifted_by_table(b, n, q, k, table):
    """A function that reads an array [B, N] by index."""
    return k <= q + table[b, n]


def zoo(B, N, T, S, seed=0) -> dict[str, tuple]:
    """One spec for each kind of rule, with arrays for these sizes."""
    rng = np.random.default_rng([B, N, T, S] if seed == 0 else [B, N, T, S, seed])
    q_ids = rng.integers(-1, 3, (B, T)).astype(np.int32)
    kv_ids = rng.integers(-1, 3, (B, S)).astype(np.int32)
    sorted_ids = np.sort(rng.integers(0, 3, (1, T)), -1).astype(np.int32)
    q_positions = rng.permuted(np.tile(np.arange(T), (B, 1)), axis=-1).astype(np.int32)
    kv_positions = rng.permutation(S).astype(np.int32)
    q_lengths = rng.integers(0, T + 1, B).astype(np.int32)
    kv_lengths = rng.integers(0, S + 1, B).astype(np.int32)
    table = rng.integers(-9, 9, (B, N)).astype(np.int32)
    data_free = {
        "everything": ("everything",),
        "nothing": ("not", ("everything",)),
        "causal": ("causal",),
        "anti-causal": ("not", ("causal",)),
        "window": ("sliding_window", 13, 4),
        "window of one": ("sliding_window", 0, 0),
        "window open left": ("sliding_window", None, 3),
        "window open right": ("sliding_window", 15, None),
        "chunked": ("chunked", 24),
        "chunked, causal": ("and", ("chunked", 16), ("causal",)),
        "first": ("first", 17),
        "prefix": ("prefix", 20),
        "prefix or causal": ("or", ("prefix", 20), ("causal",)),
        "strided": ("strided", 7),
        "stride longer than a block": ("strided", 40),
        "dilated": ("dilated", (3, 2), 6),
        "global tokens": ("global_tokens", 3),
        "longformer": ("longformer", (9, 9), 2),
        "bigbird": ("bigbird", (5, 5), 2, 0.2, 3, 16),
        "random": ("random", 0.4, 11, 16),
        "random tokens": ("random", 0.5, 2, 1),
        "outside a window, causal": ("and", ("not", ("sliding_window", 8, 8)), ("causal",)),
        "function of n": ("function", later_heads_look_further),
        "function of b": ("function", rows_differ),
    }
    with_data = {
        "prefix per row": ("prefix", kv_lengths),
        "lengths": ("lengths", q_lengths, kv_lengths),
        "key lengths": ("lengths", None, kv_lengths),
        "documents": ("documents", q_ids, kv_ids),
        "sorted documents": ("documents", sorted_ids, np.sort(kv_ids)),
        "documents, causal": ("and", ("documents", q_ids, kv_ids), ("causal",)),
        "not documents": ("not", ("documents", q_ids, kv_ids)),
        "causal at positions": ("positions", ("causal",), q_positions, kv_positions),
        "window at query positions": ("positions", ("sliding_window", 9, 2), q_positions, None),
        "array": ("array", rng.random((B, N, T, S)) < 0.5),
        "array per key": ("array", rng.random((B, 1, 1, S)) < 0.5),
        "array per head": ("array", rng.random((1, N, 1, 1)) < 0.5),
        "function with a table": ("function", shifted_by_table, (table,)),
        "numbered": (
            "numbered",
            ("and", ("random", 0.5, 1, 16), ("function", rows_differ)),
            np.arange(B, dtype=np.int32)[::-1] + 3,
            np.arange(N, dtype=np.int32) + 2,
        ),
    }
    return data_free | with_data


def has_data(spec) -> bool:
    return isinstance(spec, np.ndarray) or (isinstance(spec, tuple) and any(map(has_data, spec)))
