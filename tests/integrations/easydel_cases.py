"""Calls of EasyDeL and ejkernel, for fixtures/easydel.py and the tests that read what it wrote."""

from __future__ import annotations

import numpy as np

B, T, N, K, H = 2, 12, 4, 2, 8
BLOCK = 4  # of native sparse attention: three of them


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def arrays():
    return [normal(seed, B, T, heads, H) for seed, heads in enumerate((N, K, K))]


def cases():
    """{name: (EasyDeL's operation, arguments of its call)}; of query, the last `queries`.

    mask_info is ("segments" | "attention mask", array). Where a query sees nothing, and for masks
    by head, EasyDeL's own operations differ from each other.
    """
    rng = np.random.default_rng(9)
    ids = np.sort(rng.integers(0, 3, (B, T)), axis=1).astype(np.int32)
    shown = rng.random((B, 1, T, T)) < 0.6
    shown[..., np.arange(T), np.arange(T)] = True
    return {
        "causal": ("blocksparse", {}),
        "not causal": ("blocksparse", {"causal": False}),
        "window": ("blocksparse", {"sliding_window": (3, 0)}),
        "window of one number": ("blocksparse", {"sliding_window": 2, "causal": False}),
        "window of two sides": ("blocksparse", {"sliding_window": (2, 1), "causal": False}),
        "soft cap": ("blocksparse", {"logits_soft_cap": 0.5}),
        "scale": ("blocksparse", {"softmax_scale": 0.1}),
        "segments": ("blocksparse", {"mask_info": ("segments", ids)}),
        "segments, window, soft cap": (
            "blocksparse",
            {"mask_info": ("segments", ids), "sliding_window": (4, 0), "logits_soft_cap": 0.7},
        ),
        "attention mask": ("vanilla", {"mask_info": ("attention mask", shown)}),
        "sinks of all heads": ("blocksparse", {"softmax_aux": normal(3, 3)}),
        "sinks of heads": ("blocksparse", {"softmax_aux": normal(4, N, 1)}),
        "one sink a head": ("blocksparse", {"softmax_aux": normal(6, N)}),
        "one sink a kv head": ("blocksparse", {"softmax_aux": normal(7, K)}),
        "one query": ("vanilla", {"queries": 1}),  # as its block-sparse operation does on TPUs
    }


def selections():
    """{name: (function of ejkernel's native sparse attention, keyword arguments)}."""
    rng = np.random.default_rng(5)
    own = np.arange(T)[None, :, None, None] // BLOCK
    # its own block and the first one, once where they are the same
    blocks = np.concatenate([own, np.where(own > 0, 0, -1)], -1)
    blocks = np.broadcast_to(blocks, (B, T, K, 2)).astype(np.int32)
    gates = rng.random((2, B, T, N)).astype(np.float32)
    everything = np.broadcast_to(np.arange(3), (B, T, K, 3)).astype(np.int32)
    return {
        "selected": (
            "apply_native_sparse_attention",
            {"block_indices": everything, "block_counts": 3},
        ),
        "selected, scale": (
            "apply_native_sparse_attention",
            {"block_indices": everything, "block_counts": 3, "softmax_scale": 0.2},
        ),
        "own and first": (
            "apply_native_sparse_attention",
            {"block_indices": blocks, "block_counts": 2},
        ),
        "gate": (
            "native_sparse_attention",
            {"block_indices": everything, "block_counts": 3, "g_slc": gates[0]},
        ),
        "compressed": (
            "native_sparse_attention",
            {"block_counts": 3, "g_cmp": gates[0], "g_slc": gates[1]},
        ),
    }
