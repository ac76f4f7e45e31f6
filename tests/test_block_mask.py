"""BlockMask lists the blocks that its rule allows: built, transposed, counted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracle
from tests.block_masks import CASES, PAIRS, SOME, build, full_size, listed_blocks, seen, true_blocks
from tests.specs import to_rule, zoo
from xsake import BlockMask, _jax, masks
from xsake.block_mask import lists
from xsake.masks.rule import Grid


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


def test_a_mask_of_a_rule_without_spans_is_made_without_jit():
    """Its capacity is a compiled program all the same; the grid is of no other test."""
    rule = masks.strided(7) & masks.causal()
    with jax.disable_jit():
        mask = BlockMask.from_rule(rule, (37, 29), block=16)
    np.testing.assert_array_equal(
        mask.blocks(), jax.jit(lambda: BlockMask.from_rule(rule, (37, 29), block=16))().blocks()
    )


def test_lists_are_the_same_by_sums_as_by_a_cumulative_sum(monkeypatch):
    """On GPUs, short rows of blocks are counted by sums."""
    grid = Grid((2000, 1700), (128, 128), 2, 3)
    live = np.random.default_rng(0).random((2, 3, *grid.counts)) < 0.4
    full = live & (np.random.default_rng(1).random(live.shape) < 0.5)
    both = []
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(_jax, "platform", lambda platform=platform: platform)
        both.append(lists.lists_from_map(jnp.asarray(live), jnp.asarray(full), grid, 120))
    for name, one, other in zip(lists.Lists._fields, *both, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_lists_of_known_classes_are_those_of_traced_ones():
    """The last kv block reaches past S, so that it is never full; one head visits nothing."""
    classes = np.random.default_rng(0).integers(0, 3, (2, 3, 4, 5)).astype(np.int8)
    classes[1, 2] = 0
    how = masks.everything(), (64, 78), (16, 16)
    known, traced = (BlockMask.from_classes(x, *how) for x in (classes, jnp.asarray(classes)))
    for name in ("kv_start", "kv_count", "full_count"):
        np.testing.assert_array_equal(getattr(known, name), getattr(traced, name))
    for head in np.ndindex(2, 3):
        count = int(known.kv_count[head].sum())
        np.testing.assert_array_equal(known.kv_index[head][:count], traced.kv_index[head][:count])
    np.testing.assert_array_equal(known.blocks()[..., :4], classes[..., :4])
    np.testing.assert_array_equal(known.blocks()[..., 4], np.minimum(classes[..., 4], 1))
