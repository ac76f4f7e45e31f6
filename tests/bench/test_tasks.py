"""The suite `tasks`: its documents, what it calibrates on, and which heads it changes."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.hads.test_plan import profile_of
from xsake.bench.suites import tasks
from xsake.evaluate.needle import Answers
from xsake.hads import Profile
from xsake.hads.statistics import POLICIES_WITH_COST
from xsake.model.observer import Observer


def encode(text):
    return [ord(c) for c in text]


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A folder of documents; nothing is calibrated: a call is recorded, its profile is random."""
    (tmp_path / "words.txt").write_text("It was a dark and stormy night. " * 200)
    tokenizer = SimpleNamespace(encode=encode)
    opened = SimpleNamespace(tokenizer=lambda: tokenizer)
    monkeypatch.setattr(tasks.huggingface, "examine", lambda path: opened)
    words = [tmp_path / "words.txt"]
    sizes = dict(length=128, documents=2, prompts=3, evaluation=2)
    tasks.prepare(tmp_path / "model", tmp_path / "documents", words, words, **sizes)
    calls = []

    def profile(documents, *, block, curves, kinds):
        calls.append((len(documents), kinds))
        found = profile_of(1, 2)
        cost = found.statistics.cost
        for policy in POLICIES_WITH_COST:
            for name in ("part_queries", "oracle"):
                cost[policy][name] = cost[policy]["static"]
        return dataclasses.replace(found, facts=dataclasses.replace(found.facts, kinds=kinds))

    subject = object.__new__(Observer)  # without a model, whose weights would have to be made
    subject.hash, subject.profile = "a model", profile
    bench = tasks._Bench(subject, encode, tmp_path / "documents")
    monkeypatch.setattr(tasks._Bench, "load", lambda *given: bench)
    return calls


def test_documents_of_two_kinds_are_calibrated_on_once(tmp_path, asked, monkeypatch):
    """And the table asks for the usual methods: the first two densities before the others."""
    runs, built = [], set()

    def run_tasks(subject, methods_at, encode, fillers, settings, block, out, **facts):
        if not runs:
            built.update(method.name for method in methods_at(settings.densities[0], 128))
        runs.append((tuple(settings.densities), facts["facts"]["kinds"]))
        out.write_text(json.dumps({"rows": runs}))

    monkeypatch.setattr(tasks.needle, "run_tasks", run_tasks)
    monkeypatch.setattr(tasks, "_perplexity", lambda *given: ["gap"])
    paths = [tmp_path / name for name in ("model", "documents", "profiles", "out.json")]
    for _ in range(2):
        tasks.table(*paths, block=16, lengths=(128,), densities=(0.8, 0.9, 0.7))
    mixed = "2 documents of text and 2 documents of retrieval"
    assert asked == [(2, "2 documents of text"), (4, mixed)]
    assert built == set(tasks.METHODS)
    assert json.loads(paths[-1].read_text())["perplexity"] == ["gap"]
    assert runs == [((0.8, 0.9), mixed), ((0.7,), mixed)] * 2
    assert Profile.load(tmp_path / "profiles" / "text-16.safetensors").facts.kinds == asked[0][1]


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
