"""The Hopper kernels: small cases interpreted, and cases on a GPU."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests import oracle
from tests.backends.hopper.test_hopper import mask_of, own_lists
from tests.conditions import needs_gpu, needs_interpreter
from xsake import BlockMask, Options, _jax, masks
from xsake.backends import Call, hopper, kernel_rule
from xsake.backends.options import BackwardTiling, ForwardTiling


@pytest.mark.parametrize(
    ("block", "ctas", "tiling"),
    [
        ((128, 128), 2, {"persistent": False}),
        ((64, 64), 2, {"schedule": "counter"}),
        ((128, 128), 1, {"schedule": "counter"}),
    ],
    ids=str,
)
@needs_interpreter
def test_a_small_forward_agrees_when_interpreted(block, ctas, tiling, capsys, monkeypatch):
    """A few row blocks with full and partial blocks; no warpgroup reads what may be overwritten."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import forward_kernel as hopper_forward

    monkeypatch.setattr(_jax, "multiprocessors", lambda: ctas)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 256, 1, 64)), jnp.bfloat16) for _ in range(3))
    mask = mask_of(masks.causal(), 256, block)
    out, lse = hopper_forward.forward(
        q,
        k,
        v,
        mask.lists,
        block=block,
        rule=kernel_rule.by_query(mask),
        scale=0.125,
        tiling=ForwardTiling(**tiling),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    assert "RACE" not in capsys.readouterr().out  # the interpreter prints them
    want, want_lse = oracle.attention(
        *(np.asarray(x, np.float64) for x in (q, k, v)),
        allowed=oracle.allowed(("causal",), 1, 1, 256, 256),
        scale=0.125,
    )
    assert oracle.relative_error(out, want) <= 1e-2
    assert oracle.relative_error(jnp.moveaxis(lse, 1, 2), want_lse) <= 1e-4
    assert "RACE" not in capsys.readouterr().out  # the interpreter prints them


LAZY = {"lazy_maximum": True, "lazy_rescale": 8.0}


def interpreted_forward(q, k, v, mask, tiling):
    """(out, logsumexp [B, N, T]) by the kernel on Mosaic's interpreter."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import forward_kernel as hopper_forward

    return hopper_forward.forward(
        q,
        k,
        v,
        mask.lists,
        block=mask.block,
        rule=kernel_rule.by_query(mask),
        scale=0.125,
        tiling=ForwardTiling(**tiling),
        interpret=plgpu.InterpretGPUParams(),
    )


def growing(rng, length, heads, size, dtype=jnp.bfloat16, steps=8):
    """q, k and v, whose logits grow along the keys; by 8, so much that float16 would overflow."""
    q, k, v = (jnp.asarray(rng.standard_normal((2, length, heads, size)), dtype) for _ in range(3))
    k = k.at[..., 0].set(jnp.arange(length)[:, None] // 40 * steps)
    return q.at[..., 0].set(jnp.asarray(rng.choice([-4, 0, 2, 8], q.shape[:3]), dtype)), k, v


@pytest.mark.parametrize("tiling", [LAZY, LAZY | {"overlap": False}], ids=str)
@pytest.mark.parametrize("block", [64, 128])
@needs_interpreter
def test_rows_that_outgrow_their_maximum_or_have_none_yet_agree(tiling, block, monkeypatch):
    """A row's first visited block is empty for the last rows of a row block."""
    monkeypatch.setattr(_jax, "multiprocessors", lambda: 2)
    q, k, v = (x[:1] for x in growing(np.random.default_rng(0), 256, 1, 64))
    mask = mask_of(masks.sliding_window(90, 0), 256, (block, block))
    out, lse = interpreted_forward(q, k, v, mask, tiling)
    want, want_lse = oracle.attention(
        *(np.asarray(x, np.float64) for x in (q, k, v)),
        allowed=oracle.allowed(("sliding_window", 90, 0), 1, 1, 256, 256),
        scale=0.125,
    )
    assert oracle.relative_error(out, want) <= 1e-2
    assert oracle.relative_error(jnp.moveaxis(lse, 1, 2), want_lse) <= 1e-4


@pytest.mark.parametrize(("block", "overlap"), [(64, True), (128, True), (128, False)])
@needs_interpreter
def test_most_steps_look_for_no_maximum(block, overlap, monkeypatch):
    """With overlap, the result of a step that looked for one after the first would show."""
    from xsake.backends.hopper.forward_steps import TileSteps

    monkeypatch.setattr(_jax, "multiprocessors", lambda: 2)
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 384, 1, 64)), jnp.bfloat16) for _ in range(3))
    full_softmax = TileSteps.full_softmax

    def spoilt(self, s, t, *others):
        p, *more = full_softmax(self, s, t, *others)
        return (p if t is not None else jnp.full_like(p, jnp.nan)), *more

    if overlap:
        monkeypatch.setattr(TileSteps, "full_softmax", spoilt)
    mask = mask_of(masks.causal(), 384, (block, block))
    out, lse = interpreted_forward(q, k, v, mask, LAZY | {"overlap": overlap})
    want, want_lse = oracle.attention(
        *(np.asarray(x, np.float64) for x in (q, k, v)),
        allowed=oracle.allowed(("causal",), 1, 1, 384, 384),
        scale=0.125,
    )
    assert oracle.relative_error(out, want) <= 1e-2
    assert oracle.relative_error(jnp.moveaxis(lse, 1, 2), want_lse) <= 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"overlap": False},
        {"alternate_products": False},
        {"step": 64},
        {"rows": 192},
        {"bias_in_shared": True},
        {"bias_in_shared": True, "overlap": False, "lazy_maximum": False},
        {"bias_in_shared": True, "step": 64, "persistent": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(("size", "steps"), [(64, 0), (64, 1), (128, 0), (128, 8)])
@pytest.mark.gpu
@needs_gpu
def test_on_a_card_rows_that_outgrow_their_maximum_agree(size, steps, more, dtype):
    """Causal, windows, documents and a bias that forbids; with 0 hardly a row outgrows it.

    The last keys are NaN for the rows before them, which drop their blocks.
    """
    rng = np.random.default_rng(size)
    q, k, v = growing(rng, 700, 2, size, dtype, steps)
    ids = jnp.asarray(np.sort(rng.integers(0, 4, (2, 700))))
    forbids = jnp.where(jnp.asarray(rng.random((2, 1, 700, 700))) < 0.5, 0, -jnp.inf)
    causal = masks.causal()
    options = Options(hopper_forward=ForwardTiling(**LAZY | more))
    for rule, bias in (
        (causal, None),
        (causal & masks.sliding_window(90, 0), None),
        (causal & masks.documents(ids), None),
        (masks.everything(), forbids.astype(dtype)),
        (causal, forbids[:1, :, :, :].astype(jnp.float32)),
    ):
        run = functools.partial(
            xsake.dot_product_attention, mask=rule, return_residual=True, bias=bias
        )
        want = [np.asarray(x) for x in run(q, k, v, implementation="reference")]
        seen = slice(640) if rule is causal and bias is None else slice(None)
        poisoned = [x.at[:, seen.stop :].set(jnp.nan) if seen.stop else x for x in (k, v)]
        got = run(q, *poisoned, implementation="hopper", options=options)
        for x, y, limit in zip(got, want, (1e-2, 1e-4), strict=True):
            assert oracle.relative_error(np.asarray(x)[:, seen], y[:, seen]) <= limit


@needs_interpreter
def test_a_small_backward_agrees_when_interpreted(monkeypatch):
    """Seven products over blocks of 64, where one warpgroup hands its sums to the other.

    The documents of the first batch row are in order, those of the second are not.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import backward_kernel as hopper_backward

    monkeypatch.setattr(_jax, "multiprocessors", lambda: 2)
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        jnp.asarray(rng.standard_normal((2, 72, 1, 64)), jnp.bfloat16) for _ in range(4)
    )
    ids = np.stack([np.arange(72) // 20, np.arange(72) % 3])
    ids[:, 69:] = -1
    mask = mask_of(masks.documents(ids) & masks.causal(), 72, (64, 64))
    exact = [np.asarray(x, np.float64) for x in (q, k, v)]
    spec = ("and", ("documents", ids, ids), ("causal",))
    seen = {"allowed": oracle.allowed(spec, 2, 1, 72, 72), "scale": 0.125}
    out, lse = oracle.attention(*exact, **seen)
    d_lse = np.where(np.isfinite(lse), rng.standard_normal(lse.shape), 0)
    want = oracle.attention_grads(*exact, **seen, d_out=np.asarray(d_out, np.float64), d_lse=d_lse)
    got = hopper_backward.backward(
        q,
        k,
        v,
        jnp.asarray(out, jnp.bfloat16),
        jnp.asarray(np.moveaxis(lse, 2, 1), jnp.float32),
        d_out,
        jnp.asarray(np.moveaxis(d_lse, 2, 1), jnp.float32),
        mask.lists,
        block=mask.block,
        rule=kernel_rule.by_key(mask),
        row_rule=kernel_rule.by_query(mask),
        scale=0.125,
        tiling=BackwardTiling(fused=False, schedule="counter"),
        interpret=plgpu.InterpretGPUParams(),
    )
    assert got[3] is None  # no bias
    for name, gradient in zip(("dq", "dk", "dv"), got[:3], strict=True):
        assert oracle.relative_error(gradient, want[name]) <= 1e-2, name


@pytest.mark.parametrize(
    "used", ["out", *(pytest.param(x, marks=pytest.mark.slow) for x in ("logsumexp", "both"))]
)
@needs_interpreter
def test_gradients_flow_through_the_used_results(used, monkeypatch):
    """The output, its logsumexp or both, interpreted; what is not used is not read."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import backward_kernel as hopper_backward
    from xsake.backends.hopper import forward_kernel as hopper_forward

    seen = {}

    def backward(*args, **rest):
        seen["d_lse"] = args[6]
        return run(*args, **rest, interpret=plgpu.InterpretGPUParams())

    forward = functools.partial(hopper_forward.forward, interpret=plgpu.InterpretGPUParams())
    run = hopper_backward.backward
    monkeypatch.setattr(_jax, "multiprocessors", lambda: 1)
    monkeypatch.setattr(hopper_forward, "forward", forward)
    monkeypatch.setattr(hopper_backward, "backward", backward)
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        jnp.asarray(rng.standard_normal((1, 64, 1, 64)), jnp.bfloat16) for _ in range(4)
    )
    d_lse = jnp.asarray(rng.standard_normal((1, 64, 1)), jnp.float32)
    mask = mask_of(masks.causal(), 64, (64, 64))
    options = Options(
        deterministic=True,
        hopper_forward=ForwardTiling(),
        hopper_backward=BackwardTiling(),
    )

    def loss(q, k, v):
        out, lse = hopper.forward(Call(q, k, v, None, mask, 0.125, None, options))
        parts = {"out": (out * d_out).astype(jnp.float32).sum(), "logsumexp": (lse * d_lse).sum()}
        return sum(parts.values()) if used == "both" else parts[used]

    jax.clear_caches()  # so that the kernels are traced again, through the functions above
    got = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    want = oracle.attention_grads(
        *(np.asarray(x, np.float64) for x in (q, k, v)),
        allowed=oracle.allowed(("causal",), 1, 1, 64, 64),
        scale=0.125,
        d_out=np.asarray(d_out, np.float64) * (used != "logsumexp"),
        d_lse=np.asarray(d_lse, np.float64) * (used != "out"),
    )
    for name, gradient in zip(("dq", "dk", "dv"), got, strict=True):
        assert oracle.relative_error(gradient, want[name]) <= 1e-2, name
    assert (seen["d_lse"] is None) == (used == "out")


