"""Attention of sampled queries, and estimates for all of them, on Hopper (sm90).

    q [B, T, N, H], sample [B, G] ─ queries.py ─ rows [B, G · N / K, K, H], intervals by piece
        ─ hopper.run_pieces ─ out, logsumexp of each piece of the keys
        ─ compare.py, with the sparse out and logsumexp ─ mass, ‖Δ‖², ‖out'‖² of every query
        ─ means.py ─ means and intervals by window and head, densities

In plain JAX this is about 25 launches of 1 to 6 µs; `xsake.hads` has that form, which is the
definition. The kernels are those of lanes.py, run on a CPU by tests/backends/hopper.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jax import Array


class Windows(NamedTuple):
    """The windows of a sample; the last number of each array is that of all queries together."""

    length: int  # queries
    every: int  # of a group, from which one is sampled
    per: int  # groups of a window
    tokens: np.ndarray  # float32 [windows + 1]
    scale: np.ndarray  # of the spread: its product is the squared standard error
    student: np.ndarray  # half an interval in standard errors; -1: nothing is known of the spread


class Visits(NamedTuple):
    """The blocks of a mask, and those that its rule allows."""

    kv_start: Array  # int32 [B|1, N|K|1, row blocks]
    kv_count: Array
    kv_index: Array  # int32 [B|1, N|K|1, M]
    live: tuple[np.ndarray, np.ndarray]  # [row blocks] each: blocks lo … hi - 1 are allowed
