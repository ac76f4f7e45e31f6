"""The suite of the earlier XSAKE's claims, on sizes that take seconds."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flax import nnx

from tests.hads.test_plan import profile_of
from tools import claims_tables
from xsake.bench.suites import claims
from xsake.bench.timing import Timing
from xsake.model import Config, Transformer

HOW: Any = {"heads": 2, "head_size": 8, "density": 0.8, "block": 16, "selectors": ("mean_query",)}


def test_speed_has_a_line_for_each_length_and_form(tmp_path):
    out = tmp_path / "speed.json"
    claims.speed(out, lengths=(64,), **HOW)
    report = json.loads(out.read_text())
    head, lines = claims_tables.speed(report)
    lines = list(lines)
    forms = ["dense, jax.nn", "dense, xsake", "block lists", "mean_query and block lists"]
    assert [line[:2] for line in lines] == [["1·2·64·8", form] for form in forms]
    assert all(len(line) == len(head) for line in lines)
    assert [lines[0][2], lines[0][4]] == ["100", "1.00"]
    assert [row["density"] for row in report["rows"]] == pytest.approx([1.0, 1.0, 0.8, 0.8])


def test_a_wrong_output_is_not_timed(tmp_path, monkeypatch):
    attend = claims.dot_product_attention

    def wrong(*given, implementation=None, **how):
        out = attend(*given, implementation=implementation, **how)
        return out if implementation else out.at[0, -1, 0, 0].add(1e-3)

    monkeypatch.setattr(claims, "dot_product_attention", wrong)
    out = tmp_path / "speed.json"
    with pytest.raises(ValueError, match=r"an output is off by 0\.00"):
        claims.speed(out, lengths=(64,), **HOW)
    assert not out.exists()


def test_baselines_have_the_columns_of_the_earlier_page(tmp_path, monkeypatch):
    """The smallest KL first, after dense attention; all with the budget of the density."""
    profile = profile_of(2, 2)
    length = profile.facts.length
    sizes = dict(vocab_size=32, context=length, layers=2, width=8, heads=2, kv_heads=1, head_size=4)
    small = Transformer(Config(**sizes, mlp_width=8), rngs=nnx.Rngs(0))
    names = ("sliding_window", "random", "mean_query/output")
    seen = []

    def measured(subject, built, documents, block, report):
        seen.append((len(documents), block))
        figures = {f"{x}{end}": 0.5 for x in claims.FIGURES for end in ("", "_standard_error")}
        counts = [float(x.counts.sum()) for x in built]
        rows = [
            {"method": x.name, "realised_density_ratio": n}
            for x, n in zip(built, counts, strict=True)
        ]
        return [figures | row | {"kl": 1.0 - i / 4} for i, row in enumerate(rows)]

    def timed(subject, tokens, built, block, repeats):
        return {name: Timing((2.0, 1.0)) for name in ("dense", *(x.name for x in built))}

    loaded = SimpleNamespace(model=small)
    monkeypatch.setattr(claims.huggingface, "load", lambda *path, **how: loaded)
    monkeypatch.setattr(claims.Profile, "load", lambda path: profile)
    monkeypatch.setattr(claims, "measure_methods", measured)
    monkeypatch.setattr(claims, "time_attention", timed)
    np.save(tmp_path / "tokens.npy", np.zeros((2, length), np.int32))
    out = tmp_path / "baselines.json"
    given = (tmp_path / "model", tmp_path / "tokens.npy", tmp_path / "profile", out)
    claims.baselines(*given, density=0.6, count=2, names=names)
    report = json.loads(out.read_text())
    assert seen == [(2, profile.facts.block)]
    rows = {row["method"]: row for row in report["rows"]}
    assert set(rows) == {"dense", *names}
    assert len({rows[name]["density"] for name in names}) == 1
    assert {row["over_dense"] for row in rows.values()} == {1.0}
    head, lines = claims_tables.baselines(report)
    lines = list(lines)
    assert lines[0][:3] == ["dense", "100", "1500"]
    assert [line[0] for line in lines[1:]] == sorted(names, key=lambda name: rows[name]["kl"])
    assert lines[1][3:] == [f"{rows[lines[1][0]]['kl']:.3f} ± 0.500", "50.00 ± 50.00"]
    assert all(len(line) == len(head) for line in lines)
