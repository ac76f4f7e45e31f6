"""Real processes that train together: they stop together, and end if one of them is lost."""

from __future__ import annotations

import json
import signal
import time

import jax
import numpy as np
import pytest

from tests.parallel.cluster import LOST_SECONDS, Cluster
from tests.train.corpus import changed, config, token_file
from xsake.data.stream import Stream
from xsake.data.tokens import TokenDataset
from xsake.observe import sinks
from xsake.observe.events import Resumed, RunStarted, Stopped, Straggler, TrainStep
from xsake.parallel import processes
from xsake.parallel.mesh import MeshSizes
from xsake.parallel.processes import Processes
from xsake.train import inputs

ENDED = 75


@pytest.fixture
def start(tmp_path):
    """Starts clusters, and ends what a test leaves of them."""
    token_file(tmp_path)
    started = []

    def make(*arguments, **more):
        started.append(Cluster(tmp_path, *arguments, **more))
        return started[-1]

    yield make
    for cluster in started:
        cluster.kill()


def events_of(cluster, kind):
    return [event for event in sinks.read(cluster.events) if isinstance(event, kind)]


def losses(cluster):
    return {event.step: event.loss_nats for event in events_of(cluster, TrainStep)}


def far(found, wanted):
    return max(abs(found[step] / wanted[step] - 1) for step in wanted)


