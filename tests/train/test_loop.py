"""An interrupted run resumes exactly."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal

import jax
import numpy as np
import pytest

from tests.train.corpus import changed, config, documents, token_file
from xsake.data.stream import Stream
from xsake.hads import Plan
from xsake.model import huggingface
from xsake.observe import sinks
from xsake.observe.events import (
    CheckpointSaved,
    Evaluated,
    PlanSwapped,
    Resumed,
    RunStarted,
    Stopped,
    TrainStep,
)
from xsake.train import loop, planning, step
from xsake.train.config import Hads

PROGRAMS: list[int] = []  # how many programs a whole run compiled for its update
TIMES = ("time_unix_seconds", "step_seconds", "tokens_per_second", "calibration_seconds")


def logged(folder):
    """All events without times, and without resumptions, stops and checkpoints."""
    found = []
    for event in sinks.read(folder / "events.jsonl"):
        if not isinstance(event, Resumed | Stopped | CheckpointSaved):
            values = {k: v for k, v in dataclasses.asdict(event).items() if k not in TIMES}
            found.append((type(event).__name__, values))
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return token_file(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    whole = config(tmp_path_factory.mktemp("runs"), text, checkpoint__export=True)
    before = step.compiled_update._cache_size()
    assert loop.train(whole).reason == "finished"
    PROGRAMS.append(step.compiled_update._cache_size() - before)
    return whole.run_folder


@pytest.fixture
def whole(text, tmp_path):
    return config(tmp_path / "runs", text)


class At:
    """A sink that calls a function when a given step is logged."""

    def __init__(self, number, do):
        self.number, self.do = number, do

    def write(self, event):
        if isinstance(event, TrainStep) and event.step == self.number:
            self.do()

    def close(self):
        pass


def test_the_event_log_of_a_run_is_complete(undisturbed):
    events = sinks.read(undisturbed / "events.jsonl")
    steps = [x for x in events if isinstance(x, TrainStep)]
    assert [x.step for x in steps] == list(range(1, 17))
    assert [x.step for x in events if isinstance(x, PlanSwapped)] == [4, 8, 12]
    assert [x.step for x in events if isinstance(x, Evaluated)] == [8, 16]
    saved = [x.step for x in events if isinstance(x, CheckpointSaved)]
    assert saved == [3, 6, 9, 12, 15, 16]
    assert isinstance(events[0], RunStarted)
    assert [x.density_ratio for x in steps[:4]] == [1.0] * 4
    # 48 tokens in blocks of 16 allow 6 blocks a head, of which 5 are forced: 0.84 · 24 is 20
    assert [x.density_ratio for x in steps[4:]] == [pytest.approx(20 / 24)] * 12
    assert steps[-1].loss_nats < steps[0].loss_nats
    assert steps[-1].tokens_seen == 16 * 2 * 48
    assert isinstance(events[-1], Stopped)


def test_plans_are_swapped_without_recompiling(undisturbed):
    """Three plans, each with hashes and notes of its own: one dense program and one sparse."""
    assert len(list((undisturbed / "plans").iterdir())) == 3
    assert max(PROGRAMS) <= 2


def test_sigterm_loses_nothing(whole, undisturbed):
    """The signal arrives while a step is logged; that step is saved."""
    for number, sign in ((5, signal.SIGTERM), (10, signal.SIGINT)):
        outcome = loop.train(whole, At(number, lambda sign=sign: os.kill(os.getpid(), sign)))
        assert (outcome.reason, outcome.step) == ("signal", number)
        assert (whole.run_folder / "checkpoints" / str(number)).is_dir()
    assert loop.train(whole).reason == "finished"
    assert logged(whole.run_folder) == logged(undisturbed)
    resumed = [
        x.step for x in sinks.read(whole.run_folder / "events.jsonl") if isinstance(x, Resumed)
    ]
    assert resumed == [5, 10]


def test_a_run_stops_at_time_or_step_limits_and_resumes(whole, undisturbed):
    assert loop.train(changed(whole, run__seconds=1e-9)).reason == "seconds"
    assert loop.train(changed(whole, run__stop_at=7)).step == 7
    assert loop.train(whole).step == 16
    assert logged(whole.run_folder) == logged(undisturbed)


def test_a_truncated_newest_checkpoint_costs_only_time(whole, undisturbed):
    """Steps since the previous checkpoint are recomputed identically and logged once."""
    loop.train(changed(whole, run__stop_at=8))
    state = whole.run_folder / "checkpoints" / "8" / "state"
    path = max((x for x in state.rglob("*") if x.is_file()), key=lambda x: x.stat().st_size)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    loop.train(whole)
    assert logged(whole.run_folder) == logged(undisturbed)
    (resumed,) = (
        x for x in sinks.read(whole.run_folder / "events.jsonl") if isinstance(x, Resumed)
    )
    assert resumed.step == 6
    assert "checkpoint 8 is damaged" in resumed.note


def test_the_plan_in_use_is_the_plan_in_the_folder(undisturbed, text):
    """And calibration is reproducible: a function of weights, text, seed and step."""
    found = [Plan.load(x) for x in sorted((undisturbed / "plans").iterdir())]
    swaps = [x for x in sinks.read(undisturbed / "events.jsonl") if isinstance(x, PlanSwapped)]
    assert [planning.plan_hash(plan) for plan in found] == [x.plan_hash for x in swaps]
    whole = config(undisturbed.parent, text)
    stream = Stream([text], 48, whole.seed)
    weights = step.initial(whole).parameters
    one, other = (planning.new_plan(whole, weights, stream, 4) for _ in range(2))
    assert planning.plan_hash(one) == planning.plan_hash(other)


def test_evaluation_is_the_mean_over_targets_of_the_exported_model(undisturbed, text):
    """Recomputed from model/ with the last plan, window by window."""
    loaded = huggingface.load(undisturbed / "model")
    plan = Plan.load(undisturbed / "plans" / "step-000012.safetensors")
    stream = Stream([text], 48)
    total = count = 0.0
    for begin in (0, 48, 96):
        batch = stream.at([begin])
        logits = loaded.model(batch.tokens, mask=plan, segment_ids=batch.segment_ids)
        log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
        chosen = np.take_along_axis(log_p, batch.targets[..., None], -1)[..., 0]
        total, count = total - (chosen * batch.weights).sum(), count + batch.weights.sum()
    event = [x for x in sinks.read(undisturbed / "events.jsonl") if isinstance(x, Evaluated)][-1]
    assert event.targets == count
    assert event.loss_nats == pytest.approx(total / count, rel=1e-6)
    assert event.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)
    begin = text.tokens[: int(text.starts[1]) - 1]
    assert loaded.tokenizer.decode(begin.tolist()) == documents()[0]


def test_sequences_begin_with_bos_if_data_bos_is_set(whole, monkeypatch):
    """In training and in evaluation."""
    seen = []

    def recorded(compiled):
        def call(weights, batch, plan, **static):
            seen.append(batch.tokens)
            return compiled(weights, batch, plan, **static)

        return call

    for name in ("compiled_update", "compiled_loss"):
        monkeypatch.setattr(step, name, recorded(getattr(step, name)))
    model = dataclasses.replace(whole.model, bos=7)
    loop.train(changed(whole, model=model, data__bos=True, run__stop_at=1, evaluation__every=1))
    assert len(seen) > 2
    assert {int(token) for tokens in seen for token in tokens[:, 0]} == {7}


def test_a_loss_that_is_not_finite_raises(whole):
    """After `bad_steps` such steps in a row."""
    broken = changed(whole, optimizer__learning_rate=1e30, run__bad_steps=3, hads=Hads())
    with pytest.raises(loop.NotFiniteError, match=r"3 steps in a row at step \d+; .*last good"):
        loop.train(broken)
    events = sinks.read(broken.run_folder / "events.jsonl")
    assert events[-1].reason == "not finite"
    steps = [x for x in events if isinstance(x, TrainStep)]
    assert [x.skipped_steps for x in steps[-3:]] == [1, 2, 3]
    assert steps[-1].gradient_norm is None


def test_other_settings_in_an_existing_run_raise_and_are_named(whole):
    loop.train(changed(whole, run__seconds=1e-9))
    with pytest.raises(ValueError, match=r"other settings \(optimizer.beta1: 0.9 → 0.8\)"):
        loop.train(changed(whole, optimizer__beta1=0.8))
    values = json.loads((whole.run_folder / "config.json").read_text())
    assert values["optimizer"]["beta1"] == 0.9


def test_a_folder_in_use_raises(whole):
    def second():
        with pytest.raises(ValueError, match="in use by another process"):
            loop.train(whole)
        seen.append(True)

    seen = []
    loop.train(changed(whole, run__stop_at=2), At(1, second))
    assert seen


def test_a_vocabulary_that_is_too_small_and_missing_text_raise(whole):
    small = dataclasses.replace(whole.model, vocab_size=64)
    with pytest.raises(ValueError, match=r"a vocabulary of \d+, the model one of 64"):
        loop.train(changed(whole, model=small))
    with pytest.raises(ValueError, match=r"data.train names no tokenized dataset"):
        loop.train(changed(whole, data__train=()))
