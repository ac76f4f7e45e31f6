"""Every route answers, with the library's own numbers, and refuses in one sentence."""

from __future__ import annotations

import csv
import gc
import io
import json
import os
import typing
import weakref

import numpy as np
import pytest

from tests.observe.test_sinks import EVENTS
from tests.server.conftest import client_of, make_run, steps
from xsake import BlockMask, hads, masks, selection, shipped
from xsake.hads import baselines, budget
from xsake.hads.statistics import SELECTORS
from xsake.observe.events import Event
from xsake.server import drawings, openapi, profiles, results
from xsake.server.profiles import Profiles
from xsake.server.routes import profiles as profile_routes
from xsake.server.routes.masks import MaskIn
from xsake.server.routes.profiles import PlanIn
from xsake.server.settings import Settings


def detail(answer):
    return answer.json()["detail"]


# --------------------------------------------------------------------------------------------- runs


def test_runs_are_listed_with_the_figures_of_their_events(client):
    (run,) = client.get("/api/runs").json()["runs"]
    assert (run["name"], run["state"], run["step"], run["steps"]) == ("a", "dead", 3, 20)
    assert run["perplexity"] == {"valid": 9.0}
    assert client.get("/api/runs/a").json() == run
    assert client.get("/api/runs/a/config").json() == {"seed": 0}


def test_a_run_that_does_not_exist_is_404(client):
    for path in ("", "/config", "/events", "/live"):
        answer = client.get(f"/api/runs/none{path}")
        assert answer.status_code == 404
        assert detail(answer) == "there is no run 'none'; /api/runs lists them"


def test_pages_of_events_cover_the_file_once(client):
    found, after = [], "start"
    while True:
        page = client.get("/api/runs/a/events", params={"after": after, "limit": 2}).json()
        found += page["events"]
        after = page["next"]
        if page["is_end"]:
            break
    assert found == [json.loads(event.to_json()) for event in EVENTS]
    assert page["total"] == len(EVENTS)
    again = client.get("/api/runs/a/events", params={"after": after}).json()
    assert (again["events"], again["next"], again["is_end"]) == ([], after, True)


def test_a_thinned_list_keeps_all_but_train_steps_and_both_ends(tmp_path):
    make_run(tmp_path, events=[*steps(50), EVENTS[3], *steps(50, 51)[1:]])
    with client_of(runs=(tmp_path,), published=False) as client:
        page = client.get("/api/runs/a/events", params={"points": 5}).json()
    kinds = [event["event"] for event in page["events"]]
    assert kinds.count("TrainStep") == 5
    assert (kinds.count("RunStarted"), kinds.count("PlanSwapped")) == (1, 1)
    shown = [event["step"] for event in page["events"] if event["event"] == "TrainStep"]
    assert (shown[0], shown[-1]) == (1, 100)


def test_the_package_has_a_dense_run_and_one_with_hads(shipped_client):
    runs = {run["name"]: run for run in shipped_client.get("/api/runs").json()["runs"]}
    assert runs["shipped"]["state"] == "finished"
    assert any(run["plan"] and run["density_ratio"] < 1 for run in runs.values())
    linked = {name: run["results"] for name, run in runs.items() if run["results"]}
    assert linked["training-37m-2026-11-15.hads-0"] == ["training-37m-2026-11-15"]
    assert shipped_client.get("/api/runs/shipped/config").json()["seed"] == 0


# ------------------------------------------------------------------------------- profiles and plans


