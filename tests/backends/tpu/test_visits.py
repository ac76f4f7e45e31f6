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


def decoded(mask: BlockMask, by_column: bool):
    """(layout, visits of each launch as tuples of x, g, i, j, kind, is_first, is_last)."""
    layout = visits.Layout.of(mask, SIZES, by_column)
    mask = mask.transpose() if by_column else mask
    found = jax.jit(lambda: visits.visits_of(mask, layout, has_partial=True))()
    launches = []
    for table, total, base in zip(*found, strict=True):
        visit = layout.at(table, base, jnp.arange(total))
        wanted = visit.x, visit.g, visit.i, visit.j, visit.kind, visit.is_first, visit.is_last
        wanted = [np.broadcast_to(np.asarray(x), total) for x in wanted]
        launches.append(list(zip(*(x.tolist() for x in wanted), strict=True)))
    return layout, launches


@pytest.mark.parametrize(
    ("heads", "batch", "by_column", "most"),
    [
        pytest.param(4, 2, False, visits.MOST_VISITS, id="rows"),
        pytest.param(4, 2, True, visits.MOST_VISITS, id="columns"),
        pytest.param(4, 2, True, 60, id="columns in several launches"),
        pytest.param(2, 1, False, 60, id="rows of lists by kv head, in several launches"),
    ],
)
def test_every_listed_block_is_visited_once_and_nothing_else(
    heads, batch, by_column, most, monkeypatch
):
    monkeypatch.setattr(visits, "MOST_VISITS", most)
    blocks = blocks_of(heads, batch)
    mask = BlockMask.from_dense(blocks, masks.causal(), shape=(96, 128), block=32)
    layout, launches = decoded(mask, by_column)
    assert (len(launches) > 1) == (most == 60)
    classes = np.broadcast_to(np.asarray(mask.blocks()), (2, heads, 3, 4)).repeat(4 // heads, 1)
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
        return visits.visits_of(mask, layout, has_partial=False).total

    blocks = np.zeros((1, 4, 3, 4), bool)
    blocks[0, 0], blocks[0, 1:, :, 0] = True, True
    assert total(blocks).tolist() == [2 * (12 + 3 * 3)]
