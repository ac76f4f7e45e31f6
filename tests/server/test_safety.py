"""What must not be read cannot be, and what is too large, malformed or foreign is refused."""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest

from tests.observe.test_sinks import STARTED, trained
from tests.server.conftest import BASE, client_of, make_run, steps
from xsake import shipped
from xsake.cli.serve import _keep_compiled, serve
from xsake.server.settings import Limits, Settings

TOKEN = "0123456789abcdef-token"


# ---------------------------------------------------------------------------------- who may ask


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8000", "", "[::1", "a b"])
def test_a_host_of_another_name_is_refused(client, host):
    """DNS rebinding: a page elsewhere lets its own name resolve to this machine."""
    answer = client.get("/api/runs", headers={"host": host})
    assert answer.status_code == 421
    assert "is not a name of this server" in answer.json()["detail"]


@pytest.mark.parametrize("host", ["localhost:8000", "LOCALHOST", "127.0.0.1:1", "[::1]:8000"])
def test_a_loopback_name_is_served(client, host):
    assert client.get("/health", headers={"host": host}).status_code == 200


def test_further_names_are_served_if_they_are_given(root):
    with client_of(runs=(root,), hosts=("dash.example",)) as client:
        assert client.get("/health", headers={"host": "dash.example"}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "x", "http://["]
)
def test_requests_of_another_site_are_refused(client, origin):
    body = {"text": "a"}
    answer = client.post("/api/play/texts", json=body, headers={"origin": origin})
    assert answer.status_code == 403
    assert client.get("/api/runs", headers={"origin": BASE}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_another_address_than_loopback_needs_a_token(host):
    with pytest.raises(ValueError, match="needs a token: set --token or XSAKE_TOKEN"):
        Settings(host=host)
    assert Settings(host=host, token=TOKEN).token == TOKEN
    with pytest.raises(ValueError, match="give at least 16 ASCII ones"):
        Settings(token="short")


def test_a_token_is_asked_for_everywhere_but_health(root):
    with client_of(runs=(root,), token=TOKEN) as client:
        assert client.get("/health").status_code == 200
        for path in ("/api/runs", "/metrics", "/", "/openapi.json", "/api/runs?token=" + TOKEN):
            answer = client.get(path)
            assert answer.status_code == 401, path
            assert TOKEN not in answer.text
        for wrong in (TOKEN[:-1], TOKEN + "x", "", "é"):
            header = {"authorization": f"Bearer {wrong}".encode()}
            assert client.get("/api/runs", headers=header).status_code == 401
        header = {"authorization": f"Bearer {TOKEN}"}
        assert client.get("/api/runs", headers=header).status_code == 200


def test_a_browser_gets_the_token_as_a_cookie_and_a_clean_address(root):
    with client_of(runs=(root,), token=TOKEN) as client:
        answer = client.get(f"/?token={TOKEN}&a=1", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/?a=1")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert client.get("/api/runs").status_code == 200  # the client keeps cookies
        client.cookies.clear()
        away = client.get(f"//evil.example?token={TOKEN}", follow_redirects=False)
        assert not away.headers.get("location", "/").startswith("//")


# ------------------------------------------------------------------------------ what may be read


@pytest.mark.parametrize(
    "name",
    ["..", "../..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "/etc", "a/../../b", ".", "a%00", "\\..\\"],
)
def test_no_name_of_a_run_leads_out_of_the_root(client, root, name):
    (root.parent / "config.json").write_text('{"secret": 1}')
    (root.parent / "events.jsonl").write_text(STARTED.to_json() + "\n")
    for path in (f"/api/runs/{name}", f"/api/runs/{name}/config", f"/api/runs/{name}/events"):
        answer = client.get(path)
        inside = answer.url.path.startswith("/api/runs/")  # the client resolves .. before it sends
        assert answer.status_code == (404 if inside else answer.status_code), path
        assert "secret" not in answer.text


@pytest.mark.parametrize("name", ["../conftest", "..%2f..%2fpyproject", "%2fetc%2fpasswd", "none"])
def test_no_name_of_a_result_or_profile_leads_out_of_its_folder(shipped_client, name):
    assert shipped_client.get(f"/api/results/{name}").status_code == 404
    assert shipped_client.get(f"/api/profiles/{name}").status_code == 404


def test_symbolic_links_out_of_the_root_are_not_followed(root, tmp_path):
    outside = make_run(tmp_path / "outside", "secret", config={"secret": 1})
    (root / "folder").symlink_to(outside)
    linked = make_run(root, "config")
    (linked / "config.json").unlink()
    (linked / "config.json").symlink_to(outside / "config.json")
    linked = make_run(root, "events")
    (linked / "events.jsonl").unlink()
    (linked / "events.jsonl").symlink_to(outside / "events.jsonl")
    loop = make_run(root, "loop")
    (loop / "events.jsonl").unlink()
    (loop / "events.jsonl").symlink_to(loop / "events.jsonl")
    results = tmp_path / "results"
    results.mkdir()
    (results / "r.json").symlink_to(outside / "config.json")
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    (profiles / "p.safetensors").symlink_to(shipped.PROFILES[0])
    (profiles / "own.safetensors").write_bytes(shipped.PROFILES[0].read_bytes())
    folders = {"runs": (root,), "results": (results,), "profiles": (profiles,)}
    with client_of(**folders, published=False) as client:
        listed = [profile["name"] for profile in client.get("/api/profiles").json()["profiles"]]
        assert listed == ["own"]
        assert client.get("/api/profiles/p").status_code == 404
        names = [run["name"] for run in client.get("/api/runs").json()["runs"]]
        assert set(names) <= {"a", "loop"}
        assert client.get("/api/results").json()["results"] == []
        for name in ("folder", "config", "events", "loop"):
            for path in ("", "/config", "/events", "/live"):
                answer = client.get(f"/api/runs/{name}{path}")
                assert "secret" not in answer.text
                assert name == "loop" or answer.status_code == 404


def test_a_pipe_or_a_folder_in_place_of_a_file_does_not_hang_the_server(root):
    for name in ("pipe", "folder"):
        run = make_run(root, name)
        (run / "events.jsonl").unlink()
    os.mkfifo(root / "pipe" / "events.jsonl")
    (root / "folder" / "events.jsonl").mkdir()
    with client_of(runs=(root,), published=False) as client:
        assert len(client.get("/api/runs").json()["runs"]) == 3
        for name in ("pipe", "folder"):
            assert client.get(f"/api/runs/{name}/events").status_code in (404, 422)
        assert client.get("/metrics").status_code == 200


# ----------------------------------------------------------------------------- what may be sent


def test_a_body_that_is_too_long_is_refused_with_and_without_its_length(client):
    limit = Limits().body_bytes
    long = b'{"text": "' + b"a" * limit + b'"}'
    kind = {"content-type": "application/json"}
    answer = client.post("/api/play/texts", content=long, headers=kind)
    assert answer.status_code == 413
    pieces = (long[i : i + 9999] for i in range(0, len(long), 9999))  # chunked, without a length
    answer = client.post("/api/play/texts", content=pieces, headers=kind)
    assert answer.status_code == 413
    assert f"{limit:,} bytes" in answer.json()["detail"]
    bad = client.post("/api/play/texts", content=b"", headers={"content-length": "-5"})
    assert bad.status_code == 400


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[" * 10_000, b'{"text": NaN}', b'{"text": "\\ud800"}', b"\xff\xfe", b"[]"],
)
def test_a_malformed_body_is_refused(client, content):
    kind = {"content-type": "application/json"}
    answer = client.post("/api/play/texts", content=content, headers=kind)
    assert answer.status_code in (400, 422)
    json.loads(answer.content)


def test_numbers_that_are_not_finite_are_null(root):
    run = make_run(root, "nan", events=[])
    lines = [
        STARTED.to_json(),
        '{"event": "TrainStep", "step": 1, "x": NaN, "y": [1e999, -Infinity]}',
    ]
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    results = root.parent / "results"
    results.mkdir()
    (results / "r.json").write_text('{"results": [{"case": "a", "seconds": NaN, "t": 1e999}]}')
    with client_of(runs=(root,), results=(results,), published=False) as client:
        (_, step) = client.get("/api/runs/nan/events").json()["events"]
        assert (step["x"], step["y"]) == (None, [None, None])
        (row,) = client.get("/api/rows").json()["rows"]
        assert (row["seconds"], row["t"]) == (None, None)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"a": 1',
        "\x00",
        "[" * 100_000,
        '{"results": 3, "rows": [1]}',
        '{"densities": []}',
    ],
)
def test_a_result_file_of_the_wrong_shape_is_named_or_empty(root, content):
    (root / "r.json").write_text(content)
    with client_of(results=(root,), published=False) as client:
        listed = client.get("/api/results").json()
        assert len(listed["results"]) + len(listed["unreadable"]) == 1
        assert client.get("/api/rows").json()["rows"] == []
        assert client.get("/api/results/r").status_code in (200, 422)


@pytest.mark.parametrize(
    "line", ["nonsense", "[]", "[" * 100_000, '{"event": 3}', "\x00", '"\\ud800"']
)
def test_a_damaged_line_is_counted_and_the_others_are_served(root, line):
    run = make_run(root, "bad", events=[])
    content = f"{STARTED.to_json()}\n{line}\n{trained(1).to_json()}\n"
    (run / "events.jsonl").write_bytes(content.encode("utf-8", "surrogatepass") + b"\xff\xfe\n")
    with client_of(runs=(root,), published=False) as client:
        page = client.get("/api/runs/bad/events").json()
        assert 3 in page["damaged"]
        kinds = [event.get("event") for event in page["events"]]
        assert ("RunStarted" in kinds, "TrainStep" in kinds) == (True, True)
        assert client.get("/api/runs/bad").status_code == 200
        assert client.get("/metrics").status_code == 200


def test_a_half_written_line_is_not_an_error(root):
    run = make_run(root, "half", events=steps(2))
    with (run / "events.jsonl").open("a") as file:
        file.write(trained(3).to_json()[:40])
    with client_of(runs=(root,), published=False) as client:
        page = client.get("/api/runs/half/events").json()
        assert [event["step"] for event in page["events"]] == [0, 1, 2]
        assert page["damaged"] == []
        assert client.get("/api/runs/half").json()["step"] == 2


def test_pages_are_right_while_another_thread_writes(root):
    """A reader sees a prefix of what the writer has written, whole lines only."""
    run = make_run(root, "busy", events=[STARTED])
    stop = threading.Event()

    def write():
        with (run / "events.jsonl").open("a") as file:
            for step in range(1, 100_000):
                if stop.is_set():
                    return
                text = trained(step).to_json() + "\n"
                file.write(text[:50])
                file.flush()
                file.write(text[50:])
                file.flush()

    writer = threading.Thread(target=write)
    with client_of(runs=(root,), published=False) as client:
        writer.start()
        try:
            found, after = [], "start"
            while len(found) < 300:
                url = "/api/runs/busy/events"
                page = client.get(url, params={"after": after, "limit": 100}).json()
                assert page["damaged"] == []
                found += [event["step"] for event in page["events"]]
                after = page["next"]
        finally:
            stop.set()
            writer.join()
    assert found == list(range(len(found)))


def test_calls_of_the_model_wait_for_their_turn_or_are_refused(shipped_client):
    served = shipped_client.app.state.served
    limits = served.settings.limits
    served._waiting += limits.model_waiting + limits.model_calls
    try:
        answer = shipped_client.get("/api/masks?rule=causal")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    finally:
        served._waiting -= limits.model_waiting + limits.model_calls
    assert shipped_client.get("/api/masks?rule=causal").status_code == 200


def test_a_server_without_a_cache_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    """A plain user may have no place to write to."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    _keep_compiled()
    assert "compiled programs are not kept" in capsys.readouterr().out


def test_a_taken_port_and_a_missing_folder_are_one_sentence(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"--port {port} cannot be bound: Address already in use"):
            serve(port=port)
    with pytest.raises(FileNotFoundError, match="does not exist; name a folder that does"):
        serve(results=(tmp_path / "none",))
    with pytest.raises(ValueError, match="needs a token"):
        serve(host="0.0.0.0")
