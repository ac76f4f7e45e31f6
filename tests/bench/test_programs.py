"""What benchmarks check first: without their GPU, and with bad input, they end in a sentence."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import re
import runpy
from pathlib import Path

import pytest
import tyro

from xsake import _jax
from xsake.bench import programs, run
from xsake.bench.suites import costs, counters, first_call, parallel, selection, train_step
from xsake.cli import machine

HOPPER = [name for name in run.SUITES if name.startswith("hopper")]
SUITES = Path(costs.__file__).parent
PROGRAMS = [x.stem for x in SUITES.glob("*.py") if "programs.parser(" in x.read_text()]

COMMANDS = {  # programs whose options tyro makes from functions
    name: importlib.import_module(f"xsake.bench.suites.{name}").COMMANDS
    for name in ("certificate", "hads_table", "tasks")
} | {"selection": {"": selection.main}}

without_gpu = pytest.mark.skipif(_jax.platform() != "cpu", reason="there is a GPU")


def main_of(name):
    if name in COMMANDS:
        run_command = functools.partial(tyro.extras.subcommand_cli_from_dict, COMMANDS[name])
        run_alone = functools.partial(tyro.cli, selection.main)
        return lambda line: (run_alone if name == "selection" else run_command)(args=line)
    return importlib.import_module(f"xsake.bench.suites.{name}").main


@pytest.fixture
def ends(capsys, tmp_path, monkeypatch):
    """ends(name, line): the sentence with which a program stops in an empty folder; status 2."""
    monkeypatch.chdir(tmp_path)

    def end(name, line):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as stopped:
            main_of(name)(line.split())
        assert stopped.value.code == programs.BAD_INPUT
        assert sorted(tmp_path.rglob("*")) == before  # nothing was written
        printed = capsys.readouterr()
        assert not printed.out
        assert printed.err.count("\n") == 1
        return printed.err.strip()

    return end


@pytest.mark.parametrize("suite", run.SUITES)
def test_a_suite_that_is_run_as_a_program_names_its_command(suite, capsys):
    path = SUITES / f"{suite.replace('-', '_')}.py"
    if "def main(" in path.read_text():
        return  # it is a program, too
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(path), run_name="__main__")
    assert stopped.value.code == programs.BAD_INPUT
    said = f"this module is no program but a suite: run `xsake bench --suite {suite}`\n"
    assert capsys.readouterr().err == said


# ---------------------------------------------------------------------------------------- machines


@without_gpu
@pytest.mark.parametrize(
    "given",
    [
        *({"suite": name} for name in HOPPER),
        {"suite": "hopper", "jobs": 2},
        {"suite": "hopper-versions", "seconds": 5.0},
        {"autotune": True},
        {"autotune": True, "join": (Path("a.json"),)},
    ],
    ids=str,
)
def test_suites_for_hopper_are_refused_before_anything_is_written(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE",):
        monkeypatch.setenv(name, os.environ.get(name, "true"))  # which `bench` sets with --jobs
    with pytest.raises(
        ValueError, match=r"^--.* needs a Hopper GPU \(H100, H200\); this is a cpu$"
    ):
        machine.bench(**given)
    assert list(tmp_path.iterdir()) == []


@without_gpu
@pytest.mark.parametrize(
    ("name", "line", "sentence"),
    [
        ("counters", "launch 1 256 64 0.5 --facts f.json", "counters launch needs a Hopper GPU (H"),
        ("first_call", "--platform gpu --index 0", "first_call --platform gpu needs a GPU; this"),
        ("train_step", "--only dense", "train_step needs a GPU; this is a cpu"),
        ("train_profile", "--only dense", "train_profile needs a GPU; this is a cpu"),
        ("certificate", "speed --out o", "certificate speed needs a GPU; this is a cpu"),
        (
            "certificate",
            "model --model m --documents d --profile p --out o",
            "certificate model needs a GPU; this is a cpu",
        ),
        ("selection", "--out o", "selection needs a Hopper GPU (H"),
    ],
)
def test_programs_for_a_gpu_end_in_a_sentence(ends, name, line, sentence):
    assert ends(name, line).startswith(sentence)


@pytest.mark.parametrize(
    ("name", "line"), [("first_call", "--platform gpu --out o.json"), ("train_step", "")]
)
def test_a_program_that_starts_others_asks_another_process_for_the_gpu(
    ends, name, line, monkeypatch
):
    """Its own JAX would take the memory of the processes that measure."""

    def own(need):
        raise AssertionError("this process looked at the GPU")

    monkeypatch.setattr(programs, "why_not", own)
    monkeypatch.setattr(programs, "why_not_apart", lambda need: f"needs a {need}")
    assert ends(name, line).endswith(" needs a gpu")


@pytest.mark.slow
@without_gpu
def test_a_process_of_its_own_says_what_was_found():
    for need in ("gpu", "hopper"):
        assert programs.why_not_apart(need) == programs.why_not(need)


def test_a_device_that_jax_cannot_start_is_a_reason(monkeypatch):
    def platform():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(_jax, "platform", platform)
    assert programs.why_not("gpu") == (
        "needs a GPU, but JAX cannot start: Unable to initialize backend 'cuda'"
    )


def test_any_gpu_is_enough_for_some_and_an_old_one_is_refused_by_others(monkeypatch):
    monkeypatch.setattr(_jax, "platform", lambda: "gpu")
    monkeypatch.setattr(_jax, "compute_capability", lambda: (8, 0))
    monkeypatch.setattr(_jax, "device_kind", lambda: "NVIDIA A100")
    assert programs.why_not("gpu") is None
    assert programs.why_not("hopper").endswith("this is NVIDIA A100")


# ------------------------------------------------------------------------------------------- input


@pytest.mark.parametrize(
    ("name", "line", "sentence"),
    [
        (
            "first_call",
            "--index 99",
            "--index is 99; attention, layers, model, cache on a cpu have",
        ),
        ("first_call", "--index -1", "--index is -1; "),
        ("costs", "gone.json", "there is no file gone.json"),
        ("costs", "list.json", "list.json is not a result file of `xsake bench --suite costs`: "),
        ("costs", "cpu.json", "cpu.json is not a result file of `xsake bench --suite costs`: res"),
        ("costs", "empty.json", "empty.json has no results; measure them"),
        ("training", "nope --out o.json", "nope is not the folder of a run: there is no nope/eve"),
        ("training", "run --out o.json", "run/events.jsonl has no start of a run; name the fold"),
        ("counters", "read gone.json --out o.json", "there is no file gone.json"),
        ("counters", "read cpu.json --out o.json", "cpu.json is not written by `launch`: it has"),
        ("counters", "read case.json --out o.json", "there is no file case.csv, which ncu writes"),
        ("counters", "read other.json --out o.json", "other.csv has no kernel with these metrics"),
        ("parallel", "--out o.json --profile x", "--profile is 'x'; give NAME=FILE, such as"),
        ("parallel", "--out o.json --profile x=gone", "gone"),
        ("certificate", "coverage --model m --documents d --profile gone --out o", "No such file"),
        ("certificate", "one_key --out gone/o", "there is no folder gone; make it first"),
        (
            "hads_table",
            "prepare --model gone --out o --novels a --held-out b --wikipedia c",
            "there is no checkpoint gone",
        ),
        ("hads_table", "table --model m --documents d --out o --profiles p", "no file d/held_out"),
        ("hads_table", "profile --model m --documents d --out o", "no file d/novels.npy"),
        ("hads_table", "profile --model m --documents run --out run", "run is a folder; name a f"),
        ("hads_table", "speed --model m --documents d --out o --plan list.json", "list.json cann"),
        ("tasks", "prepare --model gone --out o --calibration a --held-out b", "no checkpoint go"),
        (
            "tasks",
            "table --model m --documents d --profiles p --out o",
            "there is no d/fillers.npy",
        ),
        (
            "tasks",
            "heads --model m --documents d --profiles p --out o",
            "there is no d/fillers.npy",
        ),
        ("tasks", "merge --out o --parts gone", "there is no file gone"),
        ("tasks", "merge --out o --parts cpu.json", "cpu.json is not a table of tasks that can"),
        ("sparse_training", "--train a --valid b --runs r --out o", "there is no a, b; `xsake tok"),
    ],
)
def test_bad_input_ends_in_a_sentence(ends, tmp_path, name, line, sentence):
    case = {"case": "x", "machine": {}, "commit": "a"}
    for file, content in {
        "list.json": [],
        "cpu.json": {"results": [{"case": "x", "median_seconds": 1.0}]},
        "empty.json": {"results": []},
        "case.json": case,
        "other.json": case,
    }.items():
        (tmp_path / file).write_text(json.dumps(content))
    (tmp_path / "other.csv").write_text('"ID","Kernel Name"\n"",""\n"0","k"\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("")
    assert sentence in ends(name, line)


@pytest.mark.parametrize("out", ["gone/o.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    out, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for run_program in (first_call.main, train_step.main, parallel.main):
        with pytest.raises(SystemExit):
            run_program(["--out", out])
        assert "argument --out: " in capsys.readouterr().err


def test_the_counters_of_a_kernel_are_read(tmp_path):
    """The first line has the units."""
    names = ["Kernel Name", *counters.METRICS.values()]
    lines = [names, ["", "ns", *[""] * (len(names) - 2)], ["xsake_forward", *["2"] * len(names)]]
    table = tmp_path / "case.csv"
    table.write_text(
        "".join(",".join(f'"{x}"' for x in line[: len(names)]) + "\n" for line in lines)
    )
    (record,) = counters.records_of({"case": "x"}, table)
    assert record["kernel"] == "xsake_forward"
    assert record["seconds"] == pytest.approx(2e-9)
    assert record["cycles"] == 2


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_option_of_a_program_is_described(name, monkeypatch):
    """Its description keeps its lines."""
    made = []
    original = programs.parser

    def keep(*given):
        made.append(original(*given))
        return made[-1]

    monkeypatch.setattr(programs, "parser", keep)
    with pytest.raises(SystemExit):
        main_of(name)(["--help"])
    (parser,) = made
    assert parser.description in parser.format_help()
    parsers = [parser]
    while parsers:
        for action in parsers.pop()._actions:
            if isinstance(action.choices, dict):  # subcommands
                assert len(action._choices_actions) == len(action.choices)
                parsers += action.choices.values()
            else:
                assert action.help, action


@pytest.mark.parametrize(
    ("name", "command"), [(name, command) for name, some in COMMANDS.items() for command in some]
)
def test_every_option_of_a_command_is_described(name, command):
    """tyro takes the words from the docstring, also of a function that `stopping` wraps."""
    function = COMMANDS[name][command]
    described = re.findall(r"^ {6}(\w+): \S", function.__doc__.partition("Args:")[2], re.MULTILINE)
    assert described == list(inspect.signature(function).parameters)
