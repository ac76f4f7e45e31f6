"""Checkpoints restore every bit, and damaged ones are detected and skipped."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest

from tests.train.corpus import changed, config
from xsake.hads import Plan
from xsake.hads.terms import Terms
from xsake.train import checkpoint, step
from xsake.train.checkpoint import Checkpoints


def state_of(whole, seed, number):
    """Random arrays in the shape of a state."""
    draw = np.random.default_rng(seed)
    like = jax.eval_shape(lambda: step.initial(whole))
    state = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(x.dtype), like)
    state = jax.tree.map(jax.numpy.asarray, state)
    return like, state._replace(step=jax.numpy.int32(number))


def plan_of(seed, selector="static"):
    draw = np.random.default_rng(seed)
    counts = draw.integers(1, 4, (2, 2, 3)).astype(np.int32)
    scores = draw.random((2, 2, 3, 3)).astype(np.float32) if selector == "static" else None
    return Plan(counts, scores, Terms(0.84, "kl", selector, 16, 48, notes=("a", "b")))


@pytest.fixture
def whole(tmp_path):
    return config(tmp_path / "runs", checkpoint__best=0)


@pytest.fixture
def saved(whole):
    """Checkpoints at 3 and 6; returns (folder, like, states)."""
    checkpoints = Checkpoints(whole, "data")
    states = {}
    for number in (3, 6):
        like, states[number] = state_of(whole, number, number)
        checkpoints.save(states[number], plan_of(number))
    checkpoints.close()
    return checkpoints.folder, like, states


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("plan", [None, plan_of(1), plan_of(1, "mean_query")])
def test_a_checkpoint_restores_what_was_saved(whole, plan):
    like, state = state_of(whole, 0, 9)
    checkpoints = Checkpoints(whole, "data")
    assert checkpoints.restore(like) is None
    checkpoints.save(state, plan)
    checkpoints.close()
    found = Checkpoints(whole, "data").restore(like)
    assert_same(found.state, state)
    assert jax.tree.structure(found.state) == jax.tree.structure(state)
    assert (found.plan is None) == (plan is None)
    if plan is not None:
        assert found.plan.terms == plan.terms
        assert_same(found.plan, plan)
    assert found.note == ""


def largest(folder):
    return max((x for x in folder.rglob("*") if x.is_file()), key=lambda x: x.stat().st_size)


def truncate(folder):
    path = largest(folder / "state")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(folder):
    """One bit in the middle of the largest file, which holds arrays."""
    path = largest(folder / "state")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def lose_facts(folder):
    for path in (folder / "facts").iterdir():
        path.write_bytes(b"")


def lose_plan(folder):
    shutil.rmtree(folder / "plan")


def lose_manifest(folder):
    for path in (folder / "state").rglob("manifest.ocdbt"):
        path.write_bytes(b"x")


def wrong_facts(folder):
    for path in (folder / "facts").iterdir():
        path.write_text("[1]")


def wrong_terms(folder):
    for path in (folder / "facts").iterdir():
        path.write_text(path.read_text().replace('"block": 16', '"block": 0'))


@pytest.mark.parametrize(
    "damage", [truncate, flip, lose_facts, lose_plan, lose_manifest, wrong_facts, wrong_terms]
)
def test_a_damaged_newest_checkpoint_is_moved_and_the_previous_one_restored(whole, saved, damage):
    folder, like, states = saved
    damage(folder / "6")
    checkpoints = Checkpoints(whole, "data")
    found = checkpoints.restore(like)
    assert_same(found.state, states[3])
    assert "checkpoint 6 is damaged and set aside in damaged/6" in found.note
    assert (folder.parent / "damaged" / "6").is_dir()
    checkpoints.save(states[6], None)  # the run reaches step 6 again
    checkpoints.close()
    assert_same(Checkpoints(whole, "data").restore(like).state, states[6])


def test_restore_raises_if_all_checkpoints_are_damaged(whole, saved):
    folder, like, _ = saved
    truncate(folder / "3")
    truncate(folder / "6")
    with pytest.raises(ValueError, match=r"no checkpoint of .* can be read .*run.restart begins"):
        Checkpoints(whole, "data").restore(like)


def wrapped(text):
    """As Orbax raises what TensorStore says."""
    error = Exception("Encountered error while reading array index")
    error.__cause__ = ValueError(text)
    return error


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        MemoryError(),
        RuntimeError("RESOURCE_EXHAUSTED: out of memory"),
        wrapped("PERMISSION_DENIED: Error reading"),
        wrapped("RESOURCE_EXHAUSTED: too many open files"),
    ],
    ids=repr,
)
def test_an_error_that_is_no_damage_is_raised_and_moves_nothing(whole, saved, monkeypatch, error):
    folder, like, states = saved

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_item", fail)
        wanted = OSError if type(error) is Exception else type(error)
        with pytest.raises(wanted) as caught:
            Checkpoints(whole, "data").restore(like)
    assert caught.value is error or str(error.__cause__) in str(caught.value)
    assert not (folder.parent / "damaged").exists()
    assert_same(Checkpoints(whole, "data").restore(like).state, states[6])


def test_a_checkpoint_that_cannot_be_opened_is_not_damaged(whole, saved, monkeypatch):
    """TensorStore may take a file that it cannot open for one that is not there."""
    folder, like, _ = saved
    truncate(folder / "6")

    def fail(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint, "_check_readable", fail)
    with pytest.raises(PermissionError):
        Checkpoints(whole, "data").restore(like)
    assert not (folder.parent / "damaged").exists()


def test_a_longer_schedule_goes_on_from_a_checkpoint_and_a_shorter_one_does_not(whole, saved):
    _, like, states = saved
    found = Checkpoints(whole.with_steps(32), "data").restore(like)
    assert_same(found.state, states[6])
    assert found.steps == 16
    with pytest.raises(
        ValueError, match=r"checkpoint 6 of .* has schedule.steps 16, this run with"
    ):
        Checkpoints(whole.with_steps(8), "data").restore(like)


def test_a_checkpoint_of_other_data_or_another_config_raises(whole, saved):
    folder, like, _ = saved
    with pytest.raises(ValueError, match="has data_hash data, this run other"):
        Checkpoints(whole, "other").restore(like)
    with pytest.raises(ValueError, match="has config_hash"):
        Checkpoints(changed(whole, seed=5), "data").restore(like)
    assert (folder / "6").is_dir()


def test_the_newest_and_the_best_are_kept(whole):
    checkpoints = Checkpoints(changed(whole, checkpoint__best=1, checkpoint__keep=2), "data")
    for number, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5), (6, None)):
        checkpoints.save(state_of(whole, number, number)[1], None, loss)
    checkpoints.wait()
    assert checkpoints.steps() == [2, 5, 6]
    checkpoints.close()


def test_an_incomplete_checkpoint_is_ignored(whole, saved):
    folder, like, states = saved
    (folder / "6").rename(folder / "9.orbax-checkpoint-tmp-0")
    assert_same(Checkpoints(whole, "data").restore(like).state, states[3])
