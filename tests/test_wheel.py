"""What the wheel's metadata gets from hatch_build.py."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def build(monkeypatch):
    """hatch_build.py, which only hatchling imports; of that it needs a base class."""
    interface = types.ModuleType("interface")
    interface.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_project_urls_come_from_whoever_publishes_the_wheel(build, monkeypatch):
    metadata = {}
    monkeypatch.setenv(build.VARIABLE, "Homepage=https://a.org/x Changelog=https://a.org/x?q=1")
    build.ProjectUrls().update(metadata)
    assert metadata["urls"] == {
        "Homepage": "https://a.org/x",
        "Changelog": "https://a.org/x?q=1",
    }
    monkeypatch.delenv(build.VARIABLE)
    build.ProjectUrls().update(metadata)
    assert metadata["urls"] == {}


@pytest.mark.parametrize(
    "given", ["https://a.org", "Homepage=a.org", "=https://a.org", "A=ftp://a"]
)
def test_what_is_not_a_label_and_a_url_is_refused(build, given):
    with pytest.raises(ValueError, match="must be Label=URL pairs"):
        build.project_urls(given)
