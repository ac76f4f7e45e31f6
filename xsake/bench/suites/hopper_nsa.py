"""The suite `hopper-nsa`: Native Sparse Attention on a GPU, part by part, beside open kernels.

    compressed   pooled keys and values, 32 tokens every 16, and attention to them
    choose       the 16 most important blocks of 64 for every token
    selected     attention to those
    window       of 512 tokens
    total        all of it, with the sum of the branches

Peers, if they can be imported: `flash_nsa` (mdy666/Scalable-Flash-Native-Sparse-Attention) and
`native_sparse_attention` (XunhaoLai/native-sparse-attention-triton), on the same arrays and the
same blocks; their results are compared with ours. Dense causal attention by cuDNN stands beside.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake import nsa
from xsake.bench import programs
from xsake.bench.suites import Part, Record
from xsake.bench.timing import Calls, compile_directions, time_queued
from xsake.nsa.compress import attend_compressed, compress
from xsake.nsa.selected import attend_selected
from xsake.nsa.sequences import ONE_SEQUENCE
from xsake.nsa.split import Text

H, BLOCK, COUNT, WINDOW = 128, 64, 16, 512
SCALE = H**-0.5
SETTINGS = nsa.Settings(num_selected=COUNT)
LIMIT = 2e-2  # of results in bfloat16 against another kernel's, relative to the largest value
ROUNDS = 3
GROUP = "nsa"  # of all cases: what prepares one would disturb the times of another
Measured = Iterator[tuple[str, str, float]]  # part, direction, seconds


def parts(quick: bool, model: Path | None = None) -> Iterator[Part]:
    """64 query heads on 4 kv heads at three lengths, other groups, blocks of 128."""
    lengths = (2048,) if quick else (8192, 32768, 65536)
    for T in lengths:
        yield Part(f"nsa 1·64/4·{T}·128", functools.partial(_whole, T), GROUP)
    for group in (4, 8, 16):
        T = 2048 if quick else 32768
        yield Part(
            f"selected, group {group}, {T} tokens", functools.partial(_group, T, group), GROUP
        )
    yield Part(
        f"msa 1·64/4·{lengths[-1]}·128", functools.partial(_large_blocks, lengths[-1]), GROUP
    )


def arrays(T: int, N: int = 64, K: int = 4) -> list[Array]:
    """q, k, v in bfloat16; q is scaled so that attention is not flat."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((1, T, n, H) for n in (N, K, K))
    q, k, v = (jax.random.normal(x, y, jnp.bfloat16) for x, y in zip(keys, shapes, strict=True))
    return [q * 2, k, v]


# -------------------------------------------------------------------------------------------- ours


def compressed(q: Array, k: Array, v: Array, more: None) -> Array:
    """The compressed branch."""
    pooled = compress(k, v, ONE_SEQUENCE, block=32, stride=16)
    return attend_compressed(q, pooled, ONE_SEQUENCE, scale=SCALE)[0]


def selected(q: Array, k: Array, v: Array, indices: Array) -> Array:
    """The selected branch, over blocks that NSA chose."""
    how: dict[str, Any] = {"block": BLOCK, "scale": SCALE, "is_set": True}
    return attend_selected(q, k, v, indices, forced=SETTINGS.forced, **how)[0]


def selected_128(q: Array, k: Array, v: Array, indices: Array) -> Array:
    """The selected branch with blocks of 128."""
    return attend_selected(q, k, v, indices, block=128, scale=SCALE, is_set=True)[0]


def window(q: Array, k: Array, v: Array, more: None) -> Array:
    """The window branch."""
    return nsa.attention._window(q, k, v, Text(), WINDOW, scale=SCALE)


def total(q: Array, k: Array, v: Array, more: None) -> Array:
    """All branches, added."""
    return nsa.native_sparse_attention(q, k, v, window_size=WINDOW)