@pytest.mark.parametrize(("number", "block"), [(0, 16), (1, 64)])
def test_the_shipped_profiles_are_of_the_shipped_model(shipped_client, number, block):
    profile = hads.Profile.load(shipped.PROFILES[number])
    name = shipped.PROFILES[number].stem
    found = shipped_client.get(f"/api/profiles/{name}").json()
    assert (found["summary"]["block"], found["summary"]["length"]) == (block, 32 * block)
    policies = {"uniform", "entropy", *profile.statistics.cost}  # "loss" only where it was measured
    assert set(found["summary"]["policies"]) == policies
    assert np.asarray(found["entropy"]) == pytest.approx(np.asarray(profile.statistics.entropy))
    assert np.shape(found["retained"]) == (8, 8, 20)
    head = shipped_client.get(f"/api/profiles/{name}/heads/3/6").json()
    assert np.asarray(head["mass"]) == pytest.approx(np.asarray(profile.statistics.mass[3, 6]))
    assert shipped_client.get(f"/api/profiles/{name}/heads/8/0").status_code == 404


def test_a_plan_is_the_librarys_and_its_file_loads(shipped_client, tmp_path):
    query = {"density": 0.3, "policy": "kl", "selector": "mean_query", "length": 300}
    found = shipped_client.get("/api/profiles/profile-16/plan", params=query).json()
    profile = hads.Profile.load(shipped.PROFILES[0])
    plan = hads.make(profile, 0.3, "kl", "mean_query", length=300)
    assert np.array_equal(found["counts"], plan.counts)
    assert found["density_ratio"] == plan.density
    assert found["visited_blocks"] == int(plan.counts.sum())
    file = shipped_client.get("/api/profiles/profile-16/plan/file", params=query)
    (tmp_path / "plan").write_bytes(file.content)
    loaded = hads.Plan.load(tmp_path / "plan")
    assert np.array_equal(loaded.counts, plan.counts)
    assert loaded.terms == plan.terms
    plan.save(tmp_path / "saved")
    assert file.content == (tmp_path / "saved").read_bytes()


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({}, "plan-kl-pooled-0.3"),
        ({"top_p": 0.9}, "plan-kl-pooled-0.3-top-p-0.9"),
        ({"top_p": 0.9, "end_weight": 16}, "plan-kl-pooled-0.3-top-p-0.9-end-16"),
    ],
)
def test_files_of_different_plans_have_different_names(shipped_client, monkeypatch, more, name):
    monkeypatch.setattr(profile_routes, "_plan_file", lambda profile, given: b"")
    query = {"density": 0.3, "policy": "kl", "selector": "pooled"} | more
    answer = shipped_client.get("/api/profiles/profile-16/plan/file", params=query)
    assert answer.headers["content-disposition"] == f'attachment; filename="{name}.safetensors"'


def test_an_estimate_is_the_mean_of_the_profiles_cost_at_the_plans_counts(shipped_client):
    """At density 1 nothing is dropped; at the profile's length the KL is budget.cost_of's."""
    profile = hads.Profile.load(shipped.PROFILES[1])
    url = "/api/profiles/profile-64/plan"
    whole = shipped_client.get(url, params={"density": 1}).json()
    assert whole["estimated_kl"] == pytest.approx(0, abs=1e-6)
    assert whole["estimated_recall"] == pytest.approx(1, abs=1e-6)
    found = shipped_client.get(url, params={"density": 0.3, "policy": "kl"}).json()
    counts = np.asarray(found["counts"])
    total = budget.cost_of(profile.cost("kl", "mean_query"), counts)
    assert found["estimated_kl"] == pytest.approx(total / counts.size)
    longer = shipped_client.get(url, params={"density": 0.3, "length": 4096}).json()
    assert longer["estimated_kl"] is None
    assert "no estimate beyond that" in longer["estimate_note"]


def test_a_profile_that_changes_is_read_again(tmp_path):
    """Only the new one is kept; a file that is gone or damaged is one sentence."""
    path = tmp_path / "p.safetensors"
    found = Profiles(Settings(profiles=(path,), published=False))
    path.write_bytes(shipped.PROFILES[0].read_bytes())
    first = found.load("p")
    assert found.load("p") is first
    path.write_bytes(shipped.PROFILES[1].read_bytes())
    os.utime(path, (0, 0))
    assert (first.facts.block, found.load("p").facts.block) == (16, 64)
    kept = weakref.ref(first)
    del first
    gc.collect()
    assert kept() is None
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match="cannot be read as a profile"):
        found.load("p")
    path.unlink()
    with pytest.raises(ValueError, match=r"p\.safetensors cannot be read: No such file"):
        found.load("p")


