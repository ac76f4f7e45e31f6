"""A suite that is cut off loses nothing, and a wrong result has no time."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest

from xsake import masks
from xsake.bench import run
from xsake.bench.cases import Case
from xsake.bench.checks import WrongResultError, checked, error_of


@pytest.fixture
def parts(monkeypatch):
    """A suite of three cases, which counts how often each was measured."""
    measured: list[str] = []

    def part(name):
        def rows(done):
            measured.append(name)
            yield {"case": name, "direction": "forward", "before": len(done)}

        return name, rows

    monkeypatch.setitem(run.SUITES, "hopper", lambda quick: [part(x) for x in ("a", "ab", "c")])
    monkeypatch.setenv("XSAKE_COMMIT", "one")
    return measured


def test_a_run_goes_on_where_an_earlier_one_stopped(parts, tmp_path):
    """Same commit, same machine: what the file holds is neither measured again nor lost."""
    out = tmp_path / "r.json"
    run.run_suite("hopper", out, only="a")
    assert parts == ["a", "ab"]
    report = run.run_suite("hopper", out)
    assert parts == ["a", "ab", "c"]
    assert [row["before"] for row in report["results"]] == [0, 1, 2]
    assert json.loads(out.read_text())["results"] == report["results"]


@pytest.mark.parametrize("commit", ["two", "one+", "unknown"])
def test_another_commit_measures_anew(parts, tmp_path, monkeypatch, commit):
    """Also one with changes on top, and one that nobody knows."""
    out = tmp_path / "r.json"
    monkeypatch.setenv("XSAKE_COMMIT", commit if commit != "two" else "one")
    run.run_suite("hopper", out, only="c")
    monkeypatch.setenv("XSAKE_COMMIT", commit)
    report = run.run_suite("hopper", out)
    assert parts == ["c", "a", "ab", "c"]
    assert [row["case"] for row in report["results"]] == ["a", "ab", "c"]


def test_a_case_that_is_not_there_is_an_error(parts, tmp_path):
    """It names what there is."""
    with pytest.raises(ValueError, match=r"no case with 'd' in its name.*'ab'"):
        run.run_suite("hopper", tmp_path / "r.json", only="d")


CASE = Case("grouped", T=140, N=4, K=2, H=16, sinks=0, soft_cap=3.0, rule=masks.causal())


def test_a_right_result_passes():
    """Grouped heads, sinks and a soft cap, through the reference that is compiled per shape."""
    assert max(error_of(CASE, "reference").values()) <= 1e-5


@pytest.mark.parametrize("wrong", ["output", "dq", "dk", "dv", "nan", "nan dv"])
def test_a_wrong_result_has_no_time(wrong):
    """One number that is off, in any of the four arrays, is enough; so are rows that are NaN."""
    case = Case("small", T=256, N=1, H=16)  # every token sees every other
    q, k, v = (case.arguments()[name][..., 0, :] for name in ("query", "key", "value"))
    p = jnp.exp(q @ k.swapaxes(1, 2) / 4)
    p = p / p.sum(-1, keepdims=True)
    d_out = jnp.ones_like(v)
    dp = d_out @ v.swapaxes(1, 2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / 4
    arrays = {
        "output": p @ v,
        "dq": ds @ k,
        "dk": ds.swapaxes(1, 2) @ q,
        "dv": p.swapaxes(1, 2) @ d_out,
    }

    def run_checked(arrays):
        inputs = {"query": q, "key": k, "value": v, "d_out": d_out} | arrays
        inputs = {name: x[:, :, None] for name, x in inputs.items()}
        given = {name: inputs[name] for name in ("query", "key", "value")}
        gradients = [inputs[name] for name in ("dq", "dk", "dv")]
        return checked(case, given, inputs["d_out"], inputs["output"], gradients)

    assert max(run_checked(arrays).values()) <= 1e-5
    if wrong.startswith("nan"):
        name = wrong.removeprefix("nan").strip() or "output"
        arrays[name] = arrays[name].at[0, 64:96].set(jnp.nan)
    else:
        spoilt = arrays[wrong][0, 7, 3] + 1e-3 * jnp.abs(arrays[wrong]).max()
        arrays[wrong] = arrays[wrong].at[0, 7, 3].set(spoilt)
    with pytest.raises(WrongResultError, match="no time is reported"):
        run_checked(arrays)
