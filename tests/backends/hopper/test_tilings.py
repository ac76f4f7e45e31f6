"""Which class of measured tilings a call is in."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from xsake import BlockMask, masks
from xsake.backends import Sizes
from xsake.backends.hopper import tilings
from xsake.backends.options import ForwardTiling


def test_classes_of_calls_know_causal_masks_and_lists_that_heads_share():
    """Of which a tiling is measured."""
    sizes = Sizes(2, 4096, 4096, 4, 4, 64, 64)
    shape = (4096, 4096)
    ids = np.sort(np.random.default_rng(0).integers(0, 9, (2, 4096)), axis=1)
    names = {
        "64 short causal": BlockMask.from_rule(masks.causal(), shape),
        "64 short one": BlockMask.from_rule(masks.causal() & masks.documents(ids), shape),
        "64 short one sparse": BlockMask.from_rule(masks.sliding_window(200, 0), shape),
        "64 short mixed": BlockMask.from_dense(np.ones((4, 32, 32), bool), masks.causal()),
    }
    for name, mask in names.items():
        assert tilings.call_class(sizes, mask) == name
    full = BlockMask.from_rule(masks.everything(), shape)
    assert tilings.call_class(sizes, full) == "64 short full"
    assert tilings.call_class(sizes, full, "keys") == "64 short one"
    assert tilings.call_class(sizes, full, "pairs") == "64 short bias"
    for name in ("64 short causal", "64 short one"):
        known = ForwardTiling(**tilings._fields("forward", name))
        assert tilings.measured_forward(sizes, names[name]) == known


def test_a_class_that_was_not_measured_takes_the_tiling_of_one_like_it(monkeypatch):
    """Without a mask all lists are long, as under a causal one, and unlike those of documents."""
    sizes, full = Sizes(2, 64, 64, 4, 4, 64, 64), BlockMask.from_rule(masks.everything(), (64, 64))
    measured = {
        "64 short causal": {"tiling": {"order": "heads"}},
        "64 short one": {"tiling": {"order": "natural"}},
    }
    table = {"forward": measured, "backward": measured}
    monkeypatch.setattr(tilings, "_table", lambda: table)
    assert tilings.measured_backward(sizes, full).order == "heads"
    assert tilings.measured_backward(sizes, full, has_bias=True).order == "natural"
    assert tilings.measured_forward(sizes, full).order == "natural"
    assert tilings._fields("forward", "64 short one sparse") == {"order": "natural"}
    assert tilings._fields("forward", "64 long one") == {}
    measured["64 short full"] = {"tiling": {"order": "sections"}}
    assert tilings.measured_backward(sizes, full).order == "sections"
    assert tilings.measured_forward(sizes, full).order == "sections"


@pytest.mark.parametrize("T", [4096, 16384])
def test_no_causal_call_with_a_bias_has_a_tiling_of_192_rows(T, monkeypatch):
    """Which it would run with other rows than those it was measured with."""
    length = "short" if T < tilings.LONG else "long"
    table = copy.deepcopy(tilings._table())
    table["forward"][f"64 {length} causal"]["tiling"] = {"rows": 192}
    monkeypatch.setattr(tilings, "_table", lambda: table)
    causal, small = BlockMask.from_rule(masks.causal(), (T, T)), Sizes(2, T, T, 4, 4, 64, 64)
    assert tilings.measured_forward(small, causal).rows == 192
    for queries, like in ((3, "bias"), (1, "one")):
        bias = tilings.bias_kind((1, 4, queries, 3))
        found = tilings.measured_forward(small, causal, bias)
        assert found == ForwardTiling(**tilings._fields("forward", f"64 {length} {like}"))
        assert found.rows is None
        large = small._replace(H=128, Hv=128)
        assert tilings.call_class(large, causal, bias) == f"128 {length} causal"
