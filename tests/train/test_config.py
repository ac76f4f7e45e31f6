"""The config round-trips through JSON, refuses unknown keys, and hashes what affects results."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.train.corpus import changed
from xsake.model import PRESETS as MODELS
from xsake.model import parameter_shapes
from xsake.train.config import PRESETS, Config, Hads
from xsake.train.flops import per_token


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_round_trips_through_json(name, tmp_path):
    config = PRESETS[name]
    config.write(tmp_path / "config.json")
    found = Config.read(tmp_path / "config.json")
    assert found == config
    assert found.hash == config.hash


def test_unknown_keys_raise_at_any_depth():
    with pytest.raises(ValueError, match="Config has no 'optimiser'; did you mean 'optimizer'"):
        Config.from_dict({"optimiser": {}})
    with pytest.raises(ValueError, match="hads has no 'densty'; did you mean 'density'"):
        Config.from_dict({"hads": {"densty": 0.4}})
    with pytest.raises(ValueError, match="has no 'layer'"):
        Config.from_dict({"model": {**PRESETS["tiny"].model.to_dict(), "layer": 1}})


def test_the_hash_covers_what_affects_results_and_nothing_else():
    config = PRESETS["tiny"]
    same = changed(config, run__name="b", checkpoint__every=3, observe__every=9, data__train=("x",))
    assert same.hash == config.hash
    for change in (
        {"seed": 1},
        {"data__rows": 4},
        {"optimizer__beta2": 0.9},
        {"schedule__steps": 99},
        {"hads__density": 0.9},
        {"compute__dtype": "bfloat16"},
    ):
        assert changed(config, **change).hash != config.hash, change


def test_the_hash_of_a_run_stays_when_models_get_new_settings():
    """That of a run before `Config` had soft caps, sinks and the like; one that is used counts."""
    config = Config(model=MODELS["tiny"])
    assert config.hash == "0b554f85318efc1c"
    model = dataclasses.replace(config.model, sinks=True)
    assert dataclasses.replace(config, model=model).hash != config.hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data__length": 300}, "data.length = 300 is more than model.context = 256"),
        ({"data__bos": True}, "model.bos, which is None; set model.bos to the id of a token"),
        ({"optimizer__accumulate": 3}, "data.rows = 8 is not a multiple"),
        ({"optimizer__ema_decay": 1.0}, "ema_decay must be at least 0 and below 1"),
        ({"hads__density": 0.01}, "density 0.01 is below"),
        ({"hads__policy": "best"}, "hads.policy 'best' is not one of"),
        ({"hads__policy": "loss"}, "hads.policy 'loss' is not one of"),
        ({"compute__dtype": "int8"}, "compute.dtype 'int8' is not one of"),
        ({"schedule__warmup_steps": 101}, "schedule.warmup_steps = 101 is more than"),
        ({"schedule__steps": 0}, "schedule.steps must be at least 1, got 0"),
        ({"evaluation__windows": -1}, "evaluation.windows must not be negative, got -1"),
        ({"run__seconds": -1.0}, "run.seconds must not be negative, got -1.0"),
        ({"run__stop_at": -1}, "run.stop_at must not be negative"),
        ({"checkpoint__best": -1}, "checkpoint.best must not be negative"),
        ({"compute__loss_tokens": -1}, "compute.loss_tokens must not be negative"),
        ({"hads__band": -1}, "hads.band must not be negative"),
        ({"seed": -1}, "seed must not be negative"),
        ({"mesh__fsdp": -1}, "mesh.fsdp must not be negative, got -1; 0 has it chosen"),
        ({"compute__implementation": "nope"}, r"compute.implementation 'nope' is not one of \["),
        ({"schedule__final_ratio": -0.1}, "schedule.final_ratio must not be negative"),
        ({"optimizer__beta1": 1.0}, "optimizer.beta1 must be at least 0 and below 1, got 1.0"),
        ({"optimizer__beta2": -0.1}, "optimizer.beta2 must be at least 0 and below 1, got -0.1"),
        (
            {"hads": Hads(density=0.9, ramp_steps=9, from_density=0.01)},
            r"density 0.01 is below .* \(hads.from_density, hads.block = 64\)",
        ),
        (
            {"hads": Hads(density=0.9, ramp_steps=9, from_density=1.5)},
            r"1.5.* \(hads.from_density, hads.block = 64\)",
        ),
        *(
            ({"run__name": x}, "run.name names a folder inside")
            for x in ("", ".", "..", "a/b", "/a")
        ),
        ({"optimizer__learning_rate": float("nan")}, "learning_rate must not be negative, got nan"),
    ],
)
def test_invalid_settings_raise(change, message):
    with pytest.raises(ValueError, match=message):
        changed(PRESETS["tiny"], **change)


def test_a_density_that_no_plan_has_is_not_checked():
    """Without a ramp, from_density is not used."""
    assert changed(PRESETS["tiny"], hads=Hads(density=0.9, from_density=0.01)).hads.ramp_steps == 0


def test_the_density_falls_linearly_after_the_dense_steps():
    hads = Hads(density=0.4, warmup_steps=10, every=5, from_density=1.0, ramp_steps=20)
    assert [hads.density_at(x) for x in (0, 9)] == [None, None]
    found = [hads.density_at(x) for x in (10, 15, 20, 30, 99)]
    assert found == pytest.approx([1.0, 0.85, 0.7, 0.4, 0.4])
    assert [x for x in range(31) if hads.is_due(x)] == [10, 15, 20, 25, 30]
    assert not any(Hads().is_due(x) for x in range(200))


def test_the_presets_have_their_documented_sizes():
    sizes = {}
    for name, config in PRESETS.items():
        shapes = parameter_shapes(config.model).values()
        sizes[name] = sum(map(math.prod, shapes))
    assert 2 * sizes["shipped"] < 12e6  # bytes in bfloat16
    for name in ("gpt-37m", "gpt-37m-4k", "gpt-37m-nsa", "gpt-37m-msa"):
        assert 36.5e6 < sizes[name] < 38e6, (name, sizes[name])


def test_data_bos_is_on_in_the_preset_shipped_only():
    """And it changes the config hash."""
    shipped = PRESETS["shipped"]
    assert {name for name, config in PRESETS.items() if config.data.bos} == {"shipped"}
    assert changed(shipped, data__bos=False).hash != shipped.hash


def test_flops_per_token_equal_a_count_by_hand():
    """4 width² + 3 width · 1024 weights per layer, the head, and T / 2 keys per query."""
    model = PRESETS["gpt-37m"].model
    width, layers = 384, 10
    matrices = layers * (4 * width**2 + 3 * width * 1024) + 50_304 * width
    attention = 12 * layers * width * (2048 / 2)
    assert per_token(model, 2048) == 6 * matrices + attention
    assert per_token(model, 2048, 0.25) == 6 * matrices + attention / 4


def test_devices_of_an_old_config_are_the_data_axis():
    found = Config.from_dict({"run": {"devices": 4, "name": "old"}, "mesh": {"fsdp": 2}})
    assert (found.mesh.data, found.mesh.fsdp, found.run.name) == (4, 2, "old")
