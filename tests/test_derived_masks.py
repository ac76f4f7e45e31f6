"""Masks made of masks, and what one can see of them: intersected, indexed, drawn, large."""

from __future__ import annotations

import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracle
from tests.block_masks import CASES, build, full_size, seen, true_blocks
from tests.specs import to_rule, zoo
from xsake import BlockMask, dot_product_attention, masks
from xsake.masks import intervals


@pytest.mark.parametrize("name", ["window", "random", "documents", "array"])
def test_mask_and_rule_is_their_intersection(name):
    sizes, block = CASES["aligned"]
    bits = np.random.default_rng(3).random((2, 3, 4, 4)) < 0.6
    mask = BlockMask.from_dense(jnp.asarray(bits), masks.causal(), block=block)
    spec = zoo(*sizes)[name]
    cut = mask & to_rule(spec)
    whole = ("and", ("and", ("blocks", bits, block), ("causal",)), spec)
    see = oracle.allowed(whole, *sizes)
    dense, blocks = seen(cut)
    assert (full_size(dense, sizes) == see).all()
    found, truth = full_size(blocks, sizes), true_blocks(see, block)
    assert ((found == 0) <= (truth == 0)).all()
    assert ((found == 2) <= (truth == 2)).all()
    if name == "window":
        assert ((found == 0) == (truth == 0)).mean() > 0.9, "blocks are reclassified"
        assert (found == 0).sum() > (full_size(mask.blocks(), sizes) == 0).sum()


def test_masks_and_rules_and_arrays_intersect_in_any_order():
    sizes, block = CASES["aligned"]
    bits = np.random.default_rng(3).random((2, 3, 4, 4)) < 0.6
    tokens = np.random.default_rng(4).random((64, 64)) < 0.9
    one = BlockMask.from_dense(jnp.asarray(bits), masks.causal(), block=block)
    two = build(zoo(*sizes)["window"], sizes, block)
    see = full_size(one.to_dense(), sizes) & full_size(two.to_dense(), sizes)
    for both in (one & two, two & one, masks.sliding_window(13, 4) & one):
        assert (full_size(both.to_dense(), sizes) == see).all()
    for both in (one & tokens, tokens & one, one & jnp.asarray(tokens)):
        assert (
            full_size(both.to_dense(), sizes) == full_size(one.to_dense(), sizes) & tokens
        ).all()
    # a mask that all heads share, and an array by head
    of_heads = np.random.default_rng(5).random((1, 3, 64, 64)) < 0.9
    assert two.kv_count.shape[1] == 1
    each = two & of_heads
    assert each.kv_count.shape[1] == 3
    see = full_size(two.to_dense(), sizes) & of_heads
    assert (full_size(each.to_dense(), sizes) == see).all()


def test_derived_masks_carry_intervals(monkeypatch):
    """&, transpose, indexing and sharding keep them; a rule of another kind drops them."""
    monkeypatch.setattr(intervals, "are_read", lambda: True)  # as on a GPU
    sizes, block = CASES["aligned"]
    B, _, T, S = sizes
    ids = np.sort(zoo(*sizes)["documents"][1])
    mask = BlockMask.from_rule(masks.documents(ids), (T, S), block=block)
    causal = mask & masks.causal()
    assert causal.intervals.shape == (B, 1, 2, T)
    q, k = np.ogrid[:T, :S]
    see = ((ids[:, :, None] == ids[:, None]) & (ids[:, :, None] >= 0) & (k <= q))[:, None]
    for derived, want in (
        (causal, see),
        (causal.transpose(), see.swapaxes(2, 3)),
        (causal[1, 0], see[1:]),
    ):
        lo, hi = np.moveaxis(np.asarray(derived.intervals), 2, 0)[..., None]
        assert (((k >= lo) & (k < hi)) == want).all()
    spec = causal.partition_spec("rows").intervals
    assert spec == jax.sharding.PartitionSpec("rows", None, None, None)
    first = masks.first(3) | masks.sliding_window(9, 0)
    two = mask & first
    assert two.intervals.shape == two.transpose().intervals.shape == (B, 1, 4, T)
    lo, hi, *other = np.moveaxis(np.asarray(two.intervals), 2, 0)[..., None]
    seen = ((k >= lo) & (k < hi)) | ((k >= other[0]) & (k < other[1]))
    by_rule = (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] >= 0)
    assert (seen == (by_rule & ((k < 3) | (k <= q) & (q - k <= 9)))[:, None]).all()
    assert (two & first).intervals is None
    assert (mask & masks.strided(3)).intervals is None
    assert BlockMask.from_rule(masks.causal(), (T, S), block=block).intervals is None


def test_lists_of_a_rule_without_arrays_are_constants():
    """Under jit too, and equal to those that a compiled call would compute."""
    shape, size = (300, 200), dict(block=(32, 16))
    window = masks.sliding_window(40, 3)
    traced = jax.make_jaxpr(lambda: BlockMask.from_rule(window, shape, **size).lists)()
    assert not traced.eqns
    constant = BlockMask.from_rule(window, shape, **size)
    computed = BlockMask.from_rule(window, shape, **size, capacity=constant.kv_index.shape[-1])
    for x, y in zip(constant.lists[:4], computed.lists[:4], strict=True):
        assert x.dtype == y.dtype
        assert (x == y).all()


def test_indexing_takes_one_head_of_one_row():
    sizes, block = CASES["unaligned"]
    for name in ("documents", "causal", "function with a table"):
        mask = build(zoo(*sizes)[name], sizes, block)
        see = full_size(seen(mask)[0], sizes)
        for b, n in [(0, 1), (1, 0)]:
            one = np.asarray(seen(mask[b, n])[0]).reshape(sizes[2:])
            assert (one == see[b, n]).all(), (name, b, n)


