"""The suite `tasks`: its documents, what it calibrates on, and which heads it changes."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.hads.test_plan import profile_of
from tools import certificate_tables, task_tables
from xsake.bench.suites import tasks
from xsake.evaluate.needle import Answers
from xsake.hads import Certify, Profile
from xsake.hads.statistics import POLICIES_WITH_COST
from xsake.model.observer import Observer


def encode(text):
    return [ord(c) for c in text]


def profile_with_curves():
    found = profile_of(1, 2)
    cost = found.statistics.cost
    for policy in POLICIES_WITH_COST:
        for name in ("outlier_queries", "oracle"):
            cost[policy][name] = cost[policy]["static"]
    return found


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A folder of documents; nothing is calibrated: a call is recorded, its profile is random."""
    (tmp_path / "words.txt").write_text("It was a dark and stormy night. " * 200)
    tokenizer = SimpleNamespace(encode=encode)
    opened = SimpleNamespace(tokenizer=lambda: tokenizer)
    monkeypatch.setattr(tasks.huggingface, "examine", lambda path: opened)
    words = [tmp_path / "words.txt"]
    sizes = dict(lengths=(128, 64), documents=2, prompts=3, evaluation=2)
    tasks.prepare(tmp_path / "model", tmp_path / "documents", words, words, **sizes)
    calls = []

    def profile(documents, *, block, curves, kinds, loss):
        calls.append((len(documents), kinds, *(["loss"] if loss else [])))
        found = profile_with_curves()
        return dataclasses.replace(found, facts=dataclasses.replace(found.facts, kinds=kinds))

    subject = object.__new__(Observer)  # without a model, whose weights would have to be made
    subject.hash, subject.profile = "a model", profile
    bench = tasks._Bench(subject, encode, tmp_path / "documents")
    monkeypatch.setattr(tasks._Bench, "load", lambda *given: bench)
    return calls


def without_results(subject, methods_at, encode, fillers, settings, block, out, *, facts, **how):
    """As `needle.run_tasks` with every family left out."""
    run = tasks.needle.facts_of_run(subject, fillers, settings, block)
    out.write_text(json.dumps(run | facts | {"rows": []}))


def test_documents_of_two_kinds_are_calibrated_on_once(tmp_path, asked, monkeypatch):
    """And the table asks for the usual methods: the first two densities before the others."""
    runs, sources, built = [], [], set()

    def run_tasks(subject, methods_at, encode, fillers, settings, block, out, *, facts, **how):
        built.update(method.name for method in methods_at(settings.densities[0], 128))
        runs.append((tuple(settings.densities), facts["kinds"]))
        sources.append((facts["made_from"], facts["others"][tasks.LABEL]))
        given = subject, methods_at, encode, fillers, settings, block, out
        without_results(*given, facts=facts, **how)

    monkeypatch.setattr(tasks.needle, "run_tasks", run_tasks)
    monkeypatch.setattr(tasks, "_perplexity", lambda *given: ["gap"])
    paths = [tmp_path / name for name in ("model", "documents", "profiles", "out.json")]
    for _ in range(2):
        tasks.table(
            *paths,
            block=16,
            length=128,
            families=("passkey",),
            densities=(0.8, 0.9, 0.7),
            names=(*tasks.METHODS, f"mean_query/output {tasks.LABEL}"),
            certify=(0.1,),
        )
    mixed = "2 documents of text and 2 documents of retrieval"
    assert asked == [(2, "2 documents of text"), (4, mixed)]
    from_text = f"mean_query/output {tasks.LABEL}"
    certified = "{} certified, error 0.1"
    assert built == {
        *(*tasks.METHODS, from_text),
        *(certified.format(name) for name in ("outlier_queries/output", from_text)),
    }
    assert json.loads(paths[-1].read_text())["perplexity"] == ["gap"]
    first, rest = ((0.8, 0.9), mixed), ((0.7,), mixed)
    # methods, then oracles and certified methods at the first two densities, then oracles
    assert runs == [first, rest, first, first, rest] * 2
    assert [x["kinds"] for x in sources[0]] == [mixed, "2 documents of text"]
    assert all(x == sources[0] for x in sources)
    found = Profile.load(tmp_path / "profiles" / "text-128-16.safetensors")
    assert found.facts.kinds == asked[0][1]
    assert len(np.load(tmp_path / "documents" / "text-64.npy")) == 4


