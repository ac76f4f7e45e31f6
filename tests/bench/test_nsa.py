"""The suite `nsa` measures what it says, and its results are right."""

import pytest

from tools import tables
from xsake.bench import run
from xsake.bench.suites import nsa


@pytest.mark.slow
def test_records_of_a_small_case(monkeypatch):
    monkeypatch.setitem(nsa.SIZES, "N", 2)
    monkeypatch.setitem(nsa.SIZES, "K", 1)
    records = list(nsa.measure("all branches", 80, repeats=1))
    assert [x["direction"] for x in records] == ["forward", "forward+backward"]
    assert all(x["error"] <= 1e-5 and x["temporary_bytes"] > 0 for x in records)
    assert tables.TABLES["nsa"](records).count("all branches, 80 tokens") == 2


def test_cases_of_the_suite():
    assert run.SUITES["nsa"] is nsa
    assert [part.case for part in nsa.parts(False)] == ["selected T=2048", "all branches T=2048"]
