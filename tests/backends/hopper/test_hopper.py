"""The Hopper kernels: refusals, lowering, small cases interpreted, and cases on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests import oracle
from tests.conditions import needs_gpu, needs_interpreter, needs_newer_jax
from xsake import BlockMask, Options, _jax, masks
from xsake.backends import Call, hopper, kernel_rule
from xsake.backends.options import BackwardTiling, ForwardTiling

RULES = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.sliding_window(300, 10),
    "documents": masks.documents(jnp.arange(500) // 130) & masks.causal(),
    "positions": masks.at_positions(masks.causal(), jnp.arange(500)[::-1], jnp.arange(500)[::-1]),
    "lengths": masks.lengths(query=jnp.array([400]), key_value=jnp.array([300])),
    "prefix": masks.prefix(jnp.array([70])) | masks.causal(),
    "chunked": masks.chunked(200) & masks.causal(),
    "not": ~masks.first(20),
    "function": masks.rule(lambda b, n, q, k: (q - k) * 3 < 100 * (n + 1)),
}


def mask_of(rule, length=500, block=(128, 128)):
    """A BlockMask of ragged length."""
    rule = masks.everything() if rule is None else rule
    return BlockMask.from_rule(rule, (length, length), block=block)


# Kernels of the forward and a work table; of the fused backward, transposed lists and a work table;
# of dq by rows and a work table.
FORWARD, FUSED, BY_ROWS = 2, 3, 2


def kernels_lowered(mask, head_size=64, value_size=None, deterministic=False, **backward):
    """How many kernels a call and its gradients lower to for CUDA, on a machine without a card."""
    length = mask.shape[0]
    q, k, v = (
        jax.ShapeDtypeStruct((1, length, heads, size), jnp.bfloat16)
        for heads, size in ((4, head_size), (2, head_size), (2, value_size or head_size))
    )

    def attend(q, k, v):
        options = Options(
            deterministic=deterministic,
            hopper_forward=ForwardTiling(),
            hopper_backward=BackwardTiling(**backward),
        )
        return hopper.forward(Call(q, k, v, None, mask, 0.1, None, options))

    def gradients(q, k, v):
        (out, lse), pull_back = jax.vjp(attend, q, k, v)
        return pull_back((out, lse))

    text = jax.jit(gradients).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("@mosaic_gpu")


@pytest.mark.parametrize(
    "names", [["none"], ["causal"], ["function"], ["documents"], list(RULES)], ids=len
)
@needs_newer_jax
def test_every_rule_lowers_for_cuda(names):
    """Layout inference and verification of the forward and the fused backward; all rules as one."""
    rules = [RULES[name] for name in names if RULES[name] is not None]
    rule = functools.reduce(lambda a, b: a & b, rules) if rules else None
    assert kernels_lowered(mask_of(rule), 128) == FORWARD + FUSED


def slow(*values):
    """Lowering a call and its gradients takes 3 to 9 s: one case of each kind in `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("block", "sizes"),
    [
        slow((128, 128), (40, 40)),
        ((128, 128), (64, 128)),
        slow((128, 128), (128, 64)),
        slow((128, 128), (192, 256)),
        slow((64, 128), (64, 64)),
        ((64, 128), (128, 128)),
        slow((128, 64), (64, 128)),
        ((128, 64), (256, 256)),
        slow((64, 64), (128, 128)),
        slow((64, 64), (256, 64)),
    ],
    ids=str,
)
@needs_newer_jax
def test_every_head_and_block_size_lowers_for_cuda(sizes, block):
    """Forward and one fused kernel; with a head of 256, kernels for each of dk, dv and dq."""
    kernels = kernels_lowered(mask_of(masks.causal(), block=block), *sizes)
    again = 0 if max(sizes) <= 128 else 1 + BY_ROWS  # ColumnsKernel a second time, dq
    assert kernels == FORWARD + FUSED + again


@pytest.mark.parametrize("block", [(64, 128), slow((128, 128)), slow((128, 64))], ids=str)
@needs_newer_jax
def test_deterministic_gradients_come_from_two_kernels(block):
    """dk and dv from one, dq from the other: nothing is added in an order that may change."""
    mask = mask_of(masks.causal(), block=block)
    assert kernels_lowered(mask, 128, deterministic=True) == FORWARD + FUSED + BY_ROWS


@needs_newer_jax
def test_lengths_that_are_multiples_of_8_have_a_kernel_for_delta():
    """Before both forms of the backward; the lengths of the tests above have no such kernel."""
    eights = mask_of(masks.causal(), 504)
    assert kernels_lowered(eights, 128) == FORWARD + FUSED + 1
    assert kernels_lowered(eights, 128, deterministic=True) == FORWARD + FUSED + BY_ROWS + 1


@pytest.mark.parametrize(
    ("block", "size", "tiling"),
    [
        ((128, 128), 128, {}),
        slow((128, 128), 64, {"schedule": "fixed"}),
        slow((64, 128), 128, {"persistent": False}),
        slow((128, 64), 128, {}),
        ((64, 64), 64, {}),
    ],
    ids=str,
)
@needs_newer_jax
def test_the_cast_of_dq_inside_the_kernel_lowers_for_cuda(block, size, tiling):
    """Shared memory and layouts fit a fourth warpgroup, and dq is a result of the kernel."""
    mask = mask_of(masks.causal(), 504, block)
    assert kernels_lowered(mask, size, cast="kernel", **tiling) == FORWARD + FUSED + 1  # delta


@pytest.mark.parametrize("rule", ["causal", "window", "documents", "lengths"])
@needs_newer_jax
def test_a_row_block_counts_as_many_visits_as_the_transposed_lists_have(rule):
    """Otherwise it would be cast before it is complete, or never."""
    from xsake.backends.hopper import prepare as hopper_prepare
    from xsake.backends.hopper.shape import Shape

    mask = mask_of(RULES[rule], 500, (64, 128))
    columns = mask.transpose().lists
    visits = np.zeros(8, int)
    for start, count in zip(columns.kv_start[0, 0], columns.kv_count[0, 0], strict=True):
        np.add.at(visits, np.asarray(columns.kv_index[0, 0])[start : start + count], 1)
    x, lse = jnp.ones((2, 500, 3, 64), jnp.bfloat16), jnp.ones((2, 3, 500))
    prepared = hopper_prepare.prepare(
        x,
        lse,
        x,
        None,
        mask.lists,
        Shape.of(x, x, x, mask.lists, mask.block),
        BackwardTiling(),
        zeros=64,
        counts=True,
        interpret=True,
    )
    assert visits.any()
    counters = np.asarray(prepared.counters).reshape(2, 3, 8)
    np.testing.assert_array_equal(counters, np.broadcast_to(-visits, (2, 3, 8)))


def own_lists(heads, length, block=(128, 128), share=0.4):
    """A mask with one list per head; every third column of blocks is empty."""
    rng = np.random.default_rng(length)
    blocks = rng.random((1, heads, -(-length // block[0]), -(-length // block[1]))) < share
    blocks[..., ::3] = False
    return BlockMask.from_dense(blocks, masks.causal(), shape=(length, length), block=block)


@pytest.mark.parametrize(
    ("cast", "size"), [("pass", 128), slow("pass", 64), slow("kernel", 64), slow("kernel", 128)]
)
@needs_newer_jax
def test_heads_with_their_own_lists_have_one_launch_before_the_products(size, cast):
    """Transposed lists, their work table and delta, where every head is sorted by itself."""
    mask = own_lists(4, 1032)
    for order in ("natural", "heads"):
        assert kernels_lowered(mask, size, cast=cast, order=order) == FORWARD + 2
    assert kernels_lowered(mask, size, cast=cast) == FORWARD + FUSED + 1  # delta


@needs_newer_jax
def test_a_cast_by_another_name_is_refused():
    """Also where nothing checks the types of options, as the tests do."""
    from xsake.backends.hopper import backward_kernel

    tiling = BackwardTiling()
    object.__setattr__(tiling, "cast", "later")
    x, lse = jnp.ones((1, 504, 1, 64), jnp.bfloat16), jnp.ones((1, 1, 504))
    with pytest.raises(ValueError, match=r"cast is 'later', which is none of \('pass', 'kernel'\)"):
        backward_kernel.backward(x, x, x, x, lse, x, None, mask_of(None, 504).lists, tiling=tiling)


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
    for name, gradient in zip(("dq", "dk", "dv"), got, strict=True):
        assert oracle.relative_error(gradient, want[name]) <= 1e-2, name


@pytest.mark.parametrize("used", ["out", "logsumexp", "both"])
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
    assert text.count('custom_call_target="mosaic_gpu') == FORWARD + FUSED + 1  # delta


def test_without_a_gpu_the_reason_names_it():
    """A named backend raises with its reason, and `explain` has it too."""
    if _jax.platform() == "gpu":
        pytest.skip("there is a GPU here")
    q = jnp.zeros((1, 128, 1, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"hopper.*needs a Hopper GPU.*this is a cpu"):
        xsake.dot_product_attention(q, q, q, implementation="hopper")
    assert "Hopper" in xsake.explain(q, q, q).reasons["hopper"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "bfloat16 and float16; this is float32"),
        ({"head": 320}, "heads of up to 256; these are 320"),
        ({"block": 32}, "blocks of 64 and 128; these are 32 × 32"),
        ({"rule": masks.random(0.5)}, "random"),
        ({"rule": masks.rule(lambda b, n, q, k: jnp.sin(q - k) > 0)}, "sin"),
        ({"capability": (10, 0)}, "compute capability 9.0"),
        ({"version": (0, 10, 2)}, "JAX 0.11"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else str(x),
)
def test_every_refusal_has_its_reason(change, reason, monkeypatch):
    """On a machine that claims to be an H200, one property of the call at a time is unsupported."""
    monkeypatch.setattr(_jax, "platform", lambda: "gpu")
    monkeypatch.setattr(_jax, "compute_capability", lambda: change.get("capability", (9, 0)))
    monkeypatch.setattr(_jax, "version", lambda: change.get("version", (0, 11, 2)))
    q = jnp.zeros((1, 256, 1, change.get("head", 64)), change.get("dtype", "bfloat16"))
    rule = change.get("rule", masks.causal())
    mask = BlockMask.from_rule(rule, (256, 256), block=change.get("block", 128))
    said = hopper.why_not(Call(q, q, q, None, mask, 1.0, None, Options()))
    assert said is not None
    assert reason in said


def test_supported_calls_are_not_refused(monkeypatch):
    """Every rule of this file runs on a machine that claims to be an H200."""
    monkeypatch.setattr(_jax, "platform", lambda: "gpu")
    monkeypatch.setattr(_jax, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(_jax, "version", lambda: (0, 11, 2))
    q = jnp.zeros((1, 500, 1, 64), jnp.bfloat16)
    array = masks.array(np.ones((500, 500), bool))
    rules = RULES | {"array": array, "array or causal": array | masks.causal()}
    for name, rule in rules.items():
        bias = jnp.zeros((1, 1, 500, 500))
        said = hopper.why_not(Call(q, q, q, bias, mask_of(rule), 1.0, None, Options()))
        assert said is None, f"{name}: {said}"
