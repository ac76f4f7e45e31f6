"""The installed command: its version, its name, and what it says when packages are missing."""

from __future__ import annotations

import inspect
import itertools
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from jax import monitoring
from rich.console import Console

import xsake
from xsake import __main__, _extras, cli
from xsake.cli import progress, terminal
from xsake.observe.compiling import COMPILED, LOWERED
from xsake.train import config as settings
from xsake.train import loop

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"absl-py": "absl", "orbax-checkpoint": "orbax.checkpoint"}  # unlike their distribution
# Of benchmarks and checks, where installed.
PEERS = {
    "cudnn", "flash_attn", "flash_nsa", "native_sparse_attention", "scipy", "torch", "wandb",
}  # fmt: skip


def test_every_extra_lists_the_modules_that_it_installs():
    extras = PROJECT["optional-dependencies"]
    for extra, modules in _extras.MODULES.items():
        names = [re.split(r"[\[><=]", x)[0] for x in extras[extra]]
        wanted = {MODULES.get(x, x.replace("-", "_")) for x in names if x not in ("xsake", "jax")}
        assert set(modules) == wanted, extra
    included = {x: re.findall(r"xsake\[(.*?)\]", " ".join(extras[x])) for x in _extras.MODULES}
    assert {x: tuple(y) for x, y in included.items() if y} == _extras.INCLUDED
    table = (ROOT / "README.md").read_text().partition("| extra | installs")[2].partition("\n\n")[0]
    assert set(
        re.findall(r"`(\w+)`", " ".join(re.findall(r"^\|(.*?)\|", table, re.MULTILINE)))
    ) == set(extras)


def test_every_import_of_the_package_is_required_or_in_an_extra():
    known = {x.split(".")[0] for modules in _extras.MODULES.values() for x in modules}
    known |= {re.split(r"[><=]", x)[0] for x in PROJECT["dependencies"]} | {"jaxlib", "xsake"}
    pages = ROOT / "xsake" / "server" / "static"  # which may be built meanwhile
    folders = [x for x in (ROOT / "xsake").iterdir() if x.is_dir() and x.name != "server"]
    folders += [x for x in pages.parent.iterdir() if x.is_dir() and x != pages]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    for path in [*paths, *(ROOT / "xsake").glob("*.py"), *pages.parent.glob("*.py")]:
        imports = re.findall(
            r"^ *(?:import|from) (\w+)(?:$|[\w.]* (?:as|import) )", path.read_text(), re.MULTILINE
        )
        found = set(imports) - known - PEERS - sys.stdlib_module_names
        assert not found, (path, found)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ModuleNotFoundError) as raised:
        _extras.require("xsake train", "train")
    wanted = "xsake train needs flax and optax, which are not installed: pip install 'xsake[train]'"
    assert str(raised.value) == _extras.advice(raised.value) == wanted
    for name, advice in (
        ("tensorboardX", "tensorboardX is not installed: pip install 'xsake[tensorboard]'"),
        ("orbax", "orbax is not installed: pip install 'xsake[train]'"),
        ("torch", "it belongs to no extra of xsake"),
    ):
        assert advice in _extras.advice(ModuleNotFoundError("No module", name=name))


