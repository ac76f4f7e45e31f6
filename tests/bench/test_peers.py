"""Peers get the case's blocks, pass the same checks, and appear in the tables."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import types
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools import tables
from xsake import masks
from xsake.bench import measure, peers, timing
from xsake.bench.cases import Case, RunCase
from xsake.bench.checks import WrongResultError
from xsake.bench.suites import Record, hopper, hopper_features

SPARSE = Case("sparse", B=2, T=256, N=2, H=16, block=(32, 64), head_densities=(0.2, 0.6))
CASES = {
    "sparse": SPARSE,
    "causal": Case("causal", T=64, N=2, H=16, rule=masks.causal()),
    "full": Case("full", T=64, N=2, H=16, rule=masks.everything()),
}


class Tensor(np.ndarray):
    """A stub of torch.Tensor; `attend` is the function that computed it, if any."""

    attend: Any = None

    def clone(self, memory_format):
        return np.array(self).view(Tensor)

    def requires_grad_(self):
        return self

    def detach(self):
        return self

    def contiguous(self):
        return np.ascontiguousarray(self).view(Tensor)

    def to(self, device):
        return self


class Lists(NamedTuple):
    """A stub of BlockSparseTensorsTorch."""

    mask_block_cnt: Any
    mask_block_idx: Any
    full_block_cnt: Any
    full_block_idx: Any
    block_size: tuple[int, int]


@pytest.fixture
def fake_torch(monkeypatch):
    """Stubs of torch, its FlexAttention and FlashAttention-4 in plain JAX.

    `lists` are the block lists that they received, `errors` are added to results.
    """
    state = types.SimpleNamespace(lists=[], errors={})

    def lists(*args, **more):
        state.lists.append(Lists(*args, **more))
        return state.lists[-1]

    def attend(q, k, v, seen):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / 4
        p = jnp.where(seen, jnp.exp(logits - logits.max(-1, keepdims=True)), 0)
        p = p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30)  # a query without keys gets zeros
        return jnp.einsum("bnts,bsnh->btnh", p, v)

    def tensor(x, name):
        x = np.array(x)
        x[0, -1, 0, 3] += state.errors.get(name, 0)
        return x.view(Tensor)

    def flash_attn_func(q, k, v, causal, block_sparse_tensors=None, block_sparse_tensors_bwd=None):
        seen = by_key = np.tri(q.shape[1], dtype=bool) if causal else np.ones(1, bool)
        if block_sparse_tensors is not None:
            size = block_sparse_tensors.block_size
            seen = _tokens(block_sparse_tensors, size)
            by_key = _tokens(block_sparse_tensors_bwd, size[::-1]).mT
        out = tensor(attend(*map(np.asarray, (q, k, v)), seen), "out")
        out.attend = lambda *x: attend(*x, by_key)
        return out, None

    def from_kv_blocks(*lists, BLOCK_SIZE):
        state.lists.append(Lists(*lists, BLOCK_SIZE))
        return _tokens(state.lists[-1], BLOCK_SIZE)

    def flex(q, k, v, block_mask, enable_gqa):
        assert enable_gqa == (q.shape[1] != k.shape[1])

        def heads_first(*x):
            return attend(*(y.swapaxes(1, 2) for y in x), block_mask).swapaxes(1, 2)

        out = tensor(heads_first(*map(np.asarray, (q, k, v))), "out")
        out.attend = heads_first
        return out

    def grad(out, inputs, d_out, retain_graph):
        pull_back = jax.vjp(out.attend, *map(np.asarray, inputs))[1]
        names = ("dq", "dk", "dv")
        found = zip(pull_back(np.asarray(d_out)), names, strict=True)
        return tuple(tensor(*pair) for pair in found)

    torch = types.ModuleType("torch")
    torch.__dict__.update(
        from_dlpack=lambda x: np.asarray(x).view(Tensor),
        from_numpy=lambda x: x.view(Tensor),
        zeros_like=np.zeros_like,
        contiguous_format=None,
        no_grad=contextlib.nullcontext,
        cuda=types.SimpleNamespace(
            synchronize=lambda: None, Stream=lambda: None, stream=contextlib.nullcontext
        ),
        autograd=types.SimpleNamespace(grad=grad),
    )
    cute = types.ModuleType("flash_attn.cute")
    sparsity = types.ModuleType("flash_attn.cute.block_sparsity")
    cute.__dict__.update(flash_attn_func=flash_attn_func)
    attention = types.ModuleType("torch.nn.attention")
    attention.__dict__.update(
        flex_attention=types.SimpleNamespace(
            flex_attention=flex, BlockMask=types.SimpleNamespace(from_kv_blocks=from_kv_blocks)
        )
    )
    sparsity.__dict__.update(BlockSparseTensorsTorch=lists)
    packages = (types.ModuleType(name) for name in ("flash_attn", "torch.nn"))
    for module in (torch, *packages, cute, sparsity, attention):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(peers, "_time_torch", lambda call: (call(), 1.0)[1])
    monkeypatch.setattr(peers, "compiled", lambda fn: fn)
    return state


def _tokens(lists, size):
    """The token mask of block lists, bool [B, N, queries, keys]; transposed if the lists are."""
    count, index = lists.full_block_cnt, lists.full_block_idx
    kept = np.zeros(index.shape, bool)
    np.put_along_axis(kept, index, np.arange(index.shape[-1]) < count[..., None], -1)
    return kept.repeat(size[0], -2).repeat(size[1], -1)


@pytest.mark.parametrize("name", CASES)
def test_flash_attention_4_computes_the_case(fake_torch, name):
    """Forward by lists per query block, backward by lists per key block: both are checked."""
    assert peers.flash_attention_4(CASES[name]) == {"forward": 1.0, "backward": 1.0}
    assert len(fake_torch.lists) == (2 if name == "sparse" else 0)


def test_a_case_with_documents_or_a_window_is_checked_with_its_rule(fake_torch):
    """Causal at least: the same call without it raises."""
    from flash_attn.cute import flash_attn_func

    def calls(is_causal):
        case = RunCase("causal", T=64, N=2, H=16)
        return peers.torch_calls(case, lambda *x: flash_attn_func(*x, causal=is_causal)[0])

    assert list(calls(True)) == ["forward", "backward"]
    with pytest.raises(WrongResultError, match="no time is reported"):
        calls(False)


def test_a_captured_call_keeps_what_its_graph_reads(fake_torch):
    """A graph replays addresses: memory that was freed may hold anything by then."""
    replays = []

    class Graph:
        def replay(self):
            replays.append(self)

    torch = sys.modules["torch"]
    torch.cuda.CUDAGraph, torch.cuda.current_stream = Graph, lambda: None
    torch.cuda.graph = lambda graph, stream, capture_error_mode: contextlib.nullcontext()

    class Owned:
        def __call__(self):
            return None

    call = Owned()
    alive, replay = weakref.ref(call), peers.captured(call)
    del call
    gc.collect()
    assert alive() is not None
    replay()
    assert len(replays) == 1


@pytest.mark.parametrize("kv_heads", [None, 1])
def test_flex_attention_computes_the_case(fake_torch, kv_heads):
    """In the layout [B, N, T, H]."""
    case = dataclasses.replace(SPARSE, K=kv_heads)
    assert peers.flex_attention(case) == {"forward": 1.0, "backward": 1.0}


@pytest.mark.parametrize(
    ("peer", "shapes"),
    [
        (peers.flex_attention, [(2, 2, 8, 4)]),
        (peers.flash_attention_4, [(2, 2, 8, 4), (2, 2, 4, 8)]),
    ],
)
def test_a_peer_gets_full_blocks_only(fake_torch, peer, shapes):
    """int32 and contiguous, as the kernels assume; no partial blocks."""
    peer(SPARSE)
    for lists, shape in zip(fake_torch.lists, shapes, strict=True):
        assert lists.full_block_idx.shape == shape
        assert lists.full_block_cnt.sum() == SPARSE.blocks().sum()
        assert not lists.mask_block_cnt.any()
        assert lists.block_size == SPARSE.block
        for x in lists[:4]:
            assert x.dtype == np.int32
            assert x.flags["C_CONTIGUOUS"]


@pytest.mark.parametrize(
    ("peer", "what"),
    [
        (peers.flex_attention, "out"),
        (peers.flex_attention, "dk"),
        *((peers.flash_attention_4, what) for what in ("out", "dq", "dk", "dv")),
    ],
)
def test_a_wrong_peer_raises(fake_torch, peer, what):
    fake_torch.errors[what] = 0.1
    with pytest.raises(WrongResultError, match="no time is reported"):
        peer(SPARSE)


@pytest.mark.parametrize("name", ["causal", "full"])
def test_cudnn_is_checked(monkeypatch, name):
    """With jax.nn in place of cuDNN: it passes, and raises with the opposite causality."""
    plain = jax.nn.dot_product_attention

    def attend(q, k, v, is_causal, implementation):
        assert implementation == "cudnn"
        return plain(q, k, v, is_causal=is_causal ^ wrong)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setattr(peers, "time_directions", lambda calls: dict.fromkeys(calls, 1.0))
    wrong = False
    assert peers.cudnn(CASES[name]) == {"forward": 1.0, "backward": 1.0}
    wrong = True
    with pytest.raises(WrongResultError, match="no time is reported"):
        peers.cudnn(CASES[name])


@pytest.mark.parametrize(
    "more", [{}, {"bias": (0, 0, 0, 0)}, {"token_mask": (0, 0, 0, 0)}, {"head_densities": (0.4,)}]
)
def test_the_jax_nn_peer_of_the_xla_backend_is_checked(monkeypatch, more):
    """With the case's bias and token mask; dense if the case is block-sparse."""
    case = Case("plain", T=64, N=2, H=16, block=(32, 32), **more)
    scale = 1 / 4
    plain = jax.nn.dot_product_attention

    def attend(*args, implementation, **named):
        return plain(*args, **named, scale=scale)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setattr(peers, "time_directions", lambda calls: dict.fromkeys(calls, 1.0))
    assert hopper_features.jax_nn(case) == {"forward": 1.0, "backward": 1.0}
    scale = 1 / 5
    with pytest.raises(WrongResultError, match="no time is reported"):
        hopper_features.jax_nn(case)


