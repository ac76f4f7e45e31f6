"""Other libraries' attention, timed in the same process if they are installed.

A peer is a function of a Case that returns seconds, {"forward": …, "backward": …}. It runs on the
case's own q, k and v, and its output and gradients are checked as ours are. Block-sparse peers get
the case's blocks of every batch row and head, all marked as full (without a token mask).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.bench.cases import Case
from xsake.bench.checks import checked, checked_calls
from xsake.bench.timing import (
    Calls,
    beside,
    compile_directions,
    time_directions,
    time_queued,
)

Peer = Callable[[Case], dict[str, float]]
PACKAGES = (
    "torch",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)


def versions() -> dict[str, str]:
    """Versions of the peers' packages that are installed."""
    installed = {found.name for found in metadata.distributions()}
    return {name: metadata.version(name) for name in PACKAGES if name in installed}


def cudnn(case: Case) -> dict[str, float]:
    """`jax.nn.dot_product_attention` on cuDNN, dense or causal."""
    given = case.arguments(on_device=True)
    arrays = [given[name] for name in ("query", "key", "value")]
    is_causal = _is_causal(case)

    def attend(q: Any, k: Any, v: Any, _: None) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cudnn")

    return jax_seconds(case, given, compile_directions(attend, arrays, None))


def dense_causal(q: Array, k: Array, v: Array) -> Array:
    """Dense causal attention: cuDNN on a GPU, elsewhere the default implementation of jax.nn."""
    peer: Any = "cudnn" if jax.default_backend() == "gpu" else None
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=peer)


def jax_seconds(case: Case, given: dict[str, Any], calls: Calls) -> dict[str, float]:
    """Seconds of forward and backward, after their results are checked."""
    with beside():
        checked_calls(case, given, calls)
    return time_directions(calls)


def on_its_own_stream(peer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Runs a peer on a new stream: CUDA graphs cannot capture calls on the default stream.

    If a backward is captured, its forward must run on the new stream too.
    """

    @functools.wraps(peer)
    def run(case: Any) -> Any:
        import torch

        with torch.cuda.stream(torch.cuda.Stream()):
            return peer(case)

    return run


@on_its_own_stream
def flex_attention(case: Case) -> dict[str, float]:
    """PyTorch's FlexAttention, compiled, with the case's blocks as full blocks."""
    from torch.nn.attention import flex_attention as flex

    lists = _torch_lists(np.asarray(case.blocks()))
    mask = flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=case.block)
    attend = functools.partial(
        compiled(flex.flex_attention), block_mask=mask, enable_gqa=(case.K or case.N) != case.N
    )
    return _torch_seconds(torch_calls(case, attend, heads_first=True))


@on_its_own_stream
def flash_attention_4(case: Case) -> dict[str, float]:
    """FlashAttention-4: its block-sparse kernels for cases with blocks, else its dense ones."""
    from flash_attn.cute import flash_attn_func

    options: dict[str, Any] = {"causal": _is_causal(case)}
    blocks = case.blocks()
    if blocks is not None:
        options["block_sparse_tensors"] = _full_blocks(blocks, case.block)
        options["block_sparse_tensors_bwd"] = _full_blocks(blocks.mT, case.block)
    return _torch_seconds(torch_calls(case, lambda q, k, v: flash_attn_func(q, k, v, **options)[0]))


@beside()
def torch_calls(
    case: Case, attend: Callable[..., Any], heads_first: bool = False
) -> dict[str, Callable[[], Any]]:
    """Calls of attend(q, k, v), without a gradient, and of its gradients; results are checked.

    q, k, v are the case's own, [B, T, N, H] or, with heads_first, [B, N, T, H].
    """
    import torch

    def swap_heads(x: Any) -> Any:
        return x.swapaxes(1, 2) if heads_first else x

    def to_torch(x: jax.Array) -> Any:
        return swap_heads(_to_torch(x)).contiguous()

    given = case.arguments(on_device=True)
    shape = (*given["query"].shape[:3], case.sizes[-1])
    d_out = jax.random.normal(jax.random.key(0), shape, case.dtype)
    q, k, v = (to_torch(given[name]).requires_grad_() for name in ("query", "key", "value"))
    out, out_gradient = attend(q, k, v), to_torch(d_out)

    def pull_back() -> Any:
        return torch.autograd.grad(out, (q, k, v), out_gradient, retain_graph=True)

    def forward() -> Any:
        with torch.no_grad():
            return attend(q, k, v)

    results = [x.detach().contiguous() for x in (forward(), *pull_back())]
    torch.cuda.synchronize()
    first, *gradients = (swap_heads(jnp.from_dlpack(x)) for x in results)
    checked(case, given, d_out, first, gradients)
    return {"forward": forward, "backward": pull_back}


def _torch_seconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    return {direction: _time_torch(call) for direction, call in calls.items()}


def _full_blocks(blocks: np.ndarray, size: tuple[int, int]) -> Any:
    """FlashAttention-4's block lists.

    `size` is (query, key) tokens of a block, also for the backward, whose lists are per key block.
    """
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    return BlockSparseTensorsTorch(*_torch_lists(blocks), block_size=size)


def _torch_lists(blocks: np.ndarray) -> tuple[Any, ...]:
    """Counts [B, N, row blocks] and indices [B, N, row blocks, kv blocks]: partial, then full.

    All blocks are full: none needs a token mask.
    """
    import torch

    count, index = (torch.from_numpy(x).to("cuda") for x in block_lists(blocks))
    return torch.zeros_like(count), torch.zeros_like(index), count, index


def block_lists(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count of kept blocks per row block, and the indices of all blocks, the kept ones first.

    >>> [x.tolist() for x in block_lists(np.array([[False, True, True]]))]
    [[2], [[1, 2, 0]]]
    """
    lists = blocks.sum(-1), np.argsort(~blocks, axis=-1, kind="stable")
    count, index = (np.ascontiguousarray(x, dtype=np.int32) for x in lists)
    return count, index


def _is_causal(case: Case) -> bool:
    return case.rule is not None and case.rule.is_causal


def _to_torch(x: jax.Array) -> Any:
    """Copies, so that torch does not alias JAX's buffer."""
    import torch

    return torch.from_dlpack(x).clone(memory_format=torch.contiguous_format)


@functools.cache
def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile, for calls whose backward is timed many times."""
    import torch
    import torch._functorch.config as settings

    settings.donated_buffer = False  # the backward of one forward is timed many times
    return torch.compile(fn, dynamic=False)  # a kernel per shape, as users get by default


@beside()
def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph, which excludes Python's overhead."""
    import torch

    stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    for _ in range(3):
        call()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()

    def replay() -> Callable[[], Any]:
        graph.replay()
        return call  # which owns the tensors that the graph reads

    return replay


def wait_for_torch(_: Any) -> None:
    """`wait` of `time_queued` for calls of torch."""
    import torch

    torch.cuda.synchronize()


def _time_torch(call: Callable[[], Any]) -> float:
    """Seconds of a call, queued as ours are."""
    return time_queued(captured(call), wait=wait_for_torch).median_seconds