def test_a_mask_is_a_pytree():
    sizes, block = CASES["aligned"]
    mask = build(zoo(*sizes)["documents, causal"], sizes, block)
    leaves, structure = jax.tree.flatten(mask)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    again = jax.tree.unflatten(structure, leaves)
    assert (again.shape, again.block) == (mask.shape, mask.block)
    assert (np.asarray(again.to_dense()) == np.asarray(mask.to_dense())).all()
    specs = jax.tree.structure(
        mask.partition_spec(batch="data", heads="model"),
        is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec),
    )
    assert specs == structure


def test_str_draws_one_line_per_row_of_blocks():
    bits = jnp.eye(6, dtype=bool)
    lines = str(BlockMask.from_dense(bits, masks.causal(), block=16)).splitlines()
    assert len(lines) >= 6
    drawn = [str(BlockMask.from_dense(x, block=16)) for x in (bits, ~bits, jnp.tri(6, dtype=bool))]
    assert len(set(drawn)) == 3
    assert len(str(BlockMask.from_rule(masks.causal(), (1 << 15, 1 << 15))).splitlines()) < 200


def test_a_drawing_says_its_head_its_denominator_and_an_overflow():
    bits = jnp.tri(4, dtype=bool)
    assert "of the causal blocks" in str(BlockMask.from_dense(bits, masks.causal(), block=16))
    per_head = BlockMask.from_dense(jnp.stack([bits, ~bits]), block=16)
    assert "of all blocks" in str(per_head)
    assert "density 0.500 of all blocks" in str(per_head)
    assert "batch row 0 of 1, head 0 of 2, density 0.625:" in str(per_head)
    build = jax.jit(lambda bits: BlockMask.from_dense(bits, block=16, capacity=9))
    assert "OVERFLOW" in str(build(bits))
    assert "OVERFLOW" in repr(build(bits))
    assert "OVERFLOW" not in str(build(bits & False))


def test_a_plot_names_its_head_has_a_legend_and_is_not_clipped():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes

    rule = masks.causal() & (masks.first(1) | masks.sliding_window(300) | masks.strided(300))
    rule = rule & masks.chunked(1000) & masks.sliding_window(2000)  # too long for one line
    dense = np.ones((3, 4, 4), bool)
    axes = BlockMask.from_dense(dense, rule, shape=(64, 60), block=16).plot(n=1)
    assert isinstance(axes, Axes)
    assert axes.get_title().endswith("head 1 of 3")
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["full", "partial", "empty"]
    assert [*axes.get_xlim(), *axes.get_ylim()] == [0, 60, 64, 0]
    assert axes.images[0].get_extent() == [0, 64, 64, 0]  # a block is 16 tokens wide at the end too
    figure = axes.figure
    figure.draw_without_rendering()
    everything, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(everything.p0) >= 0
    assert everything.x1 <= width
    assert everything.y1 <= height
    plt.close(figure)


def test_a_million_tokens_need_no_square_array():
    """Neither tokens x tokens nor blocks x blocks: only the 8,192 rows of at most 33 blocks."""
    T, window, rows = 1 << 20, 4096, 8192
    rule = masks.sliding_window(window) & masks.causal()

    def make():
        mask = BlockMask.from_rule(rule, (T, T))
        return jax.block_until_ready(mask)

    tracemalloc.start()
    mask = make()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    begun = time.perf_counter()
    make()
    seconds = time.perf_counter() - begun
    listed = rows * 33 - 32 * 33 // 2  # the first 32 rows begin at token 0
    assert int(mask.kv_count.sum()) == listed
    assert mask.kv_index.size == listed, "the capacity equals the number of listed blocks"
    assert peak_bytes < 50e6, "NumPy held less than the 67 MB of one byte per pair of blocks"
    assert seconds < 2.0, "10 × the 0.2 s target, to allow for a busy machine"
    largest = max(_sizes(jax.make_jaxpr(lambda: BlockMask.from_rule(rule, (T, T)))()), default=0)
    assert largest <= 8 * listed
    assert int(mask.kv_index[0, 0, -1]) < rows


def _sizes(closed):
    """Elements of every array that a traced program makes or holds."""
    yield from (np.size(constant) for constant in closed.consts)
    for equation in closed.jaxpr.eqns:
        yield from (var.aval.size for var in equation.outvars)
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(value, "jaxpr"):
                yield from _sizes(value)


@pytest.mark.parametrize("made", ["from_rule", "from_dense"])
@pytest.mark.parametrize("cell", [16, 8])
def test_a_head_dependent_rule_on_a_mask_without_heads_is_right_or_refused(made, cell):
    """A mask built without `heads` and used with four."""
    sizes, spec = (1, 4, 64, 64), ("random", 0.5, 3, cell)
    x = oracle.random_inputs(np.random.default_rng(4), 1, 64, 64, 4, 2, 8)
    q, k, v = (jnp.asarray(x[name], jnp.float32) for name in "qkv")
    make = {
        "from_rule": lambda: BlockMask.from_rule(to_rule(spec), (64, 64), block=16),
        "from_dense": lambda: BlockMask.from_dense(jnp.ones((4, 4), bool), to_rule(spec), block=16),
    }[made]
    expected, _ = oracle.attention(q, k, v, allowed=oracle.allowed(spec, *sizes))
    try:
        out = dot_product_attention(q, k, v, mask=make(), implementation="xla")
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = None
    assert "heads" in refusal if refusal else oracle.relative_error(out, expected) <= 2e-6