def test_a_token_mask_counts_every_pair():
    assert measure.visited_pairs(SPARSE, jnp.ones((1, 1, 256, 256), bool)) == 2 * 2 * 256 * 256


def test_flash_attention_4_is_a_peer_of_every_case(monkeypatch):
    """With cuDNN for dense cases, with FlexAttention for block-sparse ones."""
    asked = {}

    def measured(case, others, backend="hopper"):
        asked[case.name] = others
        for direction in ("forward", "backward"):
            record = {"case": case.name, "direction": direction}
            yield record | {"median_seconds": 1.0, "density_ratio": 1.0}

    monkeypatch.setattr(hopper, "measure", measured)
    monkeypatch.setattr(hopper, "time_ratio", lambda case, other, direction: 1.0)
    done: list[Record] = []
    for part in hopper.parts(quick=True):
        done.extend(part.measure(done))
    assert len(asked) == 6
    for name, others in asked.items():
        first = "flex_attention" if "density" in name else "cudnn"
        assert list(others) == [first, "flash_attention_4"]
        assert others["flash_attention_4"] is peers.flash_attention_4


def test_a_failing_peer_is_recorded_with_its_reason_and_our_time_is_kept():
    """A peer that is not installed, one that is wrong, one that raises; each is called once."""
    asked = []

    def failing(error):
        def peer(case):
            asked.append(error)
            raise error

        return peer

    others = {
        "absent": failing(ImportError("no module flash_attn")),
        "wrong": failing(WrongResultError("errors exceed")),
        "broken": failing(AssertionError("sm90 only")),
        "there": lambda case: {"forward": 1.0, "backward": 2.0},
    }
    records = list(measure.measure(CASES["causal"], others, "xla"))
    assert len(asked) == 3
    assert [record["direction"] for record in records] == ["forward", "backward"]
    for record, seconds in zip(records, (1.0, 2.0), strict=True):
        assert record["absent_missing"] == "no module flash_attn"
        assert record["wrong_missing"] == "WrongResultError: errors exceed"
        assert record["broken_missing"] == "AssertionError: sm90 only"
        assert record["times_faster_than_there"] == seconds / record["median_seconds"]
        assert not any(f"{name}_teraflops" in record for name in ("absent", "wrong", "broken"))