def test_a_method_of_the_loss_is_calibrated_with_it(tmp_path, asked, monkeypatch):
    """Into a file of its own: a profile without it is not taken for one.

    The first table has the oracle alone, which is measured after all others.
    """
    monkeypatch.setattr(tasks.needle, "run_tasks", without_results)
    monkeypatch.setattr(tasks, "_perplexity", lambda *given: [])
    paths = [tmp_path / name for name in ("model", "documents", "profiles")]
    selected = "outlier_queries/output"
    for name in ("oracle/output", selected, "outlier_queries/loss", "outlier_queries/loss"):
        out = tmp_path / f"{name.split('/')[1]}.json"
        tasks.table(*paths, out, block=16, length=128, families=("passkey",), names=(name,))
    mixed = "2 documents of text and 2 documents of retrieval"
    assert asked == [(4, mixed), (4, mixed, "loss")]
    found = sorted(x.name for x in (tmp_path / "profiles").iterdir())
    assert found == ["mixed-128-16-loss.safetensors", "mixed-128-16.safetensors"]


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_a_file_of_other_settings_is_refused_before_the_calibration(
    tmp_path, asked, monkeypatch, seconds, capsys
):
    """Or after it where the profile differs; and it stays, whatever is measured."""
    monkeypatch.setattr(tasks.needle, "run_tasks", without_results)
    monkeypatch.setattr(tasks, "_perplexity", lambda *given: ["gap"])
    paths = [tmp_path / name for name in ("model", "documents", "profiles", "out.json")]
    out = paths[-1]

    def run(**more):
        how = dict(block=16, length=128, families=("passkey",), names=("sink_window",)) | more
        tasks.table(*paths, **how)

    def refused(said, calibrations, **more):
        asked.clear()
        before = out.read_bytes()
        with pytest.raises(SystemExit):
            run(seconds=seconds, **more)
        assert said in capsys.readouterr().err
        assert (len(asked), out.read_bytes()) == (calibrations, before)

    run()
    refused("other settings: seed 1 there, 9 here", 0, seed=9)
    kept = out.read_text()
    out.write_text("[1, 2")
    refused(f"{out} is not a table of tasks: {out} is not JSON", 0)
    out.write_text(json.dumps({"provenance": {}, "rows": []}))
    refused(f"{out} is not a table of tasks: it has no 'schema'", 0)
    out.write_text(kept.replace('"band": 0', '"band": 1'))
    for file in (tmp_path / "profiles").iterdir():
        file.unlink()
    refused("the profile or plan's band 1 there, 0 here", 1)


def test_every_step_builds_its_methods_with_all_weights_of_the_end():
    """Also that of the oracles, which have no plan that could have one."""
    build, certified = tasks._builders(
        profile_with_curves(), {}, Certify(criterion="error"), (0.1,), (1.0, 16.0)
    )
    selected = "outlier_queries/output", "outlier_queries/output, end × 16"
    wanted = {
        (False, "sink_window"): ["sink_window", *selected],
        (False, "oracle/output"): ["oracle/output"],
        (True, "sink_window"): [f"{name} certified, error 0.1" for name in selected],
    }
    steps = tasks._steps(tasks.METHODS, (0.8, 0.9, 0.7), True)
    assert len(steps) == 5
    for is_certified, names, densities in steps:
        made = (certified if is_certified else build)(densities[0], 128, names)
        assert [method.name for method in made] == wanted[is_certified, names[-1]]


