"""BlockMask lists the blocks that its rule allows: built, transposed, intersected and printed."""

from __future__ import annotations

import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracle
from tests.specs import to_rule, zoo
from xsake import BlockMask, dot_product_attention, masks
from xsake.masks import intervals

# B, N, T, S and block: aligned, unaligned, T > S, a block larger than either side.
CASES = {
    "unaligned": ((2, 2, 50, 71), (16, 32)),
    "aligned": ((2, 3, 64, 64), (16, 16)),
    "odd, long queries": ((1, 2, 93, 37), (32, 16)),
    "one block": ((1, 2, 21, 30), (64, 128)),
}
NAMES = list(zoo(*CASES["aligned"][0]))
SOME = ["causal", "window", "stride longer than a block", "documents", "causal at positions"]
# Every rule in the hardest case; the rest of the cases with a few.
PAIRS = [(case, name) for case in CASES for name in (NAMES if case == "unaligned" else SOME)]


def build(spec, sizes, block, **more):
    B, N, T, S = sizes
    return BlockMask.from_rule(to_rule(spec), (T, S), batch=B, heads=N, block=block, **more)


@jax.jit
def seen(mask):
    """(to_dense, blocks) in one program."""
    return mask.to_dense(), mask.blocks()


def full_size(x, sizes):
    """A mask's [B|1, N|K|1, ...] with every batch row and query head written out."""
    x = np.asarray(x)
    x = np.repeat(x, sizes[1] // x.shape[1], axis=1)
    return np.broadcast_to(x, (sizes[0], sizes[1], *x.shape[2:]))


def true_blocks(see, block):
    """0 empty, 1 partial, 2 full, by looking at every token; past the last key is partial."""
    *_, T, S = see.shape
    found = np.zeros((*see.shape[:2], -(-T // block[0]), -(-S // block[1])), np.int8)
    for i in range(found.shape[2]):
        for j in range(found.shape[3]):
            stop = (j + 1) * block[1]
            part = see[:, :, i * block[0] : (i + 1) * block[0], j * block[1] : stop]
            full = part.all((2, 3)) & (stop <= S)
            found[:, :, i, j] = np.where(full, 2, part.any((2, 3)))
    return found


def listed_blocks(mask):
    """The lists read as the class docstring says, as 0 empty, 1 partial, 2 full."""
    start, count, full, index = map(
        np.asarray, (mask.kv_start, mask.kv_count, mask.full_count, mask.kv_index)
    )
    assert {x.dtype for x in (start, count, full, index)} == {np.dtype(np.int32)}
    found = np.zeros((*count.shape, -(-mask.shape[1] // mask.block[1])), np.int8)
    for b, n, i in np.ndindex(*count.shape):
        row = index[b, n, start[b, n, i] : start[b, n, i] + count[b, n, i]]
        assert len(row) == count[b, n, i] >= full[b, n, i] >= 0
        assert len(set(row)) == len(row)
        found[b, n, i, row] = 1
        found[b, n, i, row[: full[b, n, i]]] = 2
    return found


@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_a_mask_holds_what_its_rule_allows(case, name):
    sizes, block = CASES[case]
    spec = zoo(*sizes)[name]
    mask = build(spec, sizes, block)
    see = oracle.allowed(spec, *sizes)
    assert (mask.shape, mask.block) == (sizes[2:], block)
    dense, blocks = seen(mask)
    assert (full_size(dense, sizes) == see).all()
    found, truth = full_size(blocks, sizes), true_blocks(see, block)
    assert not ((found == 0) & (truth != 0)).any(), "a block that is not empty is left out"
    assert not ((found == 2) & (truth != 2)).any(), "a block that is not full is called full"
    assert (full_size(listed_blocks(mask), sizes) == found).all()
    assert not mask.overflow
    if spec[0] in {"causal", "sliding_window", "chunked", "first", "strided", "everything"}:
        assert (found == truth).all(), "analytic rules miss nothing"


@pytest.mark.parametrize(
    ("T", "S", "block"),
    [
        (17, 31, (8, 32)),
        (1, 40, (32, 8)),
        pytest.param(40, 48, (16, 16), marks=pytest.mark.slow),
        pytest.param(15, 1, (8, 32), marks=pytest.mark.slow),
    ],
)
def test_analytic_rules_are_exact_at_every_edge(T, S, block):
    specs = [
        ("causal",),
        *(("sliding_window", left, right) for left in (0, 7, 16, None) for right in (0, 9)),
        *(("chunked", size) for size in (1, 5, 16, 33)),
        *(("first", n) for n in (0, 1, 16, 99)),
        *(("strided", stride) for stride in (1, 2, 19, 50)),
    ]
    # all of them in one program, each with the same capacity
    size = -(-T // block[0]) * -(-S // block[1])
    all_blocks = jax.jit(
        lambda: [build(spec, (1, 1, T, S), block, capacity=size).blocks() for spec in specs]
    )
    for spec, found in zip(specs, all_blocks(), strict=True):
        see = oracle.allowed(spec, 1, 1, T, S)
        assert (np.asarray(found) == true_blocks(see, block)).all(), spec


@pytest.mark.parametrize(
    ("rule", "leading"),
    [
        (masks.causal(), (1, 1)),
        (masks.documents(jnp.zeros((2, 64), jnp.int32)), (2, 1)),
        (masks.documents(jnp.zeros((1, 64), jnp.int32)), (1, 1)),
        (masks.random(0.5, block=16), (1, 4)),
        (masks.prefix(jnp.array([3, 40])) & masks.random(0.5), (2, 4)),
    ],
)
def test_a_mask_has_no_axis_its_rule_does_not_read(rule, leading):
    mask = BlockMask.from_rule(rule, (64, 64), batch=2, heads=4, block=16)
    assert mask.kv_count.shape == (*leading, 4)
    assert mask.kv_index.shape[:2] == leading


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
@pytest.mark.parametrize("spec", [None, ("causal",), ("random", 0.5, 3, 4), ("first", 50)])
def test_listed_blocks_and_their_rule(leading, spec):
    sizes, block = (2, 3, 50, 71), (16, 32)
    bits = np.random.default_rng(0).random((*leading, 4, 3)) < 0.5
    rule = None if spec is None else to_rule(spec)
    if spec and spec[0] == "random" and len(leading) == 0:
        leading = (1,)
        bits = np.broadcast_to(bits, (3, 4, 3))  # a rule of n needs one list per head
    mask = BlockMask.from_dense(jnp.asarray(bits), rule, shape=(50, 71), block=block)
    bits = bits.reshape((1,) * (4 - bits.ndim) + bits.shape)
    see = oracle.allowed(("blocks", bits, block), *sizes)
    see = see & oracle.allowed(spec or ("everything",), *sizes)
    dense, blocks = seen(mask)
    assert (full_size(dense, sizes) == see).all()
    found, truth = full_size(blocks, sizes), true_blocks(see, block)
    assert ((found == 0) <= (truth == 0)).all()
    assert ((found == 2) <= (truth == 2)).all()
    if spec != ("random", 0.5, 3, 4):
        assert (found == truth).all()
    assert (full_size(listed_blocks(mask), sizes) == found).all()


def test_from_dense_takes_its_lengths_from_the_blocks():
    mask = BlockMask.from_dense(jnp.ones((3, 2), bool), block=(16, 32))
    assert mask.shape == (48, 64)
    assert np.asarray(mask.to_dense()).all()
    assert (np.asarray(mask.blocks()) == 2).all()
    assert BlockMask.from_dense(jnp.ones((1, 1), bool)).block == (128, 128)


@pytest.mark.parametrize("mod", ["rule", "function", None])
def test_kv_blocks_of_flex_attention_equal_from_dense(mod):
    """Separate partial and full lists, unsorted, with garbage after the counted entries."""
    B, N, block = 2, 3, (16, 16)
    rng = np.random.default_rng(1)
    row, column = np.arange(4)[:, None], np.arange(5)
    bits = (rng.random((B, N, 4, 5)) < 0.5) & (column <= row)
    full = bits & (column < row)  # wholly below the diagonal
    partial = bits & ~full
    counts, lists = [], []
    for part in (partial, full):
        order = np.argsort(~part, axis=-1, kind="stable")
        counts.append(part.sum(-1).astype(np.int32))
        lists.append(order.astype(np.int32))
    mask_mod = {"rule": masks.causal(), "function": lambda b, h, q, k: k <= q, None: None}[mod]
    mask = BlockMask.from_kv_blocks(
        jnp.asarray(counts[0]),
        jnp.asarray(lists[0]),
        jnp.asarray(counts[1]),
        jnp.asarray(lists[1]),
        block=block,
        mask_mod=mask_mod,
        shape=(64, 80),
    )
    same = BlockMask.from_dense(
        jnp.asarray(bits), None if mod is None else masks.causal(), shape=(64, 80), block=block
    )
    assert (np.asarray(mask.to_dense()) == np.asarray(same.to_dense())).all()
    if mod == "rule":
        assert (np.asarray(mask.blocks()) == np.asarray(same.blocks())).all()


def test_kv_blocks_without_full_ones():
    mask = BlockMask.from_kv_blocks(
        jnp.array([[[1, 2, 0]]]), jnp.array([[[[2, 9], [0, 1], [9, 9]]]]), block=8, shape=(24, 24)
    )
    expected = np.zeros((3, 3), bool)
    expected[[0, 1, 1], [2, 0, 1]] = True
    assert (np.asarray(mask.to_dense())[0, 0] == np.kron(expected, np.ones((8, 8), bool))).all()


@pytest.mark.parametrize("name", ["causal", "documents", "random", "function with a table"])
def test_building_under_jit_equals_building_eagerly(name):
    sizes, block = CASES["unaligned"]
    spec = zoo(*sizes)[name]
    eager = build(spec, sizes, block)
    traced = jax.jit(
        lambda rule: BlockMask.from_rule(
            rule, sizes[2:], batch=sizes[0], heads=sizes[1], block=block
        )
    )(to_rule(spec))
    assert (full_size(seen(traced)[0], sizes) == full_size(seen(eager)[0], sizes)).all()
    assert (full_size(listed_blocks(traced), sizes) == full_size(listed_blocks(eager), sizes)).all()
    assert not traced.overflow


def test_everything_runs_under_jit():
    sizes, block = CASES["unaligned"]
    bits = jnp.asarray(np.random.default_rng(2).random((2, 2, 4, 3)) < 0.5)

    def parts(bits):
        mask = BlockMask.from_dense(bits, masks.causal(), shape=sizes[2:], block=block)
        cut = mask & masks.first(40)
        return (
            mask.to_dense(),
            mask.blocks(),
            mask.density(),
            mask.transpose().to_dense(),
            (
                cut.to_dense(),
                cut.blocks(),
                mask[1, 0].to_dense(),
            ),
        )

    for traced, eager in zip(
        jax.tree.leaves(jax.jit(parts)(bits)), jax.tree.leaves(parts(bits)), strict=True
    ):
        np.testing.assert_array_equal(traced, eager)


@pytest.mark.parametrize(
    "name",
    [*SOME, "random", "array per key", "prefix per row", "function with a table", "numbered"],
)
def test_transpose_swaps_queries_and_keys(name):
    sizes, block = CASES["unaligned"]
    spec = zoo(*sizes)[name]
    mask = build(spec, sizes, block)
    turned = mask.transpose()
    assert (turned.shape, turned.block) == (mask.shape[::-1], mask.block[::-1])
    assert turned.kv_index.shape == mask.kv_index.shape, "transpose keeps the capacity"
    see, blocks = (full_size(x, sizes) for x in seen(mask))
    assert (full_size(seen(turned)[0], sizes) == see.swapaxes(2, 3)).all()
    visited = full_size(listed_blocks(turned), sizes) > 0
    assert (visited == (blocks > 0).swapaxes(2, 3)).all()
    again, blocks_again = (full_size(x, sizes) for x in seen(turned.transpose()))
    assert (again == see).all()
    assert ((blocks_again > 0) == (blocks > 0)).all()


def test_density_is_relative_to_causal_blocks_or_to_all_if_not_causal():
    shape = (64, 64)  # 4 x 4 blocks of 16, of which causality allows 10

    def density(rule, shape=shape, **more):
        return float(BlockMask.from_rule(rule, shape, block=16, **more).density())

    window = masks.sliding_window(16)  # the diagonal and both neighbours: 10 of 16
    assert density(masks.causal()) == 1
    assert density(masks.everything()) == 1
    assert density(window) == pytest.approx(10 / 16)
    assert density(window & masks.causal()) == pytest.approx(7 / 10)
    assert density(masks.sliding_window(16, 0)) == pytest.approx(7 / 10)
    assert density(window | masks.causal()) == pytest.approx(13 / 16)
    assert density(masks.first(16)) == pytest.approx(4 / 16)
    assert density(masks.causal(), (64, 40)) == 1
    bits = np.zeros((2, 4, 4), bool)
    bits[0, 0, 0] = bits[1] = True  # heads are summed before dividing: (1 + 10) / 20
    mask = BlockMask.from_dense(jnp.asarray(bits), masks.causal(), block=16)
    assert float(mask.density()) == pytest.approx(11 / 20)
    assert float(BlockMask.from_dense(jnp.asarray(bits), block=16).density()) == pytest.approx(
        17 / 32
    )


def test_a_capacity_that_is_too_small_raises_with_both_numbers():
    assert BlockMask.from_rule(masks.causal(), (64, 64), block=16, capacity=10).kv_index.size == 10
    with pytest.raises(ValueError, match=r"(?s)(10.*\b7\b|\b7\b.*10)"):
        BlockMask.from_rule(masks.causal(), (64, 64), block=16, capacity=7)
    bits = np.tri(4, dtype=bool)
    with pytest.raises(ValueError, match=r"(?s)(10.*\b7\b|\b7\b.*10)"):
        BlockMask.from_dense(jnp.asarray(bits), block=16, capacity=7)


@pytest.mark.parametrize(("capacity", "overflows"), [(9, True), (10, False), (16, False)])
def test_overflow_under_jit_sets_the_overflow_flag(capacity, overflows):
    build = jax.jit(lambda bits: BlockMask.from_dense(bits, block=16, capacity=capacity))
    mask = build(jnp.tri(4, dtype=bool))
    assert mask.overflow.dtype == bool
    assert bool(mask.overflow) == overflows
    assert mask.kv_index.shape[-1] == capacity
    assert not build(jnp.eye(4, dtype=bool)).overflow
    turned = jax.jit(lambda mask: mask.transpose())(mask)
    assert bool(turned.overflow) == overflows, "transpose keeps the overflow flag"


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
    assert "batch row 0 of 1, head 0 of 2" in str(per_head)
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
