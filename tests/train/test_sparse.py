"""Training a model with sparse attention: resumed exactly, exported, and its settings checked."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.train.corpus import MODEL, changed, config, token_file
from xsake.model import Sparse, huggingface
from xsake.observe import sinks
from xsake.observe.events import TrainStep
from xsake.train import loop, planning, warm_start
from xsake.train.config import PRESETS, Config, Hads

MSA = dataclasses.replace(
    MODEL, attention="msa", sparse=Sparse(block_size=8, num_selected=3, index_size=4)
)


def sparse_run(folder, text, **changes):
    whole = config(folder, text, hads=Hads(), model=MSA, schedule__steps=8)
    return changed(whole, evaluation__files=(), checkpoint__export=True, **changes)


def logged(folder):
    events = sinks.read(folder / "events.jsonl")
    steps = [x for x in events if isinstance(x, TrainStep)]
    return [(x.loss_nats, x.index_loss_nats, x.gradient_norm, x.density_ratio) for x in steps]


@pytest.mark.slow
def test_a_run_with_an_indexer_resumes_exactly_and_is_exported(tmp_path):
    text = token_file(tmp_path)
    whole = sparse_run(tmp_path, text)
    assert loop.train(whole).reason == "finished"
    stopped = changed(whole, run__name="stopped", run__stop_at=4)
    assert loop.train(stopped).reason == "stop_at"
    assert loop.train(changed(stopped, run__stop_at=0)).reason == "finished"
    steps = logged(whole.run_folder)
    assert logged(stopped.run_folder) == steps
    assert all(index > 0 for _, index, _, _ in steps)
    # 6 blocks of 8 tokens, of which each query visits 3 at most
    assert {density for *_, density in steps} == {(1 + 2 + 3 * 4) / 21}
    loaded = huggingface.load(whole.run_folder / "model")  # with its tokenizer
    assert loaded.config == MSA
    restored = loaded.model.parameters()["layers.sparse.index_key.kernel"]
    assert np.abs(restored).max() > 0
    assert warm_start.configured(whole, str(whole.run_folder)).model == MSA


def test_settings_that_do_not_go_together_are_refused():
    whole = config("runs", hads=Hads(), model=MSA)
    with pytest.raises(ValueError, match=r"hads.density = 0.84 plans dense attention, .* 'msa'"):
        config("runs", model=MSA)
    with pytest.raises(ValueError, match=r"observe.heads_every = 5 observes dense .* 'msa'"):
        changed(whole, observe__heads_every=5)
    with pytest.raises(ValueError, match="index_loss must not be negative, got -1"):
        changed(whole, index_loss=-1.0)
    with pytest.raises(ValueError, match=r"index_loss = 2.0 is the weight of the indexer's loss"):
        changed(config("runs"), index_loss=2.0)
    assert changed(whole, index_loss=2.0).hash != whole.hash
    assert Config.from_dict(whole.to_dict()) == whole


def test_runs_of_before_sparse_attention_keep_their_hash():
    """benchmarks/results/training-37m-2026-11-15.json records this one."""
    old = changed(PRESETS["gpt-37m"], hads__selector="mean_query")
    assert old.hash == "11cda8d7798d4c3d"


def test_the_density_of_dense_attention_is_that_of_the_plan():
    assert planning.used_density(config("runs"), None) == 1