def typed(monkeypatch, capsys, main, *words):
    monkeypatch.setattr(sys, "argv", ["xsake", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr().out
    return said if stopped.value.code == 1 else stopped.value.code


def test_commands_say_which_extra_is_missing_before_they_start(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optax", None)
    wanted = "needs optax, which is not installed: pip install 'xsake[train]'\n"
    for command in ("train", "demo"):
        said = typed(monkeypatch, capsys, cli.main, command)
        assert said == f"xsake: xsake {command} {wanted}"
    monkeypatch.setitem(sys.modules, "tyro", None)
    said = typed(monkeypatch, capsys, __main__.main)
    assert said == (
        "xsake: the command xsake needs tyro, which is not installed: pip install 'xsake[cli]'"
    )


@pytest.mark.parametrize(
    ("setting", "value", "module", "extra"),
    [
        ("tensorboard", True, "tensorboardX", "tensorboard"),
        ("wandb", True, "wandb", "wandb"),
        ("prometheus_port", 9000, "prometheus_client", "serve"),
    ],
)
def test_a_missing_sink_is_refused_before_a_folder_is_made(
    tmp_path, monkeypatch, setting, value, module, extra
):
    monkeypatch.setitem(sys.modules, module, None)
    config = settings.Config(
        data=settings.Data(train=("nowhere",)),
        observe=settings.Observe(**{setting: value}),
        run=settings.Run(folder=str(tmp_path / "runs")),
    )
    with pytest.raises(ModuleNotFoundError, match=rf"observe\.{setting} needs .*\[{extra}\]"):
        loop.train(config)
    assert not (tmp_path / "runs").exists()


def test_the_version_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["xsake", "--version"])
    __main__.main()
    assert capsys.readouterr().out == f"xsake {xsake.__version__}\n"
    assert PROJECT["version"] == xsake.__version__
    assert PROJECT["scripts"]["xsake"] == "xsake.__main__:main"


def test_what_a_command_prints_to_run_next_runs_as_printed(tmp_path, monkeypatch):
    """With the script on the PATH, with the script elsewhere, and without a script."""
    script = tmp_path / "bin" / "xsake"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", "")
    assert terminal.runnable() == "bin/python -m xsake"
    script.parent.mkdir()
    script.touch(mode=0o755)
    assert terminal.runnable() == "bin/xsake"
    monkeypatch.setenv("PATH", str(script.parent))
    assert terminal.runnable() == "xsake"
    other = tmp_path / "other" / "xsake"  # of another environment
    other.parent.mkdir()
    other.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    assert terminal.runnable() == "bin/xsake"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_says_when_xla_compiles(capsys, monkeypatch, is_terminal):
    """A bar on a terminal; elsewhere the lines of finished parts, and "compiling" once."""
    monkeypatch.setenv("TERM", "xterm")
    shown = Console(force_terminal=is_terminal, highlight=False, width=80)
    monkeypatch.setattr(progress, "console", shown)
    with progress.progress("calibrating", 2) as report:
        for done in (1, 2):
            monitoring.record_event_duration_secs(LOWERED, 0.1)
            report("still the first line")
            time.sleep(0.15 * is_terminal)  # the bar is drawn every tenth of a second
            monitoring.record_event_duration_secs(COMPILED, 0.1)
            report(f"{done} of 2", done)
    printed = capsys.readouterr().out
    if is_terminal:
        assert -1 < printed.find("still the first line · compiling") < printed.find("2 of 2")
    else:
        assert printed == "calibrating\ncompiling\n1 of 2 (0 s)\n2 of 2 (0 s)\n"


def test_a_status_line_is_for_terminals(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for is_terminal in (False, True):
        monkeypatch.setenv("FORCE_COLOR", "1" if is_terminal else "")
        with progress.status("loading") as update:
            update("reading the prompt")
            monitoring.record_event_duration_secs(LOWERED, 0.1)
            time.sleep(0.15 * is_terminal)  # the line is drawn every tenth of a second
        captured = capsys.readouterr()
        assert not captured.out
        assert ("reading the prompt · compiling" in captured.err) == is_terminal


@pytest.mark.slow
def test_python_m_xsake_is_the_command():
    run = subprocess.run(
        [sys.executable, "-m", "xsake", "--version"], capture_output=True, check=True
    )
    assert run.stdout.decode() == f"xsake {xsake.__version__}\n"


@pytest.mark.parametrize("kind", [x for x in vars(settings).values() if inspect.isclass(x)])
def test_every_setting_has_a_help_text_of_its_own(kind):
    """tyro takes a field's comment; a field without one would get the comment above another."""
    if kind.__module__ != settings.__name__ or kind is settings.Config:
        return
    lines = inspect.getsource(kind).splitlines()
    for before, line in itertools.pairwise(lines):
        if re.match(r"    \w+: ", line):
            assert "  # " in line or before.strip().startswith("#"), line
