"""Selected blocks on Hopper: lists by block, lowering, and every result on a GPU."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests.conditions import needs_gpu, needs_interpreter, needs_newer_jax
from tests.nsa import oracle
from tests.nsa.test_selected import inputs
from tests.oracle import relative_error
from xsake import _jax
from xsake.backends import SelectedCall
from xsake.backends.hopper import selected
from xsake.backends.hopper.selected import choose, lists
from xsake.backends.options import Options
from xsake.nsa.selected import attend_selected

LIMIT = 1e-2  # of bfloat16 and float16, as in test_conformance.py


def sets(rng, B, T, K, n, block, forced=(0, 0)):
    """Random sets of causal blocks of every query: some empty, some full, -1 at the end."""
    found = np.full((B, T, K, n), -1)
    for b, t, k in np.ndindex(B, T, K):
        current = t // block
        chosen = {j for j in range(current + 1) if j < forced[0] or j > current - forced[1]}
        others = [j for j in rng.permutation(current + 1).tolist() if j not in chosen]
        chosen |= set(others[: rng.integers(0, n + 1 - len(chosen))])
        found[b, t, k, : len(chosen)] = sorted(chosen)
    return found


# ------------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize("chunk", [64, 128, 640])
def test_tiles_hold_every_selection_once(chunk):
    """Each tile is of one block and one segment, in the order of tokens, with the right limits."""
    rng = np.random.default_rng(chunk)
    B, T, K, n, block, tokens = 2, 300, 2, 3, 64, 4
    indices = sets(rng, B, T, K, n, block)
    make = jax.jit(lists.tiles_of, static_argnums=(1, 2, 3, 4))
    tiles = make(jnp.asarray(indices, jnp.int32), 5, block, tokens, chunk)
    tiles = jax.tree.map(np.asarray, tiles)
    chunks = -(-T // chunk)
    assert tiles.starts[0] == 0
    assert tiles.starts.shape == (B * chunks * K + 1,)
    used = tiles.starts[-1]
    rows, limits = tiles.rows.reshape(-1, tokens), tiles.limits.reshape(-1, tokens)
    listed = set()
    for tile in range(used):
        head, j = divmod(int(tiles.block[tile]), 5)
        b, k = divmod(head, K)
        segment = int(np.searchsorted(tiles.starts, tile, side="right")) - 1
        before = -1
        assert limits[tile, 0] > 0  # no tile is empty
        for row, limit in zip(rows[tile], limits[tile], strict=True):
            if limit == 0:  # no token: the tile's first one again
                assert row == rows[tile, 0]
                continue
            t = row // K % T
            assert row == (b * T + t) * K + k
            assert limit == min(t - j * block + 1, block)
            assert before < t
            assert segment == (b * chunks + t // chunk) * K + k
            listed.add((b, int(t), k, j))
            before = t
    expected = {(b, t, k, int(j)) for (b, t, k, _), j in np.ndenumerate(indices) if j >= 0}
    assert listed == expected
    slots = tiles.slots
    for (b, t, k, s), j in np.ndenumerate(indices):
        if j < 0:
            assert slots[b, t, k, s] == -1
        else:
            tile, place = divmod(int(slots[b, t, k, s]), tokens)
            assert tiles.block[tile] == (b * K + k) * 5 + j
            assert rows[tile, place] == (b * T + t) * K + k


def test_large_blocks_become_several_of_the_kernels_blocks():
    indices = jnp.full((1, 200, 1, 2), -1, jnp.int32).at[0, 150, 0].set(jnp.array([0, 1]))
    found = selected.of_kernel_blocks(indices, 128)
    assert found[0, 150, 0].tolist() == [0, 1, 2, -1]  # tokens from 192 on are after 150
    assert (found[0, 149] == -1).all()


# --------------------------------------------------------------------------------------- refusals


def call_of(B=1, T=128, N=4, K=2, H=64, dtype=jnp.bfloat16, block=64, **more):
    q, k = (jax.ShapeDtypeStruct((B, T, heads, H), dtype) for heads in (N, K))
    indices = jax.ShapeDtypeStruct((B, T, K, 2), jnp.int32)
    given = {"first": None, "last": None, "options": Options()} | more
    return SelectedCall(q, k, k, indices, block=block, scale=0.1, **given)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (call_of(dtype=jnp.float32), "takes bfloat16 and float16; this is float32"),
        (call_of(H=192), "takes heads of up to 128; these are 192"),
        (call_of(N=130), "takes up to 64 query heads for each kv head; these are 65"),
        (call_of(block=32), "takes blocks of a multiple of 64 tokens; these are 32"),
        (
            call_of(first=jnp.zeros((1, 128), jnp.int32)),
            (
                "takes one whole sequence in every batch row; these are packed into one or split "
                "over devices (packed ones can have a batch row each)"
            ),
        ),
        (
            call_of(options=Options(deterministic=True)),
            "adds dk and dv in any order; deterministic asks for one",
        ),
        (call_of(), None),
        (call_of(block=128, dtype=jnp.float16), None),
    ],
)
def test_what_the_kernels_do_not_support_is_refused_with_the_reason(call, reason, monkeypatch):
    monkeypatch.setattr(_jax, "why_no_hopper", lambda needs: None)
    assert selected.why_not(call) == reason


def test_what_varies_inside_shard_map_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(_jax, "why_no_hopper", lambda needs: None)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    rows, said = jax.sharding.PartitionSpec("data"), []

    def record(q):
        said.append(selected.why_not(dataclasses.replace(call_of(), q=q)))
        return q

    for checked in (True, False):
        run = jax.shard_map(record, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=checked)
        jax.eval_shape(run, call_of().q)
    remedy = "has no types for what varies over 'data'; pass check_vma=False to shard_map"
    assert said == [remedy, None]


def test_without_a_hopper_gpu_the_reason_is_that():
    if _jax.platform() != "gpu":
        assert selected.why_not(call_of()) == _jax.why_no_hopper((0, 11))
        assert selected.why_not(call_of()) is not None


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"block": 128}, "pooled blocks of 32 every 16 tokens; these are 128, 32 and 16"),
        ({"num_selected": 65}, "up to 64 selected blocks; these are 65"),
        ({"group": 32}, "up to 16 query heads for each kv head; these are 32"),
        ({}, None),
    ],
)
def test_choosing_is_refused_with_the_reason(more, part, monkeypatch):
    monkeypatch.setattr(_jax, "why_no_hopper", lambda needs: None)
    given = {"block": 64, "pooled_block": 32, "stride": 16, "num_selected": 16, "group": 4} | more
    q = jax.ShapeDtypeStruct((1, 128, given.pop("group"), 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 7, 1, 64), jnp.bfloat16)
    reason = choose.why_not(q, k, **given)
    assert reason is None if part is None else part in reason


# --------------------------------------------------------------------------------------- lowering


@pytest.mark.parametrize(("group", "H"), [(3, 80), pytest.param(16, 64, marks=pytest.mark.slow)])
@needs_newer_jax
def test_all_branches_lower_for_cuda(group, H, monkeypatch):
    monkeypatch.setattr(_jax, "why_no_hopper", lambda needs: None)
    monkeypatch.setattr(_jax, "platform", lambda: "gpu")
    monkeypatch.setattr(_jax, "multiprocessors", lambda: 132)
    q, k = (jax.ShapeDtypeStruct((1, 200, n, H), jnp.bfloat16) for n in (group, 1))

    def loss(q, k, v):
        return xsake.native_sparse_attention(q, k, v).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for name in ("selected", "selected_backward", "merge", "importance", "top"):
        assert f"xsake_{name}_mosaic_gpu" in text, name


# --------------------------------------------------------------------------------------- on a GPU


@functools.partial(jax.jit, static_argnames=("block", "forced", "implementation"))
def results(q, k, v, indices, d_out, d_lse, block, forced, implementation):
    """out, logsumexp and the gradients of q, k, v."""

    def attend(q, k, v):
        return attend_selected(
            *(q, k, v, indices), block=block, scale=q.shape[-1] ** -0.5, is_set=True,
            forced=forced, implementation=implementation,
        )  # fmt: skip

    found, pull_back = jax.vjp(attend, q, k, v)
    return *found, *pull_back((d_out, d_lse))


CASES = {
    "group 1": dict(N=2, K=2, H=64, Hv=64, T=300),
    "group 3, odd sizes": dict(N=6, K=2, H=72, Hv=40, T=333),
    "group 4, batch": dict(B=3, N=4, K=1, H=64, Hv=128, T=257),
    "group 2": dict(N=4, K=2, H=64, Hv=64, T=300, forced=(1, 1)),
    "group 4, forced, long": dict(N=8, K=2, H=128, Hv=128, T=9000, n=6, forced=(1, 2)),
    "group 8": dict(N=16, K=2, H=128, Hv=128, T=512),
    "group 16": dict(N=16, K=1, H=128, Hv=128, T=500),
    "group 32": dict(N=32, K=1, H=64, Hv=64, T=200),
    "float16": dict(N=16, K=1, H=64, Hv=64, T=200, dtype="float16"),
    "blocks of 128": dict(N=16, K=1, H=128, Hv=128, T=600, block=128),
    "short": dict(N=8, K=1, H=64, Hv=64, T=1),
    "several chunks": dict(N=8, K=1, H=64, Hv=64, T=9000, n=4),
    "forced": dict(N=16, K=1, H=128, Hv=128, T=700, n=5, forced=(1, 2)),
    "forced only": dict(N=8, K=2, H=64, Hv=64, T=333, n=2, forced=(1, 1)),
    "forced, several chunks": dict(N=8, K=1, H=64, Hv=64, T=9000, n=6, forced=(1, 2)),
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_results_agree_with_the_oracle_on_a_gpu(name):
    case = {"dtype": "bfloat16", "block": 64, "n": 5, "forced": (0, 0)} | CASES[name]
    block, n, forced = (case.pop(x) for x in ("block", "n", "forced"))
    dtype = case["dtype"]
    given = inputs(B=case.pop("B", 2), **case)
    B, T, K = given["k"].shape[:3]
    indices = sets(np.random.default_rng(7), B, T, K, n, block, forced)
    arrays = [jnp.asarray(given[x], dtype) for x in ("q", "k", "v", "d_out")]
    ints, d_lse = jnp.asarray(indices, jnp.int32), jnp.asarray(given["d_lse"], jnp.float32)
    how = {"block": block, "forced": forced}
    found = results(*arrays[:3], ints, arrays[3], d_lse, implementation="hopper", **how)
    if T > 1000:  # the oracle's T × T would be large: float32 on xla, which is compared with it
        wide = [x.astype(jnp.float32) for x in arrays]
        expected = results(*wide[:3], ints, wide[3], d_lse, implementation="xla", **how)
    else:
        expected = by_oracle(given, indices, block)
    for what, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        error = relative_error(np.asarray(x, np.float64), np.asarray(y, np.float64), floor=1e-30)
        assert error <= LIMIT, what


def by_oracle(given, indices, block):
    found = []
    for b in range(len(indices)):
        q, k, v, d_out, d_lse = (given[name][b] for name in ("q", "k", "v", "d_out", "d_lse"))
        seen = oracle.selected_mask(indices[b], None, np.zeros(len(q), int), block)
        scale = q.shape[-1] ** -0.5
        out, lse, _ = oracle.attention(q, k, v, seen, scale)
        found.append((out, lse, *oracle.attention_grads(q, k, v, seen, scale, d_out, d_lse)))
    return [np.stack(x) for x in zip(*found, strict=True)]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("T", "N", "K", "H"), [(1000, 16, 1, 128), (700, 6, 2, 64), (9000, 8, 1, 64)]
)
def test_chosen_blocks_agree_with_xla_on_a_gpu(T, N, K, H):
    """All but a few, whose importance is nearly that of the first block that is left out."""
    q, k = (jax.random.normal(jax.random.key(n), (2, T, n, H), jnp.bfloat16) for n in (N, K))
    q = q * 2
    found, expected = (
        np.asarray(xsake.nsa.select_blocks(q, k, num_selected=8, implementation=x))
        for x in ("hopper", "xla")
    )
    assert found.shape == expected.shape
    assert (found == expected).all(-1).mean() > 0.99
    rows = zip(found.reshape(-1, 8).tolist(), expected.reshape(-1, 8).tolist(), strict=True)
    assert max(len(set(x) - set(y)) for x, y in rows) <= 2
    assert (np.sort(found, axis=-1)[found.min(-1) >= 0] == found[found.min(-1) >= 0]).all()


@needs_interpreter
def test_all_steps_of_the_forward_agree_when_interpreted(capsys, monkeypatch):
    """Two CTAs, tiles with and without a mask, slots without a token, forced blocks; no race."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper.selected import finish, parts

    monkeypatch.setattr(_jax, "multiprocessors", lambda: 2)
    given = inputs(B=1, T=192, N=16, K=1, H=64, Hv=64, dtype="float16")
    indices = sets(np.random.default_rng(0), 1, 192, 1, 2, 64)
    for t in range(192):  # the own block, and sometimes another
        others = [j for j in indices[0, t, 0] if 0 <= j < t // 64][:1]
        indices[0, t, 0] = [*others, t // 64, -1][:2]
    rest = selected.without_forced(jnp.asarray(indices, jnp.int32), 0, 1)
    assert rest.shape[-1] == 1
    tiles = lists.tiles_of(rest, 3, 64, 4, 192)
    q, k, v = (jnp.asarray(given[x], jnp.float16) for x in "qkv")
    q = q.reshape(192, 16, 64)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    part, lse = parts.parts(
        *(q, k, v, tiles, jnp.int32(0)),
        segments=1, most_tiles=51, scale=0.125, interpret=interpret,
    )  # fmt: skip
    slots = tiles.slots[0]
    own = jnp.where(slots[..., None] < 0, -jnp.inf, lse.reshape(-1, 16)[slots])
    own = own.transpose(1, 2, 0, 3).reshape(1, 1, -1)
    out, total = finish.finish(
        *(q, k, v, part.reshape(-1, 16, 64), own, jnp.maximum(slots, 0), jnp.zeros(2, jnp.int32)),
        forced=(0, 1), scale=0.125, interpret=interpret,
    )  # fmt: skip
    assert "RACE" not in capsys.readouterr().out  # the interpreter prints them
    expected = by_oracle(given, indices, 64)
    found = out.reshape(192, 16, 64), total.reshape(192, 16) * np.log(2)
    for x, y in zip(found, expected, strict=False):
        assert relative_error(np.asarray(x, np.float64), y[0]) <= LIMIT


@pytest.mark.parametrize(("initial", "local"), [(1, 2), (0, 1), (2, 3)])
def test_lists_without_forced_blocks(initial, local):
    rng = np.random.default_rng(initial)
    T, n = 64 * 9, 6
    indices = np.full((1, T, 1, n), -1)
    expected = []
    for t in range(T):
        current = t // 64
        forced = {j for j in range(current + 1) if j < initial or j > current - local}
        others = rng.permutation([j for j in range(current + 1) if j not in forced])
        others = set(others[: n - len(forced)].tolist())
        chosen = sorted(forced | others)
        indices[0, t, 0, : len(chosen)] = chosen
        expected.append(others)
    rest = np.asarray(selected.without_forced(jnp.asarray(indices, jnp.int32), initial, local))
    assert rest.shape[-1] == max(1, n - initial - local)
    for t in range(T):
        kept = rest[0, t, 0]
        assert set(kept[kept >= 0].tolist()) == expected[t]
        assert (kept >= 0).sum() == len(expected[t])