def test_a_plan_comes_with_what_was_measured_of_it(shipped_client):
    (path,) = shipped.RESULTS.glob("shipped-hads-16-*.json")
    rows = json.loads(path.read_text())["densities"]["0.43"]["rows"]
    (wanted,) = (row for row in rows if row["method"] == "static/kl")
    query = {"density": 0.43, "policy": "kl", "selector": "static"}
    found = shipped_client.get("/api/profiles/profile-16/plan", params=query).json()
    (measured,) = found["measured"]
    assert (measured["result"], measured["method"]) == (path.stem, "static/kl")
    assert measured["perplexity_gap"] == wanted["perplexity_gap"]
    assert measured["perplexity_gap_standard_error"] == wanted["perplexity_gap_standard_error"]
    for change in ({"density": 0.5}, {"length": 256}, {"top_p": 0.9}):
        other = shipped_client.get("/api/profiles/profile-16/plan", params=query | change).json()
        assert other["measured"] == []


def test_a_plan_may_weigh_the_end_of_a_text(shipped_client):
    """So does its Python; measurements are of methods with the same weight."""
    query = {"density": 0.4, "selector": "static", "policy": "uniform", "end_weight": 16}
    found = shipped_client.get("/api/profiles/profile-16/plan", params=query).json()
    profile = hads.Profile.load(shipped.PROFILES[0])
    plan = hads.make(profile, 0.4, "uniform", "static", end_weight=16.0)
    assert np.array_equal(found["counts"], plan.counts)
    assert not np.array_equal(plan.counts, hads.make(profile, 0.4, "uniform", "static").counts)
    scope = {}
    exec(
        found["python"].replace('plan.save("plan.safetensors")', "").replace("print", "str"), scope
    )
    assert np.array_equal(scope["plan"].counts, plan.counts)
    names = "static/uniform", "static/uniform, end × 16", "static/uniform, end × 4"
    rows = [{"method": x, "realised_density_ratio": plan.density} for x in names]
    table = {"model_hash": plan.terms.model_hash, "block": 16, "length": plan.length}
    table["densities"] = {"0.4": {"rows": rows}}
    (measured,) = profiles.measured({"a table": table}, plan, plan.length)
    assert measured["method"] == "static/uniform, end × 16"
    for beyond in (0, 1e-7, 1e7, "inf"):
        answer = shipped_client.get(
            "/api/profiles/profile-16/plan", params=query | {"end_weight": beyond}
        )
        assert answer.status_code == 422
        assert detail(answer)[0]["loc"][-1] == "end_weight"


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ({"density": 0.05}, "density 0.05 is below 0.120"),
        ({"density": 0.5, "selector": "pooled", "policy": "kl"}, "no cost curves for 'pooled'"),
        ({"density": 0.5, "policy": "loss"}, "calibrate with loss=True"),
        ({"density": 0.5, "length": 1 << 17, "policy": "kl"}, None),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_the_librarys_sentence(shipped_client, query, why):
    answer = shipped_client.get("/api/profiles/profile-64/plan", params=query)
    assert answer.status_code == (422 if why else 200)
    assert why is None or why in detail(answer)


def test_the_blocks_of_a_static_plan_are_the_librarys(shipped_client):
    url = "/api/profiles/profile-16/plan/heads/3/2"
    query = {"density": 0.4, "selector": "static", "length": 200}
    found = shipped_client.get(url, params=query).json()
    scope = {}
    script = found["python"].replace('plan.save("plan.safetensors")', "").replace("print", "str")
    exec(script, scope)
    mask = scope["plan"].mask(3, length=200)[0, 2]
    assert np.array_equal(found["blocks"], np.asarray(mask.blocks())[0, 0])
    assert found["density_ratio"] == pytest.approx(scope["plan"].shares[3, 2])
    answer = shipped_client.get(url, params={"density": 0.4})
    assert answer.status_code == 422
    assert "looks at the input" in detail(answer)