def test_two_cases_are_timed_interleaved(monkeypatch):
    """The ratio is the median over rounds, so drift between rounds does not change it."""
    called = []

    def compiled(case, backend):
        fns = {d: lambda d=d: called.append((case.name, d)) for d in ("forward", "backward")}
        return {}, {d: (fn, ()) for d, fn in fns.items()}

    # sparse and full, then full and sparse, …; two rounds are outliers
    slower = iter((2.0, 1.0, 20.0, 40.0, 6.0, 3.0, 1.0, 9.0, 1.0, 1.0))

    def time_queued(fn, *args):
        fn(*args)
        seconds = next(slower)
        return timing.Timing((1e9, seconds, seconds))  # the median counts

    monkeypatch.setattr(measure, "compiled", compiled)
    monkeypatch.setattr(timing, "time_queued", time_queued)
    assert measure.time_ratio(CASES["sparse"], CASES["full"], "backward") == 2.0
    pair = [("sparse", "backward"), ("full", "backward")]
    assert called == [*pair, *pair[::-1]] * 2 + pair  # the first call alternates


def test_the_table_has_flash_attention_4_if_the_file_has_it():
    def record(direction, **more):
        mine = {"case": "a", "direction": direction, "teraflops": 600.0}
        return mine | {"cudnn_teraflops": 500.0, "times_faster_than_cudnn": 1.2} | more

    fourth = {"flash_attention_4_teraflops": 640.0, "times_faster_than_flash_attention_4": 0.9375}
    directions = ("forward", "backward")
    table = tables.hopper([record(direction, **fourth) for direction in directions]).splitlines()
    assert "| speedup over peer | FlashAttention-4 | speedup over FlashAttention-4 |" in table[0]
    assert (
        table[2] == "| a | 600 / 600 | cuDNN 500 / 500 | 1.20 / 1.20 | 640 / 640 | 0.94 / 0.94 |  |"
    )
    without = tables.hopper([record(direction) for direction in directions]).splitlines()
    assert "FlashAttention-4" not in without[0]
    assert without[2] == "| a | 600 / 600 | cuDNN 500 / 500 | 1.20 / 1.20 |  |"
