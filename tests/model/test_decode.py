"""Decoding against a cache: what is read, what is not, and that the cache holds what it should."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.draws import FAST_COMPILATION
from tests.model.families import LLAMA
from xsake import decode
from xsake.model import KVCache

B, N, K, H, BLOCK, BLOCKS, LAYERS = 3, 4, 2, 8, 16, 6, 2
S = BLOCK * BLOCKS
LAYER = 1
LENGTHS = np.array([S - 1, 37, 3])  # of the rows' caches; the queries are the next tokens
OUTPUT = 2e-6  # float32 against float64, of outputs of size about 1

jit = functools.partial(jax.jit, compiler_options=FAST_COMPILATION)


def arrays(T, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((B, T, N, H)).astype(np.float32)
    k, v = rng.standard_normal((2, LAYERS, B, K, S, H)).astype(np.float32)
    first = np.minimum(LENGTHS, S - T)
    return q, k, v, (first[:, None] + np.arange(T)).astype(np.int32)


def brute_force(q, k, v, positions, window=None, blocks=None):
    """softmax over the slots that each query sees and its head chose, in float64, one by one."""
    out = np.zeros(q.shape)
    for b, t, n in itertools.product(*map(range, q.shape[:3])):
        slots = np.arange(S)
        seen = slots <= positions[b, t]
        if window is not None:
            seen &= slots > positions[b, t] - window
        if blocks is not None:
            seen &= np.isin(slots // BLOCK, list(blocks[b][n]))
        keys, values = (x[LAYER, b, n * K // N][seen].astype(np.float64) for x in (k, v))
        s = keys @ q[b, t, n] / np.sqrt(H)
        p = np.exp(s - s.max())
        out[b, t, n] = p @ values / p.sum()
    return out


@functools.partial(jit, static_argnames="window")
def dense(q, k, v, positions, layer, window=None):
    return decode.dense(q, k, v, positions, layer=layer, span=S, window=window)


@functools.partial(jit, static_argnames=("entries", "window"))
def sparse(q, k, v, positions, scores, counts, layer, entries, window=None):
    chosen = decode.choose(scores, positions, counts, block=BLOCK, entries=entries, window=window)
    how = {"layer": layer, "lists": scores.shape[1], "block": BLOCK, "window": window}
    return decode.sparse(q, k, v, positions, chosen, **how), *chosen


def by_head(head, block, live, lists):
    """The chosen blocks of every row and query head as sets, each entry counted once."""
    found = []
    for b in range(B):
        entries = [
            (int(n), int(j)) for n, j, x in zip(head[b], block[b], live[b], strict=True) if x
        ]
        assert len(entries) == len(set(entries))
        found.append([{j for n, j in entries if n == head_ * lists // N} for head_ in range(N)])
    return found


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("T", [1, 3])
def test_dense_is_the_softmax_over_what_a_query_sees(T, window):
    q, k, v, positions = arrays(T)
    found = dense(q, k, v, positions, LAYER, window)
    assert np.abs(found - brute_force(q, k, v, positions, window)).max() < OUTPUT


@pytest.mark.parametrize("lists", [N, K])
@pytest.mark.parametrize(("T", "window"), [(1, None), (3, None), (1, 41)])
def test_sparse_is_the_softmax_over_the_chosen_blocks(T, window, lists):
    """Every head has its own budget; attention over the chosen blocks is recomputed in NumPy."""
    q, k, v, positions = arrays(T)
    rng = np.random.default_rng(1)
    scores = rng.standard_normal((B, lists, BLOCKS)).astype(np.float32)
    counts = rng.integers(2, 5, (B, lists), dtype=np.int32)
    entries = 4 * lists + 3
    out, *chosen = sparse(q, k, v, positions, scores, counts, LAYER, entries, window)
    blocks = by_head(*chosen, lists)
    assert np.abs(out - brute_force(q, k, v, positions, window, blocks)).max() < OUTPUT
    for b, n in itertools.product(range(B), range(N)):
        oldest = 0 if window is None else max(positions[b, 0] - window + 1, 0) // BLOCK
        visible = range(oldest, positions[b, -1] // BLOCK + 1)
        forced = {j for j in visible if j == 0 or j >= positions[b, 0] // BLOCK}
        assert forced <= blocks[b][n] <= set(visible)
        wanted = np.clip(counts[b, n * lists // N], len(forced), len(visible))
        assert len(blocks[b][n]) == wanted
        # the others are the best by score
        free = sorted(set(visible) - forced, key=lambda j: -scores[b, n * lists // N, j])
        assert blocks[b][n] - forced == set(free[: wanted - len(forced)])


def test_a_budget_that_covers_all_blocks_is_dense():
    q, k, v, positions = arrays(1)
    scores = np.zeros((B, N, BLOCKS), np.float32)
    counts = np.full((B, N), BLOCKS, np.int32)
    out, *_ = sparse(q, k, v, positions, scores, counts, LAYER, N * BLOCKS)
    assert np.abs(out - dense(q, k, v, positions, LAYER)).max() < OUTPUT


def test_what_is_not_seen_may_be_nan():
    """Other layers, slots past the length, and for sparse the blocks that no head chose."""
    q, k, v, positions = arrays(1)
    slots = np.arange(S)
    unseen = slots[None] > positions
    poisoned = [x.copy() for x in (k, v)]
    for x in poisoned:
        x[1 - LAYER] = np.nan
        x[LAYER] = np.where(unseen[:, None, :, None], np.nan, x[LAYER])
    assert (dense(q, *poisoned, positions, LAYER) == dense(q, k, v, positions, LAYER)).all()

    scores = np.random.default_rng(1).standard_normal((B, N, BLOCKS)).astype(np.float32)
    counts = np.full((B, N), 3, np.int32)
    clean, *chosen = sparse(q, k, v, positions, scores, counts, LAYER, 3 * N + 2)
    blocks = by_head(*chosen, N)
    read = np.zeros((B, K, BLOCKS), bool)
    for b, n in itertools.product(range(B), range(N)):
        read[b, n * K // N, list(blocks[b][n])] = True
    assert not read[0].all()
    for x in poisoned:
        x[LAYER] = np.where(np.repeat(read, BLOCK, axis=2)[..., None], x[LAYER], np.nan)
    found, *_ = sparse(q, *poisoned, positions, scores, counts, LAYER, 3 * N + 2)
    assert (found == clean).all()


def test_sparse_costs_what_it_visits():
    """Twice the entries cost twice the work and bytes; the cache's capacity costs nothing."""

    def cost(entries, capacity):
        shapes = [(1, 1, N, 64), *[(LAYERS, 1, K, capacity, 64)] * 2]
        q, k, v = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        positions = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        listed = (jax.ShapeDtypeStruct((1, entries), kind) for kind in (jnp.int32, jnp.int32, bool))

        def run(q, k, v, positions, *listed):
            chosen = decode.Chosen(*listed)
            return decode.sparse(q, k, v, positions, chosen, layer=LAYER, lists=N, block=64)

        compiled = jax.jit(run).lower(q, k, v, positions, *listed).compile()
        memory = compiled.memory_analysis().temp_size_in_bytes
        return compiled.cost_analysis()["flops"], memory

    few, many = cost(32, 4096), cost(64, 4096)
    assert 1.8 < many[0] / few[0] < 2.2
    assert many[1] < 2.2 * few[1]
    assert cost(32, 16_384) == few


