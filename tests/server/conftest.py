"""A server over a run root of its own and what comes with the package."""

from __future__ import annotations

import json

import pytest
from fastapi.testclient import TestClient

from tests.observe.test_sinks import EVENTS, STARTED, trained, written
from xsake.server.app import create_app
from xsake.server.settings import Settings

BASE = "http://127.0.0.1:8000"


def make_run(root, name="a", events=EVENTS, config=None):
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or {"seed": 0}))
    written(folder / "events.jsonl", events)
    return folder


def steps(count, first=1):
    return [STARTED, *(trained(step) for step in range(first, first + count))]


def client_of(**settings):
    return TestClient(create_app(Settings(**settings)), base_url=BASE)


@pytest.fixture
def root(tmp_path):
    make_run(tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def client(root):
    """Serves the run root only: nothing of the package, and no model."""
    with client_of(runs=(root,), published=False) as found:
        yield found


@pytest.fixture(scope="session")
def shipped_client():
    """Serves what comes with the package; its model is loaded once."""
    with client_of() as found:
        yield found
