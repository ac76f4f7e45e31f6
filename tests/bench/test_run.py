"""Interrupted suites resume, partial files are joined, and wrong results are not timed."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path

import jax.numpy as jnp
import pytest

from xsake import masks
from xsake.bench import regression, run
from xsake.bench.cases import Case
from xsake.bench.checks import WrongResultError, checked, error_of
from xsake.bench.suites import Part
from xsake.cli import machine


@pytest.fixture
def parts(monkeypatch):
    """A suite of three cases, which counts how often each was measured."""
    measured: list[str] = []

    def part(name):
        def measure(done):
            measured.append(name)
            yield {"case": name, "direction": "forward", "before": len(done)}

        return Part(name, measure)

    suite = types.SimpleNamespace(parts=lambda quick, model: [part(x) for x in ("a", "ab", "c")])
    monkeypatch.setitem(run.SUITES, "hopper", suite)
    monkeypatch.setenv("XSAKE_COMMIT", "one")
    return measured


def test_an_interrupted_run_resumes(parts, tmp_path):
    """Same commit, same machine: records in the file are kept and not measured again."""
    out = tmp_path / "r.json"
    run.run_suite("hopper", out, only="a")
    assert parts == ["a", "ab"]
    report = run.run_suite("hopper", out)
    assert parts == ["a", "ab", "c"]
    assert [record["before"] for record in report["results"]] == [0, 1, 2]
    assert json.loads(out.read_text())["results"] == report["results"]


@pytest.mark.parametrize("commit", ["two", "one+", "unknown"])
def test_another_commit_measures_again(parts, tmp_path, monkeypatch, commit):
    """Also a commit with local changes, and an unknown one."""
    out = tmp_path / "r.json"
    monkeypatch.setenv("XSAKE_COMMIT", commit if commit != "two" else "one")
    run.run_suite("hopper", out, only="c")
    monkeypatch.setenv("XSAKE_COMMIT", commit)
    report = run.run_suite("hopper", out)
    assert parts == ["c", "a", "ab", "c"]
    assert [record["case"] for record in report["results"]] == ["a", "ab", "c"]


def test_other_flags_of_xla_measure_again_and_are_not_joined(parts, tmp_path, monkeypatch):
    """They change what is measured, as a commit does."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    files = partial_files(tmp_path, "c")
    monkeypatch.delenv("XLA_FLAGS")
    files += partial_files(tmp_path, "ab")
    with pytest.raises(ValueError, match=r"ab\.json has xla_flags None, .*c\.json has --xla_gpu_a"):
        run.join("hopper", files, tmp_path / "whole.json")
    found = run.run_suite("hopper", files[0], only="c")
    assert parts == ["c", "ab", "c"]
    assert "xla_flags" not in found


def test_several_texts_name_cases(parts, tmp_path):
    """A case is measured if it has one of them."""
    run.run_suite("hopper", tmp_path / "r.json", only="b|c")
    assert parts == ["ab", "c"]


def test_suites_and_cases_are_printed(parts, capsys):
    machine.bench(cases=True)
    said = capsys.readouterr().out
    assert all(re.search(rf"\b{name}\b", said) for name in run.SUITES)
    assert "window" in said
    machine.bench(suite="hopper", cases=True)
    assert capsys.readouterr().out.split() == ["a", "ab", "c"]
    for suite in set(run.SUITES) - {"hopper"}:
        machine.bench(suite=suite, cases=True)
        assert capsys.readouterr().out.strip()
    with pytest.raises(ValueError, match="--cases measures nothing and takes no option but --su"):
        machine.bench(cases=True, only="a")


def test_an_unknown_case_raises(parts, tmp_path):
    """The error lists the cases."""
    with pytest.raises(ValueError, match=r"no case with 'd' in its name.*'ab'"):
        run.run_suite("hopper", tmp_path / "r.json", only="d")


def partial_files(tmp_path, *only):
    """Files with some of the cases each, as several processes write them."""
    files = [tmp_path / f"{x}.json" for x in only]
    for x, file in zip(only, files, strict=True):
        run.run_suite("hopper", file, only=x)
    return files


def test_partial_files_are_joined_in_suite_order(parts, tmp_path):
    """Nothing is measured again; all commands are recorded."""
    files = partial_files(tmp_path, "c", "a")
    for file, command in zip(files, ("second", "first"), strict=True):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"command": command}))
    whole = run.join("hopper", files, tmp_path / "whole.json")
    assert parts == ["c", "a", "ab"]
    assert [record["case"] for record in whole["results"]] == ["a", "ab", "c"]
    assert whole["command"] == "second; first"
    assert json.loads((tmp_path / "whole.json").read_text()) == whole
    assert run.run_suite("hopper", tmp_path / "whole.json")["results"] == whole["results"]


def test_joining_files_that_do_not_fit_raises(parts, tmp_path, monkeypatch):
    """Files of two commits, with a case twice, or of another suite."""
    files = partial_files(tmp_path, "c", "a")
    with pytest.raises(ValueError, match=r"case 'c' is in more than one of"):
        run.join("hopper", [*files, files[0]], tmp_path / "whole.json")
    with pytest.raises(ValueError, match=r"c\.json has results of the suite 'hopper'; it cannot"):
        run.join("hopper-features", files[:1], tmp_path / "whole.json")
    one = tmp_path / "one.json"
    one.write_text(json.dumps(json.loads(files[0].read_text()) | {"suite": "cpu"}))
    with pytest.raises(ValueError, match=r"suite 'cpu' is one case: its files cannot be joined"):
        run.join("cpu", [one], tmp_path / "whole.json")
    monkeypatch.setenv("XSAKE_COMMIT", "two")
    files[1:] = partial_files(tmp_path, "ab")
    with pytest.raises(ValueError, match=r"ab\.json has commit two, .*c\.json has one"):
        run.join("hopper", files, tmp_path / "whole.json")


