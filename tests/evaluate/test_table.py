import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tools import tables as report
from tools import task_tables
from xsake.bench import timing
from xsake.data import documents as text
from xsake.evaluate import methods, table
from xsake.hads import calibrate, make, row_blocks
from xsake.hads.chunks import Softmax
from xsake.hads.statistics import block_sensitivity, measure
from xsake.model import Config, Transformer
from xsake.model.observer import Observer

BLOCK, LENGTH = 16, 120


@pytest.fixture(scope="module")
def subject():
    config = Config(
        vocab_size=64,
        context=256,
        layers=2,
        width=32,
        heads=4,
        kv_heads=2,
        head_size=8,
        mlp_width=48,
    )
    parameters = Transformer(config, rngs=nnx.Rngs(0)).parameters()
    parameters["layers.query.kernel"] *= 1000  # heads that prefer some keys, as trained ones do
    return Observer(Transformer.of(config, parameters))


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, LENGTH).astype(np.int32) for _ in range(4)]


@pytest.fixture(scope="module")
def profile(subject, documents):
    return calibrate(
        subject.observe,
        subject.weights,
        documents[:2],
        layers=2,
        heads=4,
        block=BLOCK,
        curves=("static", "mean_query", "oracle"),
        model_hash=subject.hash,
    )


def test_every_method_has_the_density_asked_for(profile):
    found = methods.at_density(profile, 0.6, LENGTH, {"from elsewhere": profile})
    names = [method.name for method in found]
    assert len(names) == len(set(names))
    assert {"sliding_window", "seed_entropy", "static/kl", "oracle/kl"} < set(names)
    assert {"mean_query/kl", "mean_query/output"} < set(names)
    assert {"oracle/output", "mean_query/output + centroids"} < set(names)
    assert {"mean_query/kl from elsewhere", "static/output from elsewhere"} < set(names)
    for method in found:
        assert int(method.counts.sum()) == round(0.6 * 8 * 36), method.name
    assert names == methods.names_of(profile, {"from elsewhere": profile})
    some = ("sink_window", "mean_query/kl + centroids")
    assert tuple(x.name for x in methods.at_density(profile, 0.6, LENGTH, names=some)) == some


def test_a_weight_of_the_end_is_that_of_methods_with_a_plan_and_in_their_names(profile):
    plans = {("kl", "mean_query"), ("output", "static")}
    for policy, selector in plans:
        plan = make(profile, 0.6, policy, selector, end_weight=16.0, length=LENGTH)
        name = f"{selector}/{policy}, end × 16"
        assert methods.name_of(plan) == methods.of_plan(plan, LENGTH).name == name
        names = [f"{selector}/{policy}", "oracle/output", "sink_window"]
        (found,) = methods.at_density(profile, 0.6, LENGTH, names=names, end_weight=16.0)
        assert found.name == name
        np.testing.assert_array_equal(found.counts, plan.counts)
    assert methods.name_of(make(profile, 0.6, "kl", "mean_query")) == "mean_query/kl"
    assert methods.at_density(profile, 0.6, LENGTH, names=names[1:], end_weight=16.0) == []


@pytest.mark.parametrize(
    ("weight", "text"),
    [(16, "16"), (0.5, "0.5"), (1.2345678, "1.2345678"), (1e6, "1000000"), (1e-6, "1e-06")],
)
def test_other_weights_have_other_names_which_the_tables_read(profile, weight, text):
    plan = make(profile, 0.6, "kl", "mean_query", end_weight=float(weight), length=LENGTH)
    name = methods.name_of(plan)
    assert name == f"mean_query/kl, end × {text}"
    for full in (name, f"{name}, blocks of 64"):
        assert task_tables._weight(full) == weight
        assert task_tables.END.sub("", full) == full.replace(f", end × {text}", "")


def test_a_method_without_a_cost_curve_is_named(profile):
    """The fixture calibrates static, mean_query and oracle."""
    names = {method.name for method in methods.at_density(profile, 0.6, LENGTH)}
    wanted = {f"{s}/{p}" for s in methods.OTHER_SELECTORS for p in ("kl", "output")}
    assert set(methods.left_out(profile)) == wanted
    assert not names & wanted
    with pytest.raises(ValueError, match=r"density 0\.1 is below 0\.417"):
        methods.at_density(profile, 0.1, LENGTH)


