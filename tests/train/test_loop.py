"""An interrupted run resumes exactly."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import time
import types

import jax
import numpy as np
import pytest

from tests.model.checkpoints import FIXTURES, read, write_gguf
from tests.train.corpus import changed, config, documents, token_file
from xsake.data import tokens
from xsake.data.stream import Stream
from xsake.hads import Plan
from xsake.model import Completion, GenerateOptions, huggingface
from xsake.observe import registry, sinks
from xsake.observe.events import (
    CheckpointSaved,
    Evaluated,
    HeadsObserved,
    PlanSwapped,
    Resumed,
    RunStarted,
    Sampled,
    Stopped,
    Straggler,
    TrainStep,
)
from xsake.parallel.mesh import MeshSizes
from xsake.train import inputs, loop, optimizer, planning, samples, step, warm_start
from xsake.train.checkpoint import Checkpoints
from xsake.train.config import Config, Hads

PROGRAMS: list[int] = []  # how many programs a whole run compiled for its update
TIMES = ("time_unix_seconds", "step_seconds", "tokens_per_second", "calibration_seconds")


def logged(folder):
    """All events without times, resumptions, stops, checkpoints, samples and observed heads.

    And without slow steps, which other work on the machine causes.
    """
    left_out = Resumed | Stopped | CheckpointSaved | Sampled | HeadsObserved | Straggler
    found = []
    for event in sinks.read(folder / "events.jsonl"):
        if not isinstance(event, left_out):
            values = {k: v for k, v in dataclasses.asdict(event).items() if k not in TIMES}
            found.append((type(event).__name__, values))
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return token_file(tmp_path_factory.mktemp("text"))


def continued(model, prompts, **options):
    """`generate` without its programs: checks the call and repeats the prompt's last token."""
    given = GenerateOptions(**options)
    given.check(model.config, prompts)
    return [Completion([prompt[-1]] * given.max_tokens, "length") for prompt in prompts]


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    """16 steps, with observed heads and a sample of text every 8; `continued` stands in for it."""
    whole = config(tmp_path_factory.mktemp("runs"), text, checkpoint__export=True)
    sampled = changed(
        whole, observe__sample_every=8, observe__sample_tokens=5, observe__heads_every=8
    )
    before = step.compiled_update._cache_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "generate", continued)
        assert loop.train(sampled).reason == "finished"
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


def test_observed_heads_are_logged(undisturbed):
    """By layer and head; that they change nothing else, the comparisons of runs show."""
    found = [x for x in sinks.read(undisturbed / "events.jsonl") if isinstance(x, HeadsObserved)]
    assert [x.step for x in found] == [8, 16]
    # after so few steps, a query attends to all keys nearly alike; 20% is one block of three
    of_block = 16 / np.maximum(np.arange(1, 49), 16)
    for event in found:
        assert (event.tokens, event.block, event.top_density_ratio) == (48, 16, 0.2)
        np.testing.assert_allclose(event.entropy_ratios, np.ones((2, 2)), atol=0.01)
        np.testing.assert_allclose(event.top_mass_ratios, np.full((2, 2), of_block.mean()), 0.01)
        assert (np.array(event.block_entropy_ratios) <= 1).all()
    assert found[0].top_mass_ratios != found[1].top_mass_ratios


def test_samples_of_text_are_logged(undisturbed, text):
    found = [x for x in sinks.read(undisturbed / "events.jsonl") if isinstance(x, Sampled)]
    assert [x.step for x in found] == [8, 16]
    tokenizer = huggingface.load(undisturbed / "model").tokenizer
    prompt = text.tokens[:16].tolist()
    assert found[0].prompt == tokenizer.decode(prompt)
    assert found[0].text == tokenizer.decode([prompt[-1]] * 5)


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
        def call(weights, batch, *rest, **static):
            seen.append(batch.tokens)
            return compiled(weights, batch, *rest, **static)

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


@pytest.fixture
def stopped(whole):
    """A run that stopped before its first step: it has a checkpoint and compiled nothing."""
    brief = changed(whole, run__seconds=1e-9)
    loop.train(brief)
    return brief


def lose(folder):
    shutil.rmtree(folder / "checkpoints")


def damage(folder):
    for path in (folder / "checkpoints" / "0" / "facts").iterdir():
        path.write_text("")


