"""Sizes of a mesh; training on it equals training on one device; runs resume on any mesh."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.families import LLAMA
from xsake.model.on_mesh import mesh_for_text
from xsake.parallel.mesh import (
    MeshSizes,
    abstract_mesh,
    check_divides,
    make_mesh,
    parse,
    resolved,
)
from xsake.train.config import Config, Data, Hads
from xsake.train.step import token_order

ROOT = Path(__file__).parents[2]


def run_module(name, *arguments):
    ended = subprocess.run(
        [sys.executable, "-m", name, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    return ended.stdout.count(": ok\n")


@pytest.mark.slow
def test_training_on_eight_devices_equals_training_on_one(tmp_path):
    """Data × fsdp, with plans, evaluation and a checkpoint that one device goes on from."""
    assert run_module("tests.train.sharded", tmp_path) == 7


@pytest.mark.parametrize(
    "shapes",
    [
        ["fsdp=2,context=2,tensor=2"],
        [],
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_steps_on_a_mesh_equal_those_on_one_device(shapes):
    """And devices hold their shares of the state, by bytes; a checkpoint is read on any mesh."""
    claims = 1 + 3 * 3 if shapes else 1 + 3 * (2 * 7 + 2 * 2)
    assert run_module("tests.parallel.shapes", *shapes) == claims


@pytest.mark.parametrize(
    ("flags", "claims"),
    [
        pytest.param([], 2, marks=pytest.mark.second_python, id="one case"),
        pytest.param(["--all"], 8, marks=pytest.mark.slow, id="all"),
    ],
)
def test_sparse_attention_of_split_sequences_is_that_of_one_device(flags, claims):
    assert run_module("tests.parallel.nsa_on_eight", *flags) == claims


@pytest.mark.parametrize(
    ("claim", "count"),
    [
        pytest.param("generation is", 1, marks=pytest.mark.slow, id="generation"),
        pytest.param("observed heads", 1, marks=pytest.mark.second_python, id="heads"),
        pytest.param("", 7, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="all"),
    ],
)
def test_commands_on_a_mesh_have_the_results_of_one_device(claim, count):
    """Calibration, evaluation, generation, the passes of the server, heads while training."""
    assert run_module("tests.parallel.commands_on_eight", claim) == count


def test_tokens_are_laid_out_so_that_devices_have_equal_work():
    mesh = abstract_mesh(parse("data=1,fsdp=1,tensor=1,context=4"))
    data, windowed = Data(length=512, rows=4), dataclasses.replace(LLAMA, window=8)
    nsa = dataclasses.replace(LLAMA, attention="nsa")
    orders = {
        "zigzag": Config(model=LLAMA, data=data),
        "balanced": Config(model=LLAMA, data=data, hads=Hads(density=0.9, block=32)),
        "contiguous": Config(model=windowed, data=data),
    }
    assert {name: token_order(config, mesh) for name, config in orders.items()} == {
        name: name for name in orders
    }
    large = Hads(density=0.9, block=64)  # two row blocks on each of four devices
    for config in (Config(model=nsa, data=data), Config(model=LLAMA, data=data, hads=large)):
        assert token_order(config, mesh) == "contiguous"
    assert token_order(orders["zigzag"], None) == "contiguous"


@pytest.mark.parametrize(
    ("sizes", "length", "message"),
    [
        ("data=2", 64, "mesh.data = 2 splits batch rows, but one text is read at a time"),
        ("context=2", None, "mesh.context = 2 splits texts whose length is known"),
        ("context=4", 62, "length = 62 is not divisible by mesh.context = 4; choose"),
        ("tensor=4", 64, "model.kv_heads = 2 is not divisible by mesh.tensor = 4"),
        ("fsdp=16", 64, "has 16 devices, but there are 8"),
    ],
)
def test_a_mesh_that_cannot_read_one_text_is_refused(monkeypatch, sizes, length, message):
    monkeypatch.setattr("jax.device_count", lambda: 8)
    monkeypatch.delenv("XSAKE_MESH", raising=False)
    with pytest.raises(ValueError, match=message):
        mesh_for_text(LLAMA, parse(sizes), length)


def test_what_is_not_given_is_chosen():
    nothing: dict[str, str] = {}
    assert resolved(MeshSizes(), 8, environment=nothing) == MeshSizes(8, 1, 1, 1)
    assert resolved(MeshSizes(fsdp=4), 8, environment=nothing) == MeshSizes(2, 4, 1, 1)
    # as many devices as share the rows evenly
    assert resolved(MeshSizes(), 8, 20, 2, environment=nothing).data == 5
    assert resolved(MeshSizes(tensor=2), 8, 6, environment=nothing) == MeshSizes(3, 1, 2, 1)


def test_settings_win_over_the_environment():
    environment = {"XSAKE_MESH": "fsdp=2, context=2"}
    assert resolved(MeshSizes(), 8, environment=environment) == MeshSizes(2, 2, 1, 2)
    assert resolved(MeshSizes(fsdp=4), 8, environment=environment) == MeshSizes(1, 4, 1, 2)


@pytest.mark.parametrize("text", ["fsdp", "fsdp=two", "model=2", "fsdp=2,fsdp=4", "fsdp=-1"])
def test_a_mesh_that_cannot_be_read_raises(text):
    with pytest.raises(ValueError, match=r"the mesh '.*' has '.*'; give each of data, fsdp, "):
        parse(text)


def test_a_negative_size_raises():
    with pytest.raises(ValueError, match=r"mesh.tensor must not be negative, got -2; 0 has it"):
        resolved(MeshSizes(tensor=-2), 8, environment={})


@pytest.mark.parametrize(
    ("asked", "how", "message"),
    [
        (MeshSizes(data=99), {}, r"data 99 × fsdp 1 .* has 99 devices, but there are 8; ask for"),
        (MeshSizes(fsdp=16), {}, r"has 16 devices, but there are 8; ask for fewer"),
        (MeshSizes(data=2), {"all_devices": True}, r"but there are 8; all of them must take part"),
        (MeshSizes(fsdp=3), {"all_devices": True}, r"has 6 devices, but there are 8; all of them"),
        (MeshSizes(data=3), {"rows": 8}, r"data.rows = 8 is not divisible by mesh.data × mesh.fs"),
        (MeshSizes(fsdp=8), {"rows": 4}, r"= 1 × 8 × 1; make it a multiple of 8, or change the"),
        (MeshSizes(), {"rows": 4, "all_devices": True}, r"= 8 × 1 × 1; make it a multiple of 8"),
    ],
)
def test_sizes_that_do_not_fit_raise(asked, how, message):
    with pytest.raises(ValueError, match=message):
        resolved(asked, 8, environment={}, **how)


def test_a_model_that_an_axis_does_not_divide_raises():
    divided = {"fsdp": ("model.width", 64), "tensor": ("model.kv_heads", 3)}
    check_divides(MeshSizes(1, 4, 3, 1), divided)
    with pytest.raises(
        ValueError, match=r"model.kv_heads = 3 is not divisible by mesh.tensor = 4; choose mesh.te"
    ):
        check_divides(MeshSizes(1, 4, 4, 1), divided)


def test_one_device_has_no_mesh():
    assert make_mesh(MeshSizes(1, 1, 1, 1)) is None
    with pytest.raises(ValueError, match="the axis 'data' has no size yet; `resolved` divides"):
        make_mesh(MeshSizes(fsdp=2))
