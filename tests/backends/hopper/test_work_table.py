"""Transposed lists and work tables of the Hopper kernels: plain JAX here, the kernels on a GPU."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conditions import needs_gpu, needs_newer_jax
from xsake import BlockMask, _jax, masks
from xsake.block_mask.lists import known_lists
from xsake.hads import sampled
from xsake.masks.rule import Grid

pytestmark = needs_newer_jax
SMS = 4  # multiprocessors, as the tables here are made for
# list batch, list heads, row blocks, kv blocks, share of blocks, with partial blocks
MASKS = {
    "few": (1, 2, 5, 7, 0.4, False),
    "causal": (2, 3, 16, 16, 0.5, True),
    "128 rows": (1, 2, 128, 128, 0.1, False),
    "more columns than lanes": (1, 2, 130, 300, 0.3, True),
    "most rows": (1, 1, 384, 256, 0.05, True),
    "everything": (1, 1, 96, 96, 1.0, False),
    "nothing": (1, 2, 9, 9, 0.0, False),
    "too many rows": (1, 1, 400, 130, 0.1, True),
}


def random_mask(name):
    """A mask of 64-blocks with spare capacity; its first row block is empty."""
    batch, heads, rows, columns, share, partial = MASKS[name]
    rng = np.random.default_rng(rows)
    blocks = rng.random((batch, heads, rows, columns)) < share
    blocks[:, :, 0] &= name == "everything"
    rule = masks.sliding_window(64 * columns, 40) if partial else None
    capacity = max(1, int(blocks.sum((2, 3)).max())) + 37
    shape = (64 * rows - 3, 64 * columns)
    return BlockMask.from_dense(blocks, rule, shape=shape, block=(64, 64), capacity=capacity)


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    """The counter of a table begins at the number of CTAs."""
    monkeypatch.setattr(_jax, "multiprocessors", lambda: SMS)


def tiling(order, l2_bytes=24 << 20):
    """The fields that a table depends on."""
    return types.SimpleNamespace(order=order, l2_bytes=l2_bytes)


def expected_table(mask, batch, heads, run, has_tail, nesting="bni"):
    """The rows one by one, sorted by Python: longest first within runs, and within the tail."""
    start, count, full, index = (np.asarray(x) for x in mask.lists[:4])
    list_batch, list_heads, blocks = count.shape
    rows = []
    for number in range(batch * heads * blocks):
        b, n, i = number // blocks // heads, number // blocks % heads, number % blocks
        at = (b % list_batch, n // (heads // list_heads), i)
        first = (at[0] * list_heads + at[1]) * index.shape[-1]
        rows.append((b, n, i, first + start[at], count[at], full[at], 0, 0))
    rows.sort(key=lambda row: [row["bni".index(axis)] for axis in nesting])
    tail = max(0, len(rows) - (4 * SMS if has_tail else 0)) // run * run
    runs = [rows[first : first + run] for first in range(0, tail, run)]
    rows = [row for part in (*runs, rows[tail:]) for row in sorted(part, key=lambda row: -row[4])]
    return np.array([*rows, (0, 0, 0, 0, -1, 0, min(SMS, len(rows)), 0)])


# order, bytes of L2, batch rows and heads that share a list, work tiles in a run (None: all)
ORDERS = [
    ("natural", 24 << 20, 2, 1, lambda blocks, group: 1),
    ("longest", 24 << 20, 2, 2, lambda blocks, group: None),
    ("heads", 24 << 20, 2, 2, lambda blocks, group: group * blocks),
    ("sections", 1, 2, 2, lambda blocks, group: group * blocks),
    ("sections", 200_000, 1, 1, lambda blocks, group: 2 * group * blocks),
    ("sections", 24 << 20, 2, 2, lambda blocks, group: None),
]


# order, query heads per list head, nesting, where heads or batch rows share a bias
NESTED = [
    ("natural", 2, "ibn"),
    ("longest", 2, "ibn"),
    ("longest", 1, "bin"),
    ("natural", 3, "nib"),
]


def check_nested_tables(name, interpret):
    """Work tiles of several heads and batch rows, row block by row block."""
    from xsake.backends.hopper import work_table

    mask = random_mask(name)
    list_batch, list_heads, blocks = mask.kv_count.shape
    for order, group, nesting in NESTED:
        batch, heads = 2 if list_batch == 1 else list_batch, list_heads * group
        table = functools.partial(
            work_table.work_table,
            B=batch,
            N=heads,
            K=list_heads,
            kv_bytes=1,
            tiling=tiling(order),
            interpret=interpret,
            nesting=nesting,
        )
        found = jax.jit(table)(mask.lists)
        run = 1 if order == "natural" else batch * heads * blocks
        want = expected_table(mask, batch, heads, run, has_tail=True, nesting=nesting)
        np.testing.assert_array_equal(found, want, err_msg=f"{order} {nesting}")


def check_tables(name, interpret, has_tail):
    from xsake.backends.hopper import work_table

    mask = random_mask(name)
    list_batch, list_heads, blocks = mask.kv_count.shape
    for order, l2_bytes, batch, group, run in ORDERS:
        batch, heads = batch * list_batch, list_heads * group
        how = tiling(order, l2_bytes)
        found = jax.jit(
            lambda lists, batch=batch, heads=heads, how=how: work_table.work_table(
                lists, batch, heads, list_heads, 100_000, how, interpret, has_tail
            )
        )(mask.lists)
        tiles = batch * heads * blocks
        together = min(run(blocks, group) or tiles, tiles)
        np.testing.assert_array_equal(
            found, expected_table(mask, batch, heads, together, has_tail), err_msg=order
        )


@pytest.mark.parametrize("name", ["few", "causal", "128 rows", "nothing"])
def test_a_table_has_every_work_tile_longest_first(name):
    """Lists shared by heads and batch rows, runs that do and do not divide the work tiles."""
    check_tables(name, interpret=True, has_tail=name != "causal")


@pytest.mark.parametrize("name", ["few", "causal", "nothing"])
def test_equal_work_tiles_keep_the_order_of_their_nesting(name):
    check_nested_tables(name, interpret=True)


@pytest.mark.parametrize(("shape", "nesting"), [((1, 1), "ibn"), ((2, 1), "bin"), ((1, 8), "nib")])
def test_heads_that_share_a_bias_add_to_the_same_rows_of_its_gradient(shape, nesting):
    """Two batch rows of eight heads: those that share the bias have consecutive work tiles."""
    from xsake.backends.hopper import backward_kernel, work_table
    from xsake.backends.options import BackwardTiling

    mask = BlockMask.from_rule(masks.causal(), (8 * 64, 8 * 64), block=(64, 64))
    bias = jax.ShapeDtypeStruct((*shape, 512, 512), jnp.bfloat16)
    how, found = backward_kernel._together(bias, mask.lists, BackwardTiling())
    assert found == nesting
    table = work_table.work_table(mask.lists, 2, 8, 8, 1, how, interpret=True, nesting=found)
    b, n, i, _, count, *_ = np.asarray(table)[:-1].T
    assert (np.diff(count) <= 0).all()
    own = b if shape[0] > 1 else n if shape[1] > 1 else 0 * b
    together = 16 // len(np.unique(own))
    assert (np.ptp((i + 8 * own).reshape(-1, together), axis=1) == 0).all()


def test_the_work_ends_with_the_shortest_tiles_of_several_heads(monkeypatch):
    """Documents of uneven lengths: no multiprocessor is left alone with a long work tile."""
    from xsake.backends.hopper import work_table

    sms = 24
    monkeypatch.setattr(_jax, "multiprocessors", lambda: sms)
    lengths = [700, 100, 2900, 396]
    ids = np.repeat(np.arange(len(lengths)), lengths)[None]
    mask = BlockMask.from_rule(masks.causal() & masks.documents(ids), (4096, 4096))
    table = work_table.work_table(mask.lists, 1, 8, 8, 1, tiling("heads"), interpret=True)
    visits = np.asarray(table)[:-1, 4]
    busy = np.zeros(sms)
    for count in visits:  # whichever is free first takes the next work tile
        busy[busy.argmin()] += count
    assert busy.max() <= 1.03 * visits.sum() / sms


@pytest.mark.parametrize("shared", [(1, 1), (3, 1), (1, 2), (3, 2), (1, 4), (3, 4)])
def test_heads_know_which_lists_they_share(shared):
    """Three batch rows of four heads; every list is written by the first head that has it."""
    from xsake.backends.hopper import work_table

    batch, heads = shared
    blocks = np.ones((batch, heads, 3, 3), bool)
    mask = BlockMask.from_dense(blocks, shape=(192, 192), block=(64, 64))
    tables = work_table.HeadTables(mask.lists, 3, 3, 4, run=3, counts=False)
    wanted = [(b % batch) * heads + n // (4 // heads) for b in range(3) for n in range(4)]
    assert [int(tables._list_of(jnp.int32(head))) for head in range(12)] == wanted
    writes = [bool(tables._writes_lists(jnp.int32(head))) for head in range(12)]
    assert writes == [number not in wanted[:head] for head, number in enumerate(wanted)]
    assert tables.tail == min(12, -(-(2 if batch * heads == 12 else 4) * SMS // 3))
    first, count = tables._tail_lists(tables.tail)
    assert {*wanted[-tables.tail :]} <= {*range(first, first + count)}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", MASKS)
def test_the_kernel_computes_the_same_table(name):
    """As Python sorts it."""
    for has_tail in (False, True):
        check_tables(name, interpret=False, has_tail=has_tail)
    check_nested_tables(name, interpret=False)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", MASKS)
def test_the_kernel_transposes_lists_as_the_mask_does(name):
    check_transposed(name)


def check_transposed(name):
    """Every array of BlockMask.transpose; entries past the lists are valid indices."""
    from xsake.backends.hopper.transpose import transpose_lists

    mask = random_mask(name)
    columns = mask.grid.counts[1]
    found = jax.jit(lambda lists: transpose_lists(lists, columns))(mask.lists)
    want = mask.transpose().lists
    used = np.arange(want.kv_index.shape[-1]) < np.asarray(want.kv_count).sum(-1, keepdims=True)
    index = np.asarray(found.kv_index)
    np.testing.assert_array_equal(index[used], np.asarray(want.kv_index)[used])
    assert (index >= 0).all()
    assert (index < mask.grid.counts[0]).all()
    for name in ("kv_start", "kv_count", "full_count", "overflow"):
        np.testing.assert_array_equal(getattr(found, name), getattr(want, name), err_msg=name)


def test_an_unknown_order_is_refused():
    """The error names it and lists the orders there are."""
    from xsake.backends.hopper import work_table

    with pytest.raises(
        ValueError, match=r"order is 'shortest'; choose one of \['heads', 'longest'"
    ):
        work_table.work_table(random_mask("few").lists, 1, 2, 2, 1, tiling("shortest"), True)


def test_a_known_table_has_every_work_tile_and_the_longest_first():
    from xsake.backends.hopper import work_table
    from xsake.backends.hopper.scheduler import COUNTER

    rows = sampled.SampledRows(masks.causal(), (1024, 1024), 256, 4, 64)
    classes = sampled.block_classes(rows, 128, 4)
    lists = known_lists(classes, Grid((256, 256), (64, 128), len(classes), 1))
    *records, end = work_table.known_table(lists, 8, 2)
    assert (end[4], end[COUNTER]) == (-1, SMS)
    counts = [record[4] for record in records]
    assert counts == sorted(counts, reverse=True)
    assert len({tuple(x[:3]) for x in records}) == len(records) == 8 * 2 * 4
    index = lists.kv_index.reshape(-1)
    for b, _, i, start, count, full, *_ in records:
        named = np.zeros(2, int)
        named[index[start : start + count]] = 1
        named[index[start : start + full]] = 2
        np.testing.assert_array_equal(named, classes[b % 4, 0, i])
