"""What a user would pick instead, timed in the same run where it can be imported.

A peer is a function of a Case that returns seconds, {"forward": …, "backward": …}.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xsake.bench.cases import Case
from xsake.bench.timing import compile_directions, time_directions

Peer = Callable[[Case], dict[str, float]]


@functools.lru_cache(maxsize=4)
def cudnn(case: Case) -> dict[str, float]:
    """`jax.nn.dot_product_attention` on cuDNN, dense or causal."""
    given = case.arguments(on_device=True)
    arrays = [given[name] for name in ("query", "key", "value")]
    is_causal = case.rule is not None and case.rule.is_causal

    def attend(q: Any, k: Any, v: Any, _: None) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cudnn")

    return time_directions(compile_directions(attend, arrays, None))


@functools.lru_cache(maxsize=4)
def flex_attention(case: Case) -> dict[str, float]:
    """PyTorch's FlexAttention, compiled, with the case's blocks as full blocks."""
    import torch
    from torch.nn.attention import flex_attention as flex

    B, T, _, N, _, H, _ = case.sizes
    blocks = torch.from_numpy(np.asarray(case.blocks())).to("cuda")
    count = blocks.sum(-1).int()
    index = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True).int()
    mask = flex.BlockMask.from_kv_blocks(
        torch.zeros_like(count), torch.zeros_like(index), count, index, BLOCK_SIZE=case.block[0]
    )
    q, k, v = (
        torch.randn(B, N, T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    attend = _compiled(flex.flex_attention)
    out = attend(q, k, v, block_mask=mask)
    d_out = torch.randn_like(out)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v, block_mask=mask)

    return {"forward": _time_torch(forward), "backward": _time_torch(backward)}


@functools.cache
def _compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    import torch
    import torch._functorch.config as settings

    settings.donated_buffer = False  # so that one graph can be timed many times
    return torch.compile(fn, dynamic=False)  # every shape its own kernel, as a user would have it


def _time_torch(call: Callable[[], None], calls: int = 30, rounds: int = 5) -> float:
    """Seconds by device events around queued calls, the median of some rounds."""
    import torch

    for _ in range(3):
        call()
    taken = []
    for _ in range(rounds):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(calls):
            call()
        ended.record()
        torch.cuda.synchronize()
        taken.append(began.elapsed_time(ended) / 1e3 / calls)
    return statistics.median(taken)
