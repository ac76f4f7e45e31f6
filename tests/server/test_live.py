"""Live events: everything once, in order, through reconnections, resumes and slow readers."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

from tests.observe.test_sinks import STARTED, trained
from tests.server.conftest import make_run, steps
from tests.server.live_server import running
from xsake.observe import event_log, registry, sinks
from xsake.observe.events import Resumed, Stopped
from xsake.server import live
from xsake.server.settings import Limits


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(live, "POLL_SECONDS", 0.02)


@pytest.fixture
def served(tmp_path):
    run = make_run(tmp_path / "runs", events=steps(2))
    limits = Limits(listeners=3, send_seconds=0.5)
    with running(runs=(tmp_path / "runs",), published=False, limits=limits) as (url, app):
        yield run, url, app


def messages(answer):
    """(id, event, data) of every message, as a browser's EventSource has them."""
    fields = {}
    for line in answer.iter_lines():
        if line.startswith(":"):
            continue
        if not line:
            if "data" in fields:
                yield fields.get("id"), fields.get("event", "message"), fields["data"]
            fields = {}
            continue
        name, _, value = line.partition(": ")
        fields[name] = value


class Listener:
    """A connection, and the messages that arrive on it."""

    def __init__(self, url, after=None, last=None):
        query = {} if after is None else {"after": after}
        headers = {} if last is None else {"last-event-id": last}
        self.client = httpx.Client(timeout=20)
        self.stream = self.client.stream(
            "GET", f"{url}/api/runs/a/live", params=query, headers=headers
        )
        self.answer = self.stream.__enter__()
        assert self.answer.status_code == 200, self.answer.read()
        assert self.answer.headers["content-type"].startswith("text/event-stream")
        self._messages = messages(self.answer)

    def take(self, count):
        return [next(self._messages) for _ in range(count)]

    def steps(self, count):
        return [json.loads(data)["step"] for _, _, data in self.take(count)]

    def close(self):
        self.stream.__exit__(None, None, None)
        self.client.close()


def append(run, *events):
    with (run / "events.jsonl").open("a") as file:
        file.writelines(event.to_json() + "\n" for event in events)


def test_new_events_arrive_and_a_half_written_one_waits(served):
    run, url, _ = served
    listener = Listener(url, "start")
    assert listener.steps(3) == [0, 1, 2]
    text = trained(3).to_json()
    with (run / "events.jsonl").open("a") as file:
        file.write(text[:30])
        file.flush()
        time.sleep(0.1)
        file.write(text[30:] + "\n")
    ((_, kind, data),) = listener.take(1)
    assert (kind, json.loads(data)) == ("message", json.loads(text))
    listener.close()


def test_a_listener_that_comes_back_gets_what_follows_its_last_event(served):
    run, url, _ = served
    listener = Listener(url, "start")
    *_, (last, _, _) = listener.take(3)
    listener.close()
    append(run, trained(3), trained(4))
    again = Listener(url, last=last)
    assert again.steps(2) == [3, 4]
    again.close()
    page = httpx.get(f"{url}/api/runs/a/events").json()
    listener = Listener(url, page["next"])
    append(run, trained(5))
    assert listener.steps(1) == [5]
    listener.close()


def test_without_a_start_only_new_events_are_sent(served):
    run, url, app = served
    listener = Listener(url)
    while not app.state.served.listeners:
        time.sleep(0.01)
    time.sleep(0.1)
    append(run, trained(3))
    assert listener.steps(1) == [3]
    listener.close()


def test_a_run_that_is_resumed_resets_its_listeners(served):
    """The file is replaced by one without the later steps: those are sent again."""
    run, url, _ = served
    append(run, trained(3), trained(4))
    listener = Listener(url, "start")
    *_, (last, _, _) = listener.take(5)
    file = sinks.EventFile(run / "events.jsonl", 2)
    file.write(Resumed(step=2, commit="", device=""))
    file.write(trained(3))
    ((_, kind, _),) = listener.take(1)
    assert kind == "reset"
    assert listener.steps(5) == [0, 1, 2, 2, 3]
    listener.close()
    page = httpx.get(f"{url}/api/runs/a/events", params={"after": last})
    assert page.status_code == 409
    again = Listener(url, last=last)
    ((_, kind, _),) = again.take(1)
    assert kind == "reset"
    again.close()
    file.close()