def test_oracle_kl_ranks_by_mass_and_oracle_output_by_sensitivity():
    """Even attention, all values equal but those of one block: only that block changes anything."""
    T, odd = 4 * BLOCK, 2
    v = np.ones((T, 1, 4), np.float32)
    v[odd * BLOCK : (odd + 1) * BLOCK] = 5
    seen = methods.Activations(
        jnp.zeros((T, 2, 4)), jnp.zeros((T, 1, 4)), jnp.asarray(v), jnp.ones((2, 4, 8))
    )
    mass, sensitivity = (
        np.asarray(methods.scores_of(name, seen, BLOCK))[:, -1] for name in ("mass", "sensitivity")
    )
    np.testing.assert_allclose(np.exp(mass[:, :3]), 16 / 56.5, rtol=0.05)
    assert (sensitivity.argmax(-1) == odd).all()
    assert methods.ORACLES == {
        "kl": "mass",
        "output": "sensitivity",
        "loss": "loss_sensitivity",
    }


def test_a_short_profile_plans_longer_texts_below_its_own_smallest_density(subject, documents):
    """Forced blocks are 70% of 4 row blocks and 42% of 8: 0.5 is possible for the latter only."""
    short = subject.profile([x[:64] for x in documents[:2]], block=BLOCK, curves=("mean_query",))
    with pytest.raises(ValueError, match=r"below 0\.700"):
        make(short, 0.5, "kl")
    plan = make(short, 0.5, "kl", length=LENGTH)
    assert plan.counts.sum() == round(0.5 * 8 * 36)
    assert plan.terms.density == 0.5
    assert plan.counts.std(1).max() > 0  # heads differ: the short profile says something
    with pytest.raises(ValueError, match=r"below 0\.417"):
        make(short, 0.3, "kl", length=LENGTH)


def test_the_table_is_written_resumed_and_refuses_other_data(subject, profile, documents, tmp_path):
    """Nothing is measured or compiled twice; other data need another file."""
    out, said = tmp_path / "table.json", []
    found = table.run_table(subject, profile, documents[2:], [0.6], out, report=said.append)
    rows = {row["method"]: row for row in found["densities"]["0.6"]["rows"]}
    assert len(said) == 2 * len(rows)
    assert "no cost curve in the profile: past_query/kl, " in out.with_suffix(".md").read_text()
    compiled = [f._cache_size() for f in (table._dense_pass, table._sparse_pass)]
    more = table.run_table(subject, profile, documents[2:], [0.6, 0.7], out)
    assert set(more["densities"]) == {"0.6", "0.7"}
    assert compiled == [f._cache_size() for f in (table._dense_pass, table._sparse_pass)]
    for row in rows.values():
        assert abs(row["realised_density_ratio"] - 0.6) < 1e-2 / 8
        assert row["kl"] > 0
        np.testing.assert_allclose(row["kl"], np.mean(row["kl_by_document"]))
        assert 0 < row["recall"] < 1
    # the blocks, and so the attention KL, are the same; the centroids change the output
    plain, corrected = rows["mean_query/kl"], rows["mean_query/kl + centroids"]
    assert plain["kl"] == corrected["kl"]
    assert plain["logit_kl"] != corrected["logit_kl"]
    assert rows["oracle/kl"]["kl"] == min(row["kl"] for row in rows.values())
    again = table.run_table(subject, profile, documents[2:], [0.6], out, report=said.append)
    assert again == json.loads(out.read_text())
    assert len(said) == 2 * len(rows)
    assert "| mean_query/kl | run time | 0.6" in out.with_suffix(".md").read_text()
    with pytest.raises(ValueError, match=r"with other settings: the documents .*; name another"):
        table.run_table(subject, profile, documents[1:3], [0.6], out)


def test_a_table_of_some_methods_has_just_those(subject, profile, documents, tmp_path, monkeypatch):
    asked = []

    def measured(_, methods, *rest):
        asked.append([method.name for method in methods])
        return [{"method": name} for name in asked[-1]]

    monkeypatch.setattr(table, "measure_methods", measured)
    monkeypatch.setattr(table, "to_markdown", lambda found: "")

    def run(*only, others=None):
        found = table.run_table(
            subject, profile, documents[2:], [0.6], tmp_path / "t", only=only, others=others
        )
        return [row["method"] for row in found["densities"]["0.6"]["rows"]]

    names = ["sink_window", "static/kl"]
    assert run(*names) == names
    # what the file has is skipped, by method: not all else that is asked for at this density
    assert run("static/kl", "oracle/kl") == [*names, "oracle/kl"]
    assert asked == [names, ["oracle/kl"]]
    assert set(run(others={"from elsewhere": profile})) == set(
        methods.names_of(profile, {"from elsewhere": profile})
    )
    assert not {*names, "oracle/kl"} & set(asked[2])
    assert (len(run()), len(asked)) == (len(asked[2]) + 3, 3)
    with pytest.raises(ValueError, match="method 'magic' does not exist"):
        run("magic")


