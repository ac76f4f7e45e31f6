"""ejkernel's blocksparse_attention: what cannot be honoured is refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash

from tests.integrations.test_blocksparse import BEFORE, BIAS, BLOCK, SEEN, SINKS, H, ours
from xsake.integrations.ejkernel import (
    BwdParams,
    FwdParams,
    SparseMask,
    blocksparse,
    blocksparse_attention,
)


def layouts(**more):
    return {"qkv_layouts": (BEFORE,), "chunk_size": BLOCK} | more


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (layouts(mask_builder=lambda: BEFORE), "mask_builder and qkv_layouts are both given"),
        (
            {"chunk_size": 8, "q_blocksize": 16},
            "chunk_size=8, q_blocksize=16 disagree, but forward and backward visit the same blocks",
        ),
        (
            {"chunk_size": 64, "bwd_params": BwdParams(q_blocksize=32)},
            r"chunk_size=64, bwd_params\.q_blocksize=32 disagree",
        ),
        (
            {"fwd_params": FwdParams(q_blocksize=64, num_warps=4)},
            r"fwd_params\.num_warps=4 sets a kernel of ejkernel, .* leave it None",
        ),
        ({"fwd_params": 64}, "fwd_params must have q_blocksize and kv_blocksize"),
        ({"chunk_size": 0}, "chunk_size must be an integer from 1"),
        ({"sliding_window": (1, 2, 3)}, r"sliding_window must be w or \(left, right\), got"),
        ({"sliding_window": -2}, "window left must be an integer from 0"),
        ({"softmax_aux": SINKS[:3]}, r"softmax_aux must be \[N\], \[K\].* K = 2, or \[M\]"),
        ({"softmax_aux": np.zeros(3, np.int32)}, "softmax_aux must be floating, got int32"),
        ({"softmax_aux": "x"}, "softmax_aux must be an array, got str"),
        ({"mask_builder": max}, "mask_builder <built-in function max> has no signature to read"),
        ({"softmax_scale": float("nan")}, "softmax_scale must be a finite number, got nan"),
        ({"attention_mask": SEEN[0, 0]}, r"attention_mask must be \[B, T, S\] or .* \[24, 24\]"),
        ({"attention_mask": SEEN.astype("int32") - 1}, "other than 0 and 1; of an additive mask"),
        ({"attention_mask": BIAS}, "attention_mask must be bool or integer .* goes to bias"),
        ({"bias": BIAS[..., :H]}, r"bias must be broadcastable to \[B, N, T, S\] = \[2, 4, 24"),
        ({"sequence_parallelism_mesh_axis_name": "x"}, "'x' is not an axis of a surrounding"),
        (layouts(chunk_size=6), r"qkv_layouts\[0\]\.lower_bounds must be \[2, 1, 4\], for 24"),
        (
            layouts(chunk_size=None, q_blocksize=8, kv_blocksize=12),
            r"qkv_layouts\[0\]\.upper_bounds reaches block 3, but 24 tokens in blocks of 12 are 2",
        ),
        (layouts(qkv_layouts=(BEFORE,) * 4), "qkv_layouts must be one to three SparseMasks"),
        (
            layouts(qkv_layouts=(BEFORE, BEFORE, BEFORE)),
            r"qkv_layouts\[2\] drops blocks that qkv_layouts\[0\] visits, so gradients would not",
        ),
        (layouts(qkv_layouts=SparseMask(None, None)), "lower_bounds is None; a SparseMask needs"),
        ({"mask_builder": 3}, "mask_builder must be a function, got int"),
        ({"mask_builder": lambda a, b: None}, r"mask_builder must take no arguments, or \(q_len,"),
        (
            {"mask_builder": lambda *five: np.zeros((2, 2), bool) if five else BEFORE},
            "lower_bounds must be",
        ),
        (
            {"mask_builder": lambda a, b, c, d, e: splash.FullMask((8, 8))},
            r"must return a mask of shape \(24, 24\) for a head, got FullMask of shape \(8, 8\)",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ours(**arguments)


def test_other_layouts_and_head_sizes_are_refused():
    q = np.zeros((1, 2, 8, 129), np.float32)
    with pytest.raises(ValueError, match="fused_backward=True takes head sizes up to 128, got 129"):
        blocksparse_attention(q, q, q, fused_backward=True)
    with pytest.raises(ValueError, match=r"key must be \[B, heads, tokens, H\], got shape \[2, 8"):
        blocksparse_attention(q, q[0], q)
    with pytest.raises(TypeError, match="attention_mask must be an array, got object"):
        blocksparse.token_mask(object())
    with pytest.raises(TypeError, match="query must be an array, got NoneType"):
        blocksparse_attention(None, q, q)
    ids = np.zeros((1, 8), np.int32)
    with pytest.raises(ValueError, match="mesh would not shard the ranges"):
        SparseMask.from_inputs(ids, ids, ids, ids, 8, 8, mesh=object())
    with pytest.raises(TypeError, match="q_segment_ids must hold integers, got object"):
        SparseMask.from_inputs(ids, None, ids, ids, 8, 8)
