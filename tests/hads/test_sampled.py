"""Into how many pieces the keys of sampled queries are cut on a GPU of 132 multiprocessors."""

import jax.numpy as jnp
import numpy as np
import pytest

from xsake import masks
from xsake.hads import sampled

EVERY, BLOCK_Q, MULTIPROCESSORS = 64, 128, 132
ROW_BLOCK = EVERY * BLOCK_Q  # queries that a row block of sampled ones stands for


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(sampled._jax, "why_no_hopper", lambda needs_jax: None)
    monkeypatch.setattr(sampled._jax, "multiprocessors", lambda: MULTIPROCESSORS)


def pieces_of(B, T, N, S):
    rows = sampled.SampledRows(masks.causal(), (T, S), -(-T // EVERY), EVERY, BLOCK_Q)
    return sampled.number_of_pieces(rows, B * N)


def finish_time(pieces, B, T, N, S):
    """The model of `number_of_pieces` for a causal rule, in blocks of 128 keys."""
    tiles, size = [], S // pieces
    for first in range(0, T, ROW_BLOCK):
        seen = min(first + ROW_BLOCK, T, S)
        keys = [min(seen - begin, size) for begin in range(0, seen, size)]
        tiles += [x / 128 + sampled.TILE_OVERHEAD_BLOCKS for x in keys] * (B * N)
    free = [0.0] * MULTIPROCESSORS
    for tile in sorted(tiles, reverse=True):
        free[free.index(min(free))] += tile
    return max(free)


@pytest.mark.parametrize(
    ("B", "T", "N", "S"),
    [
        (1, 8192, 16, 8192),
        (1, 32768, 4, 32768),  # row blocks see 1, 2, 3 and 4 quarters of the keys
        (4, 8192, 16, 8192),
        (2, 8192, 26, 8192),  # without the time that a tile itself takes, more pieces
        (1, 24576, 16, 24576),  # with the shortest tiles first, another number
        (1, 65536, 20, 65536),  # with a limit of more tiles, more pieces
        (16, 32768, 16, 32768),  # so many work tiles that two pieces are the most
        (1, 2048, 1, 1024),
    ],
)
def test_no_other_number_of_pieces_is_modelled_to_finish_sooner(B, T, N, S, gpu):
    """Of the powers of two that leave every piece enough keys, and the GPU not too many tiles."""
    found = pieces_of(B, T, N, S)
    assert S % found == 0
    assert S // found >= sampled.MIN_PIECE_KEYS
    assert found <= sampled.MAX_PIECES
    tiles = B * N * -(-T // ROW_BLOCK)
    choices = [1]
    for pieces in (2, 4, 8, 16):
        is_divided = tiles * pieces // 2 < sampled.MAX_TILES_PER_SM * MULTIPROCESSORS
        if is_divided and S // pieces >= sampled.MIN_PIECE_KEYS:
            choices.append(pieces)
    assert found in choices
    times = {pieces: finish_time(pieces, B, T, N, S) for pieces in choices}
    assert times[found] == min(times.values())


def test_keys_that_no_piece_divides_stay_whole(gpu):
    assert pieces_of(1, 8192, 16, 8191) == 1
    assert pieces_of(1, 8192, 16, 8192) > 1


def test_without_a_hopper_gpu_keys_stay_whole():
    assert pieces_of(1, 8192, 16, 8192) == 1


def test_only_keys_of_windows_and_documents_are_cut():
    documents = masks.causal() & masks.documents(jnp.zeros((1, 8), jnp.int32))
    assert sampled._splits(documents)
    assert not sampled._splits(masks.causal() & masks.array(jnp.ones((1, 1, 8, 8), bool)))


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(
    "rule",
    [
        masks.causal(),
        masks.sliding_window(100, 30),
        masks.causal() & masks.sliding_window(60),
        masks.everything(),
    ],
    ids=str,
)
def test_blocks_of_a_sample_are_live_where_a_query_sees_them_and_full_where_all_do(rule, group):
    """Whichever queries of their groups are sampled: against the rule itself, token by token."""
    T, S, every, block, keys, pieces = 500, 512, 16, 16, 32, 4
    G = -(-T // every)
    rows = sampled.SampledRows(rule, (T, S), G, every, block, group)
    classes = sampled.block_classes(rows, keys, pieces)
    sees = np.asarray(rule(0, 0, np.arange(T)[:, None], np.arange(S)))
    sees = np.broadcast_to(sees, (T, S)).reshape(T, -1, keys)
    query = np.arange(T)
    wanted = np.zeros((rows.row_blocks, S // keys), int)
    for i in range(rows.row_blocks):
        first, last = i * block // group, min((i * block + block - 1) // group, G - 1)
        own = sees[(first <= query // every) & (query // every <= last)]
        wanted[i] = own.any((0, 2)).astype(int) + own.all((0, 2))
    wanted = np.swapaxes(wanted.reshape(rows.row_blocks, pieces, -1), 0, 1)[:, None]
    np.testing.assert_array_equal(np.broadcast_to(classes, wanted.shape), wanted)