@pytest.mark.parametrize(
    ("harm", "why"), [(damage, "are damaged (0 in damaged/)"), (lose, "are gone")]
)
def test_a_run_without_its_checkpoints_begins_anew_only_when_told(stopped, harm, why):
    folder = stopped.run_folder
    events = (folder / "events.jsonl").read_text()
    harm(folder)
    if harm is damage:
        with pytest.raises(ValueError, match=r"no checkpoint of .* can be read"):
            loop.train(stopped)
    for _ in range(2):  # the same command again and again
        with pytest.raises(ValueError, match=rf"its checkpoints {re.escape(why)}; .*run.restart"):
            loop.train(stopped)
    assert (folder / "events.jsonl").read_text() == events
    loop.train(changed(stopped, run__restart=True, seed=3))  # and then with any settings
    assert (folder / "replaced" / "1" / "events.jsonl").read_text() == events
    assert isinstance(sinks.read(folder / "events.jsonl")[0], RunStarted)
    assert not (folder / "damaged").exists()
    assert not Config.read(folder / "config.json").run.restart
    loop.train(changed(stopped, seed=3))  # resumes the new one
    assert any(isinstance(x, Resumed) for x in sinks.read(folder / "events.jsonl"))


@pytest.fixture
def ended(monkeypatch):
    """The errors by which a process would end the others, each with the newest checkpoint then."""
    found = []

    def fail(self, error):
        found.append((type(error).__name__, self._position().rpartition(": ")[2]))

    monkeypatch.setattr(loop.Watch, "fail", fail)
    return found


@pytest.mark.parametrize(
    ("change", "kind"),
    [({"mesh": MeshSizes(data=77)}, ValueError), ({"init": "nowhere"}, FileNotFoundError)],
    ids=["mesh", "init"],
)
def test_a_refused_setting_does_not_keep_the_name(whole, ended, change, kind):
    """A mesh is refused before there is a folder, a checkpoint while the session is made."""
    with pytest.raises(kind):
        loop.train(changed(whole, **change, run__seconds=1e-9))
    assert not whole.run_folder.exists()
    assert len(ended) == 1
    whole.run_folder.mkdir(parents=True)  # as a process leaves it that is killed at the start
    changed(whole, seed=9).write(whole.run_folder / "config.json")
    assert loop.train(changed(whole, run__seconds=1e-9)).reason == "seconds"


def test_a_dataset_that_is_missing_here_ends_the_other_processes(whole, ended):
    """They wait for this one, to compare settings and data."""
    with pytest.raises(FileNotFoundError):
        loop.train(changed(whole, data__train=("nowhere",)))
    assert [kind for kind, _ in ended] == ["FileNotFoundError"]


def test_a_refused_restart_leaves_the_run_as_it_was(stopped, ended):
    events = (stopped.run_folder / "events.jsonl").read_text()
    before = sorted(x.name for x in stopped.run_folder.iterdir())
    with pytest.raises(FileNotFoundError, match="nowhere"):
        loop.train(changed(stopped, run__restart=True, init="nowhere", seed=3))
    assert ended == [("FileNotFoundError", "step 0")]  # after the checkpoint was brought back
    assert (stopped.run_folder / "events.jsonl").read_text() == events
    assert Config.read(stopped.run_folder / "config.json") == stopped
    found = sorted(x.name for x in stopped.run_folder.iterdir() if x.name != "replaced")
    assert found == before


def test_a_run_can_be_made_longer_but_not_shorter(stopped):
    """A checkpoint says how long its schedule was, so a kill right after the change is no harm."""
    longer = stopped.with_steps(32)
    for _ in range(2):
        loop.train(longer)
        note = sinks.read(stopped.run_folder / "events.jsonl")[-2]
        assert (type(note), note.steps) == (Resumed, 32)
        assert "schedule.steps: 16 → 32; the learning rate follows the longer" in note.note
    assert registry.summary(stopped.run_folder).steps == 32
    with pytest.raises(ValueError, match=r"other settings \(schedule.steps: 32 → 16\)"):
        loop.train(stopped)
    with pytest.raises(ValueError, match=r"schedule.steps: 32 → 64; seed: 0 → 1"):
        loop.train(changed(longer.with_steps(64), seed=1))


def test_the_learning_rate_of_a_longer_schedule_is_said():
    """At the old end it was final_ratio of the peak; half of the longer schedule is left."""
    whole = changed(
        Config(), optimizer__learning_rate=1e-3, schedule__warmup_steps=0, schedule__steps=100
    )
    said = optimizer.longer_note(whole, 50, 50)
    assert "it was 1.00e-04 and is 5.36e-04, at the end 1.00e-04" in said


