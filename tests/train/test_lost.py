"""A run that ends early: what is logged, and whether it may begin again."""

from __future__ import annotations

import threading

import pytest

from tests.train.corpus import config
from xsake.observe import sinks
from xsake.observe.events import LOST, CheckpointSaved, Resumed, Stopped
from xsake.train import folder, run_sinks


class Kept:
    """A sink that keeps the events."""

    def __init__(self):
        self.events = []

    def write(self, event):
        self.events.append(event)

    def close(self):
        pass


@pytest.fixture
def whole(tmp_path):
    found = config(tmp_path)
    found.run_folder.mkdir()
    return found


def begin(whole, *logged):
    log = run_sinks.Log(whole, -1, ())
    for event in logged:
        log.write(event)
    log.close()


def test_a_run_that_lost_a_process_before_its_first_checkpoint_begins_again(whole):
    begin(whole, CheckpointSaved(step=3, path="checkpoints/3"), Stopped(step=4, reason=LOST))
    assert folder.checked_history(whole.run_folder) == ""


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (Stopped(step=4, reason="signal"), "it saved no checkpoint"),
        (Resumed(step=4, commit="", device=""), "it saved no checkpoint"),
        (CheckpointSaved(step=4, path="checkpoints/4"), "its checkpoints are gone"),
    ],
    ids=["stopped", "resumed", "saved"],
)
def test_a_run_that_had_a_checkpoint_does_not(whole, event, why):
    saved = [event] * 2 if isinstance(event, CheckpointSaved) else [event]
    begin(whole, *saved, Stopped(step=4, reason=LOST))
    with pytest.raises(ValueError, match=why):
        folder.checked_history(whole.run_folder)


@pytest.mark.parametrize("reason", ["not finite", "finished"])
def test_a_loss_is_logged_unless_the_run_has_stopped(whole, reason):
    """A diverged run logs why before it ends the other processes, which then count as lost."""
    kept = Kept()
    log = run_sinks.Log(whole, -1, (kept,))
    log.write(Stopped(step=4, reason=reason))
    log.write_loss(4, "process 0 raised")
    assert [x.reason for x in kept.events] == [reason]
    log.close()
    log = run_sinks.Log(whole, -1, ())
    log.write_loss(4, "process 1 of 2 is gone")
    (found,) = sinks.read(whole.run_folder / "events.jsonl")
    assert (found.reason, found.note) == (LOST, "process 1 of 2 is gone")
    log.close()
    log.write_loss(4, "again")


def test_a_loss_does_not_wait_for_a_sink_that_is_stuck(whole, monkeypatch):
    monkeypatch.setattr(run_sinks, "LOCK_SECONDS", 0.1)
    entered, leave = threading.Event(), threading.Event()

    class Stuck(Kept):
        def write(self, event):
            super().write(event)
            entered.set()
            leave.wait(30)

    stuck = Stuck()
    log = run_sinks.Log(whole, -1, (stuck,))
    thread = threading.Thread(target=log.write, args=(CheckpointSaved(step=1, path=""),))
    thread.start()
    try:
        assert entered.wait(30)
        log.write_loss(1, "process 1 of 2 is gone")
        assert len(stuck.events) == 1
    finally:
        leave.set()
        thread.join()
        log.close()


def test_other_processes_log_nothing(whole):
    log = run_sinks.Log(whole, -1, (), is_writer=False)
    log.write_loss(4, "process 1 of 2 is gone")
    log.sync()
    log.close()
    assert not (whole.run_folder / "events.jsonl").exists()