@pytest.fixture
def written(subject, profile, documents, tmp_path, monkeypatch):
    """run(profile=…, subject=…, densities=…, others=…): a table whose methods are not measured."""
    monkeypatch.setattr(
        table, "measure_methods", lambda _, methods, *rest: [{"method": x.name} for x in methods]
    )
    monkeypatch.setattr(table, "to_markdown", lambda found: "")
    own = profile, subject

    def run(profile=own[0], subject=own[1], densities=(0.6,), others=None):
        given = subject, profile, documents[2:], densities, tmp_path / "t"
        return table.run_table(*given, only=("sink_window",), others=others)

    return run


def changed(profile, **facts):
    return dataclasses.replace(profile, facts=dataclasses.replace(profile.facts, **facts))


def test_a_table_of_other_settings_is_not_resumed(written, profile, subject, tmp_path):
    """Of the profile and of the run; the sentence names what differs, and the file stays."""
    written()
    before = (tmp_path / "t").read_bytes()
    other = dataclasses.replace(profile, mass_halves=profile.mass_halves + 1)
    narrow = copy.copy(subject)
    narrow.dtype = "bfloat16"
    for change, said in (
        ({"profile": changed(profile, band=1)}, "the profile's band 0 there, 1 here; name another"),
        (
            {"profile": changed(profile, dtype="float16")},
            "the profile's dtype '' there, 'float16' here",
        ),
        ({"profile": changed(profile, seed=7)}, "the profile's seed None there, 7 here"),
        ({"profile": other}, "other settings: the profile's values; name another file"),
        ({"subject": narrow}, "settings: dtype 'float32' there, 'bfloat16' here; name another"),
    ):
        with pytest.raises(ValueError, match=said):
            written(**change)
    assert (tmp_path / "t").read_bytes() == before
    old = json.loads(before)
    del old["profile"]
    (tmp_path / "t").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="does not record its profile, so that its results may"):
        written()


def test_profiles_that_were_all_measured_again_are_not_those_of_the_table(written, profile):
    """Each differs from what the file has in nothing but its values."""
    again = dataclasses.replace(profile, mass_halves=profile.mass_halves + 1)
    written(others={"one": profile, "two": profile})
    for main, others, said in (
        (again, {"one": again}, "the profile's values; --others one's values; name another"),
        (profile, {"one": again, "two": again}, "--others one's values; --others two's values"),
        (again, {}, "settings: the profile's values; name another"),
    ):
        with pytest.raises(ValueError, match=said):
            written(profile=main, others=others)


def test_a_setting_that_only_one_of_the_profiles_has_is_a_difference(written, tmp_path):
    """As of a file by another version."""
    written()
    found = json.loads((tmp_path / "t").read_text())
    del found["profile"]["seed"]
    (tmp_path / "t").write_text(json.dumps(found))
    with pytest.raises(ValueError, match="the profile's seed not known there, None here"):
        written()
    found["profile"] |= {"seed": None, "speed": 3}
    (tmp_path / "t").write_text(json.dumps(found))
    with pytest.raises(ValueError, match="the profile's speed 3 there, not known here"):
        written()


def test_other_profiles_must_be_of_the_same_model_and_blocks_and_have_a_method(written, profile):
    """Their numbers would be those of another model's heads; or they would be left out silently."""
    none = profile.statistics._replace(cost={"output": {}})
    bare = dataclasses.replace(profile, statistics=none)
    for other, said in (
        (
            changed(profile, model_hash="b"),
            "label 'x' is of another model \\(b, the first profile's",
        ),
        (
            changed(profile, block=32),
            "label 'x' is in blocks of \\(32, the first profile's is 16\\)",
        ),
        (bare, "label 'x' has no method .* lacks the cost curves of static, mean_query, outlier_"),
    ):
        with pytest.raises(ValueError, match=said):
            written(others={"x": other})