def test_a_longer_run_replaces_the_exported_model(undisturbed, text, tmp_path):
    """Only if it made a step."""
    whole = config(tmp_path, text)
    shutil.copytree(undisturbed / "model", whole.run_folder / "model")
    old = huggingface.load(whole.run_folder / "model").model.hash()
    parameters = step.initial(whole).parameters
    session = types.SimpleNamespace(
        config=whole,
        state=types.SimpleNamespace(average={}, parameters=parameters),
        stream=Stream([text], 48),
        step=16,
        first_step=16,
        mesh=None,
        is_writer=True,
    )
    loop._Session._export(session)
    assert huggingface.load(whole.run_folder / "model").model.hash() == old
    session.step = 17
    loop._Session._export(session)
    found = huggingface.load(whole.run_folder / "model").model.parameters()
    jax.tree.map(np.testing.assert_array_equal, found, parameters)


def test_two_evaluation_files_of_one_name_are_refused(whole, text, tmp_path):
    shutil.copytree(text.folder, tmp_path / "other" / text.folder.name)
    files = (str(text.folder), str(tmp_path / "other" / text.folder.name))
    with pytest.raises(ValueError, match="two datasets of the name 'text', by which results are"):
        loop.train(changed(whole, evaluation__files=files))


def test_a_vocabulary_larger_than_the_tokenizers_is_said(undisturbed, whole, text):
    size = text.header.vocab_size
    said = sinks.read(undisturbed / "events.jsonl")[0].note
    assert said.startswith(f"model.vocab_size is 320, the tokenizer's {size}: the other rows of")
    equal = changed(whole, model=dataclasses.replace(whole.model, vocab_size=size))
    assert inputs.vocabulary_note(equal, Stream([text], 48)) == ""


# --------------------------------------------------------------------------------------- warm start


@pytest.fixture
def initial(undisturbed, whole):
    """A config that starts from the exported model of another run."""
    warm = warm_start.configured(changed(whole, run__seconds=1e-9), str(undisturbed))
    return changed(warm, run__name="warm")


def test_a_warm_start_has_the_weights_of_the_checkpoint(initial, undisturbed, monkeypatch):
    loop.train(initial)
    loaded = huggingface.load(undisturbed / "model").model
    started = sinks.read(initial.run_folder / "events.jsonl")[0]
    assert (started.init, started.init_hash) == (str(undisturbed), loaded.hash())
    shapes = jax.eval_shape(lambda: step.initial(initial))
    hash_of_data = started.data_hash
    found = Checkpoints(initial, hash_of_data).restore(shapes).state.parameters
    jax.tree.map(np.testing.assert_array_equal, found, loaded.parameters())
    with pytest.raises(ValueError, match=r"other settings \(init: .* → None\)"):
        loop.train(changed(initial, init=None))
    monkeypatch.setattr(huggingface, "examine", None)  # it is not read again
    assert loop.train(initial).reason == "seconds"


def test_a_warm_start_from_gguf(text, tmp_path, whole):
    """The weights of the folder that the file was made from, without a tokenizer to compare."""
    path = write_gguf(tmp_path / "x.gguf", *read(FIXTURES / "llama"))
    warm = warm_start.configured(whole, str(path))
    assert warm.data.length == min(whole.data.length, warm.model.context)
    found, _ = warm_start.load(warm, text)
    expected = huggingface.load(FIXTURES / "llama", tokenizer=False).model.parameters()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_warm_start_that_does_not_fit_is_refused(initial, text, tmp_path):
    wide = dataclasses.replace(initial.model, mlp_width=32)
    with pytest.raises(ValueError, match=r"another model than .* \(model.mlp_width: 16 → 32\)"):
        warm_start.load(changed(initial, model=wide), text)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint nowhere"):
        warm_start.configured(initial, "nowhere")
    words = tokens.train_tokenizer(["another text of other words"] * 9, 300)
    other = tokens.tokenize(["some text"], words, tmp_path / "other")
    with pytest.raises(ValueError, match="was tokenized with another tokenizer than that of"):
        warm_start.load(initial, other)


def test_a_slow_step_is_reported(whole, monkeypatch):
    """The first step, which compiles, is not timed."""
    times = []

    def median_if_slow(self, seconds):
        times.append(seconds)
        return 0.25 if seconds > 2 else None

    monkeypatch.setattr(loop.Stragglers, "median_if_slow", median_if_slow)
    loop.train(changed(whole, run__stop_at=3), At(2, lambda: time.sleep(2)))
    events = sinks.read(whole.run_folder / "events.jsonl")
    (slow,) = (x for x in events if isinstance(x, Straggler) and x.step == 3)
    assert (slow.median_seconds, len(times)) == (0.25, 2)
    assert slow.step_seconds > 2


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
