"""The suite `hopper-rules`: peers get the rule of a case, wrong results have no time; its table."""

from __future__ import annotations

import functools
import sys
import types

import numpy as np
import pytest

from tools import rule_tables
from xsake.attention import dot_product_attention
from xsake.bench import rule_peers
from xsake.bench.cases import RunCase
from xsake.bench.checks import WrongResultError
from xsake.bench.suites import hopper_rules
from xsake.bench.timing import Timing
from xsake.block_mask import BlockMask

CASES = {
    "causal": RunCase("causal", B=2, T=12, N=2, H=4),
    "window": RunCase("window", B=2, T=12, N=2, H=4, window=5),
    "documents": RunCase("documents", B=2, T=12, N=2, H=4, mean_document=3),
}


def seen_by(case):
    """The definition: bool [B, T, T]."""
    q, k = np.ogrid[: case.T, : case.T]
    ids = case.ids()
    seen = (k <= q) & (ids[:, :, None] == ids[:, None, :])
    return seen & (q - k < (case.window or case.T))


@pytest.fixture
def stubs(monkeypatch):
    """Libraries whose output is what a query sees, bool [B, T, N, …], instead of attention."""

    def for_heads(seen, q):
        return np.repeat(np.broadcast_to(seen, (*q.shape[:2], seen.shape[-1]))[:, :, None], 2, 2)

    def create_mask_plan(ends, q, k, v, build_backward):
        assert build_backward
        assert ends.dtype == np.int32
        assert ends.flags["C_CONTIGUOUS"]
        ends, key = ends[0].reshape(-1, *q.shape[:2], 1), np.arange(k.shape[1])
        seen = key < ends[0]
        for i in range(1, len(ends), 2):
            seen = seen | ((key >= ends[i]) & (key < ends[i + 1]))
        return seen

    def flash_attn_func(q, k, v, causal, window_size):
        assert causal
        left, right = window_size
        assert right is None
        back = np.subtract.outer(np.arange(q.shape[1]), np.arange(k.shape[1]))
        seen = (back >= 0) & (back <= (len(back) if left is None else left))
        return for_heads(seen, q), None

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal
    ):
        assert causal
        assert cu_seqlens_q.dtype == np.int32
        assert max_seqlen_q == max_seqlen_k == np.diff(cu_seqlens_q).max()
        token = np.arange(len(q))
        of = np.searchsorted(cu_seqlens_q, token, side="right")
        seen = (of[:, None] == of) & (token <= token[:, None])
        return np.repeat(seen[:, None], 2, 1), None

    def create_block_mask(is_seen, B, H, T, S, device):
        b, q, k = np.ogrid[: B or 1, :T, :S]
        return is_seen(b, 0, q, k)

    def flex(q, k, v, block_mask, enable_gqa):
        assert not enable_gqa
        return for_heads(block_mask, np.swapaxes(q, 1, 2))

    class Tensor(np.ndarray):
        def to(self, device):
            return self

    modules = {
        "torch": {"from_numpy": lambda x: x.view(Tensor)},
        "torch.nn": {},
        "torch.nn.attention": {
            "flex_attention": types.SimpleNamespace(
                flex_attention=flex, create_block_mask=create_block_mask
            )
        },
        "cudnn": {
            "create_mask_plan": create_mask_plan,
            "flex_attn_func": lambda q, k, v, mask_plan: for_heads(mask_plan, q),
        },
        "flash_attn": {},
        "flash_attn.cute": {
            "flash_attn_func": flash_attn_func,
            "flash_attn_varlen_func": flash_attn_varlen_func,
        },
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)

    def torch_calls(case, attend, heads_first=False):
        x = np.zeros((case.B, case.T, case.N, case.H), np.float32)
        x = x.swapaxes(1, 2) if heads_first else x
        return {"forward": lambda: attend(x, x, x)}

    monkeypatch.setattr(rule_peers.peers, "torch_calls", torch_calls)
    monkeypatch.setattr(rule_peers.peers, "captured", lambda call: call)
    monkeypatch.setattr(rule_peers.peers, "compiled", lambda fn: fn)
    sys.modules["torch"].cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        Stream=lambda: None, stream=lambda _: _NoStream()
    )