def test_other_profiles_may_be_added_to_a_table_but_not_exchanged(written, profile):
    one, two = changed(profile, seed=1), changed(profile, seed=2)
    written()
    written(others={"one": one})
    assert set(written(others={"two": two})["others"]) == {"one", "two"}
    with pytest.raises(ValueError, match="--others one's seed 1 there, 2 here"):
        written(others={"one": two})


def test_a_table_leaves_out_densities_below_the_forced_blocks(written, profile, tmp_path):
    """With the reason; with a band they are more. One that measures nothing is an error."""
    found = written(densities=(0.1, 0.6))
    assert list(found["densities"]) == ["0.6"]
    assert "density 0.1 is below 0.417" in found["infeasible"]["0.1"]
    (tmp_path / "t").unlink()
    banded = changed(profile, band=2)
    with pytest.raises(ValueError, match=r"can be measured: density 0\.6 is below .* a band of 2;"):
        written(densities=(0.6,), profile=banded)
    assert not (tmp_path / "t").exists()
    found = written(densities=(0.6, 0.9), others={"banded": banded})
    assert (list(found["densities"]), list(found["infeasible"])) == (["0.9"], ["0.6"])
    found = written(densities=(0.6, 0.9))
    assert (list(found["densities"]), found["infeasible"]) == (["0.9", "0.6"], {})
    found = written(densities=(0.6, 0.9), others={"banded": banded})
    assert (list(found["densities"]), found["infeasible"]) == (["0.9", "0.6"], {})
    with pytest.raises(ValueError, match="no density is given"):
        written(densities=())


def test_the_documents_of_the_calibration_are_no_evaluation(subject, profile, documents, tmp_path):
    refused = "are those of the calibration, .* give --text other text"
    with pytest.raises(ValueError, match=refused):
        table.run_table(subject, profile, documents[:2], [0.6], tmp_path / "t")
    facts = dataclasses.replace(profile.facts, data_hash="of other text")
    elsewhere = dataclasses.replace(profile, facts=facts)
    others = {"from elsewhere": profile}
    with pytest.raises(ValueError, match=refused):
        table.run_table(subject, elsewhere, documents[:2], [0.6], tmp_path / "t", others=others)


def drawn_table(path, methods=("good", "bad")):
    """A table file of two methods at two densities; `bad` was measured at one of them."""
    row = {"kind": "run time", "kl_standard_error": 0.01, "recall_standard_error": None}
    rows = [
        {"method": methods[0], "kl": 0.1, "recall": 0.9, **row},
        {"method": methods[1], "kl": 0.2, "recall": 0.8, **row},
    ]
    densities = {"0.43": {"rows": rows}, "0.1": {"rows": rows[:1]}}
    path.write_text(json.dumps({"provenance": timing.provenance(), "densities": densities}))


def test_a_page_gets_its_tables_from_the_file(tmp_path):
    """Densities in order, the best method first, an empty cell where nothing was measured."""
    drawn_table(tmp_path / "table.json")
    page = "<!-- table hads-{} table.json -->\n<!-- end -->"
    lines = report.fill(page.format("kl"), tmp_path).splitlines()
    assert lines[2] == "| method | kind | kl at density 0.1 | kl at density 0.43 |"
    assert lines[4] == "| good | run time | 0.1000 ± 0.0100 | 0.1000 ± 0.0100 |"
    assert lines[5] == "| bad | run time |  | 0.2000 ± 0.0100 |"
    assert "`benchmarks/results/table.json`: " in lines[7]
    lines = report.fill(page.format("recall"), tmp_path).splitlines()
    assert lines[4].startswith("| good | run time | 0.9000 |")


def test_a_plan_that_keeps_everything_changes_nothing(subject, profile, documents):
    method = methods.of_plan(make(profile, 1.0, "kl", "mean_query"), LENGTH)
    (row,) = table.measure_methods(subject, [method], documents[3:], BLOCK)
    assert row["realised_density_ratio"] == 1
    assert row["recall"] == pytest.approx(1, abs=1e-6)
    for name in ("kl", "error", "logit_kl", "perplexity_gap"):
        assert abs(row[name]) < 1e-5, name
    done = []
    losses, dense = table.measure_losses(subject, [method], documents[3:], BLOCK, done.append)
    assert (losses.tolist(), dense.tolist(), done) == (
        [row["loss_by_document"]],
        row["dense_loss_by_document"],
        [1],
    )


