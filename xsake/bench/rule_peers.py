"""Other libraries' attention for causal masks, windows and packed documents.

A peer is a function of a RunCase that returns two calls, {"forward": …, "backward": …}, recorded as
CUDA graphs. Its plan, block mask or document bounds are made before. Results are checked as ours.

                         causal               window                     documents
    cuDNN                one integer a query  three integers a query     three integers a query
    FlashAttention-4     causal               window_size                lengths of documents
    FlexAttention        a BlockMask made of the rule, as a function of q and k
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from xsake.bench import peers
from xsake.bench.cases import RunCase

Peer = Callable[[RunCase], dict[str, Callable[[], Any]]]


@peers.on_its_own_stream
def cudnn_flex(case: RunCase) -> dict[str, Callable[[], Any]]:
    """`flex_attention` of cuDNN's frontend; its plan is made from the intervals of keys."""
    from cudnn import create_mask_plan, flex_attn_func

    ends = _on_device(key_ends(case))
    plans: list[Any] = []  # made by the first call

    def attend(q: Any, k: Any, v: Any) -> Any:
        if not plans:
            plans.append(create_mask_plan(ends, q, k, v, build_backward=True))
        return flex_attn_func(q, k, v, mask_plan=plans[0])

    return _captured(peers.torch_calls(case, attend))


def key_ends(case: RunCase) -> np.ndarray:
    """Ends F of intervals, int32 [1, n, B·T]: a query sees keys [0, F0) and [F1, F2).

    Plain causal masks have n = 1. Otherwise F0 is 0: the first interval is empty.
    """
    first, after = (x.reshape(-1) for x in case.runs())
    rows = [after] if not first.any() else [np.zeros_like(first), first, after]
    return np.ascontiguousarray(np.stack(rows)[None], dtype=np.int32)


@peers.on_its_own_stream
def flash_attention_4(case: RunCase) -> dict[str, Callable[[], Any]]:
    """FlashAttention-4: causal, with a window, or with documents as sequences of a batch."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if case.mean_document is None:
        left = None if case.window is None else case.window - 1
        return _captured(
            peers.torch_calls(
                case,
                lambda q, k, v: flash_attn_func(q, k, v, causal=True, window_size=(left, None))[0],
            )
        )
    bounds = document_bounds(case)
    ends, longest = _on_device(bounds), int(np.diff(bounds).max())

    def attend(q: Any, k: Any, v: Any) -> Any:
        out = flash_attn_varlen_func(
            *(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)),
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=True,
        )[0]
        return out.reshape(*q.shape[:3], -1)

    return _captured(peers.torch_calls(case, attend))


def document_bounds(case: RunCase) -> np.ndarray:
    """Where documents begin among all tokens of the batch, and where the last one ends: int32."""
    starts = np.flatnonzero(case.document_starts())
    return np.append(starts, case.B * case.T).astype(np.int32)


@peers.on_its_own_stream
def flex_attention(case: RunCase) -> dict[str, Callable[[], Any]]:
    """PyTorch's FlexAttention, compiled; its BlockMask is made from the first key of each query."""
    from torch.nn.attention import flex_attention as flex

    first = _on_device(case.runs()[0])

    def is_seen(b: Any, n: Any, q: Any, k: Any) -> Any:
        seen = k <= q
        if case.window is not None:
            seen = seen & (q - k < case.window)
        return seen if case.mean_document is None else seen & (k >= first[b, q])

    B = None if case.mean_document is None else case.B
    mask = flex.create_block_mask(is_seen, B, None, case.T, case.T, device="cuda")
    attend = functools.partial(
        peers.compiled(flex.flex_attention), block_mask=mask, enable_gqa=case.sizes[4] != case.N
    )
    return _captured(peers.torch_calls(case, attend, heads_first=True))


PEERS: dict[str, Peer] = {
    "cudnn_flex": cudnn_flex,
    "flash_attention_4": flash_attention_4,
    "flex_attention": flex_attention,
}


def _captured(calls: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    return {direction: peers.captured(call) for direction, call in calls.items()}


def _on_device(x: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(x).to("cuda")
