"""The suite `certificate` on a model's activations."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.hads.test_plan import profile_of
from xsake.bench import programs
from xsake.bench.suites import certificate
from xsake.hads import make
from xsake.model import Config, Transformer


def test_one_program_is_timed_with_the_plans_of_all_densities(tmp_path, monkeypatch):
    profile = profile_of(2, 2)
    length = profile.facts.length
    sizes = dict(vocab_size=32, context=length, layers=2, width=8, heads=2, kv_heads=1, head_size=4)
    small = Transformer(Config(**sizes, mlp_width=8), rngs=nnx.Rngs(0))
    loaded = SimpleNamespace(model=small)
    monkeypatch.setattr(programs, "why_not", lambda need: None)
    monkeypatch.setattr(certificate.huggingface, "load", lambda *path, **how: loaded)
    monkeypatch.setattr(certificate.Profile, "load", lambda path: profile)
    visited = []

    def count(plan, layer, q, k, v):
        return plan.counts[layer].sum()

    def timed(fn, plan, *given):
        visited.append(None if plan is None else int(sum(fn(plan, *given))))
        return 1.0, 0.5

    monkeypatch.setattr(certificate, "_forms", lambda threshold: {"selection": count})
    monkeypatch.setattr(certificate, "_both_times", timed)
    np.save(tmp_path / "tokens.npy", np.zeros((1, length), np.int32))
    out = tmp_path / "speed.json"
    densities = (0.6, 0.9)
    given = (tmp_path / "model", tmp_path / "tokens.npy", tmp_path / "profile", out)
    certificate.model(*given, selectors=("mean_query",), densities=densities, dtype="float32")
    rows = json.loads(out.read_text())["rows"]
    assert [(row["density"], row["inputs"]) for row in rows] == [
        (x, "activations") for x in densities
    ]
    assert [rows[0][f"dense_{kind}seconds"] for kind in ("", "device_")] == [0.5, 0.25]
    assert rows[0]["selection_device_over_dense"] == 1.0
    assert rows[0]["visited_density"] < rows[1]["visited_density"] <= 1
    assert 1 > rows[0]["dropped_mass"] > rows[1]["dropped_mass"] >= 0
    assert rows[0]["relative_error"] > rows[1]["relative_error"] >= 0
    dense, first, second = visited
    assert dense is None
    assert first < second


def test_every_layer_has_its_own_arrays():
    q, k, v = (list(10.0**i * jnp.arange(2)) for i in range(3))
    found = certificate._layers(lambda plan, layer, *x: (layer, *x), None, q, k, v)
    assert jax.tree.map(float, found) == [(0, 0, 0, 0), (1, 1, 10, 100)]


def test_the_certificate_that_is_timed_computes_its_sample():
    """A program that returned the output alone would be compiled without the sample."""
    profile = profile_of(1, 2)
    plan = make(profile, 0.6, "output", "mean_query")
    q = jnp.ones((1, profile.facts.length, 2, 4))
    forms = certificate._forms(0.2)
    counted = {
        name: jax.jit(forms[name]).lower(plan, 0, q, q, q).compile().cost_analysis()["flops"]
        for name in ("selection_and_sparse", "certificate")
    }
    assert counted["certificate"] > 1.01 * counted["selection_and_sparse"]