def test_tables_of_several_blocks_are_merged_under_names_with_the_block(tmp_path):
    same = dict(schema=1, kind="tasks", model_hash="a", filler_hash="b", prompts=1, seed=1, rule="")
    same |= {
        "provenance": {"command": "a", "commit": "1"},
        "calibration_data_hash": "c",
        "kinds": "",
        "infeasible": [],
    }
    parts = []
    for length, block in ((128, 16), (128, 8), (64, 8)):
        rows = [{"length": length, "family": "f", "method": x} for x in ("dense", "m")]
        parts.append(tmp_path / f"{length}-{block}.json")
        gaps = [{"method": "m", "length": length}]
        parts[-1].write_text(json.dumps(same | {"block": block, "rows": rows, "perplexity": gaps}))
    tasks.merge(tmp_path / "all.json", parts)
    found = json.loads((tmp_path / "all.json").read_text())
    names = [(row["length"], row["method"]) for row in found["rows"]]
    two = [(128, "m, blocks of 16"), (128, "m, blocks of 8")]
    assert names == [(128, "dense"), *two, (64, "dense"), (64, "m")]
    assert [row["method"] for row in found["perplexity"]] == [x for _, x in two] + ["m"]
    parts[0].write_text(parts[0].read_text().replace('"seed": 1', '"seed": 2'))
    with pytest.raises(ValueError, match="the tables differ in seed"):
        tasks.merge(tmp_path / "all.json", parts)


def test_tables_of_other_dtypes_are_not_merged(tmp_path, table):
    """The dtype is that of all tables that record it; older ones do not."""
    old, *new = (table(name, (name,), 64, name) for name in "abc")
    for path, dtype in zip(new, ("float32", "bfloat16"), strict=True):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": dtype}))
    assert merged(tmp_path / "out", [old, new[1]])["dtype"] == "bfloat16"
    assert "dtype" not in merged(tmp_path / "out", [old])
    with pytest.raises(ValueError, match="the tables differ in dtype"):
        tasks.merge(tmp_path / "out", [old, *new])


def test_tables_of_other_implementations_are_not_merged_and_sources_are_kept(tmp_path, table):
    paths = []
    for name, implementation in (("a", "xla"), ("b", "hopper"), ("c", "xla")):
        paths.append(table(name, (name,), 64, name))
        more = {"implementation": implementation, "made_from": {"seed": name}, "others": {}}
        paths[-1].write_text(json.dumps(json.loads(paths[-1].read_text()) | more))
    found = merged(tmp_path / "out", [paths[0], paths[2]])
    assert found["implementation"] == "xla"
    assert [part["made_from"] for part in found["parts"]] == [{"seed": "a"}, {"seed": "c"}]
    assert "made_from" not in found
    with pytest.raises(ValueError, match="the tables differ in implementation"):
        tasks.merge(tmp_path / "out", paths)


def test_tables_of_several_methods_are_merged_cell_by_cell(tmp_path):
    """The first table's cell is kept; commits and commands of all are named."""
    same = dict(schema=1, kind="tasks", model_hash="a", filler_hash="b", prompts=1, seed=1, rule="")
    same |= dict(block=8, calibration_data_hash="c", kinds="", perplexity=[], infeasible=[])
    parts = []
    for number, names in enumerate((("dense", "m"), ("dense", "m", "oracle"))):
        rows = [
            {"length": 64, "family": "f", "method": x, "density": 0.2, "table": number}
            for x in names
        ]
        origin = {"command": f"run {number}", "commit": f"commit {number}"}
        parts.append(tmp_path / f"{number}.json")
        parts[-1].write_text(json.dumps(same | {"rows": rows, "provenance": origin}))
    tasks.merge(tmp_path / "all.json", parts)
    found = json.loads((tmp_path / "all.json").read_text())
    names = [(row["method"], row["table"]) for row in found["rows"]]
    assert names == [("dense", 0), ("m", 0), ("oracle", 1)]
    assert found["provenance"] == {"command": "run 0; run 1", "commit": "commit 0, commit 1"}
    assert len(found["parts"]) == 1


def cell(method, density, right, used=None, family="f"):
    """A record of four prompts, all of which dense attention answers right."""
    accuracy, given = right.count("1") / 4, {"length": 64, "family": family}
    given |= {"method": method, "density": density, "accuracy": accuracy}
    given |= {"accuracy_difference": accuracy - 1.0, "loss_difference": 0.0}
    errors = {f"{x}_difference_standard_error": 0.1 for x in ("accuracy", "loss")}
    given |= {"right_by_prompt": right, "loss_by_prompt": [1.0 - int(x) for x in right]}
    return given | errors | {"realised_density_ratio": density if used is None else used}


def lines_of(table):
    head, lines = table
    return [dict(zip(head, line, strict=True)) for line in lines]


