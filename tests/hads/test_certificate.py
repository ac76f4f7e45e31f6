"""The certificate against NumPy: unbiased, covering, sound, exact where it says so."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from xsake import dot_product_attention, hads, masks
from xsake.block_mask import BlockMask
from xsake.hads import certificate, estimates, sampled
from xsake.masks.rule import Grid

T, BLOCK, EVERY, WINDOW = 92, 8, 8, 32
B, N, K, H = 2, 4, 2, 8
DOCUMENTS = np.repeat([[0, 1, -1], [0, 0, 1]], (40, 48, 4), axis=1)
SIZES = np.minimum(T - np.arange(0, T, EVERY), EVERY)  # of the groups: the last is short
RULES = {
    "causal": masks.causal(),
    "documents": masks.causal() & masks.documents(DOCUMENTS),
    "array": masks.array(np.random.default_rng(5).random((1, N, T, T)) < 0.7),
}


def problem(rule, seed=0, sharp=1.5):
    rng = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(rng.standard_normal((B, T, heads, H)) * size, jnp.float32)
        for heads, size in ((N, sharp), (K, 1.0), (K, 1.0))
    )
    n = -(-T // BLOCK)
    kept = rng.random((B, N, n, n)) < 0.4
    kept |= np.eye(n, dtype=bool)
    return q, k, v, BlockMask.from_dense(kept, rule, shape=(T, T), block=BLOCK)


certify = jax.jit(
    functools.partial(
        hads.certified_attention,
        every=EVERY,
        window=WINDOW,
        bound=False,
        implementation="reference",
    ),
    static_argnames=(
        *("threshold", "criterion", "guarantee", "correct", "bound", "logits_soft_cap"),
        "implementation",
    ),
)


def by_definition(q, k, v, mask, logits_soft_cap=np.inf, sinks=None):
    """(dense output, sparse output [B, T, N, H], dropped mass [B, T, N]) in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    if np.isfinite(logits_soft_cap):
        logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
    weight = np.exp(logits)
    of_sinks = 0 if sinks is None else np.exp(np.asarray(sinks, np.float64))[:, None]
    rule = masks.everything() if mask.rule is None else mask.rule
    whole = BlockMask.from_rule(rule, (T, T), batch=B, heads=N, block=BLOCK)
    found = []
    for each in (whole, mask):
        visible = weight * np.asarray(each.to_dense(batch=B, heads=N))
        total = visible.sum(-1) + of_sinks
        out = np.einsum("bnts,bsnh->btnh", visible, v)
        safe = np.moveaxis(np.where(total > 0, total, 1), 1, 2)
        found += [out / safe[..., None], np.moveaxis(total, 1, 2)]
    dense, all_weight, sparse, kept = found
    mass = np.where(all_weight > 0, 1 - kept / np.where(all_weight > 0, all_weight, 1), 0)
    return dense, sparse, mass


def by_window(x):
    """Means [B, N, windows] of x [B, T, N]."""
    return np.stack([x[:, i : i + WINDOW].mean(1) for i in range(0, T, WINDOW)], -1)