def test_what_a_plan_may_be_asked_for_is_what_the_library_has():
    fields = PlanIn.model_fields
    assert typing.get_args(fields["policy"].annotation) == budget.POLICIES
    assert typing.get_args(fields["selector"].annotation) == SELECTORS


# -------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("rule", drawings.RULES)
def test_a_drawn_rule_is_what_its_python_computes(shipped_client, rule):
    query = {"rule": rule, "length": 512, "block": 64, "left": 100, "stride": 96, "dilation": 3}
    found = shipped_client.get("/api/masks", params=query).json()
    scope = {}
    exec(found["python"].replace("print(mask)", ""), scope)
    mask = scope["mask"]
    assert np.array_equal(found["blocks"], np.asarray(mask.blocks())[0, 0])
    assert found["density_ratio"] == float(mask.density())


def test_a_rule_may_be_drawn_without_causality(shipped_client):
    query = {"rule": "sliding_window", "left": 64, "right": 64, "causal": False, "length": 512}
    found = shipped_client.get("/api/masks", params={**query, "block": 64}).json()
    mask = BlockMask.from_rule(masks.sliding_window(64, 64), (512, 512), block=64)
    assert np.array_equal(found["blocks"], np.asarray(mask.blocks())[0, 0])
    assert found["density_of"] == "all blocks"


@pytest.mark.parametrize("method", baselines.FIXED)
def test_a_drawn_method_is_what_its_python_computes(shipped_client, method):
    query = {"method": method, "density": 0.5, "length": 512, "block": 64, "heads": 2, "head": 1}
    found = shipped_client.get("/api/masks", params=query).json()
    kept = baselines.fixed(method, 0.5, 1, 2, 8)
    mask = selection.to_mask(kept[0], 512, 64)
    assert np.array_equal(found["blocks"], np.asarray(mask.blocks())[0, 1])
    scope = {}
    exec(found["python"].replace("print(mask)", ""), scope)
    assert np.array_equal(found["blocks"], np.asarray(scope["mask"].blocks())[0, 1])


def test_what_is_drawn_is_described(shipped_client):
    choices = shipped_client.get("/api/masks/choices").json()
    rules = typing.get_args(typing.get_args(MaskIn.model_fields["rule"].annotation)[0])
    methods = typing.get_args(typing.get_args(MaskIn.model_fields["method"].annotation)[0])
    assert [rule["name"] for rule in choices["rules"]] == list(drawings.RULES) == list(rules)
    assert methods == baselines.FIXED
    for name, (default, _) in drawings.PARAMETERS.items():
        assert MaskIn.model_fields[name].default == default


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ({}, "give either rule or method"),
        ({"rule": "causal", "method": "random"}, "give either rule or method"),
        ({"rule": "causal", "length": 100_000, "block": 64}, "are 1,563 blocks; at most 256"),
        ({"rule": "causal", "heads": 2, "head": 2}, "head must be below heads"),
        ({"method": "random", "density": 0.01}, "density 0.01 is below"),
    ],
)
def test_a_mask_that_is_not_drawn_is_refused_in_one_sentence(client, query, why):
    answer = client.get("/api/masks", params=query)
    assert answer.status_code == 422
    assert why in detail(answer)


# ------------------------------------------------------------------------------------------ results


def test_every_published_result_is_listed_and_served_as_it_is(shipped_client):
    listed = shipped_client.get("/api/results").json()
    assert listed["unreadable"] == {}
    names = {x["name"] for x in listed["results"]}
    assert names == {path.stem for path in shipped.RESULTS.glob("*.json")}
    assert all(x["rows"] for x in listed["results"])  # a page without rows would be empty
    assert not [x["name"] for x in listed["results"] if not x["description"]]
    name = next(x for x in names if x.startswith("cpu-"))
    wanted = json.loads((shipped.RESULTS / f"{name}.json").read_text())
    assert shipped_client.get(f"/api/results/{name}").json() == wanted
    assert shipped_client.get("/api/results/none").status_code == 404