def dense(q: Array, k: Array, v: Array, more: None) -> Array:
    """Dense causal attention by cuDNN."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def seconds(call: Callable[..., Any], *args: Any, wait: Any = jax.block_until_ready) -> float:
    """Median seconds of a call, queued."""
    return time_queued(call, *args, seconds=0.05, rounds=ROUNDS, wait=wait).median_seconds


def _timed(part: str, calls: Calls) -> Measured:
    for direction, (fn, args) in calls.items():
        yield part, direction, seconds(fn, *args)


def _whole(T: int, done: list[Record]) -> Iterator[Record]:
    """Every part, ours and the peers', at one length."""
    given = arrays(T)
    pooled, logsumexp = jax.jit(_pooled_logsumexp)(*given)
    choose = jax.jit(_choose)
    indices = choose(given[0], given[1], pooled, logsumexp)
    branches: dict[str, tuple[Any, Any]] = {
        "compressed": (compressed, None),
        "selected": (selected, indices),
        "window": (window, None),
        "total": (total, None),
        "dense": (dense, None),
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:
        made = pool.map(lambda x: compile_directions(x[0], given, x[1]), branches.values())
        ours: dict[str, Calls] = dict(zip(branches, made, strict=True))
    record = functools.partial(_record, f"nsa 1·64/4·{T}·128", T)
    for part, calls in ours.items():
        who = "cudnn" if part == "dense" else "xsake"
        for _, direction, time in _timed(part, calls):
            yield record(who, part, direction, time)
    time = seconds(choose, given[0], given[1], pooled, logsumexp)
    yield record("xsake", "choose", "forward", time)
    for name, peer in PEERS.items():
        if importlib.util.find_spec(name) is None:
            continue
        results = {part: _results(ours[part]) for part in ("compressed", "selected")}
        for part, direction, time, error in peer(given, indices, results):
            yield record(name, part, direction, time) | {"difference_from_ours": error}


def _results(calls: Calls) -> list[Array]:
    """out, dq, dk, dv."""
    (forward, given), (backward, saved) = calls["forward"], calls["backward"]
    return [forward(*given), *backward(*saved)]


def _pooled_logsumexp(q: Array, k: Array, v: Array) -> tuple[Any, Array]:
    pooled = compress(k, v, ONE_SEQUENCE, block=32, stride=16)
    return pooled, attend_compressed(q, pooled, ONE_SEQUENCE, scale=SCALE)[1]


def _choose(q: Array, k: Array, pooled: Any, logsumexp: Array) -> Array:
    return nsa.attention.choose(SETTINGS, q, k, pooled, logsumexp, None, Text(), SCALE)


def _record(case: str, T: int, who: str, part: str, direction: str, time: float) -> Record:
    return {
        "suite": "hopper-nsa",
        "case": case,
        "implementation": who,
        "part": part,
        "direction": direction,
        "T": T,
        "median_seconds": time,
    }


def _group(T: int, group: int, done: list[Record]) -> Iterator[Record]:
    """The selected branch with another number of query heads for each kv head."""
    given = arrays(T, N=4 * group)
    pooled, logsumexp = jax.jit(_pooled_logsumexp)(*given)
    indices = jax.jit(_choose)(given[0], given[1], pooled, logsumexp)
    pairs = int((indices >= 0).sum()) * group * BLOCK  # of a query and a key
    case = f"selected, group {group}, {T} tokens"
    for part, direction, time in _timed("selected", compile_directions(selected, given, indices)):
        record = _record(case, T, "xsake", part, direction, time)
        yield record | {"group": group, "picoseconds_per_pair": time / pairs * 1e12}


def _large_blocks(T: int, done: list[Record]) -> Iterator[Record]:
    """The selected branch as MSA has it: 16 blocks of 128."""
    given = arrays(T)
    settings = nsa.Settings(score="moba", block_size=128, num_selected=COUNT)
    choose = jax.jit(
        lambda q, k: nsa.attention.choose(settings, q, k, None, None, None, Text(), SCALE)
    )
    calls = compile_directions(selected_128, given, choose(*given[:2]))
    for part, direction, time in _timed("selected", calls):
        yield _record(f"msa 1·64/4·{T}·128", T, "xsake", part, direction, time)


# ------------------------------------------------------------------------------------------- peers


def _means(given: list[Array]) -> list[Array]:
    """Pooled keys and values, which the peers get as we compute them."""
    pooled = compress(given[1], given[2], ONE_SEQUENCE, block=32, stride=16)
    assert pooled.v is not None
    return [pooled.k, pooled.v]


def _torch(x: Array) -> Any:
    import torch

    return torch.from_dlpack(x).clone()


def _time_torch(call: Callable[[], Any]) -> float:
    import torch

    return seconds(call, wait=lambda _: torch.cuda.synchronize())


def _differences(found: list[Any], expected: list[Array]) -> float:
    """The largest error of the results, each relative to its largest value; raises if too large."""
    worst = 0.0
    for x, y in zip(found, expected, strict=True):
        x, y = (a.astype(jnp.float32) for a in (jnp.from_dlpack(x.detach().contiguous()), y[0]))
        worst = max(worst, float(jnp.abs(x - y).max() / jnp.abs(y).max()))
    if worst > LIMIT:
        raise ValueError(f"a peer's results differ from ours by {worst:.3f}, limit {LIMIT}")
    return worst


def _peer(
    part: str, attend: Callable[..., Any], given: list[Any], expected: list[Array] | None
) -> Iterator[tuple[str, str, float, float | None]]:
    """Times attend(q, k, v) and its gradients, and compares them with ours."""
    import torch

    leaves = [x.requires_grad_() for x in given]
    out = attend(*leaves)
    d_out = jax.random.normal(jax.random.key(0), (1, *out.shape), jnp.bfloat16)
    gradient = _torch(d_out)[0]

    def pull_back() -> Any:
        return torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    def forward() -> Any:
        with torch.no_grad():
            attend(*leaves)

    error = None if expected is None else _differences([out, *pull_back()], expected)
    yield part, "forward", _time_torch(forward), error
    yield part, "backward", _time_torch(pull_back), error


def flash_nsa(given: list[Array], indices: Array, ours: dict[str, list[Array]]) -> Iterator[Any]:
    """mdy666's kernels, on [T, heads, size]."""
    import torch
    from flash_nsa.ops.compress_attn import compress_attn
    from flash_nsa.ops.select_attn import select_attn
    from flash_nsa.ops.topk import slc_topk_indices
    from flash_nsa.utils import NSAHelper

    q, k, v = (_torch(x)[0] for x in given)
    NSAHelper.init_cu_seqlens(torch.tensor([0, len(q)], device="cuda", dtype=torch.int32))
    blocks = -(-len(q) // BLOCK)
    top = _torch(jnp.where(indices < 0, blocks, indices)[0]).permute(1, 0, 2).contiguous()
    yield from _peer(
        "selected", lambda *x: select_attn(*x, top, SCALE), [q, k, v], ours["selected"]
    )
    means = [_torch(x)[0] for x in _means(given)]
    yield from _peer(
        "compressed", lambda *x: compress_attn(*x, SCALE)[0], [q.detach(), *means], None
    )
    with torch.no_grad():
        _, lse = compress_attn(q, *means, SCALE)

        def choose() -> Any:
            return slc_topk_indices(
                q, means[0], lse, sm_scale=SCALE, maybe_efficient_version=True, scale_slc_p=True
            )

        yield "choose", "forward", _time_torch(choose), None


def native_sparse_attention(
    given: list[Array], indices: Array, ours: dict[str, list[Array]]
) -> Iterator[Any]:
    """XunhaoLai's kernels, on [T, heads, size]; its compressed attention also chooses."""
    import torch
    from native_sparse_attention.ops.triton.compressed_attention import compressed_attention
    from native_sparse_attention.ops.triton.topk_sparse_attention import topk_sparse_attention

    q, k, v = (_torch(x)[0] for x in given)
    ends = torch.tensor([0, len(q)], device="cuda", dtype=torch.int32)
    top = _torch(indices[0]).permute(1, 0, 2).contiguous()
    yield from _peer(
        "selected",
        lambda *x: topk_sparse_attention(*x, top, BLOCK, ends, SCALE),
        [q, k, v],
        ours["selected"],
    )
    means = [_torch(x)[0] for x in _means(given)]
    pooled_ends = torch.tensor([0, len(means[0])], device="cuda", dtype=torch.int32)
    yield from _peer(
        "compressed + choose",
        lambda *x: compressed_attention(*x, 32, 16, BLOCK, COUNT, ends, pooled_ends, None, None)[0],
        [q.detach(), *means],
        None,
    )


PEERS: dict[str, Callable[..., Iterator[Any]]] = {
    "flash_nsa": flash_nsa,
    "native_sparse_attention": native_sparse_attention,
}


if __name__ == "__main__":
    programs.stop_for_suite("hopper-nsa")