def test_a_plan_is_measured_with_its_band(subject, profile, documents):
    """A budget of just the forced blocks: the band's are kept, whatever their scores are."""
    n = row_blocks.count_blocks(LENGTH, BLOCK)
    size = (2, 4, n)
    plan = make(profile, 0.9, "kl", "mean_query")
    counts = np.broadcast_to(row_blocks.floors(n, 2), size).astype(np.int32)
    banded = dataclasses.replace(plan, counts=counts, terms=dataclasses.replace(plan.terms, band=2))
    with_band = methods.of_plan(banded, LENGTH)
    without = methods.of_plan(dataclasses.replace(plan, counts=counts), LENGTH)
    blocks = jnp.asarray(np.broadcast_to(row_blocks.forced(n, 2), (*size, n)))
    wanted = methods.Method(jnp.asarray(counts), blocks, jnp.int32(0))
    found, other, given = table.measure_methods(
        subject, [with_band, without, wanted], documents[3:], BLOCK
    )
    for name in table.COLUMNS:
        assert found[name] == pytest.approx(given[name], rel=1e-5, abs=1e-6), name
        assert other[name] != pytest.approx(given[name], rel=1e-3), name


@pytest.mark.parametrize("selector", ["mean_query", "static"])
def test_a_plan_with_top_p_is_measured_at_the_density_that_it_visits(
    subject, profile, documents, selector
):
    """Below that of its budget, and that of the masks that the plan makes on the same q and k."""
    budget, plan = (make(profile, 0.9, "kl", selector, top_p=x) for x in (None, 0.5))
    method = methods.of_plan(plan, LENGTH)
    assert method.name == f"{selector}/kl, top_p 0.5"
    found, all_of_it = table.measure_methods(
        subject, [method, methods.of_plan(budget, LENGTH)], documents[3:], BLOCK
    )
    assert all_of_it["realised_density_ratio"] == pytest.approx(0.9, abs=0.01)
    assert found["realised_density_ratio"] < 0.8
    assert found["recall"] < all_of_it["recall"]
    assert found["logit_kl"] != all_of_it["logit_kl"]

    def count(layer, seen, total):
        blocks = plan.blocks(layer, seen.q, seen.k, length=LENGTH)
        return total + jnp.sum(blocks) / (2 * 4 * 36)

    tokens = jnp.asarray(documents[3])[None]
    visited = subject.observe(subject.weights, tokens, count, jnp.zeros(()))
    assert found["realised_density_ratio"] == pytest.approx(float(visited), abs=1e-6)


def test_methods_of_a_profile_have_its_band(profile):
    facts = dataclasses.replace(profile.facts, band=1)
    found = methods.at_density(dataclasses.replace(profile, facts=facts), 0.8, LENGTH)
    bands = {method.name: method.band for method in found if method.source}
    assert bands["mean_query/kl"] == bands["oracle/kl"] == bands["mean_query/kl + centroids"] == 1
    assert bands["vertical_slash"] == 0


def test_documents_are_cut_from_texts_long_enough(tmp_path):
    path = tmp_path / "texts.jsonl"
    texts = ["short", "abc def " * 200, "ghi jkl " * 200]
    path.write_text("\n".join(json.dumps({"text": x}) for x in texts))

    def encode(x):
        return [ord(c) for c in x]

    ready = text.load_documents([path], encode, 50, 5, seed=3)
    cut = text.documents(texts, encode, 50, 5, seed=3)
    assert [len(x) for x in cut] == [50] * 5
    used = ["".join(map(chr, x)) in texts[1] for x in cut]
    assert sorted(used[:2]) == sorted(used[2:4]) == [False, True]  # both texts before one again
    again = text.documents(texts, encode, 50, 5, seed=3)
    assert all((a == b).all() for a, b in zip(cut, again, strict=True))
    assert all((a == b).all() for a, b in zip(cut, ready, strict=True))
    with pytest.raises(ValueError, match="only 0 of 2 documents of 5,000 tokens"):
        text.documents(texts, encode, 5000, 2)
    with pytest.raises(ValueError, match=r"only 0 of 1 documents of 50 tokens .* from 0 texts"):
        text.documents([], encode, 50, 1)
    for length, count, name in ((0, 5, "length"), (-5, 5, "length"), (50, 0, "count")):
        with pytest.raises(ValueError, match=f"the {name} of documents must be at least 1, got"):
            text.load_documents([path], encode, length, count)
    with pytest.raises(ValueError, match=r"unsupported extension"):
        text.load_documents([path.rename(tmp_path / "texts.csv")], encode, 50, 5)