@pytest.fixture
def table(tmp_path):
    """Writes the table of some methods; returns its path."""

    def write(name, methods, length, commit, data="h", block=64, infeasible=()):
        found = dict.fromkeys(("model_hash", "filler_hash", "prompts", "seed"), 1)
        found |= {"schema": 1, "kind": "tasks", "rule": "r", "block": block, "kinds": "k"}
        found |= {"calibration_data_hash": data, "perplexity": []}
        found["infeasible"] = [{"length": length, "density": x} for x in infeasible]
        given = {"length": length, "family": "f", "density": 0.2}
        found["rows"] = [given | {"method": x} for x in ("dense", *methods)]
        found["provenance"] = {"command": f"c{commit}", "commit": commit}
        (tmp_path / name).write_text(json.dumps(found))
        return tmp_path / name

    return write


def merged(out, *given):
    tasks.merge(out, *given)
    return json.loads(out.read_text())


def test_joined_tables_are_joined_again_and_a_selection_of_methods_is_kept(tmp_path, table):
    first, second = table("1", ("a", "b"), 64, "x"), table("2", ("b", "c"), 128, "y")
    tasks.merge(tmp_path / "both", [first, second])
    cut_off = json.loads(table("3", ("d",), 64, "z").read_text())
    del cut_off["perplexity"], cut_off["infeasible"]
    (tmp_path / "3").write_text(json.dumps(cut_off))
    found = merged(tmp_path / "all", [tmp_path / "both", tmp_path / "3"], ("a", "c", "d"))
    kept = [(x["length"], x["method"]) for x in found["rows"]]
    assert kept == [(64, "dense"), (64, "a"), (128, "dense"), (128, "c"), (64, "d")]
    assert [x["length"] for x in found["parts"]] == [64, 128]
    assert found["provenance"] == {"command": "cx; cy; cz", "commit": "x, y, z"}
    tasks.merge(tmp_path / "sizes", [first, table("4", ("a",), 64, "x", block=128)])
    with pytest.raises(ValueError, match="a length with two block sizes cannot be joined again"):
        tasks.merge(tmp_path / "again", [tmp_path / "sizes", second])


def test_a_merged_table_names_all_that_its_methods_were_calibrated_on(tmp_path, table):
    """Also if it is merged again: two calibrations may have one length and one block size."""
    one, two, other = (table(x, (x,), 64, x, data=f"of {x}") for x in ("a", "b", "c"))
    found = merged(tmp_path / "both", [one, two])
    assert [x["calibration_data_hash"] for x in found["parts"]] == ["of a", "of b"]
    found = merged(tmp_path / "all", [tmp_path / "both", other])
    assert [x["calibration_data_hash"] for x in found["parts"]] == ["of a", "of b", "of c"]
    assert [x["method"] for x in found["rows"]] == ["dense", "a", "b", "c"]


def test_a_selection_of_methods_has_only_the_parts_of_those(tmp_path, table):
    parts = [table(x, (x,), 64, x, data=f"of {x}") for x in ("a", "b")]
    found = merged(tmp_path / "some", parts, ("a",))
    assert [x["calibration_data_hash"] for x in found["parts"]] == ["of a"]
    message = r"no table has the methods \['d'\]; those there are \['a', 'b', 'dense'\]"
    with pytest.raises(ValueError, match=message):
        tasks.merge(tmp_path / "none", parts, ("a", "d"))


def test_a_table_without_a_selected_method_contributes_nothing(tmp_path, table):
    """Neither its dense rows, nor what is infeasible, its commit, or its size of blocks."""
    first = table("1", ("a",), 64, "x", infeasible=(0.1,))
    second = table("2", ("b",), 64, "y", data="other", block=128, infeasible=(0.1, 0.2))
    tasks.merge(tmp_path / "both", [second, first], ("a",))
    found = merged(tmp_path / "again", [tmp_path / "both"])
    assert [x["method"] for x in found["rows"]] == ["dense", "a"]
    assert found["infeasible"] == [{"length": 64, "density": 0.1, "block": 64}]
    assert [(x["block"], x["calibration_data_hash"]) for x in found["parts"]] == [(64, "h")]
    assert found["provenance"] == {"command": "cx", "commit": "x"}
    # the second has the selected method, but each of its cells is the first table's
    same = table("3", ("a", "c"), 64, "z", data="other", infeasible=(0.05,))
    found = merged(tmp_path / "twice", [first, same], ("a",))
    assert found["provenance"] == {"command": "cx", "commit": "x"}
    assert len(found["parts"]) == 1
    assert [x["density"] for x in found["infeasible"]] == [0.1]