@pytest.mark.parametrize("lists", [N, K])
@pytest.mark.parametrize(("T", "window"), [(1, None), (3, 21)])
def test_attention_by_block_is_the_mass_summed_over_the_queries_of_a_list(T, window, lists):
    """With one-hot block indicators as v, the output of attention is the mass of each block."""
    q, k, _, positions = arrays(T)
    marks = np.zeros((LAYERS, B, K, S, BLOCKS))
    marks[..., np.arange(S), np.arange(S) // BLOCK] = 1
    shares = np.stack(
        [
            brute_force(q, k, np.repeat(marks[..., [j]], H, -1), positions, window)[..., 0]
            for j in range(BLOCKS)
        ],
        -1,
    )  # [B, T, N, blocks]
    expected = shares.sum(1).reshape(B, lists, N // lists, BLOCKS).sum(2)
    k = (
        np.where(np.arange(S)[None, :] > positions.max(1)[:, None], np.nan, 0)[
            None, :, None, :, None
        ]
        + k
    )  # what no query sees may be NaN
    found = decode.attention_by_block(
        *map(jnp.asarray, (q, k, positions)),
        layer=LAYER,
        span=S,
        lists=lists,
        block=BLOCK,
        window=window,
    )
    assert np.abs(found - expected).max() < OUTPUT * T * N


@pytest.mark.parametrize("position", [0, 37, 47, S - 1])
def test_with_reach_the_selection_includes_the_blocks_of_the_next_tokens(position):
    """Every token up to reach finds its own block listed, whatever the scores say."""
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((1, N, BLOCKS)), jnp.float32)
    reach = 20
    chosen = decode.choose(
        scores,
        jnp.array([[position]]),
        jnp.full((1, N), 2),
        block=BLOCK,
        entries=4 * N,
        reach=reach,
    )
    needed = {j for j in {0, *np.arange(position, position + reach) // BLOCK} if j < BLOCKS}
    for n in range(N):
        mine = np.asarray(chosen.block[0][(chosen.head[0] == n) & chosen.live[0]])
        assert needed <= set(mine.tolist())
        assert len(mine) == len(set(mine.tolist())) == max(2, len(needed))


@pytest.mark.parametrize("refresh", [1, 30])
def test_many_queries_that_span_blocks_read_what_is_forced_in_every_head(refresh):
    """70 queries span 5 or 6 blocks, more than the budget of 2: no head is left without a list."""
    T = 70
    q, k, v, _ = arrays(T)
    positions = np.minimum([0, 11, S - T], S - T)[:, None] + np.arange(T, dtype=np.int32)
    given = tuple(map(jnp.asarray, (q, k, v, positions.astype(np.int32))))
    how = {"layers": LAYERS, "heads": N, "kv_heads": K, "block": BLOCK, "refresh": refresh}
    few = decode.CacheReader.of(2, **how).over(S)
    with pytest.raises(ValueError, match=r"has 70 queries, .* space for 1; .*queries=70"):
        few.read(*given, few.nothing_chosen(B), layer=LAYER)
    reader = decode.CacheReader.of(2, **how).over(S, queries=T)
    run = jit(lambda *given: reader.read(*given, reader.nothing_chosen(B), layer=LAYER))
    out, chosen = run(*given)
    blocks = by_head(*(np.asarray(x[LAYER]) for x in chosen), N)
    for b, n in itertools.product(range(B), range(N)):
        assert {0, *(positions[b] // BLOCK)} <= blocks[b][n]
    assert np.abs(out - brute_force(q, k, v, positions, None, blocks)).max() < OUTPUT


# -------------------------------------------------------------------------------------------- cache


@jit
def appended(cache, k, v, count):
    for layer in range(cache.k.shape[0]):
        cache = cache.append(layer, k + layer, v, count)
    return cache.advance(count)


def filled_cache(chunks, counts):
    """A cache of unequal rows, filled in chunks; and what each row was given."""
    config = dataclasses.replace(LLAMA, kv_heads=K, head_size=H, layers=LAYERS)
    cache = KVCache.empty(config, B, 90, block=BLOCK)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, B, 96, K, H)).astype(np.float32)
    at = np.zeros(B, int)
    for T in chunks:
        count = np.minimum(counts - at, T).astype(np.int32)
        rows = np.minimum(at[:, None] + np.arange(T), 95)
        cache = appended(cache, *(x[np.arange(B)[:, None], rows] for x in (k, v)), count)
        at += count
    return cache, k, v


COUNTS = np.array([90, 33, 5])


@pytest.mark.parametrize("chunks", [[40, 40, 40], [1] * 5 + [40, 40, 40]])
def test_a_cache_holds_its_rows(chunks):
    cache, k, v = filled_cache(chunks, COUNTS)
    assert cache.capacity == 96
    assert list(cache.length) == list(COUNTS)
    for layer, b in itertools.product(range(LAYERS), range(B)):
        n = COUNTS[b]
        keys = np.swapaxes(k[b, :n] + layer, 0, 1)
        assert (cache.k[layer, b, :, :n] == keys).all()
        assert (cache.v[layer, b, :, :n] == np.swapaxes(v[b, :n], 0, 1)).all()
        assert (cache.k[layer, b, :, n:] == 0).all()


def test_appending_to_a_donated_cache_works_in_place():
    cache = KVCache.empty(LLAMA, 1, 4096)
    k = jnp.ones((1, 1, LLAMA.kv_heads, LLAMA.head_size))
    run = jax.jit(lambda cache: cache.append(0, k, k, jnp.array([1])), donate_argnums=0)
    memory = run.lower(cache).compile().memory_analysis()
    assert memory.temp_size_in_bytes < cache.k.nbytes // 8  # some blocks' worth
    assert memory.alias_size_in_bytes > 2 * cache.k.nbytes


def test_a_full_cache_is_refused():
    cache, *_ = filled_cache([40, 40, 40], COUNTS)
    cache.check_capacity(6)
    with pytest.raises(ValueError, match="holds 90 of 96 tokens, which leaves no space for 7 more"):
        cache.check_capacity(7)
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        KVCache.empty(LLAMA, 1, 0)