@pytest.mark.parametrize(
    ("length", "heads", "size", "block", "tiling"),
    [
        (4096, (4, 4), 128, (128, 128), {}),
        (4096, (4, 2), 128, (128, 128), {"max_polls": 0, "ctas": 40}),
        (1000, (3, 3), 64, (64, 128), {"schedule": "fixed"}),
        (1001, (2, 2), 64, (128, 64), {}),
        (1000, (2, 2), 128, (64, 64), {"persistent": False}),
        (2048, (4, 2), 64, (128, 128), {"order": "natural"}),
        (2048, (4, 4), 128, (128, 128), {"l2_bytes": 1}),
    ],
    ids=str,
)
@pytest.mark.gpu
@needs_gpu
def test_dq_cast_inside_the_kernel_is_dq_cast_after_it(
    length, heads, size, block, tiling, monkeypatch
):
    """Twenty times: a row block that is cast too early, or by nobody, does not show every time."""
    tiling = dict(tiling)
    if ctas := tiling.pop("ctas", None):
        monkeypatch.setattr(_jax, "multiprocessors", lambda: ctas)
    rng = np.random.default_rng(length)
    mask = own_lists(heads[0], length, block, 0.3)  # through empty columns a warpgroup runs ahead
    q, k, v, d_out = (
        jnp.asarray(rng.standard_normal((1, length, n, size)), jnp.bfloat16)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )

    def gradients(**tiling):
        options = Options(hopper_backward=BackwardTiling(**tiling))

        def attend(q, k, v):
            return xsake.dot_product_attention(
                q, k, v, mask=mask, implementation="hopper", options=options
            )

        return jax.jit(lambda: jax.vjp(attend, q, k, v)[1](d_out))

    want = [np.asarray(x, np.float32) for x in gradients(cast="pass")()]
    inside = gradients(cast="kernel", **tiling)
    for _ in range(20):
        for x, y in zip(inside(), want, strict=True):
            assert np.isfinite(np.asarray(x, np.float32)).all()
            assert oracle.relative_error(np.asarray(x, np.float32), y) <= 5e-3


