import copy
import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.hads.test_plan import profile_of
from xsake.data.tasks import Prompt
from xsake.evaluate import methods, needle
from xsake.evaluate.needle import Answers, Settings
from xsake.hads import row_blocks
from xsake.model import Config, Transformer
from xsake.model.observer import Observer


def test_an_answer_is_right_if_all_its_tokens_are_the_most_likely_ones():
    """Four positions, the last two of which are the answer: those before it do not count."""
    p = np.array([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], np.float32)
    for targets, answer, right in (
        ([1, 1, 1, 0], 2, True),
        ([1, 1, 0, 0], 2, False),
        ([0, 0, 1, 1], 2, False),
        ([0, 0, 1, 0], 4, True),
        ([1, 0, 1, 0], 4, False),
    ):
        found, loss = needle.score(jnp.log(p), jnp.array(targets), jnp.int32(answer))
        assert bool(found) == right
        want = -np.log(p[range(4), targets])[-answer:].mean()
        np.testing.assert_allclose(loss, want, rtol=1e-6)


PROMPTS = [Prompt(np.zeros(8, np.int32), 1, depth, 0) for depth in (0.1, 0.9, 0.1, 0.9)]


def record(method, density, right, loss, dense=None, family="passkey"):
    answers = Answers(np.array(right, bool), np.array(loss, np.float64))
    return needle.record(family, PROMPTS, method, "run time", density, answers, dense), answers


def test_differences_to_dense_are_paired_by_prompt():
    _, dense = record("dense", 1.0, [1, 1, 1, 0], [0.1, 0.2, 0.3, 0.4])
    found, _ = record("a", 0.2, [1, 0, 1, 0], [0.2, 0.3, 0.4, 0.5], dense)
    assert found["accuracy"] == 0.5
    assert found["accuracy_difference"] == -0.25
    assert found["accuracy_difference_standard_error"] == pytest.approx(0.25)
    assert found["loss_difference"] == pytest.approx(0.1)
    assert found["loss_difference_standard_error"] == pytest.approx(0, abs=1e-12)
    assert [(x["depth"], x["accuracy"]) for x in found["by_depth"]] == [(0.1, 1.0), (0.9, 0.0)]
    assert found["right_by_prompt"] == "1010"


def test_a_mean_is_over_the_families_that_dense_can_do():
    rows = []
    for family, right in (("passkey", [1, 1, 1, 1]), ("copy", [1, 1, 0, 0]), ("hard", [0] * 4)):
        row, dense = record("dense", 1.0, right, [0.1] * 4, None, family)
        sparse, _ = record("a", 0.2, [1, 0, 0, 0], [0.2] * 4, dense, family)
        rows += [row, sparse]
    (mean,) = needle.summarise(rows)
    assert mean["families"] == ["passkey", "copy"]
    assert mean["accuracy"] == 0.25
    assert mean["share_of_dense"] == pytest.approx(0.25 / 0.75)
    assert mean["accuracy_difference"] == pytest.approx(-0.5)
    assert (mean["density"], mean["realised_density_ratio"]) == (0.2, 0.2)
    for row, used in zip(rows, (1, 0.3, 1, 0.5, 1, 0.9), strict=True):
        row["realised_density_ratio"] = used
    (mean,) = needle.summarise(rows)
    assert (mean["density"], mean["realised_density_ratio"]) == (0.2, pytest.approx(0.4))


@pytest.fixture(scope="module")
def subject():
    config = Config(
        vocab_size=128,
        context=128,
        layers=1,
        width=16,
        heads=2,
        kv_heads=1,
        head_size=8,
        mlp_width=16,
    )
    return Observer(Transformer(config, rngs=nnx.Rngs(0)))


def encode(text):
    return [ord(c) % 128 for c in text]


FILLERS = [np.asarray(encode("He said so. " * 30)[i : i + 128], np.int32) for i in range(2)]
SETTINGS = Settings(("passkey",), (128,), 2, (0.1, 0.8), 0)


def test_results_are_written_resumed_and_refuse_other_settings(subject, tmp_path, monkeypatch):
    """A method that keeps all blocks has dense's answers; a density below the forced is named."""
    from xsake.evaluate.methods import _given

    monkeypatch.setattr(needle, "LEAST_ACCURACY", 0.0)
    everything = _given("everything", "fixed", np.tri(8, dtype=bool)[None, None].repeat(2, 1))
    out, said, asked = tmp_path / "tasks.json", [], []

    def methods_at(density, length):
        asked.append((density, length))
        return [everything]

    def run(settings=SETTINGS):
        return needle.run_tasks(
            subject, methods_at, encode, FILLERS, settings, 16, out, report=said.append
        )

    found = run()
    assert asked == [(0.8, 128)]
    why = "density 0.1 is below 0.417, that of the forced blocks alone of 8 row blocks"
    assert found["infeasible"] == [{"length": 128, "density": 0.1, "reason": why}]
    dense, sparse = found["rows"]
    assert sparse["right_by_prompt"] == dense["right_by_prompt"]
    np.testing.assert_allclose(sparse["loss_by_prompt"], dense["loss_by_prompt"], atol=1e-4)
    assert sparse["realised_density_ratio"] == 1
    assert len(said) == 2
    assert run() == json.loads(out.read_text())
    assert len(said) == 2
    with pytest.raises(ValueError, match="other settings: seed 0 there, 5 here; name another file"):
        run(SETTINGS._replace(seed=5))