def test_files_of_two_suites_with_the_same_cases_are_not_confused(parts, tmp_path, monkeypatch):
    """Such as `hopper` and `hopper-versions`: neither joined nor resumed, nor replaced."""
    monkeypatch.setitem(run.SUITES, "hopper-rules", run.SUITES["hopper"])
    (file,) = partial_files(tmp_path, "c")
    before = file.read_text()
    with pytest.raises(ValueError, match=r"c\.json has results of the suite 'hopper'; it cannot"):
        machine.bench(suite="hopper-rules", join=(file,), out=tmp_path / "whole.json")
    with pytest.raises(ValueError, match=r"c\.json has results of the suite 'hopper'; name anothe"):
        run.run_suite("hopper-rules", file)
    assert file.read_text() == before
    older = {name: x for name, x in json.loads(before).items() if name != "suite"}
    file.write_text(json.dumps(older))
    with pytest.raises(ValueError, match="written by an earlier version, which did not note the"):
        run.join("hopper", [file], tmp_path / "whole.json")


RESULT = {"commit": "a", "machine": {}, "versions": {}, "quick": False, "date": "", "command": ""}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", r".*r\.json must hold a JSON object, got list; name another file"),
        ("null", ".* got NoneType"),
        ("{", ".*Expecting property name"),
        ("[" * 100_000, ".* is nested too deeply to be read"),
        ("{}", "it has no 'commit'"),
        (json.dumps(RESULT | {"seconds": "1", "results": []}), "its 'seconds' is a str"),
        (json.dumps(RESULT | {"seconds": 1, "results": [3]}), "result 0 has no case"),
        (json.dumps(RESULT | {"seconds": 1, "results": [{"case": 3}]}), "result 0 has no case"),
    ],
    ids=lambda text: text[:20],
)
def test_a_file_that_is_no_result_file_is_neither_joined_nor_replaced(
    parts, tmp_path, content, message
):
    file = tmp_path / "r.json"
    file.write_text(content)
    with pytest.raises(
        ValueError, match=rf"r\.json is not a result file of `xsake bench`: {message}"
    ):
        machine.bench(suite="hopper", join=(file,), out=tmp_path / "new" / "o.json")
    with pytest.raises(ValueError, match=r"r\.json is not a result file of `xsake bench`"):
        run.run_suite("hopper", file)
    assert file.read_text() == content
    assert not parts


def test_join_needs_a_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        machine.bench(join=(tmp_path / "gone.json",), out=tmp_path / "o.json")
    with pytest.raises(ValueError, match="--join names no file; leave it out to measure"):
        machine.bench(join=(), out=tmp_path / "o.json")
    with pytest.raises(IsADirectoryError, match="is a folder; name a file to write"):
        machine.bench(out=tmp_path)


def test_a_ratio_above_its_limit_is_measured_again_and_then_an_error(monkeypatch, capsys):
    asked = []

    def times():
        asked.append(len(asked))
        slow = 9.0 if len(asked) < 3 else 1.0  # the machine is busy twice
        return {regression.FORWARD: slow, regression.MEMORY: 0.01}

    monkeypatch.setattr(regression, "_measured", times)
    machine.bench(check=True)
    assert asked == [0, 1, 2]
    assert "1.000 ≤ 2" in capsys.readouterr().out
    monkeypatch.setattr(regression, "_measured", lambda: {regression.MEMORY: 0.5})
    with pytest.raises(ValueError, match="above the limit: temporary memory ÷ jax"):
        machine.bench(check=True)


CASE = Case("grouped", T=140, N=4, K=2, H=16, sinks=0, soft_cap=3.0, rule=masks.causal())


def test_a_right_result_passes():
    """Grouped heads, sinks and a soft cap, through the reference that is compiled per shape."""
    assert max(error_of(CASE, "reference").values()) <= 1e-5


@pytest.mark.parametrize("wrong", ["output", "dq", "dk", "dv", "nan", "nan dv"])
def test_a_wrong_result_raises(wrong):
    """One wrong number in any of the four arrays is enough; so is a NaN."""
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
        wrong_value = arrays[wrong][0, 7, 3] + 1e-3 * jnp.abs(arrays[wrong]).max()
        arrays[wrong] = arrays[wrong].at[0, 7, 3].set(wrong_value)
    with pytest.raises(WrongResultError, match="no time is reported"):
        run_checked(arrays)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"check": True, "quick": True}, "--check measures its own ratios and takes no other opt"),
        ({"check": True, "suite": "cpu"}, "--check measures its own ratios and takes no other opt"),
        ({"autotune": True, "suite": "cpu"}, "--autotune measures no suite; leave out --suite cpu"),
        ({"autotune": True, "model": Path("m")}, "--model is for --suite model; got --autotune"),
        ({"autotune": True, "quick": True}, "--autotune has no shorter form; leave out --quick"),
        ({"model": Path("m")}, "--model is for --suite model; got --suite cpu"),
        ({"suite": "nsa", "model": Path("m")}, "--model is for --suite model; got --suite nsa"),
    ],
    ids=str,
)
def test_options_that_would_be_ignored_are_refused(given, message, monkeypatch):
    monkeypatch.setattr(regression, "_measured", dict)
    with pytest.raises(ValueError, match=message):
        machine.bench(**given)


@pytest.mark.parametrize("more", [{"only": "a"}, {"quick": True}], ids=str)
def test_join_rejects_measurement_options(more, tmp_path):
    """They would be ignored silently."""
    with pytest.raises(
        ValueError, match="--join measures nothing: give only --suite or --autotune"
    ):
        machine.bench(suite="hopper", join=(tmp_path / "a.json",), **more)
