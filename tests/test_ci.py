"""`.ci/run` with commands that only pretend."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
COMMANDS = {
    # is_newer succeeds for python3.12 only
    "python3.11": 'if [ "$1" = --version ]; then echo Python 3.11; else exit 1; fi',
    "python3.12": 'if [ "$1" = --version ]; then echo Python 3.12; fi',
    "make": """case "$*" in
      *node_modules*) sleep 1; touch "$INSTALLED" ;;
      $FAILS*) echo "it fails"; exit 1 ;;
    esac""",
    "npm": "",
    "chromium": "",
}
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def ci(folder, fails="nothing", left_out=()):
    """Its exit code, what it printed before its summary, and the summary."""
    (folder / ".ci").mkdir()
    shutil.copy(SCRIPT, folder / ".ci" / "run")
    commands, log = folder / "bin", folder / "log"
    commands.mkdir()
    for name, text in COMMANDS.items():
        if name not in left_out:
            path = commands / name
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
    for name in ("bash", "cat", "dirname", "mktemp", "rm", "sh", "sleep", "tail", "touch"):
        (commands / name).symlink_to(shutil.which(name))
    variables = {
        "PATH": str(commands),
        "PYTHON": "python3.11",
        "INSTALLED": str(folder / "installed"),
        "FAILS": fails,
    }
    with log.open("w") as out:  # not a pipe, which a process that is left behind keeps open
        command = [commands / "bash", folder / ".ci" / "run"]
        code = subprocess.run(
            command, env=os.environ | variables, stdout=out, stderr=out, timeout=60, check=False
        ).returncode
    before, _, summary = log.read_text().partition("=== CI\n")
    return code, before, summary


def test_the_summary_is_of_both_pythons_and_the_pages(tmp_path):
    code, _, summary = ci(tmp_path)
    assert code == 0, summary
    for what in ("Python 3.11", "Python 3.12", "pages in a browser"):
        assert f"{what}: passed in " in summary
    assert "total:" in summary


def test_what_runs_beside_a_suite_that_fails_has_ended(tmp_path):
    code, _, summary = ci(tmp_path, fails="pytest")
    assert code == 1
    assert "Python 3.12: FAILED" in summary
    assert "pages in a browser: passed" in summary
    assert (tmp_path / "installed").exists(), "the installation was still running"


def test_pages_that_fail_beside_a_suite_that_passes_fail_it(tmp_path):
    code, before, summary = ci(tmp_path, fails="test-web")
    assert code == 1
    assert "it fails" in before, "what they print is left out"
    assert "pages in a browser: FAILED" in summary
    assert "Python 3.12: passed" in summary


@pytest.mark.parametrize("command", ["npm", "chromium"])
def test_pages_without_node_or_a_browser_are_said_to_be_left_out(tmp_path, command):
    code, _, summary = ci(tmp_path, left_out=[command])
    assert code == 0
    assert "!!! NOT RUN: the pages in a browser" in summary
