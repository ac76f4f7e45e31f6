"""xsake tokenize, train and runs, as they are typed."""

from __future__ import annotations

import inspect
import json

import pytest

from tests.commands import caller
from tests.observe.test_sinks import STARTED, trained
from tests.train.corpus import documents
from xsake import cli
from xsake.model import huggingface
from xsake.observe.events import Stopped
from xsake.train.command import train_from
from xsake.train.config import PRESETS, Config


@pytest.fixture
def xsake(monkeypatch, capsys, tmp_path):
    """Runs a command line in a folder of its own; returns its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.console, "width", 200)
    return caller(monkeypatch, capsys)


SMALL = (
    "--model.vocab-size 300 --model.layers 1 --data.length 32 --data.rows 2 "
    "--schedule.steps 6 --schedule.warmup-steps 2 --run.name a"
)


def test_from_text_to_a_model_that_can_be_loaded(xsake, tmp_path):
    lines = [json.dumps({"text": text}) for text in documents()]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    said = xsake("tokenize a.jsonl -o text --vocabulary 300 --tokenizer tokenizer.json")
    assert "40 documents, vocabulary 300, uint16, hash" in said
    assert "run the same command again to resume" in xsake(
        f"train --data.train text {SMALL} --run.stop-at 4"
    )
    config = Config.read("runs/a/config.json")
    assert (config.model.layers, config.data.rows, config.model.heads) == (1, 2, 4)
    assert "runs/a" in xsake("train --config runs/a/config.json --run.stop-at 0")
    loaded = huggingface.load(tmp_path / "runs" / "a" / "model")
    text = documents()[0]
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
    said = xsake("runs")
    assert "finished" in said
    assert "6/6" in said
    assert config.hash[:8] in xsake("runs --hashes")
    said = xsake(f"train --data.train text {SMALL} --seed 3", code=1)
    assert "started with other settings (seed: 0 → 3)" in said


def test_the_list_of_runs_fits_80_columns(xsake, monkeypatch, tmp_path):
    """With long names and values, and every run's state is whole."""
    monkeypatch.setattr(cli.console, "width", 80)
    for name, state in (("a" * 30, Stopped(step=123456, reason="finished")), ("b", None)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")
        events = [STARTED, trained(123_456), *([state] if state else [])]
        log = tmp_path / "runs" / name / "events.jsonl"
        log.write_text("".join(x.to_json() + "\n" for x in events))
        for number in (100_000, 123_456):
            (tmp_path / "runs" / name / "checkpoints" / str(number)).mkdir(parents=True)
    for line in ("runs", "runs --hashes"):
        said = xsake(line)
        assert max(map(len, said.splitlines())) <= 80
    said = xsake("runs")
    assert "finished" in said
    assert "dead" in said
    assert "123456/20" in said


def test_user_errors_are_one_sentence(xsake, tmp_path):
    assert "No runs yet" in xsake("runs")
    assert "there is no folder elsewhere" in xsake("runs elsewhere", code=1)
    assert "data.train names no tokenized dataset" in xsake("train", code=1)
    assert "is not a tokenized dataset" in xsake("train --data.train nowhere", code=1)
    (tmp_path / "a.txt").write_text("words")
    assert "name a tokenizer.json" in xsake("tokenize a.txt -o b", code=1)
    said = xsake("tokenize a.txt -o b --tokenizer gone.json", code=1)
    assert "there is no gone.json; give --vocabulary to train one there" in said
    (tmp_path / "c.json").write_text('{"hads": {"densty": 1}}')
    assert "did you mean 'density'" in xsake("train --config c.json", code=1)
    for content, message in (
        ("[1]", "c.json must hold a JSON object, got list"),
        ('{"seed": "x"}', "c.json: seed must be a whole number, got 'x'"),
        ('{"data": 3}', "c.json: data must be an object, got 3"),
        ('{"data": {"length": true}}', "c.json: data.length must be a whole number, got True"),
        ('{"hads": {"density": "x"}}', "c.json: hads.density must be a number or null, got 'x'"),
        ('{"model": []}', "c.json: model must be an object, got []"),
        ("[" * 100_000, "c.json is nested too deeply to be read"),
    ):
        (tmp_path / "c.json").write_text(content)
        assert message in xsake("train --config c.json", code=1)


def test_a_refused_run_leaves_the_cursor_visible(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(ValueError, match=r"data.train names no"):
        train_from([])()
    printed = capsys.readouterr().out
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert -1 < printed.rfind(hidden) < printed.rfind(shown)


def test_a_preset_sets_the_defaults_of_the_flags(xsake):
    said = xsake("train --preset shipped --data.train nowhere --run.name b", code=1)
    assert "nowhere is not a tokenized dataset" in said
    command = inspect.signature(train_from(["--preset", "gpt-37m", "--seed", "3"]))
    assert command.parameters["settings"].default == PRESETS["gpt-37m"]
