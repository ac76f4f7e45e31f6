"""Attention over a sequence split over eight devices equals attention on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from xsake import BlockMask, masks
from xsake.parallel import context_attention, explain_context, token_order
from xsake.parallel.context.rows import device_loads

ROOT = Path(__file__).parents[2]
Q = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16)
K = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    ("flags", "claims"),
    [
        pytest.param([], 8, marks=pytest.mark.second_python, id="one of each kind"),
        pytest.param(["--all"], 22, marks=pytest.mark.slow, id="all"),
    ],
)
def test_eight_devices_give_the_results_of_one(flags, claims):
    ended = subprocess.run(
        [sys.executable, "-m", "tests.parallel.context_on_eight", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert ended.stdout.count(": ok\n") == claims


def blocks(block: int, heads: int = 1, shape: tuple[int, int] = (1024, 1024)) -> BlockMask:
    return BlockMask.from_rule(masks.causal(), shape, block=block, heads=heads)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"devices": 3}, "1024 tokens does not divide over 3 devices; pad it to 1026"),
        ({"layout": "snake"}, "layout must be one of .'contiguous', 'zigzag'., got 'snake'"),
        ({"devices": 1024, "layout": "zigzag"}, "even number of tokens on every device, got 1"),
        ({"method": "tree"}, "method 'tree' is not one of"),
        ({"capacity": 0}, "capacity must be an integer"),
        ({"mask": blocks(128, shape=(512, 512))}, r"is for \(T, S\) = \(512, 512\), but 8 devices"),
        ({"mask": blocks(256)}, "query blocks of 256 tokens, which do not divide the 128"),
        ({"mask": blocks(128), "layout": "zigzag"}, "do not divide the 64 consecutive tokens"),
        (
            {"mask": blocks(128), "q_positions": np.arange(1024)[None]},
            "positions cannot be applied",
        ),
        ({"kv_segment_ids": np.zeros((1, 1024), np.int32)}, "needs q_segment_ids beside it"),
        ({"implementation": "fast"}, "implementation 'fast' is not one of"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(arguments, words):
    with pytest.raises((ValueError, TypeError), match=words):
        explain_context(Q, K, K, **{"devices": 8, **arguments})


def balanced(local, devices, mask=None):
    """The shape of a balanced call's output, [B, T, N, H] of the whole sequence."""
    q = jax.ShapeDtypeStruct((1, local * devices, 2, 8), jnp.float32)
    mesh = AbstractMesh((devices,), ("context",), axis_types=(AxisType.Auto,))

    def attend(q, k, v):
        return context_attention(q, k, v, mask, is_causal=True, balance=True)

    tokens = P(None, "context")
    split = jax.shard_map(attend, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
    return jax.eval_shape(split, q, q, q).shape


@pytest.mark.parametrize(("local", "devices"), [(96, 2), (320, 2), (144, 3), (32, 2)])
def test_rows_are_balanced_in_blocks_that_fit(local, devices):
    """96 tokens are three blocks of 32 for two devices, but six of 16."""
    assert balanced(local, devices) == (1, local * devices, 2, 8)


@pytest.mark.parametrize(
    ("local", "devices", "block"), [(376, 3, None), (24, 2, None), (16, 2, None), (128, 2, 128)]
)
def test_rows_that_cannot_be_balanced_are_refused(local, devices, block):
    """Also as many blocks as devices of which the last is cut off: 24 tokens are 16 and 8."""
    mask = None if block is None else blocks(block, shape=(local * devices,) * 2)
    words = rf"multiple of the {devices} devices, got {local} tokens in blocks of {block or 16}; "
    with pytest.raises(ValueError, match=words):
        balanced(local, devices, mask)


def test_outside_of_shard_map_it_says_where_to_call_it():
    x = jnp.zeros((1, 16, 1, 8))
    with pytest.raises(ValueError, match=r"make this call inside jax.shard_map over a mesh that"):
        context_attention(x, x, x)


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        ({"is_causal": True}, "ring"),
        ({"is_causal": True, "layout": "zigzag"}, "ring"),
        ({"is_causal": True, "devices": 2}, "ring"),  # not a halo of all other keys
        ({"local_window_size": (100, 0)}, "halo"),
        ({"mask": masks.sliding_window(60, 0) | masks.first(4), "block": 32}, "gather"),
        ({"mask": masks.sliding_window(60, 0) | masks.first(4)}, "ring"),
    ],
)
def test_the_method_of_least_traffic_is_taken(arguments, method):
    """With blocks of 32, the first tokens are one block and not a whole chunk."""
    if (block := arguments.pop("block", None)) is not None:
        arguments["mask"] = BlockMask.from_rule(arguments["mask"], (1024, 1024), block=block)
        arguments["capacity"] = 2
    assert explain_context(Q, K, K, **{"devices": 8, **arguments}).method == method


def test_a_method_that_cannot_run_says_why():
    told = explain_context(Q, K, K, devices=8, is_causal=True, layout="zigzag", method="halo")
    assert told.method is None
    assert told.estimates["halo"].reason == (
        "needs layout 'contiguous' and as many queries as keys"
    )


def test_zigzag_is_a_permutation_that_gives_causal_devices_equal_work():
    order = token_order(64, 4, "zigzag")
    assert np.array_equal(np.sort(order), np.arange(64))
    visits = np.arange(1, 65)
    assert (visits[order].reshape(4, 16).sum(1) == visits.sum() / 4).all()


@pytest.mark.parametrize("seed", range(3))
def test_balanced_row_blocks_have_nearly_equal_work(seed):
    """HADS-like work: any number of visits in any row block, which no layout can know."""
    visits = np.random.default_rng(seed).geometric(0.05, 512) * np.linspace(0.2, 2, 512)
    worst = {
        name: device_loads(visits, 8, name).max() * 8 / visits.sum()
        for name in ("contiguous", "zigzag", "balanced")
    }
    assert worst["balanced"] <= 1.02 < worst["contiguous"]
    assert worst["balanced"] < worst["zigzag"]


def test_classes_and_lists_of_a_mask_are_inverse():
    mask = blocks(256)
    again = BlockMask.from_classes(mask.blocks(), mask.rule, mask.shape, mask.block)
    assert np.array_equal(again.blocks(), mask.blocks())
    assert len(np.unique(mask.blocks())) == 3  # empty, partial and full
