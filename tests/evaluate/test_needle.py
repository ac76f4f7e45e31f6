import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xsake.data.tasks import Prompt
from xsake.evaluate import needle
from xsake.evaluate.needle import Answers, Settings
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
    assert found["infeasible"] == [{"length": 128, "density": 0.1}]
    dense, sparse = found["rows"]
    assert sparse["right_by_prompt"] == dense["right_by_prompt"]
    np.testing.assert_allclose(sparse["loss_by_prompt"], dense["loss_by_prompt"], atol=1e-4)
    assert sparse["realised_density_ratio"] == 1
    assert len(said) == 2
    assert run() == json.loads(out.read_text())
    assert len(said) == 2
    with pytest.raises(ValueError, match="differ in seed; name another file"):
        run(SETTINGS._replace(seed=5))


def test_a_family_that_dense_cannot_do_is_left_out(subject, tmp_path):
    def methods_at(density, length):
        raise AssertionError("no method is measured on it")

    found = needle.run_tasks(
        subject, methods_at, encode, FILLERS, SETTINGS, 16, tmp_path / "tasks.json"
    )
    (dense,) = found["rows"]
    assert dense["accuracy"] < 0.5
    assert "less than 50%" in found["rule"]
