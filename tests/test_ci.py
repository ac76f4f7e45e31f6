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
      pytest*) exit 1 ;;
    esac""",
    "npm": "",
    "chromium": "",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_what_runs_beside_a_suite_that_fails_has_ended(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "run")
    commands, installed, log = tmp_path / "bin", tmp_path / "installed", tmp_path / "log"
    commands.mkdir()
    for name, text in COMMANDS.items():
        path = commands / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    variables = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHON": "python3.11",
        "INSTALLED": str(installed),
    }
    with log.open("w") as out:  # not a pipe, which a process that is left behind keeps open
        command = ["bash", str(tmp_path / ".ci" / "run")]
        code = subprocess.run(
            command, env=os.environ | variables, stdout=out, stderr=out, timeout=60, check=False
        ).returncode
    text = log.read_text()
    assert code == 1, text
    assert "Python 3.12: FAILED" in text.split("=== CI")[1]
    assert "total:" in text
    assert installed.exists(), "the installation was still running"
