"""W&B, TensorBoard and Trackio: a small run, stopped and resumed, is read back from their files."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sqlite3

import pytest

from tests.observe.test_sinks import trained
from tests.train import corpus
from xsake.observe import sinks
from xsake.train.config import Schedule
from xsake.train.loop import train


def read_tensorboard(folder):
    """{(name, step): value} as TensorBoard shows it: a later file purges the steps that it has.

    The files are TFRecords: length, checksum, event, checksum.
    """
    from tensorboardX.proto.event_pb2 import Event as Record
    from tensorboardX.proto.event_pb2 import SessionLog

    found = {}
    for path in sorted(folder.iterdir()):
        content, offset = path.read_bytes(), 0
        while offset < len(content):
            size = int.from_bytes(content[offset : offset + 8], "little")
            record = Record.FromString(content[offset + 12 : offset + 12 + size])
            if record.session_log.status == SessionLog.START:
                found = {key: x for key, x in found.items() if key[1] < record.step}
            found |= {(x.tag, record.step): x.simple_value for x in record.summary.value}
            offset += 16 + size
    return found


def read_wandb(folder):
    """[{(name, step): value}, …] of the offline runs in a folder, and their run ids."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs, ids = [], []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        found = {}
        for record in map(Record.FromString, log_records(path.read_bytes())):
            if record.WhichOneof("record_type") == "run":
                ids.append(record.run.run_id)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    found[name, record.history.step.num] = float(item.value_json)
        runs.append(found)
    return runs, ids


def log_records(content):
    """LevelDB's log format after a header of 7 bytes.

    Blocks of 32 KiB hold pieces: checksum (4 bytes), size (2), kind (1: whole, 2: first, 3: middle,
    4: last), data. A block ends in zeros where no header fits.
    """
    offset, whole = 7, b""
    while offset + 7 <= len(content):
        left = 32768 - offset % 32768
        if left < 7:
            offset += left
            continue
        size = int.from_bytes(content[offset + 4 : offset + 6], "little")
        kind = content[offset + 6]
        data = content[offset + 7 : offset + 7 + size]
        whole = data if kind in (1, 2) else whole + data
        if kind in (1, 4):
            yield whole
        offset += 7 + size


def logged(run_folder):
    """{(name, step): value} of events.jsonl, by the names that all trackers have."""
    return {
        (name, event.step): value
        for event in sinks.read(run_folder / "events.jsonl")
        for name, value in sinks.scalars(event).items()
    }


def is_installed(name):
    return importlib.util.find_spec(name) is not None


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of 6 steps that stops at step 3 and is resumed, with every tracker that is there."""
    tmp_path = tmp_path_factory.mktemp("trackers")
    config = corpus.config(
        tmp_path / "runs",
        corpus.token_file(tmp_path),
        hads__density=None,
        schedule=Schedule(steps=6, warmup_steps=1),
        evaluation__every=3,
        observe__tensorboard=True,
        observe__wandb=is_installed("wandb"),
        observe__trackio=is_installed("trackio"),
    )
    with pytest.MonkeyPatch.context() as patch:
        if is_installed("trackio"):
            import trackio

            for module in (trackio, trackio.utils, trackio.sqlite_storage):
                patch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
        assert train(corpus.changed(config, run__stop_at=3)).reason == "stop_at"
        assert train(config).reason == "finished"
    return config.run_folder


@pytest.mark.slow
def test_tensorboard_files_of_a_resumed_run_are_its_events(run_folder):
    wanted = logged(run_folder)
    assert {step for _, step in wanted} == set(range(1, 7))
    assert read_tensorboard(run_folder / "tensorboard") == pytest.approx(wanted)


def test_tensorboard_forgets_what_a_run_that_was_killed_will_log_again(tmp_path):
    for first, last, loss in ((1, 9, 2.0), (6, 12, 3.0)):
        sink = sinks.TensorBoard(tmp_path, first - 1)
        for step in range(first, last):
            sink.write(trained(step, loss=loss))
        sink.close()
    found = read_tensorboard(tmp_path)
    losses = {step: x for (name, step), x in found.items() if name == "train/loss_nats"}
    assert losses == {step: 2.0 if step < 6 else 3.0 for step in range(1, 12)}


@pytest.mark.slow
def test_offline_wandb_runs_of_a_resumed_run_are_its_events(run_folder):
    pytest.importorskip("wandb")
    (first, second), ids = read_wandb(run_folder)
    assert set(ids) == {"run"}  # `wandb sync --append` makes one run of them
    assert first | second == pytest.approx(logged(run_folder))
    assert {step for _, step in first} == {1, 2, 3}
    assert {step for _, step in second} == {4, 5, 6}


@pytest.mark.slow
def test_trackio_continues_the_run_of_its_name(run_folder):
    pytest.importorskip("trackio")
    (path,) = (run_folder.parent.parent / "trackio").glob("xsake*.db")
    with contextlib.closing(sqlite3.connect(path)) as database:
        found = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert {name for name, _, _ in found} == {"run"}
    shown = {
        (name, step): value for _, step, text in found for name, value in json.loads(text).items()
    }
    assert shown == pytest.approx(logged(run_folder))