def numbered(x):
    """Tokens of a text in which every character differs: its characters, between bos and eos."""
    return [0, *map(ord, x), 1]


def drawn(texts, length, count, seed=0):
    cut = text.documents(texts, numbered, length, count, seed)
    assert all((len(x), x[0]) == (length, 0) for x in cut)
    return np.stack(cut)[:, 1:]


@pytest.mark.parametrize("tokens", [105, 3000])  # 3,000: more than is tokenized
def test_documents_of_one_text_share_no_token(tokens):
    """Standard errors over documents would be too small otherwise, 0 for equal documents."""
    texts = ["".join(map(chr, range(1000, 1000 + tokens)))]
    found = [drawn(texts, 11, 10, seed) for seed in range(4)]
    for cut in found:
        assert len(np.unique(cut)) == cut.size  # without eos, which would be there twice
        assert cut.min() >= 1000
        assert (np.diff(cut, axis=1) == 1).all()
        assert np.ptp(cut) >= (99 if tokens < 110 else 1000)  # spread over the text
    assert len({cut.tobytes() for cut in found}) == 4
    assert (drawn(texts, 11, 10, 2) == found[2]).all()


def test_an_error_says_how_many_documents_fit():
    """All that fit are found: also if a long text must give what the short ones lack."""
    short, long = "x", "".join(map(chr, range(1000, 1500)))
    assert len(drawn([short, long], 11, 50)) == 50
    with pytest.raises(ValueError, match=r"only 50 of 51 documents .* give more text"):
        drawn([short, long], 11, 51)
    words = "and " * 40  # a token has more characters than a stretch is sized for
    sparse = text.documents([words * 9], lambda x: [7] * (len(x) // 40), 4, 9)
    assert [x.tolist() for x in sparse] == [[7] * 4] * 9


def test_of_a_long_text_only_a_part_is_tokenized():
    seen = []

    def encode(x):
        seen.append(len(x))
        return [len(word) for word in x.split()]

    assert len(text.documents(["a few words " * 100_000] * 3, encode, 100, 4)) == 4
    assert sum(seen) < 10_000


def test_disjoint_documents_share_no_token_and_begin_as_texts_do():
    def encode(x):
        return [-1, *range(len(x))]

    cut = text.disjoint_documents("x" * 100, encode, 11, 4)  # ten would fit
    assert [x[:2].tolist() for x in cut] == [[-1, 0], [-1, 20], [-1, 50], [-1, 70]]
    assert {len(x) for x in cut} == {11}
    whole = np.concatenate([x[1:] for x in text.disjoint_documents("x" * 100, encode, 11, 10)])
    assert whole.tolist() == list(range(100))
    for count in (0, 11):
        with pytest.raises(ValueError, match="and 10 can be cut from the text without overlap"):
            text.disjoint_documents("x" * 100, encode, 11, count)


def test_the_hash_depends_on_the_weights(subject):
    other = Observer(
        Transformer(nnx.merge(subject.graph, subject.weights).config, rngs=nnx.Rngs(1))
    )
    assert other.hash != subject.hash
    hidden = subject.hidden(subject.weights, jnp.zeros(8, jnp.int32))
    assert hidden.shape == (8, 32)


@pytest.mark.parametrize(("T", "softmax"), [(150, {}), (256, {"soft_cap": 5.0, "window": 70})])
def test_the_score_of_the_oracle_is_the_measured_sensitivity(T, softmax):
    """Up to the layer's norm, for any number of chunks, grouped heads, soft caps and windows."""
    q, k, v, kernel = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(T, 4, 8), (T, 2, 8), (T, 2, 8), (4, 8, 16)])
    )
    how = Softmax(**{name: jnp.asarray(x) for name, x in softmax.items()})
    found = measure(q, k, v, kernel, block=BLOCK, curves=(), softmax=how)
    for at_once in (BLOCK, 3 * BLOCK, 1024):
        score = block_sensitivity(q, k, v, kernel, BLOCK, how, at_once)
        np.testing.assert_allclose(score, found.sensitivity * found.norm, rtol=1e-3, atol=1e-5)