def test_rows_are_filtered_and_come_as_csv_too(shipped_client):
    query = {"where": ["suite=cpu", "direction=forward"], "density_to": 0.5}
    found = shipped_client.get("/api/rows", params=query).json()
    assert found["rows"]
    assert all(row["suite"] == "cpu" and row["density_ratio"] <= 0.5 for row in found["rows"])
    text = shipped_client.get("/api/rows", params={**query, "format": "csv"}).text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [float(x["median_seconds"]) for x in rows] == [
        x["median_seconds"] for x in found["rows"]
    ]
    assert "hads-64" in str(shipped_client.get("/api/rows?where=method=sink_window").json())


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({"results": []}, []),
        ({"one": [{"a": 1}], "two": [{"a": 2}]}, [("one", 1), ("two", 2)]),
        ({"date": "2026", "commit": "c", "a": 3}, [(None, 3)]),
        ({"date": "2026", "commit": "c"}, []),
    ],
)
def test_a_file_of_another_form_has_rows_too(content, wanted):
    found = list(results.rows("name", content))
    assert [(row.get("part"), row.get("a")) for row in found] == wanted
    assert not any("commit" in row for row in found)


def test_a_table_of_methods_has_a_row_for_each_density(shipped_client):
    (path,) = shipped.RESULTS.glob("hads-64-*.json")
    query = {"result": path.stem, "where": "method=mean_query/output"}
    found = shipped_client.get("/api/rows", params=query).json()
    assert {row["density"] for row in found["rows"]} >= {0.1, 0.2, 0.43}
    assert all(row["length"] == 8192 and row["block"] == 64 for row in found["rows"])


# ------------------------------------------------------------------------------------------- others


def test_the_page_says_how_to_build_the_pages(tmp_path):
    with client_of(static=tmp_path / "nothing") as bare:  # in a clone they may be built
        assert "make web" in bare.get("/").text
        assert bare.get("/play").status_code == 404
    (tmp_path / "static" / "_next" / "static").mkdir(parents=True)
    (tmp_path / "static" / "index.html").write_text("home")
    (tmp_path / "static" / "play.html").write_text("play")
    (tmp_path / "static" / "_next" / "static" / "a.js").write_text("1")
    with client_of(static=tmp_path / "static") as built:
        assert (built.get("/").text, built.get("/play").text) == ("home", "play")
        assert "immutable" in built.get("/_next/static/a.js").headers["cache-control"]
        assert built.get("/play").headers["cache-control"] == "no-cache"
        assert built.get("/..%2f..%2fpyproject.toml").status_code == 404
        assert built.get("/api/nothing").json()["detail"].startswith("there is no route")


def test_routes_may_be_added_to_the_app(client):
    client.app.get("/own")(lambda: {"mine": True})
    assert client.get("/own").json() == {"mine": True}


def test_the_openapi_names_every_route_and_every_answer_has_a_model():
    document = json.loads(openapi.text())
    step = document["components"]["schemas"]["TrainStep"]
    assert {"event", "step", "loss_nats", "tokens_seen"} <= set(step["required"])
    assert set(Event.kinds) <= set(document["components"]["schemas"])
    assert set(document["paths"]) >= {"/api/runs", "/api/play/texts", "/metrics", "/health"}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            (content, *_) = operation["responses"]["200"]["content"].values()
            assert content.get("schema") or path.endswith("/file"), path


# -------------------------------------------------------------------------------------- compression


def test_long_answers_are_compressed_and_event_streams_are_not(client):
    answer = client.get("/openapi.json", headers={"accept-encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) < len(answer.content) / 4
    plain = client.get("/openapi.json", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.json() == answer.json()
    headers = {"accept-encoding": "gzip"}
    with client.stream("GET", "/api/runs/a/live", headers=headers) as stream:
        assert "content-encoding" not in stream.headers
