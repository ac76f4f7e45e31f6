"""The suite `hopper-statistics` on a CPU, with `dense` in place of the kernels, and its table."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import pytest

from tools.statistics_tables import hopper_statistics as table
from xsake.bench.cases import Case
from xsake.bench.checks import WrongResultError
from xsake.bench.measure import CAUSAL
from xsake.bench.suites import hopper_statistics as suite
from xsake.bench.timing import Timing

SECONDS = {"plain": 0.001, "blocks": 0.00104, "observed": 0.0011}
CASE = Case("1·2·64·16 causal", 1, 64, N=2, H=16, dtype="bfloat16", rule=CAUSAL)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    for name in ("dot_product_attention", "observed_attention"):
        run = getattr(suite, name)
        monkeypatch.setattr(suite, name, functools.partial(_by_dense, run))
    monkeypatch.setattr(suite, "CHECKED", (0, 1))
    fake = {name: Timing((seconds,)) for name, seconds in SECONDS.items()}
    monkeypatch.setattr(suite, "time_interleaved", lambda calls, rounds: fake)


def _by_dense(run, *args, implementation, **named):
    assert implementation == "hopper"
    return run(*args, implementation="dense", **named)


@pytest.mark.second_python
def test_a_record_has_ratios_and_errors(monkeypatch):
    """And the table shows them; a wrong mass is refused before anything is timed."""
    (record,) = suite.records(CASE, [])
    assert record["blocks_over_plain"] == pytest.approx(1.04)
    assert record["errors"].keys() == {"mass", "block_entropy", "entropy"}
    old = {name: x for name, x in record.items() if "blocks" not in name}
    _, rows = table([record, old])
    assert [row[2:4] for row in rows] == [["1.040", "1.100"], ["not measured", "1.100"]]
    expected = suite._expected
    monkeypatch.setattr(
        suite, "_expected", lambda *x: expected(*x)._replace(mass=jnp.zeros((1, 1, 1, 1)))
    )
    with pytest.raises(WrongResultError, match=r"1·2·64·16 causal: errors .*'mass': 1\.0"):
        list(suite.records(CASE, []))
    monkeypatch.setattr(
        suite, "_expected", lambda *x: expected(*x)._replace(mass=jnp.full((1, 1, 1, 1), jnp.nan))
    )
    with pytest.raises(WrongResultError, match=r"errors .*'mass': nan"):
        list(suite.records(CASE, []))


def test_every_shape_is_measured_causal_and_sparse():
    names = [part.case for part in suite.parts(quick=False)]
    shapes = [f"{x}·{H}" for x in ("1·16·16384", "4·16·4096") for H in (128, 64)]
    assert names == [f"{x} {kind}" for x in shapes for kind in ("causal", "density=0.43")]
