"""The bodies of kernels in which every thread has its own value, run on the CPU.

The same kernels run on a GPU in test_work_table.py, test_kernels.py and test_selected.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.backends.hopper.test_work_table import (
    check_nested_tables,
    check_tables,
    check_transposed,
    expected_table,
    random_mask,
    tiling,
)
from tests.conditions import needs_newer_jax
from xsake import BlockMask, _jax, masks, selection
from xsake.masks import intervals

pytestmark = needs_newer_jax
SMS = 4  # multiprocessors, as in test_work_table.py
MASKS = "few", "causal", "nothing"


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    monkeypatch.setattr(_jax, "multiprocessors", lambda: SMS)


@pytest.fixture
def emulator(monkeypatch):
    from tests.backends.hopper import lane_emulator

    lane_emulator.emulate(monkeypatch)
    return lane_emulator


@pytest.mark.parametrize("name", MASKS)
def test_a_work_table_is_sorted_as_python_sorts_it(name, emulator):
    with jax.disable_jit():
        for has_tail in (False, True):
            check_tables(name, interpret=False, has_tail=has_tail)
        check_nested_tables(name, interpret=False)


def test_ctas_store_no_different_values_to_one_element(emulator):
    """On a card their order is arbitrary; equal values, as of shared lists, do not matter."""
    from xsake.backends.hopper import lanes

    def run(size, value_of):
        def body(out):
            cta = lanes.lax.axis_index("cta")
            at = np.where(lanes.lane_index() == 0, cta % size, -1)
            lanes.scatter(out, at, lanes.every_lane(value_of(cta)))

        (out,) = lanes.launch(
            body, "store", [jax.ShapeDtypeStruct((size,), jnp.int32)], {"cta": 4}, []
        )
        return out.tolist()

    assert run(4, lambda cta: cta) == [0, 1, 2, 3]
    assert run(2, lambda cta: cta % 2) == [0, 1]
    with pytest.raises(emulator.Race, match="CTAs store different values"):
        run(2, lambda cta: cta)


@pytest.mark.parametrize(
    ("loaded", "message"), [(-1, "loads what another one stored"), (1, "stores what another one")]
)
def test_no_cta_loads_what_another_one_of_its_launch_stores(loaded, message, emulator):
    """Neither before nor after it; its own elements it may load, as those of an earlier launch."""
    from xsake.backends.hopper import lanes

    def run(offset):
        def body(given, out):
            cta = lanes.lax.axis_index("cta")
            lanes.gather(given, lanes.every_lane((cta + 1) % 4))
            lanes.scatter(out, np.where(lanes.lane_index() == 0, cta, -1), lanes.every_lane(cta))
            lanes.gather(out, lanes.every_lane(np.clip(cta + offset, 0, 3)))

        def fill(out):
            lane = lanes.lane_index()
            lanes.scatter(out, np.where(lane < 4, lane, -1), lane)

        shape = jax.ShapeDtypeStruct((4,), jnp.int32)
        given = lanes.launch(fill, "fill", [shape], {"cta": 1}, [])
        return lanes.launch(body, "load", [shape], {"cta": 4}, given)[0].tolist()

    assert run(0) == [0, 1, 2, 3]
    with pytest.raises(emulator.Race, match=message):
        run(loaded)


def test_a_long_run_is_sorted_too(emulator):
    """A CTA compares its work tiles with more than 2,048 others, in two unrolled turns."""
    from xsake.backends.hopper import work_table

    rows = 2300
    blocks = np.random.default_rng(0).random((1, 1, rows, 6)) < 0.5
    mask = BlockMask.from_dense(blocks, shape=(rows * 64, 6 * 64), block=(64, 64))
    table = work_table.work_table(mask.lists, 1, 1, 1, 1, tiling("longest"))
    np.testing.assert_array_equal(table, expected_table(mask, 1, 1, rows, has_tail=True))


@pytest.mark.parametrize("name", [*MASKS, "more columns than lanes"])
def test_lists_are_transposed_as_the_mask_does(name, emulator):
    with jax.disable_jit():
        check_transposed(name)


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize(("name", "batch", "group"), [("few", 2, 2), ("causal", 2, 1)])
def test_tables_by_head_are_sorted_and_end_with_a_tail(
    name, batch, group, counts, is_sorted, emulator
):
    """Heads of their own lists, and heads and batch rows that share them."""
    from xsake.backends.hopper import lanes, work_table

    mask = random_mask(name)
    columns, row_blocks = mask.grid.counts[1], mask.grid.counts[0]
    list_heads = mask.kv_count.shape[1]
    heads = list_heads * group
    run = columns if is_sorted else 1
    tables = work_table.HeadTables(mask.lists, columns, batch, heads, run, counts)
    index, table, *counters = lanes.launch(
        lambda *refs, **smem: tables.run(work_table.lax.axis_index("head"), refs, smem),
        "tables",
        tables.out_type,
        {"head": batch * heads},
        tables.operands,
        **tables.smem,
    )
    transposed = mask.transpose().lists
    start, count, full, want = (np.asarray(x) for x in transposed[:4])
    rows = []
    for b, n, j in np.ndindex(batch, heads, columns):
        at = (b if len(count) > 1 else 0, n // group, j)
        head = at[0] * list_heads + at[1]
        rows.append((b, n, j, head * want.shape[-1] + start[at], count[at], full[at], 0, 0))
    by_head = [rows[i : i + columns] for i in range(0, len(rows), columns)]
    first = len(by_head) - tables.tail
    runs = by_head[:first] if is_sorted else [[row] for some in by_head[:first] for row in some]
    runs.append([row for some in by_head[first:] for row in some])
    wanted = [row for some in runs for row in sorted(some, key=lambda row: -row[4])]
    end = (0, 0, 0, 0, -1, 0, min(SMS, len(rows)), 0)
    np.testing.assert_array_equal(np.asarray(table).reshape(-1, 8), [*wanted, end])
    is_listed = np.arange(want.shape[-1]) < count.sum(-1, keepdims=True)
    np.testing.assert_array_equal(np.asarray(index).reshape(want.shape)[is_listed], want[is_listed])
    if counts:
        visits = np.asarray(mask.kv_count).repeat(group, axis=1)
        visits = np.broadcast_to(visits, (batch, heads, row_blocks))
        np.testing.assert_array_equal(counters[0], -visits.reshape(-1))


@pytest.mark.parametrize("join", ["and", "or"])
def test_intervals_by_key_are_those_of_plain_jax(join, emulator):
    """One interval of each query or two; a batch row whose ids are not sorted has a mark."""
    from xsake.backends.hopper import interval_transpose, lanes

    ids = np.stack([np.sort(np.arange(300) // 70), np.arange(300) % 3])
    ids[:, 290:] = -1
    of_ids = masks.documents(ids)
    rule = of_ids & masks.causal() if join == "and" else of_ids | masks.first(7)
    pairs = intervals.intervals_of(rule, (300, 300))[:, 0]
    transpose = interval_transpose.IntervalTranspose(pairs, 300)
    found = lanes.launch(
        lambda *refs: transpose.run(interval_transpose.lax.axis_index("cta"), refs),
        "intervals",
        transpose.out_type,
        {"cta": transpose.ctas},
        transpose.operands,
    )
    want = intervals.transposed(pairs[:, None], 300)[:, 0]
    np.testing.assert_array_equal(transpose.result(found), want)


def test_every_token_gets_its_best_blocks(emulator):
    """First blocks, last blocks and the best of the others; equal ones by their number."""
    from xsake.backends.hopper.selected import top

    heads, tokens, blocks, size, first = 2, 256, 20, 16, 60
    rng = np.random.default_rng(0)
    sums = rng.integers(1, 9, (1, heads, tokens, blocks, 2)).astype(np.float32)
    sums[..., 0] += sums[..., 1]
    how = {"block_size": size, "count": 7, "initial": 1, "local": 2}
    found = top.top(jnp.asarray(sums), jnp.asarray([first], jnp.int32), **how)
    own, edge = np.moveaxis(sums[0], -1, 0)
    importance = 2 * own - edge
    importance[..., 1:] += edge[..., :-1]
    for head, token in np.ndindex(heads, tokens):
        current = (first + token) // size
        forced = {0, current, max(current - 1, 0)}
        others = [j for j in range(current) if j not in forced]
        best = sorted(others, key=lambda j: -importance[head, token, j])[: 7 - 1 - 2]
        want = sorted({*forced, *best})
        np.testing.assert_array_equal(found[0, head, token], want + [-1] * (7 - len(want)))


@pytest.mark.parametrize("parts", [1, 16])
@pytest.mark.parametrize(("length", "band"), [(640, 0), (629, 2), (130 * 64 - 3, 0)])
def test_lists_have_the_blocks_that_keep_top_selects(length, band, parts, emulator):
    """Scores of one row of parts that is padded; counts out of range; more blocks than lanes."""
    from xsake.backends.hopper import best_blocks

    n, block = -(-length // 64), 64
    B, N = (2, 2) if n < 100 else (1, 1)
    rng = np.random.default_rng(length + parts)
    sums = rng.standard_normal((B, N, n, -(-n * parts // 64) * 64)).astype(np.float32) * 4
    row = np.arange(sums.shape[-1]) // parts
    sums = np.where(np.arange(n)[:, None] <= row, sums, np.nan)
    sums[:, :, 3, 5 * parts : 6 * parts] = np.nan  # a block of a row block that sees it
    sums[:, :, 2, 6 * parts : 7 * parts] = -np.inf
    counts = rng.integers(0, n + 3, (1, N, n)).astype(np.int32)
    found = best_blocks.best_blocks(
        jnp.asarray(sums), jnp.asarray(counts), length=length, block=block, parts=parts, band=band
    )
    scores = jnp.asarray(np.moveaxis(sums, 2, 3)[:, :, : n * parts])
    if parts > 1:
        kept = (np.arange(n) <= np.arange(n * parts)[:, None] // parts)[None, None]
        logs = jax.nn.log_softmax(jnp.where(kept, scores, -jnp.inf), axis=-1)
        real = np.arange(n * parts) * (block // parts) < length
        logs = jnp.where(real[:, None], 2 * logs, -jnp.inf).reshape(B, N, n, parts, n)
        scores = jax.nn.logsumexp(logs, axis=3)
    want = selection.to_mask(selection.keep_top(scores, counts, band), length, block).lists
    for name in ("kv_start", "kv_count", "full_count", "kv_index"):
        one, other = (np.asarray(getattr(x, name)) for x in (found, want))
        np.testing.assert_array_equal(one, other, err_msg=name)


# ------------------------------------------------------------------------ the emulator finds faults


def test_a_missing_barrier_is_found(emulator, monkeypatch):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    for check in (check_transposed, lambda name: check_tables(name, False, True)):
        with jax.disable_jit(), pytest.raises(emulator.Race):
            check("few")


def test_an_index_outside_is_found(emulator):
    """Of a run too: its neighbours belong to others."""
    memory = emulator.Memory(np.zeros(400, np.int32))
    ref = emulator.Ref(memory).at[emulator.pl.ds(0, 200)]
    for index in (-1, 200):
        with pytest.raises(IndexError, match="a load of"):
            ref.memory.load(ref.inside(emulator.LANE * 0 + index), emulator.LANE)
    with pytest.raises(IndexError, match="a store to"):
        ref.memory.store(ref.inside(emulator.LANE * 0 + 200), 1, emulator.LANE)


def test_lanes_that_store_two_values_to_one_element_are_found(emulator):
    memory = emulator.Memory(np.zeros(4, np.int32), is_shared=True)
    with pytest.raises(emulator.Race, match="different values"):
        memory.store(emulator.LANE * 0, emulator.LANE, emulator.LANE)


def test_elements_that_nobody_wrote_are_seen(emulator):
    from xsake.backends.hopper import lanes

    def body(out):
        lanes.scatter(out, np.where(emulator.LANE < 100, emulator.LANE, -1), emulator.LANE)

    kind = jax.ShapeDtypeStruct((128,), jnp.int32)
    (out,) = lanes.launch(body, "some", [kind], {"cta": 1}, [])
    np.testing.assert_array_equal(np.asarray(out) == emulator.UNWRITTEN, emulator.LANE >= 100)