@pytest.mark.parametrize(
    ("length", "block", "size", "counts", "order", "tail"),
    [
        (2048, (128, 128), 64, False, "natural", 0),
        (4096, (128, 128), 128, True, "heads", 0),
        (16_384, (128, 128), 64, True, "heads", 0),
        (16_384, (128, 128), 64, False, "heads", 3),
        (4104, (128, 128), 64, False, "heads", 6),
        (6144, (64, 128), 64, False, "heads", 6),
        (6144, (128, 64), 64, False, "heads", 3),
    ],
)
@pytest.mark.gpu
@needs_gpu
def test_one_launch_prepares_the_same_as_several(
    length, block, size, counts, order, tail, monkeypatch
):
    """The same lists and statistics to the bit, and the same table, but for the last heads' order.

    `tail` of them are sorted together.
    """
    from xsake.backends.hopper import prepare as hopper_prepare
    from xsake.backends.hopper import work_table
    from xsake.backends.hopper.scheduler import WorkTile
    from xsake.backends.hopper.shape import Shape

    rng = np.random.default_rng(length)
    mask = own_lists(6, length, block)
    out, d_out = (
        jnp.asarray(rng.standard_normal((1, length, 6, size)), jnp.bfloat16) for _ in range(2)
    )
    lse = jnp.asarray(rng.standard_normal((1, 6, length)), jnp.float32)
    shape = Shape.of(out, out, out, mask.lists, mask.block)
    tiling = BackwardTiling(order=order)

    def prepared():
        return jax.jit(
            lambda: hopper_prepare.prepare(
                out, lse, d_out, lse, mask.lists, shape, tiling,
                zeros=size, counts=counts,
            )
        )()  # fmt: skip

    at_once = prepared()
    monkeypatch.setattr(work_table.HeadTables, "fits", lambda *_: False)
    monkeypatch.setattr(work_table, "TAIL_TILES", 0)
    one_by_one = prepared()
    used = int(mask.kv_count.sum(-1).min())
    table = np.array(one_by_one.table)
    last = table[-1 - tail * shape.kv_blocks : -1]
    visits = last[:, WorkTile._fields.index("count")]
    last[:] = last[np.argsort(-visits, kind="stable")]
    np.testing.assert_array_equal(at_once.table, table)
    for name in ("lse", "delta", "counters"):
        one, other = (getattr(x, name) for x in (at_once, one_by_one))
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, other, err_msg=name)
    one, other = (np.asarray(x.row_blocks).reshape(6, -1)[:, :used] for x in (at_once, one_by_one))
    np.testing.assert_array_equal(one, other)
    assert not np.asarray(at_once.zeros).any()