CAPPED = {"logits_soft_cap": 2.0, "sinks": jnp.array([0.5, 2.0, -1.0, 3.0])}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("causal", {}),
        ("documents", {}),
        pytest.param("array", {}, marks=pytest.mark.slow),
        pytest.param("documents", CAPPED, marks=pytest.mark.second_python),
    ],
)
def test_the_report_is_of_the_given_mask_and_threshold_0_is_dense_attention(name, how):
    q, k, v, mask = problem(RULES[name])
    out, report = certify(q, k, v, mask, jax.random.key(1), threshold=0.0, bound=True, **how)
    dense, sparse, mass = by_definition(q, k, v, mask, **how)
    np.testing.assert_allclose(out, dense, atol=2e-5)
    np.testing.assert_array_equal(report.density, 1)
    assert (np.asarray(report.density_given) < 1).all()
    at = np.asarray(report.sample)
    assert (at // EVERY == np.arange(len(SIZES))).all()
    mean = functools.partial(np.average, weights=SIZES, axis=1)
    rows = np.arange(B)[:, None]
    np.testing.assert_allclose(report.dropped_mass_by_head.mean, mean(mass[rows, at]), atol=1e-5)
    error = ((dense - sparse) ** 2).sum(-1)
    np.testing.assert_allclose(
        report.squared_error_by_head.mean, mean(error[rows, at]), rtol=1e-4, atol=1e-6
    )
    assert (np.asarray(report.bound) >= by_window(mass) - 1e-6).all()
    assert np.asarray(report.largest_bound).max() <= 1


def test_several_sinks_of_a_head_count_as_their_sum():
    q, k, v, mask = problem(RULES["causal"])
    sinks = jnp.log(jnp.asarray([[1.0, 2.0], [3.0, 1.0], [0.5, 0.5], [2.0, 7.0]]))
    how = {"every": EVERY, "window": WINDOW, "threshold": 1.2, "criterion": "error"}
    run = jax.jit(functools.partial(hads.certified_attention, **how))
    found, want = (
        run(q, k, v, mask, jax.random.key(0), sinks=x)
        for x in (sinks, jax.nn.logsumexp(sinks, axis=-1))
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)


def estimate(x, length, every, window, widened=estimates.WIDENED_MASS, most=np.inf):
    """Of every window."""
    return estimates.by_window_and_whole(x, length, every, window, widened, most)[0]


def test_estimates_are_unbiased():
    """The mean over all samples is the truth: every query of a group is as likely as the others."""
    keys = jax.random.split(jax.random.key(2), 200)
    samples = np.asarray(jax.vmap(lambda key: sampled.sample_queries(key, 20, T, EVERY))(keys))
    samples = samples.reshape(-1, len(SIZES))
    share = np.bincount(samples.ravel(), minlength=T) / len(samples)
    expected = 1 / np.repeat(SIZES, SIZES)
    # five standard deviations of a share
    assert (np.abs(share - expected) < 5 * np.sqrt(expected / len(samples))).all()
    mass = by_definition(*problem(RULES["causal"]))[2]
    every_offset = [
        np.moveaxis(mass[:, np.arange(0, T, EVERY) + offset % SIZES], 1, 2)
        for offset in range(EVERY)
    ]
    found = estimate(jnp.asarray(np.stack(every_offset), jnp.float32), T, EVERY, WINDOW)
    np.testing.assert_allclose(found.mean.mean(0), by_window(mass), rtol=1e-5)
    # the squared standard error is not too small on average
    drawn = np.moveaxis(mass[:, samples], 3, 1)  # [B, N, samples, groups]
    found = estimate(jnp.asarray(drawn, jnp.float32), T, EVERY, WINDOW)
    assert ((found.standard_error**2).mean(2) > 0.95 * found.mean.var(2)).all()


@pytest.mark.parametrize(
    ("groups", "shape", "widened"),
    [(16, 1.0, 1.5), (16, 4.0, 1.5), (16, 0.3, 4.0)],
)
def test_intervals_cover_the_mean_of_skewed_values(groups, shape, widened):
    """Gamma variables: most are small, a few are large. 16 groups are those of a window."""
    x = np.random.default_rng(3).gamma(shape, size=(2000, groups)).astype(np.float32)
    found = estimate(jnp.asarray(x), 64 * groups, 64, 64 * groups, widened)
    covers = (found.low <= shape) & (shape <= found.high)
    assert 0.95 <= covers.mean() <= 0.999


@pytest.mark.parametrize("length", [65, 130, 320])
def test_standard_errors_hold_for_a_short_last_group(length):
    """Values of one distribution: the reported square is the variance of the mean, unless G = 1."""
    sizes = np.minimum(length - np.arange(0, length, 64), 64)
    x = np.random.default_rng(length).standard_exponential((20_000, len(sizes)))
    found = estimate(jnp.asarray(x, jnp.float32), length, 64, length)
    ratio = np.square(found.standard_error).mean() / np.var(found.mean)
    assert abs(ratio - 1) < 0.08  # 1.6% is one standard deviation at 65, the largest
    alone = estimate(jnp.asarray(x[:, :1], jnp.float32), 33, 64, 64)
    assert (alone.standard_error == 0).all()


def test_one_group_alone_says_nothing_of_the_spread():
    found = estimate(jnp.array([[0.2, 0.3, 0.1]]), 40, 16, 32, most=1.0)
    np.testing.assert_allclose(found.mean[0], [0.25, 0.1])
    np.testing.assert_array_equal([found.low[0, 1], found.high[0, 1]], [0, 1])


@pytest.mark.parametrize(
    ("length", "every", "window"),
    [(92, 8, 32), (130, 64, 64), (130, 64, 128), (33, 64, 64), (4096, 64, 1024)],
)
def test_estimates_are_those_of_the_definition(length, every, window):
    """In float64, window by window; values that hardly differ keep their spread in float32."""
    sizes = np.minimum(length - np.arange(0, length, every), every)
    rng = np.random.default_rng(length)
    x = (100 + rng.standard_normal((3, len(sizes))) / 100).astype(np.float32)
    how = length, every, window, 1.5, np.inf
    by_window, whole = estimates.by_window_and_whole(jnp.asarray(x), *how)
    per = -(-window // every)
    parts = [slice(i, i + per) for i in range(0, len(sizes), per)]
    assert by_window.mean.shape == (3, len(parts))
    found = [[each[:, i] for each in by_window] for i in range(len(parts))]
    for part, of_part in zip([*parts, slice(None)], [*found, whole], strict=True):
        mean, standard_error, low, high = map(np.asarray, of_part)
        w = sizes[part] / sizes[part].sum()
        values = x[:, part].astype(np.float64)
        want = values @ w
        np.testing.assert_allclose(mean, want, rtol=1e-6)
        if len(w) == 1:
            np.testing.assert_array_equal([standard_error, low], np.zeros((2, 3)))
            np.testing.assert_array_equal(high, np.inf)
            continue
        squares = (w**2).sum()
        spread = ((values - want[:, None]) ** 2 @ w) * squares / (1 - squares)
        np.testing.assert_allclose(standard_error, np.sqrt(spread), rtol=5e-3)
        half = stats.t.ppf(0.975, len(w) - 1) * standard_error
        np.testing.assert_allclose([low, high], [mean - half, mean + 1.5 * half], rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("criterion", ["mass", "error"])
def test_dropped_keys_that_are_no_numbers_are_reported_and_done_densely(value, criterion):
    q, k, v, mask = problem(RULES["causal"])
    clean = certify(q, k, v, mask, jax.random.key(4))[1]
    at = int(np.argmin(mask.blocks().sum((0, 1, 2))[:-1])) * BLOCK  # of a block that rows drop
    how = {"threshold": 0.9, "criterion": criterion}
    report = certify(q, k.at[:, at].set(value), v, mask, jax.random.key(4), **how)[1]
    lost = np.isnan(report.dropped_mass_by_head.mean)
    assert lost.any()
    assert not np.isnan(clean.dropped_mass_by_head.mean).any()
    assert np.asarray(report.dense_row_blocks)[lost].any(-1).all()


def test_a_value_that_is_no_number_stays_in_its_window():
    x = jnp.ones(16).at[3].set(jnp.nan)
    by_window, whole = estimates.by_window_and_whole(x, 128, 8, 32, 1.5, np.inf)
    np.testing.assert_array_equal(jnp.isnan(by_window.mean), [True, False, False, False])
    np.testing.assert_array_equal(jnp.isnan(by_window.high), [True, False, False, False])
    assert jnp.isnan(whole.mean)


@pytest.mark.parametrize(
    ("rule", "own_heads"),
    [
        (masks.causal(), 1),
        (masks.sliding_window(20, 5), K),
        (masks.chunked(24) & masks.causal(), N),
        (RULES["documents"], K),
    ],
    ids=str,
)
def test_blocks_are_counted_that_the_rule_allows(rule, own_heads):
    """Lists may have blocks that the rule empties; they are visited for nothing."""
    n = -(-T // BLOCK)
    listed = np.random.default_rng(6).random((B, own_heads, n, n)) < 0.6
    flat = np.argsort(~listed, axis=-1, kind="stable")
    mask = BlockMask.from_kv_blocks(listed.sum(-1), flat, block=BLOCK, shape=(T, T), mask_mod=rule)

    @jax.jit
    def counted(mask):
        allowed = certificate._live(rule, Grid((T, T), (BLOCK, BLOCK), B, N))
        dropped = certificate._dropped(mask, rule, B, N)
        return *certificate._visited_and_live(mask, rule, B, N), allowed, dropped

    visited, live, allowed, dropped = map(np.asarray, counted(mask))
    wide = np.repeat(listed, N // own_heads, axis=1)
    np.testing.assert_array_equal(visited, (wide & allowed).sum(-1))
    np.testing.assert_array_equal(np.broadcast_to(live, visited.shape), allowed.sum(-1))
    np.testing.assert_array_equal(dropped, ~wide & allowed)


@pytest.mark.parametrize("criterion", ["mass", "error"])
def test_a_threshold_mends_the_row_blocks_whose_sample_is_over_it(criterion):
    q, k, v, mask = problem(RULES["causal"])
    out, report = certify(q, k, v, mask, jax.random.key(4), threshold=0.3, criterion=criterion)
    dense, sparse, mass = by_definition(q, k, v, mask)
    rows = np.arange(B)[:, None]
    error = np.linalg.norm(sparse - dense, axis=-1) / np.linalg.norm(dense, axis=-1)
    compared = mass if criterion == "mass" else error
    sampled = np.moveaxis(compared[rows, np.asarray(report.sample)], 1, 2)  # [B, N, row blocks]
    fails = sampled >= 0.3
    assert 0 < fails.mean() < 1
    np.testing.assert_array_equal(report.dense_row_blocks, fails)
    by_query = np.moveaxis(np.repeat(fails, BLOCK, -1)[..., :T], 1, 2)[..., None]
    np.testing.assert_allclose(out, np.where(by_query, dense, sparse), atol=2e-5)
    assert (np.asarray(report.density) > np.asarray(report.density_given)).any()


def wants_one_key(query=43, key=3):
    """One query of head 0 wants one key of a block that is dropped; other logits are small."""
    q, k, v, mask = problem(RULES["causal"], sharp=0.1)
    direction = np.zeros(H)
    direction[0] = 8
    q, k = (x.at[0, i, 0].set(direction) for x, i in ((q, query), (k, key)))
    n = -(-T // BLOCK)
    kept = np.ones((B, N, n, n), bool)
    kept[0, 0, query // BLOCK, key // BLOCK] = False
    return q, k, v, BlockMask.from_dense(kept, masks.causal(), shape=(T, T), block=BLOCK)


def test_one_query_that_wants_one_key_escapes_the_sample_but_not_the_bound():
    q, k, v, mask = wants_one_key()
    dense, sparse, mass = by_definition(q, k, v, mask)
    assert mass[0, 43, 0] > 0.99
    missed, found = (
        next(key for key in map(jax.random.key, range(99)) if (43 in sample(key)) == wanted)
        for wanted in (False, True)
    )
    for key, caught in ((missed, False), (found, True)):
        out, report = certify(q, k, v, mask, key, threshold=0.3)
        assert bool(report.dense_row_blocks[0, 0, 43 // BLOCK]) is caught
    out, report = certify(q, k, v, mask, missed, guarantee=0.9, bound=True)
    assert report.largest_bound[0, 0, 43 // WINDOW] >= mass[0, 43, 0] - 1e-6
    assert report.dense_row_blocks[0, 0, 43 // BLOCK]
    np.testing.assert_allclose(out[0, 43, 0], dense[0, 43, 0], atol=2e-5)


def sample(key):
    return np.asarray(sampled.sample_queries(key, B, T, EVERY))[0]


def test_a_guarantee_limits_what_every_query_drops():
    q, k, v, mask = problem(RULES["causal"], sharp=0.4)
    out, report = certify(q, k, v, mask, jax.random.key(5), guarantee=0.9, bound=True)
    dense, sparse, mass = by_definition(q, k, v, mask)
    fails = np.repeat(np.asarray(report.dense_row_blocks), BLOCK, -1)[..., :T]
    fails = np.moveaxis(fails, 1, 2)
    assert 0 < fails.mean() < 1
    assert mass[~fails].max() < 0.9
    np.testing.assert_allclose(out, np.where(fails[..., None], dense, sparse), atol=2e-5)


@pytest.mark.parametrize("name", ["causal", "documents"])
def test_the_correction_adds_the_error_of_the_last_sampled_query_of_its_document(name):
    q, k, v, mask = problem(RULES[name])
    out, report = certify(q, k, v, mask, jax.random.key(6), correct=True)
    dense, sparse, _ = by_definition(q, k, v, mask)
    want = sparse.copy()
    for b in range(B):
        ids = DOCUMENTS[b] if name == "documents" else np.zeros(T)
        for t in range(T):
            before = [s for s in np.asarray(report.sample[b]) if s <= t]
            if before and ids[before[-1]] == ids[t] >= 0:
                want[b, t] += (dense - sparse)[b, before[-1]]
    np.testing.assert_allclose(out, want, atol=2e-5)


def test_no_later_key_leaks_into_a_corrected_query():
    """Outputs before token 40 do not change with the keys and values after it."""
    q, k, v, mask = problem(RULES["causal"])
    other = [x.at[:, 40:].add(1.0) for x in (k, v)]
    a, b = (certify(q, *x, mask, jax.random.key(7), correct=True)[0] for x in ((k, v), other))
    np.testing.assert_allclose(a[:, :40], b[:, :40], atol=1e-6)


def test_gradients_are_those_of_the_blocks_that_were_visited():
    q, k, v, mask = problem(RULES["causal"])
    weight = jnp.asarray(np.random.default_rng(8).standard_normal(q.shape), jnp.float32)
    rng = jax.random.key(9)
    report = certify(q, k, v, mask, rng, threshold=0.3)[1]
    visited = (mask.blocks() > 0) | report.dense_row_blocks[..., None]
    final = BlockMask.from_dense(visited, masks.causal(), shape=(T, T), block=BLOCK)

    def loss(attend):
        return lambda *qkv: (weight * attend(*qkv)).sum()

    got = jax.grad(loss(lambda *x: certify(*x, mask, rng, threshold=0.3)[0]), (0, 1, 2))(q, k, v)
    want = jax.grad(loss(lambda *x: dot_product_attention(*x, mask=final)), (0, 1, 2))(q, k, v)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)


@pytest.mark.parametrize("threshold", [None, 0.3])
def test_gradients_flow_through_the_correction(threshold):
    """Those of the sum that the output is, with the sample and the dense row blocks as given."""
    q, k, v, mask = problem(RULES["causal"])
    weight = jnp.asarray(np.random.default_rng(8).standard_normal(q.shape), jnp.float32)
    how = {"correct": True, "threshold": threshold}
    rng = jax.random.key(9)
    report = certify(q, k, v, mask, rng, **how)[1]
    visited = (mask.blocks() > 0) | report.dense_row_blocks[..., None]
    final = BlockMask.from_dense(visited, masks.causal(), shape=(T, T), block=BLOCK)
    sees = np.asarray(report.sample)[:, None] <= np.arange(T)[:, None]  # [B, T, G]
    last = np.take_along_axis(np.asarray(report.sample), np.maximum(sees.sum(-1) - 1, 0), 1)
    served = np.repeat(~np.asarray(report.dense_row_blocks), BLOCK, -1)[..., :T]
    served = np.moveaxis(served, 1, 2) & sees.any(-1)[..., None]

    def by_definition(*qkv):
        dense = dot_product_attention(*qkv, mask=masks.causal())
        sparse, out = (dot_product_attention(*qkv, mask=x) for x in (mask, final))
        error = jnp.take_along_axis(dense - sparse, last[..., None, None], axis=1)
        return out + jnp.where(served[..., None], error, 0)

    def loss(attend):
        return lambda *qkv: (weight * attend(*qkv)).sum()

    got = jax.grad(loss(lambda *x: certify(*x, mask, rng, **how)[0]), (0, 1, 2))(q, k, v)
    want = jax.grad(loss(by_definition), (0, 1, 2))(q, k, v)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "causal",
        "window",
        pytest.param("documents", marks=pytest.mark.slow),
        pytest.param("everything", marks=pytest.mark.slow),
    ],
)
def test_keys_in_pieces_are_attended_to_as_whole(name):
    """Outputs, logsumexps and gradients, with sinks and a soft cap; some pieces have no key."""
    rule = {
        **RULES,
        "window": masks.sliding_window(20, 0) & masks.documents(DOCUMENTS),
        "everything": masks.everything(),
    }[name]
    q, k, v, _ = problem(rule)
    sample = sampled.sample_queries(jax.random.key(1), B, T, EVERY)
    sinks = CAPPED["sinks"]

    @functools.partial(jax.jit, static_argnames="pieces")
    def both(given, pieces):
        (out, logsumexp), pull_back = jax.vjp(
            lambda given: sampled.attend_sampled(given, sample, rule, 2.0, pieces), given
        )
        return (out, logsumexp), *pull_back((3 * jnp.cos(out), -jnp.sin(logsumexp)))

    (results, grads), (expected, expected_grads) = (both((q, k, v, sinks), n) for n in (4, 1))
    for one, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)
    for one, other in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


SAMPLED = {  # length, every: one row block of sampled queries for all lists, or two
    "shared": (512, 8),
    "own": (1024, 4),
}


@pytest.mark.parametrize("lists", SAMPLED)
@pytest.mark.parametrize(
    "rule",
    [masks.causal(), masks.sliding_window(200, 100), masks.everything()],
    ids=str,
)
def test_blocks_of_a_sample_are_known_before_it(rule, lists):
    """A list that misses a block, or calls a partial one full, would show other tokens."""
    (length, every), pieces = SAMPLED[lists], 4
    sample = sampled.sample_queries(jax.random.key(3), B, length, every)
    in_pieces = sampled._of_pieces(rule, sample, pieces, length)
    rows = sampled._rows(rule, (length, length), sample, every)
    mask = sampled._with_known_blocks(in_pieces, rows, B, pieces)
    assert isinstance(mask, BlockMask)
    is_shared = lists == "shared" or rule == masks.everything()
    assert mask.kv_count.shape[0] == (1 if is_shared else B * pieces)
    sees = np.asarray(rule(0, 0, sample[..., None], jnp.arange(length)))
    sees = np.broadcast_to(sees, (*sample.shape, length)).reshape(*sample.shape, pieces, -1)
    found = np.asarray(mask.to_dense(batch=B * pieces))[:, 0]
    want = np.swapaxes(sees, 1, 2).reshape(B * pieces, *sees.shape[1::2])
    np.testing.assert_array_equal(np.broadcast_to(found, want.shape), want)


def test_a_sample_with_known_blocks_attends_as_without():
    (length, every), rng = SAMPLED["own"], np.random.default_rng(7)
    q, k, v = (jnp.asarray(rng.standard_normal((B, length, 2, H)), jnp.float32) for _ in range(3))
    sample = sampled.sample_queries(jax.random.key(3), B, length, every)
    given = q, k, v, None
    got = sampled.attend_sampled(given, sample, masks.causal(), None, 4, every)
    want = sampled.attend_sampled(given, sample, masks.causal(), None, 1)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


def test_lists_that_are_not_known_or_too_long_are_made_from_the_sample(monkeypatch):
    sample = sampled.sample_queries(jax.random.key(3), B, 512, 8)
    documents = masks.documents(jnp.zeros((1, 512), jnp.int32))
    for rule in (documents, documents & masks.causal()):
        in_pieces = sampled._of_pieces(rule, sample, 4, 512)
        rows = sampled._rows(rule, (512, 512), sample, 8)
        assert sampled._with_known_blocks(in_pieces, rows, B, 4) is in_pieces
    causal = sampled._of_pieces(masks.causal(), sample, 4, 512)
    rows = sampled._rows(masks.causal(), (512, 512), sample, 8)
    monkeypatch.setattr(sampled, "MAX_CONSTANT", B * 4 - 1)
    assert sampled._with_known_blocks(causal, rows, B, 4) is causal


def test_logits_that_are_no_numbers_stay_so_in_pieces():
    q, k, v, _ = problem(RULES["causal"])
    sample = jnp.asarray([[3, T - 1], [3, T - 1]])
    given = q, k.at[0, T // 2].set(jnp.nan), v, None
    logsumexp = sampled.attend_sampled(given, sample, RULES["causal"], None, 2)[1]
    np.testing.assert_array_equal(jnp.isnan(logsumexp[:, :, 0]), [[False, True], [False, False]])


def test_queries_that_see_no_key_stay_zero_in_pieces():
    """Row 0 of DOCUMENTS ends with tokens of no document."""
    q, k, v, _ = problem(RULES["documents"])
    sample = jnp.asarray([[3, T - 1], [3, T - 1]])
    given = q, k, v, None
    out, logsumexp = sampled.attend_sampled(given, sample, RULES["documents"], None, 2)
    assert not out[0, 1].any()
    assert (logsumexp[0, 1] == -jnp.inf).all()
    assert jnp.isfinite(logsumexp[:, 0]).all()
