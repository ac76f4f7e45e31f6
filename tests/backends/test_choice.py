"""Which backend runs a call without a name: estimates from constants that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake import BlockMask, masks
from xsake.backends import costs
from xsake.bench.suites import costs as suite

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# dense: 1 µs per thousand pairs; xla: three times as much, and ten microseconds for the call
CONSTANTS = {
    "dense": costs.Constants(call=0.0, pair=1e-9, product=0.0, compile=0.0),
    "xla": costs.Constants(call=1e-5, pair=3e-9, product=0.0, compile=0.0),
}


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    monkeypatch.setattr(costs, "table", lambda: {costs.platform_key(4): CONSTANTS})


def explained(T, mask=None, **call):
    q = jax.ShapeDtypeStruct((1, T, 2, 16), "float32")
    return xsake.explain(q, q, q, mask=mask, **call)


def test_the_constants_are_the_fit_of_their_result_files():
    table = json.loads(costs.PATH.read_text())
    reports = [json.loads((RESULTS / name).read_text()) for name in table["files"]]
    assert suite.fit([x for report in reports for x in report["results"]]) == table["constants"]


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), ([], 2), (["missing.json"], 2)])
def test_no_constants_are_written_without_files(arguments, code, tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "PATH", tmp_path / "costs.json")
    with pytest.raises(SystemExit) as ended:
        suite.main(arguments)
    assert ended.value.code == code
    assert not costs.PATH.exists()


def test_dense_is_taken_for_dense_masks_and_xla_for_sparse_ones():
    """By known lists of one block in 32; under a window, `dense` computes a band of 320 keys."""
    assert explained(256).chosen == "dense"
    assert explained(4096, is_causal=True).chosen == "dense"
    blocks = np.eye(32, dtype=bool)
    assert explained(4096, BlockMask.from_dense(blocks)).chosen == "xla"
    assert explained(4096, masks.sliding_window(255, 0)).chosen == "dense"


def test_beyond_the_limit_of_memory_xla_is_taken():
    """2 · 16384² logits of four bytes are 2 GiB."""
    explanation = explained(16384)
    assert explanation.chosen == "xla"
    assert "takes up to 1 GiB; these are 1 × 2 × 16384 × 16384, 2.0 GiB" in str(explanation)
    assert explanation.estimates == {}


def test_explain_says_what_was_estimated():
    """2 · 256² = 131,072 pairs, at one and at three nanoseconds."""
    explanation = explained(256)
    assert explanation.estimates == pytest.approx({"dense": 131.072e-6, "xla": 403.216e-6})
    said = "ms for a forward and a backward, with compilation spread over 1,000 calls"
    assert f"dense      chosen; estimated 0.1 {said}" in str(explanation)
    assert f"xla        can run; estimated 0.4 {said}" in str(explanation)
    assert explained(256, implementation="xla").estimates == {}


def test_known_lists_count_and_traced_ones_count_with_their_capacity():
    """One block of 16 in each row: known, or with a capacity of 16, a sixteenth of all pairs."""
    eye = np.eye(16, dtype=bool)
    assert explained(256, BlockMask.from_dense(eye, block=16)).estimates["xla"] == (
        pytest.approx(1e-5 + 3e-9 * 2 * 16 * 256)
    )

    def estimate(capacity):
        found = []

        def ask(bits):
            mask = BlockMask.from_dense(bits, block=16, capacity=capacity)
            found.append(explained(256, mask).estimates["xla"])
            return bits

        jax.eval_shape(ask, jnp.asarray(eye))
        return found[0]

    assert estimate(16) == pytest.approx(1e-5 + 3e-9 * 2 * 16 * 256)
    assert estimate(None) == pytest.approx(1e-5 + 3e-9 * 2 * 256 * 256)


def test_without_constants_the_first_backend_is_taken(monkeypatch):
    monkeypatch.setattr(costs, "table", dict)
    assert explained(16).chosen == "xla"
    assert "estimated" not in str(explained(16))


def test_the_fit_finds_the_constants():
    """Seconds that follow the formula exactly; negative terms are left out."""
    pairs, width = np.array([1e3, 1e5, 1e6, 1e7]), np.array([64, 128, 64, 256])
    seconds = 2e-4 + pairs * 5e-11 * width
    records = [
        {"platform_key": "cpu", "backend": "xla", "pairs": a, "width": b, "median_seconds": s,
         "compile_seconds": 1.5}
        for a, b, s in zip(pairs, width, seconds, strict=True)
    ]  # fmt: skip
    fitted = suite.fit(records)["cpu"]["xla"]
    wanted = {"call": 2e-4, "pair": 0.0, "product": 5e-11, "compile": 1.5}
    assert fitted == pytest.approx(wanted, abs=1e-15)


@pytest.mark.second_python
def test_the_suite_measures_both_backends():
    problem = suite.Problem(1, 2, 1, 16, 8, "window and documents")
    records = list(suite._records(problem, "float32", []))
    assert [x["backend"] for x in records] == ["xla", "dense"]
    assert [x["pairs"] for x in records] == [2 * 16 * 16] * 2
    assert all(x["median_seconds"] > 0 < x["compile_seconds"] for x in records)