def test_a_joined_table_contributes_the_lengths_that_have_a_selected_method(tmp_path, table):
    parts = [table("1", ("a",), 64, "x", infeasible=(0.1,)), table("2", ("b",), 128, "y")]
    tasks.merge(tmp_path / "both", parts)
    found = merged(tmp_path / "some", [tmp_path / "both"], ("b",))
    assert [(x["length"], x["method"]) for x in found["rows"]] == [(128, "dense"), (128, "b")]
    assert (found["infeasible"], [x["length"] for x in found["parts"]]) == ([], [128])


def test_what_is_infeasible_is_listed_for_every_size_of_blocks(tmp_path, table):
    parts = [
        table(f"{block}", ("a",), 64, "x", block=block, infeasible=infeasible)
        for block, infeasible in ((64, (0.1,)), (128, (0.1, 0.2)))
    ]
    found = merged(tmp_path / "all", [*parts, parts[0]])
    listed = [(x["block"], x["density"]) for x in found["infeasible"]]
    assert listed == [(64, 0.1), (128, 0.1), (128, 0.2)]
    assert [x["method"] for x in found["rows"][1:]] == ["a, blocks of 64", "a, blocks of 128"]


@pytest.mark.parametrize("block", ["", ", blocks of 128"])
def test_certified_methods_are_shown_with_the_density_that_they_visited(block):
    rows = [
        cell("dense", 1.0, "1111"),
        cell(f"a/output{block}", 0.2, "1000"),
        cell(f"sink_window{block}", 0.2, "0000"),
        cell(f"a/output certified, error 0.2{block}", 0.2, "1111", 0.61),
    ]
    lines = sorted(lines_of(task_tables.certified({"rows": rows})), key=lambda x: x["visited"])
    names = [f"a/output{block}", f"a/output certified, error 0.2{block}"]
    assert [x["method"] for x in lines] == names
    assert [x["visited"] for x in lines] == ["0.20", "0.61"]
    assert [x["share of dense"] for x in lines] == ["0.250", "1.000"]
    assert [x["p"] for x in lines] == ["0.250", "1.000"]
    assert lines[0]["family with the smallest p"] == "f -3 of 4, p = 0.250"


def test_methods_are_compared_prompt_by_prompt():
    """Only on families that both have; a family that dense attention cannot do does not count."""
    rows = [
        *(cell("dense", 1.0, right, family=f) for f, right in (("f", "1111"), ("g", "1000"))),
        *(cell("outlier_queries/loss", 0.2, "1110", family=f) for f in "fg"),
        *(cell("outlier_queries/output", 0.2, "1001", family=f) for f in "fg"),
        cell("outlier_queries/output", 0.3, "1111"),
    ]
    (line,) = lines_of(task_tables.pairs({"rows": rows}))
    assert (line["method"], line["density"]) == ("outlier_queries/loss", "0.2")
    assert (line["families"], line["lost, won"]) == ("1", "1, 2")
    assert line["difference, points"].startswith("+25.0 ± ")
    assert line["loss difference"].startswith("-0.250 ± ")


@pytest.mark.parametrize(("wide", "narrow"), [(0.43, 0.43), (0.43, 0.2)])
def test_blocks_are_compared_at_equal_density_and_at_equal_time(wide, narrow):
    both = [("128", wide, "1100"), ("64", narrow, "1111")]
    rows = [cell("dense", 1.0, "1111")]
    rows += [cell(f"outlier_queries/output, blocks of {b}", d, right) for b, d, right in both]
    (line,) = task_tables.pairs({"rows": rows})[1]
    assert line[2:5:2] == [f"{wide:g}", f"{narrow:g}"]
    assert line[7] == "2, 0"