@pytest.mark.second_python
@pytest.mark.timeout(300)
def test_a_killed_process_ends_the_other_and_one_goes_on(start, monkeypatch):
    """Two processes share sequences, kill -9, then one process alone from the checkpoint."""
    two = start("run", 2, 40, "context=2")
    two.wait_for_step(7)
    began = time.monotonic()
    two.signal(1, signal.SIGKILL)
    assert two.codes(60, left_out=1) == [ENDED], two.text(0)
    seconds = time.monotonic() - began
    said = two.text(0)
    assert "xsake: process 1 of 2 has died or hangs: it has been silent for" in said
    assert said.count("Newest checkpoint of") == 1
    assert "with any number of processes, to resume." in said
    assert seconds < 60
    (lost,) = events_of(two, Stopped)
    assert lost.reason == "process lost"
    before = losses(two)
    monkeypatch.setenv("XSAKE_TEST_STOP", str(max(before) + 1))
    one = start("run", 1, 40, "")
    assert one.codes(200) == [0], one.text(0)
    (resumed,) = events_of(one, Resumed)
    assert (resumed.processes, events_of(one, RunStarted)[0].processes) == (1, 2)
    # float32 sums of two devices and of one differ in their order
    common = {step: loss for step, loss in before.items() if step > resumed.step}
    assert common
    assert far(losses(one), common) < 1e-5
    assert max(losses(one)) == max(before) + 1
    print(f"ended {seconds:.1f} s after kill -9; resumed at step {resumed.step}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("victim", "kind"),
    [(3, signal.SIGKILL), (0, signal.SIGKILL), (2, signal.SIGSTOP), (0, signal.SIGSTOP)],
    ids=["SIGKILL 3", "SIGKILL 0", "SIGSTOP 2", "SIGSTOP 0"],
)
def test_four_processes_end_and_two_go_on(start, victim, kind):
    """fsdp × context: the loss curve is that of one undisturbed process."""
    four = start("run", 4, 40, "fsdp=2,context=2")
    four.wait_for_step(7)
    began = time.monotonic()
    four.signal(victim, kind)
    codes = four.codes(60, left_out=victim)
    seconds = time.monotonic() - began
    assert codes == [ENDED] * 3, "\n".join(map(four.text, range(4)))
    for number in set(range(4)) - {victim}:
        assert f"xsake: process {victim}" in four.text(number)
        assert four.text(number).count("Newest checkpoint of") == 1
    four.kill()
    two = start("run", 2, 40, "fsdp=2")
    assert two.codes(240) == [0, 0], two.text(0)
    alone = start("alone", 1, 40, "")
    assert alone.codes(240) == [0], alone.text(0)
    assert losses(two).keys() == losses(alone).keys()
    assert far(losses(two), losses(alone)) < 1e-5
    print(f"{kind.name} of {victim}: ended after {seconds:.1f} s")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("victim", "kind"),
    [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)],
    ids=["SIGKILL 1", "SIGSTOP 1", "SIGSTOP 0"],
)
def test_with_the_default_settings_the_other_ends_within_a_minute(start, monkeypatch, victim, kind):
    seconds = Processes().lost_seconds
    monkeypatch.setenv("XSAKE_TEST_LOST", str(seconds))
    two = start("run", 2, 2000, "fsdp=2")
    two.wait_for_step(7)
    began = time.monotonic()
    two.signal(victim, kind)
    assert two.codes(60, left_out=victim) == [ENDED], two.text(1 - victim)
    assert f"xsake: process {victim}" in two.text(1 - victim)
    assert "has died or hangs" in two.text(1 - victim)
    print(
        f"{kind.name} {victim}: ended after {time.monotonic() - began:.1f} s, limit {seconds:.0f} s"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_report_of_a_slow_step_names_the_process_that_stood_still(start, monkeypatch):
    monkeypatch.setenv("XSAKE_TEST_LOST", "40")
    monkeypatch.setenv("XSAKE_TEST_CHECKPOINT", "2000")  # steps before one are not timed
    two = start("run", 2, 2000, "fsdp=2")
    two.wait_for_step(12)
    two.signal(1, signal.SIGSTOP)
    time.sleep(15)
    two.signal(1, signal.SIGCONT)
    two.wait_for_step(two.steps() + 4)
    (slow,) = (event for event in events_of(two, Straggler) if event.step_seconds > 10)
    assert slow.process == 1
    two.signal(0, signal.SIGTERM)
    assert two.codes(60) == [0, 0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sigterm_to_one_process_saves_a_checkpoint_of_all(start):
    two = start("run", 2, 2000, "fsdp=2")
    two.wait_for_step(7)
    two.signal(1, signal.SIGTERM)
    assert two.codes(60) == [0, 0], two.text(0) + two.text(1)
    (stopped,) = events_of(two, Stopped)
    assert stopped.reason == "signal"
    assert (two.folder / "run" / "checkpoints" / str(stopped.step)).is_dir()
    assert f"signal at step {stopped.step}" in two.text(0)
    assert f"signal at step {stopped.step}" in two.text(1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_with_other_settings_are_refused(start, monkeypatch):
    """Of settings that are not hashed too: a process would wait for a checkpoint of all."""
    monkeypatch.setenv("XSAKE_TEST_OTHER", json.dumps({"checkpoint__every": 3}))
    two = start("run", 2, 8, "fsdp=2")
    assert two.codes(120) == [1, 1], two.text(0) + two.text(1)
    for number in (0, 1):
        assert "process 1 has checkpoint.every = 3, process 0 has 4; start all" in two.text(number)
    assert not (two.folder / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_mesh_that_does_not_fit_is_refused_by_all_processes(start):
    two = start("run", 2, 8, "context=2,data=5")
    assert two.codes(120) == [1, 1], two.text(0) + two.text(1)
    assert "RefusedError" in two.text(1)
    assert not (two.folder / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dataset_that_one_process_lacks_ends_the_other(start, monkeypatch):
    """It waits for that process, which says what is missing."""
    monkeypatch.setenv("XSAKE_TEST_OTHER", json.dumps({"data__train": ["nowhere"]}))
    two = start("run", 2, 8, "fsdp=2")
    assert two.codes(60) == [ENDED, 1], two.text(0) + two.text(1)
    assert "process 1 of 2 raised FileNotFoundError" in two.text(0)
    assert "nowhere" in two.text(1)
    assert not (two.folder / "run").exists()


def test_a_setting_that_differs_is_named(monkeypatch):
    texts = ['{"seed": "0", "observe.every": "1"}', '{"seed": "0", "observe.every": "2"}']
    monkeypatch.setattr(processes, "everyone", lambda text: texts)
    with pytest.raises(processes.RefusedError, match=r"process 1 has observe.every = 2, process 0"):
        processes.check_same({"seed": 0})


def test_processes_share_all_settings_but_paths(tmp_path):
    """What is not hashed decides when processes meet: checkpoints, evaluations, samples, stops."""
    one = config(tmp_path, token_file(tmp_path))
    elsewhere = changed(
        one,
        data__train=("/x/text",),
        evaluation__files=("/x/text",),
        run__folder="/x",
        processes=Processes("host:1", 2, 1),
    )
    assert inputs.shared_settings(elsewhere) == inputs.shared_settings(one)
    for change in (
        {"seed": 1},
        {"checkpoint__every": 7},
        {"evaluation__every": 7},
        {"observe__heads_every": 7},
        {"run__stop_at": 7},
        {"mesh": MeshSizes(fsdp=2)},
        {"init": "shipped"},
    ):
        assert inputs.shared_settings(changed(one, **change)) != inputs.shared_settings(one), change


def test_rows_of_all_processes_are_the_batch_without_overlap(tmp_path):
    stream = Stream([TokenDataset.open(token_file(tmp_path).folder)], 48)
    whole = stream.batch(3, 8)
    parts = [stream.batch_rows(3, 8, rows) for rows in ([0, 1, 4, 5], [2, 3, 6, 7])]
    for name in whole._fields:
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined[[0, 1, 4, 5, 2, 3, 6, 7]], getattr(whole, name))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"coordinator": "host:1"}, r"processes.count = 0 and processes.id = -1 are given togethe"),
        ({"count": 2, "id": 0}, r"processes.coordinator = '', .* give all three"),
        ({"coordinator": "host:1", "count": 2, "id": 2}, r"processes.id = 2 is not from 0 to"),
        ({"coordinator": "host", "count": 2, "id": 1}, r"must be host:port, got 'host'; add the"),
        ({"lost_seconds": 90.0}, r"processes.lost_seconds must be from 2 to 60, got 90.0"),
    ],
)
def test_wrong_settings_raise(given, message):
    with pytest.raises(ValueError, match=message):
        Processes(**given)


def test_one_process_agrees_with_itself():
    assert processes.agreed(lambda: "yes") == "yes"
    assert processes.everyone("x") == ["x"]
    processes.check_same({"data": "x"})
    processes.barrier("nothing to wait for")
    assert processes.is_writer()
    assert (processes.count(), jax.process_count()) == (1, 1)
    assert LOST_SECONDS < 60