class _NoStream:
    def __enter__(self):
        return self

    def __exit__(self, *problem):
        return None


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("peer", rule_peers.PEERS)
def test_a_peer_computes_the_rule_of_the_case(stubs, name, peer):
    case = CASES[name]
    found = rule_peers.PEERS[peer](case)["forward"]()
    assert found.shape[:3] == (case.B, case.T, case.N)
    want = seen_by(case)
    if found.shape[3] > case.T:  # all tokens of the batch are one row of documents
        for b in range(case.B):
            own = found[b, ..., b * case.T : (b + 1) * case.T]
            assert own.sum() == found[b].sum()
            assert (own == want[b][:, None]).all()
        return
    assert (found == want[:, :, None]).all()


def test_the_cases_have_documents_of_several_lengths():
    """Else the tests above could pass with one document, and windows that never end."""
    case = CASES["documents"]
    assert len(np.unique(np.diff(rule_peers.document_bounds(case)))) > 2
    assert not (seen_by(case)[0] == seen_by(case)[1]).all()


@pytest.mark.parametrize("name", CASES)
def test_our_own_mask_is_the_rule_of_the_case(name):
    case = CASES[name]
    dense = BlockMask.from_rule(case.arguments()["mask"], (case.T, case.T)).to_dense()
    assert (np.asarray(dense)[:, 0] == seen_by(case)).all()


@pytest.fixture
def measured(monkeypatch):
    """Runs one case with another backend in place of the kernels; a peer takes 3 s, we take 2."""

    def times_of(calls):
        return {name: 2.0 if name.startswith("xsake") else 3.0 for name in calls}

    def missing(case):
        raise ImportError("no module cudnn")

    others = {"cudnn_flex": missing, "flash_attention_4": missing}
    others["flex_attention"] = lambda case: dict.fromkeys(hopper_rules.DIRECTIONS, lambda: None)
    monkeypatch.setattr(hopper_rules, "times_of", times_of)
    monkeypatch.setattr(rule_peers, "PEERS", others)

    def records(scale=1.0):
        def attend(q, k, v, implementation, **more):
            assert implementation == "hopper"
            whole = q * scale if "mask" not in more else q
            return dot_product_attention(whole, k, v, implementation="reference", **more)

        monkeypatch.setattr(hopper_rules, "dot_product_attention", attend)
        case = RunCase("c", T=32, N=2, H=8, dtype="bfloat16", window=9, mean_document=12)
        return list(hopper_rules.records(case, []))

    return records


def test_every_direction_is_checked_and_compared(measured):
    """A peer that fails is recorded with its reason; the table compares with the others."""
    found = measured()
    assert len(found) == 5 + 4
    reasons = {x["implementation"]: x["missing"] for x in found if "missing" in x}
    assert reasons == dict.fromkeys(
        ("cudnn_flex", "flash_attention_4"), "ImportError: no module cudnn"
    )
    assert all(0 < x["error"] < 1e-2 for x in found if x["implementation"].startswith("xsake"))
    head, [row] = rule_tables.hopper_rules(found)
    assert len(head) == len(row)
    assert row[1:6] == ["2000.000 / 2000.000", "2000.000", "", "", "3000.000 / 3000.000"]
    assert row[6:] == ["1.50 / 1.50", "1.50"]


@pytest.mark.second_python
def test_a_wrong_whole_call_has_no_time(measured):
    with pytest.raises(WrongResultError, match="no time is reported"):
        measured(scale=1.5)


def test_calls_take_turns_from_another_one_on(monkeypatch):
    """So that no call always follows the same one; the first round of a turn does not count."""
    asked = []

    def time_queued(call, seconds, rounds, wait):
        asked.append(call())
        return Timing((1e9, *[float(len(asked))] * (rounds - 1)))

    monkeypatch.setattr(hopper_rules, "time_queued", time_queued)
    found = hopper_rules.times_of({name: (functools.partial(str, name), str) for name in "abc"})
    assert "".join(asked) == "abcacbcabcbabcabac"
    assert found == {"a": 10.0, "b": 10.0, "c": 8.5}
