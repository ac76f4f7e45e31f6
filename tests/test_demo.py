"""xsake demo: the whole demo on short texts (slow), its sentences, its training with a stub."""

from __future__ import annotations

import json

import pytest

from xsake import hads, shipped
from xsake.cli import demo
from xsake.data.tokens import TokenDataset
from xsake.observe import registry
from xsake.train import loop


def test_the_training_run_replaces_an_earlier_one(tmp_path, monkeypatch):
    asked = []

    def train_stub(config, *sinks):
        config.write(config.run_folder / "config.json")
        asked.append(config)
        return loop.Outcome(0, "finished", config.run_folder)

    monkeypatch.setattr(loop, "train", train_stub)
    for steps in (60, 90):  # an existing run would reject changed settings
        assert demo._train(tmp_path, steps) == tmp_path / "demo"
    first, second = asked
    assert first.hash != second.hash
    file = TokenDataset.open(second.data.train[0], verify=True)
    assert file.header.vocab_size <= second.model.vocab_size
    assert file.header.tokens > 20 * second.data.length
    assert second.hads.is_due(30)


@pytest.mark.parametrize(
    ("paired", "words"),
    [
        ((-0.02, 0.005), "At density 0.20, HADS's perplexity is 2.00 ± 0.50% lower than"),
        ((0.02, 0.005), "is 2.00 ± 0.50% higher than sink + window's (8 documents)."),
        ((-0.02, 0.015), "by 2.00 ± 1.50%, which is within chance"),
        ((-0.02, None), "by 2.00%; one document has no standard error"),
    ],
)
def test_a_verdict_needs_two_standard_errors(paired, words):
    rows = [
        demo.Compared(demo.BASELINE, 0.2, (0.1, 0.01), (0.0, 0.0)),
        demo.Compared(demo.HADS, 0.2, (0.1, 0.01), paired),
    ]
    (line,) = demo._verdicts(rows, 8)
    assert words in line


def test_the_published_lines_are_those_of_the_shipped_file():
    """Every number on them is in the file; a density that was not measured has no line."""
    table = json.loads(shipped.PUBLISHED.read_text())
    head, low, high = demo._published((0.2, 0.25, 0.43))
    assert table["source"] in head
    assert "SmolLM2-135M" in head
    for line, density in ((low, "0.2"), (high, "0.43")):
        rows = {row["method"]: row for row in table["densities"][density]["rows"]}
        for name in (demo.HADS, demo.BASELINE):
            gap, error = (100 * rows[name][f"perplexity_gap{x}"] for x in ("", "_standard_error"))
            assert f"{demo.NAMES[name]} {gap:+.2f} ± {error:.2f}%" in line


@pytest.mark.parametrize("name", ["demo", "demo-plan"])
def test_a_folder_that_is_not_the_demos_is_refused_before_any_work(tmp_path, name):
    precious = tmp_path / name / "precious"
    precious.parent.mkdir()
    precious.touch()
    with pytest.raises(FileExistsError, match="was not made by `xsake demo`, which would replace"):
        demo.demo(tmp_path)
    with pytest.raises(FileExistsError, match="was not made by `xsake demo`"):
        demo._replace(tmp_path / name)
    assert precious.exists()


@pytest.mark.parametrize(
    "wrong", [{"calibration": 0}, {"documents": -1}, {"steps": 0}, {"density": 0.0}], ids=str
)
def test_wrong_sizes_are_refused_before_any_work(tmp_path, wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        demo.demo(tmp_path / "new", **wrong)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_demo_writes_a_plan_and_a_run_and_can_be_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "LENGTH", 256)
    monkeypatch.setattr(demo, "BLOCK", 16)
    monkeypatch.setattr(demo.console, "width", 120)
    (tmp_path / "demo-plan").mkdir()  # left by an interrupted demo
    demo.demo(tmp_path, low_density=0.3, calibration=2, documents=2, steps=3)
    output = capsys.readouterr().out
    table = output.partition("4. Compare")[2].partition("How much higher")[0]
    rows = [line for line in table.splitlines() if "±" in line]
    assert [sum(name in row for row in rows) for name in demo.NAMES.values()] == [2, 2, 2]
    assert "0.0 s" not in output
    assert "tokens/s" not in output
    assert output.count("HADS's perplexity") == 2
    plan = hads.Plan.load(tmp_path / "demo-plan" / "plan.safetensors")
    assert plan.density == pytest.approx(0.43, abs=1e-3)
    demo._train(tmp_path, 3)
    (run,) = registry.runs(tmp_path)
    assert (run.name, run.state, run.step, run.plans) == ("demo", "finished", 3, 2)