def test_a_damaged_line_is_reported_by_its_number(served):
    run, url, _ = served
    listener = Listener(url, "start")
    listener.take(3)
    with (run / "events.jsonl").open("a") as file:
        file.write("nonsense\n\n")
    append(run, trained(3))
    (_, kind, data), (_, _, step) = listener.take(2)
    assert (kind, data, json.loads(step)["step"]) == ("damaged", "3", 3)
    listener.close()


def test_a_file_that_cannot_be_read_further_is_reported_and_the_stream_ends(served, monkeypatch):
    run, url, _ = served
    monkeypatch.setattr(event_log, "CHUNK", 1000)
    monkeypatch.setattr(event_log, "MAX_LINE", 5000)
    listener = Listener(url, "start")
    listener.take(3)
    with (run / "events.jsonl").open("a") as file:
        file.write("x" * 10_000)
    ((_, kind, data),) = listener.take(1)
    assert (kind, "a line is longer than 5,000 bytes" in data) == ("damaged", True)
    listener.close()
    assert httpx.get(f"{url}/api/runs/a/events").status_code == 422


def test_listeners_are_counted_and_limited(served):
    _, url, app = served
    listeners = [Listener(url, "start") for _ in range(3)]
    for listener in listeners:
        listener.take(1)
    answer = httpx.get(f"{url}/api/runs/a/live")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    for listener in listeners:
        listener.close()
    deadline = time.monotonic() + 10
    while app.state.served.listeners and time.monotonic() < deadline:
        time.sleep(0.01)
    assert app.state.served.listeners == 0
    Listener(url, "start").close()


def test_a_listener_that_does_not_read_is_dropped_and_costs_no_memory(served):
    run, url, app = served
    with (run / "events.jsonl").open("a") as file:
        file.write((trained(3).to_json() + "\n") * 40_000)
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        request = f"GET /api/runs/a/live?after=start HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"
        slow.sendall(request.encode())
        deadline = time.monotonic() + 20
        while not app.state.served.listeners and time.monotonic() < deadline:
            time.sleep(0.01)
        while app.state.served.listeners and time.monotonic() < deadline:
            assert httpx.get(f"{url}/health").status_code == 200
            time.sleep(0.05)
    assert app.state.served.listeners == 0


# ------------------------------------------------------------------------------------- event logs


def log_of(tmp_path, events):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(event.to_json() + "\n" for event in events))
    return path, event_log.EventLog(path)


def test_an_index_follows_a_file_that_grows_and_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "CHUNK", 777)  # lines cross the chunks
    events = steps(20)
    path, log = log_of(tmp_path, events)
    assert log.count() == 21
    wanted = [event.to_json().encode() for event in events]
    assert [line.text for line in log.lines(0, 100)] == wanted
    assert [line.number for line in log.lines(5, 7)] == [5, 6]
    last = log.lines(20, 21)[0]
    assert log.after(last.id) == 21
    append(tmp_path, trained(21))
    assert log.count() == 22
    written = path.read_text().splitlines(keepends=True)
    path.write_text("".join(written[:3]) + trained(99).to_json() + "\n")  # the same file, rewritten
    assert log.count() == 4
    assert log.after(last.id) is None
    path.write_text("")
    assert log.count() == 0
    for bad in ("", "x", "3", "-1-00000000", "99999999999999999999-00000000", "0-xx"):
        assert log.after(bad) is None


def test_the_index_is_small(tmp_path):
    _, log = log_of(tmp_path, steps(1000))
    assert log.count() == 1001
    assert log.index_bytes < 10 * 1001


def test_a_glance_is_the_summary_without_reading_the_middle(tmp_path):
    folder = make_run(tmp_path, events=[*steps(300), Stopped(step=300, reason="finished")])
    glance = registry.summarised(folder, event_log.newest)
    assert glance == registry.summary(folder)
    few = event_log.newest(folder / "events.jsonl", window=2000)
    assert [type(x).__name__ for x in few] == ["RunStarted", "TrainStep", "Stopped"]
    assert few[1].step == 300
    assert registry.of_events("a", few).steps == STARTED.steps


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "CHUNK", 1000)
    monkeypatch.setattr(event_log, "MAX_LINE", 5000)
    path, log = log_of(tmp_path, steps(1))
    with path.open("a") as file:
        file.write("x" * 10_000)
    with pytest.raises(ValueError, match="a line is longer than 5,000 bytes"):
        log.count()
