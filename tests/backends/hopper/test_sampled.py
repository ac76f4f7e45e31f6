"""The kernels of sampled queries: their bodies on the CPU against plain JAX, and on a card."""

from __future__ import annotations

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conditions import needs_gpu, needs_interpreter, needs_newer_jax
from xsake import BlockMask, _jax, block_scores, dot_product_attention, hads, masks
from xsake.backends import hopper
from xsake.block_mask import lists as lists_module
from xsake.hads import certificate, estimates, sampled, sampled_by_kernel
from xsake.masks.carrying import Between
from xsake.masks.rule import Grid

pytestmark = needs_newer_jax


def normal(*shape, seed=0, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.fixture
def emulator(monkeypatch):
    from tests.backends.hopper import lane_emulator

    lane_emulator.emulate(monkeypatch)
    return lane_emulator


def in_rows(x, K):
    """x [B, G, N, …] of sampled queries, as rows [B, G · N / K, K, …]."""
    B, G, N = x.shape[:3]
    return jnp.swapaxes(x.reshape(B, G, K, N // K, *x.shape[3:]), 2, 3).reshape(
        B, -1, K, *x.shape[3:]
    )


def of_queries(x, N):
    """The inverse of `in_rows`."""
    B, rows, K = x.shape[:3]
    return jnp.swapaxes(x.reshape(B, -1, N // K, K, *x.shape[3:]), 2, 3).reshape(
        B, -1, N, *x.shape[3:]
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("window", "pieces", "K"),
    [((None, 0), 8, 2), ((None, 0), 1, 6), ((200, 100), 4, 1), ((None, None), 2, 3)],
)
def test_sampled_queries_are_copied_with_the_keys_that_they_see(window, pieces, K, dtype, emulator):
    from xsake.backends.hopper.sampled.queries import gather_queries

    B, T, N, size, S = 2, 1000, 6, 64, 1024
    group = N // K
    q = normal(B, T, N, size, dtype=dtype)
    sample = sampled.sample_queries(jax.random.key(0), B, T, 48)
    G = sample.shape[1]
    width = -(-G * group // 64) * 64
    queries, pairs = gather_queries(q, sample, window, S, pieces, K, width)
    want = q[np.arange(B)[:, None], np.asarray(sample)]
    np.testing.assert_array_equal(np.asarray(queries), np.asarray(in_rows(want, K)))
    np.testing.assert_array_equal(np.asarray(of_queries(queries, N)), np.asarray(want))
    pairs = np.asarray(pairs)
    assert not pairs[..., 1, G * group :].any()
    pairs = pairs[..., : G * group].reshape(-1, 2, G, group)
    assert (pairs == pairs[..., :1]).all()
    pairs = pairs[..., 0]
    rule = masks.everything() if window == (None, None) else masks.sliding_window(*window)
    if window == (None, 0):
        rule = masks.causal()
    sees = np.asarray(rule(0, 0, np.asarray(sample)[..., None], np.arange(S)))
    sees = np.broadcast_to(sees, (B, G, S)).reshape(B, G, pieces, -1)
    lo, hi = (pairs[:, i].reshape(B, pieces, G, 1) for i in range(2))
    key = np.arange(S // pieces)
    np.testing.assert_array_equal((lo <= key) & (key < hi), np.swapaxes(sees, 1, 2))


def by_definition(of_pieces, sparse, sample, sinks, pieces):
    """As `certified_attention` does without the kernels."""
    exact = sampled._joined(of_pieces[0], jnp.swapaxes(of_pieces[1], 1, 2), sinks, pieces)
    here = (
        sampled.at_sample(sparse[0], sample).astype(jnp.float32),
        sampled.at_sample(jnp.swapaxes(sparse[1], 1, 2), sample),
    )
    error = exact[0] - here[0]
    each = certificate.dropped_mass(here[1], exact[1]), (error**2).sum(-1), (exact[0] ** 2).sum(-1)
    return jnp.swapaxes(jnp.stack(each, 1), 2, 3)


COMPARED = [(1, 64, 1, 5), (16, 128, 3, 7), (4, 256, 2, 1), (8, 128, 1, 33)]


def comparable(pieces, size, N, G, seed=0):
    """Outputs of both kinds; queries of some pieces, and one query in all, see nothing."""
    B, T = 2, 40 * G
    rng = np.random.default_rng(seed)
    out, sparse = normal(B * pieces, G, N, size), normal(B, T, N, size, seed=1)
    lse = rng.standard_normal((B * pieces, N, G)).astype(np.float32) * 5
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    lse[:, 0, G // 2] = -np.inf
    out = jnp.where(np.swapaxes(lse, 1, 2)[..., None] == -np.inf, 0, out)
    sample = sampled.sample_queries(jax.random.key(0), B, T, 40)
    whole = sampled._joined(out, jnp.swapaxes(jnp.asarray(lse), 1, 2), None, pieces)[1]
    # most of the mass is kept, of some queries nearly all
    lost = rng.choice([1e-6, 1e-3, 0.1, 2.0], whole.shape)
    of_sample = np.asarray(whole) - lost
    kept = rng.standard_normal((B, T, N)).astype(np.float32)
    kept[np.arange(B)[:, None], np.asarray(sample)] = of_sample
    kept = jnp.asarray(np.swapaxes(kept, 1, 2))
    return (out, jnp.asarray(lse)), (sparse, kept), sample


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("pieces", "size", "N", "G"), COMPARED)
def test_pieces_are_merged_and_compared_as_in_plain_jax(pieces, size, N, G, has_sinks, emulator):
    from xsake.backends.hopper.sampled import compare

    given = comparable(pieces, size, N, G)
    sinks = normal(N, dtype=jnp.float32) if has_sinks else None
    got = compare.compare(*given, None if sinks is None else sinks[None])
    (out, lse), *others = given
    for K in {1, N}:
        rows = in_rows(out, K), jnp.swapaxes(in_rows(jnp.swapaxes(lse, 1, 2), K), 1, 2)
        again = compare.compare(rows, *others, None if sinks is None else sinks[None])
        np.testing.assert_array_equal(again, got)
    want = by_definition(*given, sinks, pieces)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    if not has_sinks:
        assert not np.asarray(got)[:, 0, 0, G // 2].any()
        assert not np.asarray(got)[:, 2, 0, G // 2].any()
    if sinks is not None:
        of_rows = jnp.broadcast_to(sinks, (2, N))
        np.testing.assert_array_equal(compare.compare(*given, of_rows), got)


def test_a_logsumexp_that_is_no_number_stays_one(emulator):
    from xsake.backends.hopper.sampled import compare

    (out, lse), sparse, sample = comparable(*COMPARED[0])
    got = compare.compare((out, lse.at[0, 0, 0].set(jnp.nan)), sparse, sample, None)
    want = np.zeros(got.shape[2:], bool)
    want[0, 0] = True  # of one head and group
    np.testing.assert_array_equal(np.isnan(got[0, 0]), want)


def test_small_dropped_masses_keep_their_digits(emulator):
    """Where 1 - exp(x) of float32 would keep one or two of them."""
    from xsake.backends.hopper.sampled import compare

    change = -np.geomspace(1e-7, 20, 128).astype(np.float32)
    got = compare._dropped(change, np.zeros(128, np.float32))
    np.testing.assert_allclose(got, -np.expm1(change.astype(np.float64)), rtol=3e-7)


REPORTED = [(92, 8, 32), (130, 64, 64), (33, 64, 64), (9000, 8, 64), (4096, 64, 1024)]


def causal_mask(n, own, B=2):
    """A random causal mask, a list of all heads, of kv heads or of query heads."""
    kept = np.random.default_rng(n).random((B if own > 1 else 1, own, n, n)) < 0.4
    kept |= np.eye(n, dtype=bool)
    return BlockMask.from_dense(kept, masks.causal(), shape=(64 * n - 5,) * 2, block=64)


def visits(mask):
    from xsake.backends.hopper.sampled import Visits

    start, count, _, index, _ = mask.lists
    return Visits(start, count, index, mask.rule.spans(mask.grid).live(mask.grid.counts[1]))


@pytest.mark.parametrize(("length", "every", "window"), REPORTED)
def test_estimates_are_those_of_plain_jax(length, every, window, emulator):
    from xsake.backends.hopper.sampled import means

    B, N, G = 2, 2, -(-length // every)
    values = jnp.abs(normal(B, 3, N, G, dtype=jnp.float32)).at[0, 0, 1, G // 2].set(jnp.nan)
    windows = estimates.windows_of(length, every, window)
    found = means.means(
        values, windows, estimates.WIDENED, estimates.MOST, visits(causal_mask(3, 1))
    )
    want = estimates.of_figures(values, length, every, window)
    assert len(found) == 4 * len(want) + 2
    for one, other in zip(found[:-2], itertools.chain(*want.values()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [1, 2, 4])
@pytest.mark.parametrize("n", [3, 140])
def test_densities_are_those_of_plain_jax(n, own, emulator):
    """Lists also name blocks that the rule empties: they do not count."""
    from xsake.backends.hopper.sampled import means

    B, N = 2, 4
    mask = causal_mask(n, own)
    listed = np.random.default_rng(6).random((B, own, n, n)) < 0.6
    flat = np.argsort(~listed, axis=-1, kind="stable")
    rule = mask.rule
    loose = BlockMask.from_kv_blocks(
        listed.sum(-1), flat, block=64, shape=mask.shape, mask_mod=rule
    )
    windows = estimates.windows_of(128, 64, 64)
    values = jnp.ones((B, 3, N, 2))
    for each in (mask, loose):
        how = estimates.WIDENED, estimates.MOST, visits(each)
        *_, first, second = means.means(values, windows, *how)
        want = certificate._share(*certificate._visited_and_live(each, rule, B, N))
        np.testing.assert_allclose(first, want, rtol=1e-6)
        np.testing.assert_array_equal(first, second)


def attend_pieces(q, k, v, pairs, lists, block, soft_cap):
    """What `hopper.run_pieces` computes, by the reference."""
    C, T = len(k), q.shape[1]
    tiled = [np.tile(x, (C // len(x), *(1,) * (x.ndim - 1))) for x in lists[:4]]
    rule = Between(*(pairs[:, i, :T] for i in range(2)))
    mask = BlockMask.from_lists(
        lists._make([*map(jnp.asarray, tiled), None]), rule, (T, k.shape[1]), block
    )
    out, lse = dot_product_attention(
        jnp.repeat(q, C // len(q), axis=0), k, v, mask=mask, logits_soft_cap=soft_cap,
        return_residual=True, implementation="reference",
    )  # fmt: skip
    return out, jnp.swapaxes(lse, 1, 2)


@pytest.mark.parametrize(
    ("rule", "length", "every", "pieces", "size"),
    [
        (masks.causal(), 1024, 8, 4, 64),
        (masks.causal(), 1024, 8, 4, 128),
        (masks.causal(), 1024, 8, 1, 64),
        (masks.causal(), 509, 16, 1, 64),
        (masks.sliding_window(200, 100), 1024, 4, 4, 64),
        (masks.causal() & masks.sliding_window(300, 7), 512, 8, 2, 64),
        (masks.everything(), 512, 8, 2, 64),
    ],
    ids=str,
)
def test_figures_by_kernels_are_those_of_the_definition(
    rule, length, every, pieces, size, emulator, monkeypatch
):
    B, N, K = 2, 6, 2
    q, k, v = (normal(B, length, n, size, seed=n) for n in (N, K, K))
    sinks = normal(N, dtype=jnp.float32)
    sample = sampled.sample_queries(jax.random.key(2), B, length, every)
    n = -(-length // 64)
    kept = np.random.default_rng(0).random((1, N, n, n)) < 0.5
    mask = BlockMask.from_dense(kept, rule, shape=(length, length), block=64)
    sparse = sampled.attend(q, k, v, mask, sinks=sinks, implementation="reference")
    monkeypatch.setattr(sampled_by_kernel, "number_of_pieces", lambda *_: pieces)
    monkeypatch.setattr(hopper, "run_pieces", attend_pieces)
    given = (q, k, v, sample, sparse[0], jnp.swapaxes(sparse[1], 1, 2), sinks[None])
    measure = sampled_by_kernel._measuring(rule, 3.0, every)
    got = measure.fun(*given)
    exact = sampled.attend_sampled((q, k, v, sinks), sample, rule, 3.0, 1)
    whole = exact[0].astype(jnp.bfloat16), jnp.swapaxes(exact[1], 1, 2)
    want = by_definition(whole, (sparse[0], given[5]), sample, None, 1)
    # pieces are rounded to bfloat16 before they are merged, here all keys are
    np.testing.assert_allclose(got[:, 0], want[:, 0], atol=1e-5)
    np.testing.assert_allclose(got[:, 1:], want[:, 1:], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("sampled_queries", "group", "sizes", "rows"),
    [
        (128, 1, (64, 64), 64),
        (128, 1, (128, 128), 128),
        (128, 1, (64, 128), 128),
        (60, 1, (256, 256), 64),
        (60, 2, (256, 256), 128),
        (3, 1, (64, 64), 64),
    ],
)
def test_row_blocks_of_a_sample_are_short_with_small_heads(sampled_queries, group, sizes, rows):
    T = 64 * sampled_queries
    found = sampled_by_kernel.sampled_rows(
        masks.causal(), (T, T), sampled_queries, 64, group, sizes
    )
    assert (found.block, found.group) == (rows, group)


def test_rows_of_very_long_texts_are_not_joined():
    """Their lists, which are constants, would be large."""

    def found(T, group):
        return sampled_by_kernel.sampled_rows(
            masks.causal(), (T, T), T // 64, 64, group, (64, 64)
        ).group

    assert [found(1 << 15, 8), found(1 << 20, 8), found(1 << 20, 1)] == [8, 1, 1]


def in_plain_jax(monkeypatch, pieces):
    """Functions that JAX can trace on a CPU, in place of the kernels of `_measuring`."""
    from xsake.backends.hopper.sampled import compare, queries

    def gather_queries(q, sample, window, keys, pieces, K, width):
        N = q.shape[2]
        rule = sampled._of_pieces(masks.causal(), sample, pieces, keys)
        pairs = jnp.repeat(jnp.stack([rule.lo, rule.hi], axis=1), N // K, axis=2)
        pad = ((0, 0), (0, 0), (0, width - pairs.shape[2]))
        return in_rows(sampled.at_sample(q, sample), K), jnp.pad(pairs, pad)

    def compared(of_pieces, sparse, sample, sinks=None):
        N = sparse[0].shape[2]
        out, logs = of_pieces[0], jnp.swapaxes(of_pieces[1], 1, 2)
        of_pieces = of_queries(out, N), jnp.swapaxes(of_queries(logs, N), 1, 2)
        each = jnp.broadcast_to(sinks, (len(sample), sinks.shape[-1]))
        C = of_pieces[0].shape[0] // len(sample)
        found = [
            by_definition(
                (of_pieces[0][i * C : (i + 1) * C], of_pieces[1][i * C : (i + 1) * C]),
                (sparse[0][i : i + 1], sparse[1][i : i + 1]), sample[i : i + 1], each[i], C,
            )
            for i in range(len(sample))
        ]  # fmt: skip
        return jnp.concatenate(found)

    monkeypatch.setattr(queries, "gather_queries", gather_queries)
    monkeypatch.setattr(compare, "compare", compared)
    monkeypatch.setattr(sampled_by_kernel, "number_of_pieces", lambda *_: pieces)
    monkeypatch.setattr(hopper, "run_pieces", attend_pieces)


@pytest.mark.parametrize("mapped", ["all", "sinks only", "all but sinks", "q only"])
def test_a_mapped_axis_is_folded_into_the_batch(mapped, monkeypatch):
    in_plain_jax(monkeypatch, 2)
    V, B, T, N = 3, 2, 512, 2
    q, k, v, out = (normal(V, B, T, N, 64, seed=i) for i in range(4))
    logsumexp = normal(V, B, T, N, dtype=jnp.float32)
    sinks = normal(V, N, dtype=jnp.float32)
    names = "q", "k", "v", "sinks", "out", "logsumexp"
    chosen = {
        "all": names, "sinks only": ("sinks",), "q only": ("q",),
        "all but sinks": [x for x in names if x != "sinks"],
    }[mapped]  # fmt: skip
    axes = [0 if name in chosen else None for name in names]
    arrays = [
        x if axis == 0 else x[0]
        for x, axis in zip((q, k, v, sinks, out, logsumexp), axes, strict=True)
    ]
    sample = sampled.sample_queries(jax.random.key(0), B, T, 8)

    def figures(q, k, v, sinks, out, logsumexp):
        given = (q, k, v, sinks), (out, logsumexp), sample, masks.causal(), None, 8
        return sampled_by_kernel.figures(*given)

    got = jax.vmap(figures, axes)(*arrays)
    want = [
        figures(*(x[i] if axis == 0 else x for x, axis in zip(arrays, axes, strict=True)))
        for i in range(V)
    ]
    np.testing.assert_allclose(got, jnp.stack(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("batch", "own"), [(1, 1), (1, 4), (2, 2)])
def test_a_mapped_axis_of_figures_and_lists_is_folded_into_the_batch(batch, own, monkeypatch):
    """Whichever of them are mapped; the lists are those of a mask of its own batch and heads."""
    from xsake.backends.hopper.sampled import Visits, means

    V, B, N, G = 3, 2, 4, 3

    def of_every_head(values, windows, widened, most, visits):
        """As the kernel, something by head that depends on all values and on all lists."""
        by_list = visits.kv_start.sum(-1) + 3 * visits.kv_count.sum(-1) + visits.kv_index.sum(-1)
        by_head = jnp.repeat(by_list, N // own, axis=1)
        return values, jnp.broadcast_to(by_head, (len(values), N))

    monkeypatch.setattr(means, "means", of_every_head)
    report = sampled_by_kernel._reporting(130, 64, 64, (masks.causal(), (130, 130), (64, 64)))
    shapes = (B, 3, N, G), (batch, own, 3), (batch, own, 3), (batch, own, 6)
    arrays = [jnp.asarray(np.random.default_rng(0).integers(999, size=(V, *x))) for x in shapes]
    for figures, starts, indices in itertools.product((0, None), repeat=3):
        axes = figures, starts, starts, indices
        if axes == (None,) * 4:
            continue
        given = [x if axis == 0 else x[0] for x, axis in zip(arrays, axes, strict=True)]
        found = jax.vmap(report, axes)(*given)
        for i in range(V):
            alone = [x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True)]
            want = of_every_head(alone[0], None, None, None, Visits(*alone[1:], live=None))
            for one, other in zip(found, want, strict=True):
                np.testing.assert_array_equal(one[i], other)


@needs_interpreter
@pytest.mark.parametrize(("G", "of_pieces"), [(60, [1, 0]), (100, [1])])
def test_queries_are_shared_by_pieces_when_interpreted(G, of_pieces, monkeypatch):
    """Two batch rows of queries, four pieces of keys, a table that is known.

    The only block of a piece is partial; with 60 queries, those of every second piece see nothing.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import forward_kernel

    monkeypatch.setattr(_jax, "multiprocessors", lambda: 3)
    run = functools.partial(forward_kernel.forward, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setattr(forward_kernel, "forward", run)
    S, block, every = 256, (64 if G < 64 else 128, 128), 2
    q, k, v = (normal(2, G, 1, 64), *(normal(4, S // 2, 1, 64, seed=i) for i in (1, 2)))
    sample = jnp.arange(G, dtype=jnp.int32)[None] * every + jnp.arange(2)[:, None]
    rows = sampled.SampledRows(masks.causal(), (2 * G, S), G, every, block[0])
    classes = sampled.block_classes(rows, block[1], 2)
    assert classes.shape == (len(of_pieces), 1, 1, 1)
    assert classes.ravel().tolist() == of_pieces
    lists = lists_module.known_lists(classes, Grid((G, S // 2), block, len(classes), 1))
    rule = sampled._of_pieces(masks.causal(), sample, 2, S)
    width = -(-G // block[0]) * block[0]
    pairs = jnp.pad(jnp.stack([rule.lo, rule.hi], axis=1), ((0, 0), (0, 0), (0, width - G)))
    out, lse = hopper.run_pieces(q, k, v, pairs, lists, block, None)
    want, want_lse = attend_pieces(q, k, v, pairs, lists, block, None)
    np.testing.assert_allclose(out.astype(jnp.float32), want.astype(jnp.float32), atol=0.02)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)


# ------------------------------------------------------------------------------ certified attention


def claims_to_be_a_card(monkeypatch):
    monkeypatch.setattr(_jax, "why_no_hopper", lambda needs: None)


def certify(q, k, v, counts, **how):
    mask = block_scores.select("mean_query", q, k, counts, 128)
    how = {"bound": False} | how
    return hads.certified_attention(q, k, v, mask, jax.random.key(3), **how)


def arguments(B=1, T=2048, N=4, K=2, size=64, dtype=jnp.bfloat16):
    q, k, v = (normal(B, T, n, size, seed=n + i, dtype=dtype) for i, n in enumerate((N, K, K)))
    return q, k, v, jnp.full((N, -(-T // 128)), 5, jnp.int32)


KERNELS = "xsake_sampled_queries", "xsake_sampled_compare", "xsake_sampled_means"
SELECTION = "xsake_means", "xsake_scores", "xsake_best_blocks"  # of the mask
# sparse attention with its work table, and attention of the sample, whose table is known
ATTENTION = ("xsake_work_table", "xsake_forward", "xsake_forward")


def lowered(fn, *given):
    return jax.jit(fn).trace(*given).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("how", ["alone", "mapped", "in a loop", "with its gradient", "on devices"])
def test_the_certificate_lowers_to_its_kernels(how, monkeypatch):
    claims_to_be_a_card(monkeypatch)
    q, k, v, counts = arguments()
    sinks = jnp.zeros(4)

    def run(q, k, v):
        return certify(q, k, v, counts, sinks=sinks)

    def gradient(q, k, v):
        def loss(q, k, v):
            out, report = run(q, k, v)
            return out.astype(jnp.float32).sum() + report.squared_error_by_head.mean.sum(), report

        return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    def on_devices(q, k, v):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
        spec = jax.sharding.PartitionSpec("data")
        return jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(q, k, v)

    form = {
        "alone": run,
        "mapped": jax.vmap(run),
        "in a loop": lambda *x: jax.lax.map(lambda x: run(*x), x),
        "with its gradient": gradient,
        "on devices": on_devices,
    }[how]
    given = [x[None] if how in ("mapped", "in a loop") else x for x in (q, k, v)]
    text = lowered(form, *given)
    names = re.findall(r"@mosaic_gpu.*?(xsake_\w+)_mosaic_gpu", text)
    assert len(names) == text.count("@mosaic_gpu")
    wanted = [*KERNELS, *ATTENTION]
    if how == "with its gradient":
        wanted += ["xsake_prepare", "xsake_backward_dkvq"]
    found = [name for name in names if name not in SELECTION]
    assert collections.Counter(found) == collections.Counter(wanted)


def test_what_the_kernels_do_not_support_is_measured_by_plain_jax(monkeypatch):
    claims_to_be_a_card(monkeypatch)
    q, k, v, _ = arguments()
    causal, ids = masks.causal(), masks.documents(jnp.zeros((1, 2048), jnp.int32))

    def why(q=q, k=k, v=v, rule=causal, correct=False):
        return sampled_by_kernel.why_not(q, k, v, rule, correct=correct)

    assert why() is None
    assert why(rule=causal & masks.sliding_window(50)) is None
    assert "correct = True" in why(correct=True)
    assert "causal rules and windows" in why(rule=causal & ids)
    assert "supports bfloat16 and float16; this is float32" in why(q=q.astype(jnp.float32))
    assert "arrays of one type" in why(q=q.astype(jnp.float16))
    assert "heads of 64, 128, 256; these are (64, 32)" in why(v=v[..., :32])
    monkeypatch.undo()
    assert "GPU" in why()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("shape", "how"),
    [
        (dict(T=8192, N=16, K=16, size=128), {}),
        (dict(T=8192, N=9, K=3, size=64), {"threshold": 0.3}),
        (dict(B=3, T=2045), {"threshold": 0.4, "criterion": "error", "logits_soft_cap": 20.0}),
        (dict(B=2, T=4096), {"sinks": jnp.array([0.5, 2.0, -1.0, 3.0]), "bound": True}),
        (dict(T=4096, size=256, dtype=jnp.float16), {"every": 128}),
    ],
    ids=str,
)
def test_on_a_card_the_report_is_that_of_plain_jax(shape, how, monkeypatch):
    """By kernels alone, with a mapped axis and in a loop: the sample is the same."""
    q, k, v, counts = arguments(**shape)

    def run(q, k, v):
        return certify(q, k, v, counts, **how)

    assert all(name in jax.jit(run).lower(q, k, v).as_text() for name in KERNELS)
    found = jax.jit(run)(q, k, v)
    one = [x[None] for x in (q, k, v)]
    for again in (
        jax.jit(jax.vmap(run))(*one),
        jax.jit(lambda *x: jax.lax.map(lambda x: run(*x), x))(*one),
    ):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b[0])
    monkeypatch.setattr(sampled_by_kernel, "why_not", lambda *given, **how: "compared with")
    plain = jax.jit(functools.partial(run))
    assert not any(name in plain.lower(q, k, v).as_text() for name in KERNELS)
    want = plain(q, k, v)
    if "threshold" not in how:
        np.testing.assert_array_equal(found[0], want[0])
    # Both round outputs of pieces to 16 bits, of not always the same pieces: a bfloat16 is off by
    # up to 2⁻⁹ of its value, its square by 2⁻⁸ = 3.9e-3.
    rounding = 5e-3
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(want[1]), strict=True):
        if a.dtype == jnp.float32:
            scale = np.abs(b).mean() + 1e-6
            assert np.abs(np.asarray(a) - np.asarray(b)).mean() / scale < rounding
    np.testing.assert_array_equal(found[1].sample, want[1].sample)
    same = found[1].dense_row_blocks == want[1].dense_row_blocks
    # of values spread over 0 … 1, so many are so near the threshold, on either side
    assert same.mean() >= 1 - 2 * rounding
