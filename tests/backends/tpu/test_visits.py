"""The flat list of visits: as many as the lists have, each once, work tile after work tile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake import BlockMask, masks
from xsake.backends import Sizes
from xsake.backends.tpu import visits

SIZES = Sizes(B=2, T=96, S=128, N=4, K=2, H=8, Hv=8)


def blocks_of(heads: int, batch: int = 2) -> np.ndarray:
    """Random blocks [batch, heads, 3, 4]; a row and a column of the first head are empty."""
    densities = np.linspace(0.1, 0.9, batch * heads).reshape(batch, heads, 1, 1)
    blocks = np.random.default_rng(heads).random((batch, heads, 3, 4)) < densities
    blocks[0, 0, 1], blocks[0, 0, :, 2] = False, False
    return blocks


def decoded(mask: BlockMask, by_column: bool, in_order):
    """(layout, visits of each launch as tuples of x, g, i, j, kind, is_first, is_last)."""
    layout = visits.Layout.of(mask, SIZES, by_column)
    assert layout.why_not() is None
    mask = mask.transpose() if by_column else mask

    @jax.jit
    def one(launch):
        found = visits.visits_of(mask, layout, has_partial=True, in_order=in_order)
        table, total = found.of_launch(launch)
        visit = layout.at(table, jnp.arange(layout.steps))
        wanted = visit.x, visit.g, visit.i, visit.j, visit.kind, visit.is_first, visit.is_last
        return found.launches, table, total, [jnp.broadcast_to(x, layout.steps) for x in wanted]

    launches = []
    for launch in range(int(one(0)[0])):
        _, table, total, wanted = one(launch)
        assert table.size <= visits.MOST_WORDS
        assert 0 < total <= layout.steps
        launches.append(list(zip(*(np.asarray(x)[:total].tolist() for x in wanted), strict=True)))
    return layout, launches


@pytest.mark.parametrize(
    ("heads", "batch", "by_column", "most", "words"),
    [
        pytest.param(4, 2, False, visits.MOST_WORDS, 1, id="rows"),
        pytest.param(4, 2, True, visits.MOST_WORDS, 1, id="columns"),
        pytest.param(4, 2, True, 13, 1, id="columns in launches of two work tiles or so"),
        pytest.param(2, 1, False, 16, 1, id="rows of lists by kv head, in several launches"),
        pytest.param(4, 2, False, 34, 2, id="list numbers of their own, in several launches"),
    ],
)
def test_every_listed_block_is_visited_once_and_nothing_else(
    heads, batch, by_column, most, words, monkeypatch
):
    monkeypatch.setattr(visits, "MOST_WORDS", most)
    if words == 2:
        monkeypatch.setattr(visits.Layout, "words", 2)
    blocks = blocks_of(heads, batch)
    mask = BlockMask.from_dense(blocks, masks.causal(), shape=(96, 128), block=32)
    layout, launches = decoded(mask, by_column, jnp.array([True, False]) if words == 2 else None)
    assert (len(launches) > 2) == (most < 60)
    classes = np.broadcast_to(np.asarray(mask.blocks()), (2, heads, 3, 4)).repeat(4 // heads, 1)
    if words == 2:  # the second batch row is out of order
        classes[1][classes[1] == visits.PARTIAL] = visits.BY_RULE
    listed = {
        (b * 2 + n // 2, n % 2, i, j, classes[b, n, i, j]) for b, n, i, j in np.argwhere(classes)
    }
    got = [visit for launch in launches for visit in launch]
    live = [visit[:5] for visit in got if visit[4] != visits.EMPTY]
    assert len(live) == len(set(live))
    assert set(live) == listed
    tiles = [(x, j) if by_column else (x, g, i) for x, g, i, j, *_ in got]
    every = np.ndindex(4, 4) if by_column else np.ndindex(4, 2, 3)
    assert list(dict.fromkeys(tiles)) == sorted(every)  # each in one run of steps
    empty = len(set(tiles)) - len({tile for tile, v in zip(tiles, got, strict=True) if v[4]})
    assert len(got) == len(listed) + empty
    before, after = [None, *tiles[:-1]], [*tiles[1:], None]
    assert [v[5] for v in got] == [a != b for a, b in zip(before, tiles, strict=True)]
    assert [v[6] for v in got] == [a != b for a, b in zip(tiles, after, strict=True)]


def test_short_lists_take_few_steps_also_where_the_mask_is_traced():
    """One dense head beside three sparse ones: the grid has the sum, not four times the longest."""

    @jax.jit
    def total(blocks):
        mask = BlockMask.from_dense(blocks, shape=(96, 128), block=32)
        layout = visits.Layout.of(mask, SIZES, False)
        return visits.visits_of(mask, layout, has_partial=False).of_launch(0)[1]

    blocks = np.zeros((1, 4, 3, 4), bool)
    blocks[0, 0], blocks[0, 1:, :, 0] = True, True
    assert total(blocks) == 2 * (12 + 3 * 3)


@pytest.mark.parametrize(("length", "words", "launches"), [(1 << 17, 1, 17), (1 << 20, 2, 2342)])
def test_a_long_dense_text_is_split_into_launches(length, words, launches):
    """More visits of a head than scalar memory has space for; nothing of this size is built."""
    blocks = length // 128
    sizes = Sizes(B=1, T=length, S=length, N=4, K=4, H=128, Hv=128)
    for by_column in (False, True):
        layout = visits.Layout(sizes, blocks, blocks, blocks * (blocks + 1) // 2, by_column)
        assert layout.why_not() is None
        assert layout.words == words
        assert -(-layout.most_steps // layout.stride) == launches


@pytest.mark.parametrize(
    ("heads", "length", "said"),
    [
        ((128, 1), 1 << 17, "takes kv blocks of up to 65536 visits; these may have 131072"),
        ((256, 256), 1 << 20, "takes fewer than 2³¹ visits; this mask has space for 8593080320"),
    ],
)
def test_what_cannot_be_split_is_refused(heads, length, said):
    blocks = length // 128
    sizes = Sizes(B=1, T=length, S=length, N=heads[0], K=heads[1], H=128, Hv=128)
    reasons = [
        visits.Layout(sizes, blocks, blocks, blocks * (blocks + 1) // 2, by_column).why_not()
        for by_column in (False, True)
    ]
    assert any(said in (reason or "") for reason in reasons)