def test_weights_of_the_end_are_compared_on_the_families_that_all_have():
    rows = [cell("dense", 1.0, "1111", family=f) for f in "fg"]
    weights = (("", "1100"), (", end × 64", "1101"), (", end × 4", "1111"))
    rows += [cell(f"outlier_queries/output{x}", 0.2, right, family="f") for x, right in weights]
    rows.append(cell("outlier_queries/output", 0.2, "0000", family="g"))
    rows.append(cell("outlier_queries/output, end × 4 certified, error 0.2", 0.2, "1111"))
    gap = {"method": "outlier_queries/output, end × 4", "density": 0.2, "length": 64}
    gap |= {"perplexity_gap": 0.01, "perplexity_gap_standard_error": 0.001}
    lines = lines_of(task_tables.ends({"rows": rows, "perplexity": [gap]}))
    assert [x["weight of its end"] for x in lines] == ["1", "4", "64"]
    assert [x["share of dense"] for x in lines] == ["0.500", "1.000", "0.750"]
    assert {x["families"] for x in lines} == {"1"}
    assert [x["perplexity gap, %"] for x in lines] == ["", "1.00 ± 0.10", ""]


def test_floors_and_goals_are_judged():
    families = ("f", "g", "h")
    rows = [cell("dense", 1.0, "1111", family=f) for f in families]
    for density, first in ((0.1, "1110"), (0.2, "1110"), (0.43, "1111")):
        for f, right in zip(families, (first, "1111", "1111"), strict=True):
            rows.append(cell("outlier_queries/output", density, right, family=f))
    lines = lines_of(task_tables.floors({"rows": rows}))
    assert [(x["floor"], x["goal"]) for x in lines] == [
        ("", "at least 0.80 of dense: met"),
        ("at least 0.90 of dense: met", "at least 0.97 of dense: missed"),
        ("at most 2 points below: met", ""),
    ]


def test_times_on_activations_are_shown_with_their_threshold():
    times = ("selection", "selection_and_sparse", "certificate", "certificate_with_threshold")
    row = {"kind": "speed", "shape": "1·9·8192·64", "block": 64, "selector": "a", "density": 0.2}
    row |= {f"{name}_over_dense": 0.5 for name in times} | {"dense_seconds": 1e-3, "threshold": 0.2}
    head, lines = certificate_tables.speed({"rows": [row]})
    assert head[-1] == "+ certificate with threshold 0.2"
    assert [len(line) for line in lines] == [len(head)]
    del row["certificate_over_dense"]
    fewer, lines = certificate_tables.speed({"rows": [row]})
    assert [x for x in head if x not in fewer] == ["+ certificate"]
    assert [len(line) for line in lines] == [len(fewer)]
    row |= {"selection_device_over_dense": 0.25, "dense_device_seconds": 5e-4}
    (line,) = lines_of(certificate_tables.speed({"rows": [row]}))
    assert (line["dense ms"], line["selection ÷ dense"]) == ("1.000 / 0.500", "0.50 / 0.25")
    row |= {"dropped_mass": 0.125, "relative_error": 0.25}
    (line,) = lines_of(certificate_tables.speed({"rows": [row]}))
    assert (line["dropped mass"], line["relative error"]) == ("0.125", "0.250")


def test_one_head_at_a_time_is_changed(tmp_path, asked, monkeypatch):
    """The loss is the share of blocks that head 1 drops; no other head changes it."""

    def answer(subject, prompts, method, block):
        kept = np.asarray(method.counts)[0, 1].sum() / 36
        return Answers(np.ones(len(prompts), bool), np.full(len(prompts), 1 - kept))

    monkeypatch.setattr(tasks, "answer_prompts", answer)
    paths = [tmp_path / name for name in ("model", "documents", "profiles", "heads.json")]
    tasks.heads(*paths, block=16, length=128, prompts=3, density=0.8)
    (found,) = json.loads((tmp_path / "heads.json").read_text())["rows"]
    share = found["share_by_layer_and_head"]["text"][0][1]
    for how, change in (("all", share - 1), ("starve", 1 - 15 / 36)):
        ((other, mine),) = found[f"{how}_change_by_layer_and_head"]
        assert other == 0
        assert mine == pytest.approx(change, abs=1e-3)
    assert found["starve_loss"] == pytest.approx(0)
