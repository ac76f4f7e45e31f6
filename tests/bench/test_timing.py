"""Provenance: the command line and the CPU; turns of several processes."""

from __future__ import annotations

import fcntl
import json
import platform
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from xsake.bench import timing

PRINT = "import json; from xsake.bench import timing; print(json.dumps(timing.provenance()))"


def command_of(*call, **options):
    output = subprocess.run(call, capture_output=True, text=True, check=True, **options).stdout
    return json.loads(output)["command"]


@pytest.mark.slow
def test_a_script_is_recorded_without_its_folder(tmp_path):
    script = tmp_path / "measure.py"
    script.write_text(PRINT)
    given = command_of(sys.executable, str(script), "--out", str(tmp_path / "x.json"))
    assert given == "measure.py --out x.json"


def test_a_module_is_recorded_as_python_m(tmp_path):
    (tmp_path / "measures").mkdir()
    (tmp_path / "measures" / "__main__.py").write_text(PRINT)
    assert command_of(sys.executable, "-m", "measures", "cpu", cwd=tmp_path) == (
        "python -m measures cpu"
    )


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("Architecture: aarch64\nModel name:      Neoverse-N1\nModel: 1\n", "Neoverse-N1"),
        ("Architecture: riscv64\n", platform.machine()),
    ],
    ids=["named", "not named"],
)
def test_the_processor_is_named_by_lscpu(output, name, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: "lscpu")
    monkeypatch.setattr(
        subprocess, "run", lambda call, **_: subprocess.CompletedProcess(call, 0, stdout=output)
    )
    assert timing._processor() == name


def test_without_lscpu_the_processor_is_named_by_python(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert timing.provenance()["machine"]["processor"]


def test_flags_of_xla_are_recorded(monkeypatch):
    """They may change times, as those that turn its autotuning off do."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert timing.provenance()["xla_flags"] == "--xla_gpu_autotune_level=0"
    monkeypatch.delenv("XLA_FLAGS")
    assert "xla_flags" not in timing.provenance()


def test_a_recorded_command_can_be_pasted_into_a_shell(monkeypatch):
    arguments = ["--only", "shared, 1·16|mask", "--out", "/a/b c.json"]
    monkeypatch.setattr("sys.argv", ["xsake", *arguments])
    *_, only, cases, out, file = shlex.split(timing.command_line())
    assert (only, cases, out, file) == (*arguments[:3], "b c.json")


def test_processes_that_share_a_lock_take_turns(tmp_path, monkeypatch):
    """Another process could not take the lock inside `alone`, and can after it."""
    path = tmp_path / "lock"
    monkeypatch.setenv("XSAKE_TIMING_LOCK", str(path))
    with path.open("w") as other:
        with timing.alone(), timing.alone(), pytest.raises(BlockingIOError):  # one inside another
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_work_that_is_not_timed_waits_for_who_times(tmp_path, monkeypatch):
    """Others may prepare at the same time; who prepares cannot wait for its own end."""
    path = tmp_path / "turn"
    monkeypatch.setenv("XSAKE_TIMING_LOCK", str(path))
    with path.open("w") as other:
        with timing.beside(), timing.beside():
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(other, fcntl.LOCK_UN)
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with pytest.raises(RuntimeError, match="cannot time"), timing.alone():
                pass
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_UN)
        with timing.alone(), timing.beside(), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_who_waits_alone_is_not_overtaken(tmp_path, monkeypatch):
    """Processes that share the lock, one after the other, would never leave it to a third."""
    path = tmp_path / "lock"
    monkeypatch.setenv("XSAKE_TIMING_LOCK", str(path))
    program = "from xsake.bench import timing\nwith timing.alone(): print('alone', flush=True)"
    with path.open("w") as first, (tmp_path / "lock.turn").open("w") as turn:
        fcntl.flock(first, fcntl.LOCK_SH)
        waiting = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        try:
            while True:  # until the process has taken its turn
                try:
                    fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    break
                fcntl.flock(turn, fcntl.LOCK_UN)
                assert waiting.poll() is None
                time.sleep(0.01)
            fcntl.flock(first, fcntl.LOCK_UN)
            assert waiting.communicate(timeout=60)[0] == b"alone\n"
        finally:
            waiting.kill()
    assert waiting.returncode == 0
