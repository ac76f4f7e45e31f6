"""What EasyDeL and ejkernel themselves returned, for calls on which they are right."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from tests.integrations import easydel_cases
from tests.oracle import relative_error
from xsake.attention import dot_product_attention
from xsake.integrations import ejkernel
from xsake.integrations.easydel import MaskInfo, OperationMetadata, OperationRegistry
from xsake.integrations.ejkernel import blocksparse

EXPECTED = np.load(Path(__file__).parent / "fixtures" / "easydel.npz")
CASES, SELECTIONS = easydel_cases.cases(), easydel_cases.selections()
CLOSE = 2e-6


def test_every_case_was_stored():
    assert set(EXPECTED) == {*CASES, *SELECTIONS}


# Each is compiled; the others are in `make test-slow`.
QUICK = ("attention mask", "one sink a head", "one query", "window of two sides")


@pytest.mark.parametrize(
    "name",
    [
        "segments, window, soft cap",
        *(pytest.param(name, marks=pytest.mark.second_python) for name in QUICK),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in CASES
            if name not in ("segments, window, soft cap", *QUICK)
        ),
    ],
)
def test_the_operation_returns_what_easydel_returned(name, monkeypatch):
    door = functools.partial(dot_product_attention, implementation="reference")
    monkeypatch.setattr(blocksparse, "dot_product_attention", door)
    _, given = CASES[name]
    given = dict(given)
    if "mask_info" in given:
        kind, array = given["mask_info"]
        make = MaskInfo.from_segments if kind == "segments" else MaskInfo.from_attention_mask
        given["mask_info"] = make(array)
    query, key, value = easydel_cases.arrays()
    query = query[:, -given.pop("queries", easydel_cases.T) :]
    attend = OperationRegistry.create("blocksparse", OperationMetadata())
    found = attend(query, key, value, **given).attention_outputs
    assert relative_error(found, EXPECTED[name]) <= CLOSE


@pytest.mark.second_python
@pytest.mark.parametrize("name", SELECTIONS)
def test_native_sparse_attention_returns_what_ejkernel_returned(name):
    function, given = SELECTIONS[name]
    attend = getattr(ejkernel, function)
    found = attend(*easydel_cases.arrays(), block_size=easydel_cases.BLOCK, **given)
    assert relative_error(found, EXPECTED[name]) <= CLOSE
