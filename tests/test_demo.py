"""xsake demo: the whole demo on short texts (slow), and its training run with a stub."""

from __future__ import annotations

import pytest

from xsake import hads
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
    demo.demo(tmp_path, calibration=2, documents=1, steps=3)
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines() if " 0.430 " in line]
    names = {" ".join(row[: row.index("0.430")]) for row in rows}
    assert {"sliding_window", "bigbird", "random", "HADS mean_query/output"} <= names
    plan = hads.Plan.load(tmp_path / "demo-plan" / "plan.safetensors")
    assert plan.density == pytest.approx(0.43, abs=1e-3)
    demo._train(tmp_path, 3)
    (run,) = registry.runs(tmp_path)
    assert (run.name, run.state, run.step, run.plans) == ("demo", "finished", 3, 2)