@pytest.mark.parametrize(
    ("order", "counts"), [("natural", False), ("heads", False), ("natural", True)]
)
@pytest.mark.parametrize("shared", ["documents", "causal", "one list for two heads"])
@pytest.mark.gpu
@needs_gpu
def test_heads_that_share_lists_are_prepared_in_one_launch(shared, order, counts, monkeypatch):
    """The same lists, records, counters and intervals; of the tail only the order differs.

    The ids of the second batch row are out of order: its intervals are marked.
    """
    from xsake.backends.hopper import prepare as hopper_prepare
    from xsake.backends.hopper import work_table
    from xsake.backends.hopper.scheduler import WorkTile
    from xsake.backends.hopper.shape import Shape
    from xsake.masks import intervals

    B, T, S, N = 2, 2000, 1700, 6
    rng = np.random.default_rng(3)
    ids = np.stack([np.arange(T) // 230, np.arange(T) % 7])
    rules = {
        "documents": masks.documents(ids, ids[:, :S]) & masks.causal(),
        "causal": masks.causal(),
    }
    if shared in rules:
        mask = BlockMask.from_rule(rules[shared], (T, S), batch=B)
    else:
        blocks = rng.random((1, 3, 16, 14)) < 0.4
        mask = BlockMask.from_dense(blocks, masks.causal(), shape=(T, S))
    q, k = (jnp.asarray(rng.standard_normal((B, x, N, 64)), jnp.bfloat16) for x in (T, S))
    lse = jnp.asarray(rng.standard_normal((B, N, T)), jnp.float32)
    shape = Shape.of(q, k, k, mask.lists, mask.block)
    pairs = None if mask.intervals is None else mask.intervals[:, 0]

    def prepared():
        return jax.jit(
            lambda: hopper_prepare.prepare(
                q, lse, q, None, mask.lists, shape, BackwardTiling(order=order),
                zeros=64, counts=counts, pairs=pairs,
            )
        )()  # fmt: skip

    monkeypatch.setattr(_jax, "multiprocessors", lambda: 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_table, "work_table", None)  # that would be a second launch
        at_once = prepared()
    assert not np.asarray(at_once.zeros).any()
    monkeypatch.setattr(work_table.HeadTables, "fits", lambda *_: False)
    monkeypatch.setattr(work_table, "TAIL_TILES", 0)
    one_by_one = prepared()
    assert one_by_one.intervals is None
    assert (at_once.intervals is None) == (pairs is None)
    if pairs is not None:
        want = intervals.transposed(mask.intervals, S)[:, 0]
        assert (np.asarray(want)[:, 0, 0] < 0).tolist() == [False, True]
        np.testing.assert_array_equal(at_once.intervals, want)
    tables = [np.asarray(x.table) for x in (at_once, one_by_one)]
    tail = 0 if counts else -(-4 * 20 // shape.kv_blocks) * shape.kv_blocks  # of whole heads
    want = tables[1].copy()
    last = want[len(want) - 1 - tail : -1]
    last[:] = last[np.argsort(-last[:, WorkTile._fields.index("count")], kind="stable")]
    np.testing.assert_array_equal(tables[0], want)
    lists = np.prod(mask.kv_count.shape[:2])
    entries = [np.asarray(x.row_blocks).reshape(lists, -1) for x in (at_once, one_by_one)]
    used = np.arange(entries[0].shape[1]) < np.asarray(mask.kv_count).sum(-1).reshape(lists, 1)
    np.testing.assert_array_equal(*(x[used] for x in entries))
    for name in ("lse", "delta", *["counters"] * counts):
        np.testing.assert_array_equal(*(getattr(x, name) for x in (at_once, one_by_one)))


@pytest.mark.gpu
@needs_gpu
def test_mapped_calls_agree_with_single_ones():
    """More work tiles than multiprocessors; the mask is the same for all mapped calls."""
    rng = np.random.default_rng(5)
    q, k, v, d_out = (
        jnp.asarray(rng.standard_normal((3, 1, 2040, 16, 64)), jnp.bfloat16) for _ in range(4)
    )

    def attend(q, k, v, d_out):
        run = functools.partial(
            xsake.dot_product_attention, is_causal=True, implementation="hopper"
        )
        out, pull_back = jax.vjp(run, q, k, v)
        return out, *pull_back(d_out)

    mapped = jax.jit(jax.vmap(attend))(q, k, v, d_out)
    for i in range(3):
        for one, of_all in zip(attend(q[i], k[i], v[i], d_out[i]), mapped, strict=True):
            np.testing.assert_allclose(
                np.asarray(of_all[i], np.float32), np.asarray(one, np.float32), atol=0.02
            )


@pytest.mark.parametrize(
    ("length", "keys", "heads", "tiling"),
    [
        (1000, 1000, (4, 2), {}),
        (4096, 4096, (2, 1), {"alternate_products": False, "lazy_rescale": 8.0}),
        (777, 900, (1, 1), {"overlap": False}),
        (1500, 700, (3, 3), {"persistent": False}),
        (192, 192, (2, 2), {"step": 64, "stages": 4}),
        (100, 100, (2, 2), {"stages": 3}),
    ],
    ids=str,
)
@pytest.mark.gpu
@needs_gpu
def test_work_tiles_of_192_rows_agree(length, keys, heads, tiling):
    """Three compute warpgroups; heads of 48 channels are padded, and the soft cap is theirs too.

    Keys from the middle row block on are NaN for the rows before it, which drop them.
    """
    rng = np.random.default_rng(length)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, size, n, 48)), jnp.bfloat16)
        for size, n in ((length, heads[0]), (keys, heads[1]), (keys, heads[1]))
    )
    mask = BlockMask.from_rule(masks.causal(), (length, keys))
    run = functools.partial(
        xsake.dot_product_attention, mask=mask, logits_soft_cap=5.0, return_residual=True
    )
    options = Options(hopper_forward=ForwardTiling(rows=192, **tiling))
    want = [np.asarray(x) for x in run(q, k, v, implementation="reference")]
    middle = length // 256 * 128
    for dropped in [keys, middle] * 5:  # a missing barrier does not show every time
        poisoned = (x.at[:, dropped:].set(jnp.nan) for x in (k, v))
        got = run(q, *poisoned, implementation="hopper", options=options)
        rows = slice(length if dropped == keys else middle)
        for x, y in zip(got, want, strict=True):
            if y[:, rows].size:
                assert oracle.relative_error(np.asarray(x)[:, rows], y[:, rows]) <= 1e-2