def of_band(profile, density, length):
    """Methods of a profile whose band is 2."""
    facts = dataclasses.replace(profile.facts, band=2)
    banded = dataclasses.replace(profile, facts=facts)
    return methods.at_density(banded, density, length, names=("mean_query/output",))


def test_a_density_below_the_blocks_of_a_band_is_left_out(subject, tmp_path, monkeypatch):
    """As one below the other forced blocks is; the run goes on with the next density."""
    monkeypatch.setattr(needle, "LEAST_ACCURACY", 0.0)
    methods_at = functools.partial(of_band, profile_of(1, 2))
    least = row_blocks.least_density(8, 2)
    assert row_blocks.least_density(8) < 0.6 < least < 0.9
    settings = SETTINGS._replace(densities=(0.6, 0.9))
    given = subject, methods_at, encode, FILLERS, settings, 16, tmp_path / "tasks.json"
    found = needle.run_tasks(*given, band=2)
    assert [row["density"] for row in found["rows"]] == [1.0, 0.9]
    (left_out,) = found["infeasible"]
    assert (left_out["length"], left_out["density"]) == (128, 0.6)
    assert "forced blocks alone of 8 row blocks with a band of 2" in left_out["reason"]
    # another density later: what was left out stays recorded
    more = (*given[:4], settings._replace(densities=(0.5,)), *given[5:])
    found = needle.run_tasks(*more, band=2)
    assert [x["density"] for x in found["infeasible"]] == [0.6, 0.5]
    # methods without a band: what can be measured now is, and stays when it cannot be later
    narrow = functools.partial(methods.at_density, profile_of(1, 2), names=("sink_window",))
    found = needle.run_tasks(given[0], narrow, *given[2:])
    assert [x["density"] for x in found["infeasible"]] == [0.5]
    measured = [(row["method"], row["density"]) for row in found["rows"]]
    assert measured[2:] == [("sink_window", 0.6), ("sink_window", 0.9)]
    found = needle.run_tasks(*given, band=2)
    assert [x["density"] for x in found["infeasible"]] == [0.5]
    assert len(found["rows"]) == len(measured)


def test_a_run_that_fails_at_its_start_leaves_no_file(subject, tmp_path, monkeypatch):
    """Its file would refuse the corrected command; a prompt that is too long fails before work."""
    out = tmp_path / "tasks.json"

    def methods_at(density, length):
        raise ValueError("there is no such method")

    with monkeypatch.context() as patched:
        patched.setattr(needle, "LEAST_ACCURACY", 0.0)
        with pytest.raises(ValueError, match="there is no such method"):
            needle.run_tasks(subject, methods_at, encode, FILLERS, SETTINGS, 16, out)
    assert not out.exists()
    measured = []
    monkeypatch.setattr(needle, "answer_prompts", lambda *given: measured.append(given))
    short = SETTINGS._replace(lengths=(128, 8))
    with pytest.raises(ValueError, match="8"):
        needle.run_tasks(subject, methods_at, encode, FILLERS, short, 16, out)
    assert (measured, out.exists()) == ([], False)


def test_results_of_another_source_or_without_settings_are_not_resumed(subject, tmp_path):
    """A file that does not say what it was measured with is not taken for one of this run."""
    out = tmp_path / "tasks.json"

    def run(other=subject, **facts):
        given = other, lambda *at: [], encode, FILLERS, SETTINGS, 16, out
        return needle.run_tasks(*given, facts={"made_from": {"band": 0, "hash": "a"} | facts})

    run()
    run()
    before = out.read_bytes()
    with pytest.raises(
        ValueError, match="other settings: the profile or plan's band 0 there, 1 here; name"
    ):
        run(band=1, hash="b")
    with pytest.raises(
        ValueError, match="other settings: the profile or plan's values; name another"
    ):
        run(hash="b")
    narrow = copy.copy(subject)
    narrow.dtype, narrow.implementation = "bfloat16", "xla"
    both = (
        "dtype 'float32' there, 'bfloat16' here; implementation 'the fastest on cpu' there, 'xla'"
    )
    with pytest.raises(ValueError, match=both):
        run(narrow)
    assert out.read_bytes() == before
    old = json.loads(before)
    del old["made_from"], old["dtype"]
    out.write_text(json.dumps(old))
    with pytest.raises(ValueError, match="does not record its dtype, profile or plan, so that its"):
        run()


def test_a_file_names_all_profiles_of_its_results_and_each_difference_once(subject, tmp_path):
    out = tmp_path / "tasks.json"

    def run(others, data="x"):
        facts = {"calibration_data_hash": data, "others": others}
        facts["made_from"] = {"calibration_data_hash": data}
        given = subject, lambda *at: [], encode, FILLERS, SETTINGS, 16, out
        return needle.run_tasks(*given, facts=facts)

    run({"a": {"seed": 1}})
    run({"b": {"seed": 2}})
    assert json.loads(out.read_text())["others"] == {"a": {"seed": 1}, "b": {"seed": 2}}
    with pytest.raises(ValueError, match="settings: --others a's seed 1 there, 2 here; name"):
        run({"a": {"seed": 2}})
    with pytest.raises(ValueError, match="settings: the profile or plan's calibration text; name"):
        run({}, data="y")


def test_a_family_that_dense_cannot_do_is_left_out(subject, tmp_path):
    def methods_at(density, length):
        raise AssertionError("no method is measured on it")

    found = needle.run_tasks(
        subject, methods_at, encode, FILLERS, SETTINGS, 16, tmp_path / "tasks.json"
    )
    (dense,) = found["rows"]
    assert dense["accuracy"] < 0.5
    assert "less than 50%" in found["rule"]