@pytest.mark.slow
@needs_interpreter
def test_work_tiles_of_192_rows_agree_when_interpreted():
    """In a process of its own, whose threads are enough for four warpgroups: tests/tall_rows.py."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.tall_rows"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(": ok") == 4


@pytest.mark.parametrize(("T", "S"), [(500, 500), (300, 700), (700, 300)])
def test_row_blocks_of_192_hold_what_the_rule_allows(T, S):
    """Causal masks alone, and heads of up to 64 channels."""
    causal = BlockMask.from_rule(masks.causal(), (T, S))
    tall = hopper._in_rows(causal, 192, 64)
    assert tall.block == (192, 128)
    np.testing.assert_array_equal(tall.to_dense(), causal.to_dense())
    for mask, rows, size in (
        (causal, 192, 128),
        (causal, None, 64),
        (BlockMask.from_rule(masks.sliding_window(100, 0), (T, S)), 192, 64),
        (BlockMask.from_rule(masks.prefix(9) | masks.causal(), (T, S)), 192, 64),
        (BlockMask.from_dense(causal.blocks() > 0, masks.causal(), shape=(T, S)), 192, 64),
        (causal & masks.documents(np.arange(T) // 90, np.arange(S) // 90), 192, 64),
    ):
        assert hopper._in_rows(mask, rows, size) is mask


@pytest.mark.gpu
@needs_gpu
def test_stacked_layers_in_a_loop_are_the_layers_one_by_one():
    """XLA hands a kernel an address inside the stack, not a slice: the right one each time."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        jnp.asarray(rng.standard_normal((5, 1, 512, n, 64)), jnp.bfloat16) for n in (6, 2, 2, 6)
    )
    blocks = jnp.asarray(rng.random((5, 1, 6, 4, 4)) < 0.6)

    def layer(x):
        q, k, v, d_out, blocks = x
        mask = BlockMask.from_dense(blocks, masks.causal(), shape=(512, 512))

        def attend(q, k, v):
            return xsake.dot_product_attention(
                q, k, v, mask=mask, return_residual=True, implementation="hopper"
            )

        (out, logsumexp), back = jax.vjp(attend, q, k, v)
        return out, logsumexp, *back((d_out, jnp.zeros_like(logsumexp)))

    stacked = q, k, v, d_out, blocks
    in_a_loop = jax.jit(lambda *x: jax.lax.map(layer, x))
    alone = [jax.jit(layer)(tuple(x[i] for x in stacked)) for i in range(5)]
    for _ in range(3):  # what the first call remembers must not serve the next
        found = in_a_loop(*stacked)
        for got, want in zip(found, zip(*alone, strict=True), strict=True):
            for i in range(5):
                one, other = (np.asarray(x[i], np.float32) for x in (got, want))
                assert oracle.relative_error(one, other, floor=1.0) <= 1e-2


@pytest.mark.gpu
@needs_gpu
def test_a_scan_over_layers_runs_each_kernel_once():
    """Otherwise XLA fuses the forward with the stacking of its result, and runs it once more."""

    def layer(x, w):
        h = (x @ w).reshape(1, 256, 2, 64)
        out = xsake.dot_product_attention(h, h, h, is_causal=True, implementation="hopper")
        return x + out.reshape(x.shape), None

    def loss(w, x):
        return (jax.lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2).sum()

    w, x = jnp.ones((3, 128, 128), jnp.bfloat16), jnp.ones((1, 256, 128), jnp.bfloat16)
    text = jax.jit(jax.grad(loss)).lower(w, x).compile().as_text()
    calls = [x for x in text.splitlines() if 'custom_call_target="mosaic_gpu' in x]
    names = re.findall(r'/(xsake_\w+)/mpmd_map"', "".join(calls))
    assert len(names) == len(calls)
    assert sorted(set(names)) == sorted(names)
    assert {"xsake_forward", "xsake_backward_dkvq"} < set(names)
