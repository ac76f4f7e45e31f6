"""The kernels of block scores without a GPU: interpreted, lowered, refused, used by a plan."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conditions import needs_gpu, needs_interpreter, needs_newer_jax
from xsake import _jax, block_scores, dot_product_attention
from xsake import block_scores as scores
from xsake.block_scores import by_kernel, queries
from xsake.hads import Plan, row_blocks
from xsake.hads.terms import Terms


def random_array(batch, length, heads, size, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((batch, length, heads, size)) * 2, dtype)


def exact(queries, k, block, keys_per_peak=1):
    """log Σ 2^(q̄ · k) over every block's keys, or the largest of some of them, in float64."""
    queries, k = (np.asarray(x, np.float64) for x in (queries, k))
    k = np.repeat(k, queries.shape[2] // k.shape[2], axis=2)
    weight = np.exp2(np.einsum("brnh,bsnh->bnrs", queries, k))
    weight = np.pad(weight, [(0, 0)] * 3 + [(0, -k.shape[1] % block)])
    each = weight.reshape(*weight.shape[:3], -1, keys_per_peak, block // keys_per_peak)
    return np.log(each.max(-2).sum(-1))


def exact_means(q, block, scale):
    """scale · the mean of every block's tokens, in float64."""
    q = np.asarray(q, np.float64)
    return scale * np.stack([q[:, i : i + block].mean(1) for i in range(0, q.shape[1], block)], 1)


def interpreted(queries, k, block, *, causal, parts=1, keys_per_peak=1, run=None, **tiling):
    """The kernel on Mosaic's interpreter, which prints the races that it finds."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import scores as hopper_scores

    return (run or hopper_scores.scores)(
        queries,
        k,
        block,
        causal=causal,
        parts=parts,
        keys_per_peak=keys_per_peak,
        tiling=hopper_scores.ScoresTiling(**tiling),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )


@pytest.mark.parametrize(
    ("batch", "R", "S", "heads", "size", "block", "causal", "sms", "tiling"),
    [
        (1, 2, 256, (1, 1), 64, 128, True, 132, {}),
        (1, 5 * 16, 300, (2, 1), 64, 64, True, 2, {"parts": 16}),
        (2, 3, 301, (6, 2), 64, 128, True, 3, {}),
        (1, 5, 300, (2, 2), 128, 64, True, 2, {"warpgroups": 2}),
        (1, 70, 70 * 64 - 20, (1, 1), 64, 64, True, 2, {"q_bytes": 8 << 10}),
        (1, 70, 130, (2, 1), 128, 64, False, 2, {"q_bytes": 48 << 10}),
        (1, 2, 333, (3, 1), 256, 128, False, 1, {}),
        (1, 5 * 16, 300, (2, 1), 64, 64, True, 2, {"parts": 16, "warpgroups": 4}),
        (
            1,
            5 * 16,
            300,
            (4, 2),
            64,
            64,
            True,
            1,
            {"parts": 16, "q_bytes": 32 << 10, "q_groups": 2},
        ),
        (1, 70, 130, (4, 2), 64, 64, False, 2, {"q_bytes": 16 << 10, "q_groups": 2}),
        (1, 3 * 16, 300, (2, 1), 64, 128, True, 2, {"parts": 16, "keys_per_peak": 4}),
        (1, 5, 300, (2, 2), 128, 64, True, 2, {"keys_per_peak": 2}),
    ],
    ids=str,
)
@needs_interpreter
def test_the_kernel_sums_over_the_keys_of_every_block(
    batch, R, S, heads, size, block, causal, sms, tiling, capsys, monkeypatch
):
    """One or many segments for a CTA, groups that reach past the last tile, a short last block."""
    monkeypatch.setattr(_jax, "multiprocessors", lambda: sms)
    queries = random_array(batch, R, heads[0], size) / 8
    k = random_array(batch, S, heads[1], size, seed=1)
    got = np.asarray(interpreted(queries, k, block, causal=causal, **tiling))
    assert "RACE" not in capsys.readouterr().out
    want = exact(queries, k, block, tiling.get("keys_per_peak", 1))
    parts = tiling.get("parts", 1)
    seen = np.repeat(np.tri(R // parts, want.shape[-1], dtype=bool), parts, 0) | (not causal)
    np.testing.assert_allclose(got[..., seen], want[..., seen], rtol=1e-5, atol=1e-5)
    assert np.isneginf(got[..., ~seen]).all()


def shifted(queries, k):
    """Some rows' logits moved by so much that a sum of their powers of 2 overflows or is 0."""
    by_row = np.array([0, 20, -20, 3, 60, 0, 0, 0])[np.arange(queries.shape[1]) % 160 // 20]
    queries = queries.at[..., 0].set(jnp.asarray(by_row, queries.dtype)[None, :, None])
    return queries, k.at[..., 0].set(8)


@needs_interpreter
def test_sums_that_a_float32_cannot_hold_are_right_too(monkeypatch):
    """Beside them, one key that is no number: the scores of its block alone are none."""
    monkeypatch.setattr(_jax, "multiprocessors", lambda: 1)
    queries, k = shifted(random_array(1, 128, 1, 64) / 8, random_array(1, 192, 1, 64, seed=1))
    want = exact(queries, k, 64)
    assert (np.abs(want) > 130 * np.log(2)).any()
    k = k.at[0, 70, 0, 5].set(jnp.nan)
    got = np.asarray(interpreted(queries, k, 64, causal=False))
    np.testing.assert_allclose(got[..., ::2], want[..., ::2], rtol=1e-5, atol=1e-5)
    assert np.isnan(got[..., 1]).all()


@needs_newer_jax
@pytest.mark.parametrize("keys_per_peak", [0, 3, 16])
def test_parts_of_a_block_that_a_tile_cannot_be_cut_into_are_refused(keys_per_peak):
    from xsake.backends.hopper import scores as hopper_scores

    queries, k = random_array(1, 16, 1, 64), random_array(1, 64, 1, 64)
    with pytest.raises(ValueError, match=f"keys_per_peak is {keys_per_peak}; blocks of 64 must"):
        hopper_scores.sums(queries, k, 64, causal=True, keys_per_peak=keys_per_peak)


@pytest.mark.parametrize(
    ("batch", "T", "N", "size", "block"),
    [(2, 301, 3, 64, 128), (1, 200, 4, 128, 64), (2, 70, 4, 64, 64)],
)
@needs_interpreter
def test_means_are_over_the_tokens_of_every_block(batch, T, N, size, block, capsys):
    """A short last block, and heads that do not fill the last tile."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import means as hopper_means

    q = random_array(batch, T, N, size)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    got = np.asarray(hopper_means.means(q, block, scale=3.0, interpret=interpret), np.float64)
    assert "RACE" not in capsys.readouterr().out
    # bfloat16 has 8 bits
    np.testing.assert_allclose(got, exact_means(q, block, 3), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "tiling"),
    [
        ((1, 64, 8192, 4, 4, 64, 128), {}),
        ((2, 100, 100 * 64 - 7, 9, 3, 128, 64), {"q_bytes": 32 << 10}),
        ((1, 3, 4000, 4, 2, 128, 128), {}),  # a part of a text
        ((64, 2, 256, 8, 8, 64, 128), {}),
        ((1, 16 * 32, 2048, 9, 3, 64, 64), {"parts": 16}),
    ],
    ids=str,
)
@needs_newer_jax
def test_segments_cover_what_is_seen_once_and_evenly(sizes, tiling):
    """Every block of every group is in one segment, and no CTA has much more than its share."""
    from xsake.backends.hopper import scores as hopper_scores

    B, R, S, N, K, H, block = sizes
    parts = tiling.get("parts", 1)
    tiling = hopper_scores.ScoresTiling(**{k: x for k, x in tiling.items() if k != "parts"})
    causal = row_blocks.count_blocks(S, block) * parts == R
    queries, k = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((B, R, N, H), (B, S, K, H)))
    shape = hopper_scores.ScoresShape.of(queries, k, block, causal, parts, tiling)
    table = hopper_scores.segments(shape, 132)
    times = np.zeros((B, K, shape.groups, shape.blocks), int)
    for b, h, group, first, count in table.reshape(-1, 5):
        times[b, h, group, first : first + count] += 1
    first_tile = np.arange(shape.groups) * shape.resident
    last_tiles = np.minimum(first_tile + shape.resident, shape.tiles) - 1
    for group, (begin, end) in enumerate(zip(first_tile, last_tiles, strict=True)):
        tiles = np.arange(begin, end + 1) % shape.head_tiles
        last_row = min(tiles.max() * 64 + 63, R - 1)
        wanted = (np.arange(shape.blocks) <= last_row // parts) | (not causal)
        np.testing.assert_array_equal(
            times[:, :, group], np.broadcast_to(wanted, (B, K, len(wanted)))
        )
    work = table[..., -1].sum(-1)
    assert (work > 0).all()
    if shape.head_tiles == 1:  # all blocks cost the same
        assert work.max() <= work.mean() + 1


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 9])
@needs_newer_jax
def test_no_split_into_as_many_runs_has_a_cheaper_costliest_run(parts):
    from xsake.backends.hopper import scores as hopper_scores

    rng = np.random.default_rng(parts)
    for length in (1, 3, 8):
        costs = rng.integers(1, 9, length).astype(float)
        run = hopper_scores._split(costs, parts)
        assert run[0] == 0
        assert set(np.diff(run)) <= {0, 1}
        assert run[-1] < parts
        best = min(
            max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, length)))
            for many in range(min(parts, length))
            for cuts in itertools.combinations(range(1, length), many)
        )
        assert np.bincount(run, costs).max() == best


@pytest.mark.parametrize(
    ("block", "size", "dtype"),
    [
        (64, 64, "bfloat16"),
        (128, 64, "float16"),
        (64, 128, "float16"),
        (128, 128, "bfloat16"),
        (64, 256, "bfloat16"),
        (128, 256, "float16"),
    ],
)
@needs_newer_jax
def test_it_lowers_for_cuda(block, size, dtype):
    """Every pair of block size, head size and dtype occurs; both dtypes have 16 bits."""
    from xsake.backends.hopper import scores as hopper_scores

    queries = jax.ShapeDtypeStruct((2, 70, 4, size), dtype)
    k = jax.ShapeDtypeStruct((2, 70 * block - 3, 2, size), dtype)
    run = jax.jit(functools.partial(hopper_scores.scores, block=block, causal=True))
    text = run.trace(queries, k).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1


@pytest.fixture
def interpreted_kernel(monkeypatch):
    """Block scores use the kernels, interpreted; the value lists the shapes of their calls."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import means as hopper_means
    from xsake.backends.hopper import outliers as hopper_outliers
    from xsake.backends.hopper import scores as hopper_scores

    def outliers(q, block, parts, *, scale):
        """In plain JAX: nothing interprets the kernel. test_outliers.py compares it with this."""
        chosen = jax.vmap(lambda q: queries.outliers(q, block // parts, block))(q)
        return (chosen * scale).astype(q.dtype)

    calls = []
    kernel = hopper_scores.scores

    def run(queries, k, block, *, causal, **how):
        calls.append((queries.shape, k.shape, causal))
        return interpreted(queries, k, block, causal=causal, run=kernel, **how)

    monkeypatch.setattr(_jax, "multiprocessors", lambda: 2)
    means = functools.partial(hopper_means.means, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setattr(hopper_means, "means", means)
    monkeypatch.setattr(hopper_outliers, "outliers", outliers)
    by_kernel.batchable.cache_clear()
    block_scores.estimate.clear_cache()
    monkeypatch.setattr(scores, "why_not", lambda q, k, block: None)
    monkeypatch.setattr(scores, "BY_KERNEL", {})  # nothing interprets the kernel of lists
    monkeypatch.setattr(hopper_scores, "scores", run)
    yield calls
    by_kernel.batchable.cache_clear()
    block_scores.estimate.clear_cache()


def plan_for(heads, n):
    counts = np.broadcast_to(np.minimum(2, row_blocks.ceilings(n)), (1, heads, n)).astype(np.int32)
    return Plan(counts, None, Terms(0.5, "kl", "mean_query", 64, n * 64))


@needs_interpreter
def test_a_plan_runs_one_kernel_for_the_batch_and_agrees_with_plain_jax(
    interpreted_kernel, monkeypatch
):
    q, k = random_array(2, 190, 4, 64), random_array(2, 190, 2, 64, seed=1)
    plan = plan_for(4, 3)
    got = np.asarray(plan._scores(0, q, k, None))
    assert interpreted_kernel[-1] == ((2, 3, 4, 64), (2, 190, 2, 64), True)
    monkeypatch.setattr(scores, "why_not", lambda q, k, block: "not now")
    want = jax.vmap(lambda q, k: block_scores.mean_query(q, k, 64))(
        *(x.astype(jnp.float32) for x in (q, k))
    )
    may = row_blocks.allowed(3)
    # q̄ is rounded to 8 bits before the product: 2^-9 of the largest logit is the difference
    np.testing.assert_allclose(got[..., may], np.asarray(want)[..., may], atol=2e-2)


@needs_interpreter
@pytest.mark.parametrize(
    "selector",
    [
        pytest.param(block_scores.part_queries, marks=pytest.mark.slow),
        block_scores.outlier_queries,
        functools.partial(block_scores.outlier_queries, keys_per_peak=4),
    ],
)
def test_parts_of_a_row_block_by_the_kernel_agree_with_plain_jax(
    selector, interpreted_kernel, monkeypatch
):
    q, k = random_array(1, 190, 2, 64)[0], random_array(1, 190, 1, 64, seed=1)[0]
    got = np.asarray(selector(q, k, 64))
    assert interpreted_kernel[-1] == ((1, 3 * 16, 2, 64), (1, 190, 1, 64), True)
    monkeypatch.setattr(scores, "why_not", lambda q, k, block: "not now")
    want = selector(*(x.astype(jnp.float32) for x in (q, k)), 64)
    may = row_blocks.allowed(3)
    # as above; logits of single queries and means of 4 are larger than those of means of 64
    np.testing.assert_allclose(got[..., may], np.asarray(want)[..., may], atol=5e-2)


@needs_interpreter
def test_every_query_by_the_kernel_agrees_with_plain_jax(interpreted_kernel, monkeypatch):
    """A chunk: the last two row blocks of a text with a short last block, and one of padding."""
    q, k = random_array(1, 192, 2, 64)[0], random_array(1, 250, 1, 64, seed=1)[0]
    got = np.asarray(block_scores.every_query(q, k, 64, 2))[:, :2]
    assert interpreted_kernel[-1] == ((1, 3 * 64, 2, 64), (1, 250, 1, 64), False)
    monkeypatch.setattr(scores, "why_not", lambda q, k, block: "not now")
    want = block_scores.every_query(*(x.astype(jnp.float32) for x in (q, k)), 64, 2)[:, :2]
    may = row_blocks.allowed(4)[2:]
    # as above; q is rounded after it was scaled
    np.testing.assert_allclose(got[..., may], np.asarray(want)[..., may], atol=5e-2)


@needs_interpreter
def test_a_part_of_a_text_is_scored_against_all_keys(interpreted_kernel, monkeypatch):
    """The rows of a later part; its first token is traced."""
    q, k = random_array(1, 256, 2, 64), random_array(1, 256, 1, 64, seed=1)
    plan = plan_for(2, 4)
    whole = np.asarray(plan.blocks(0, q, k))
    part = jax.jit(lambda first: plan.blocks(0, q[:, 128:], k, first=first))(128)
    assert interpreted_kernel[-1] == ((1, 2, 2, 64), (1, 256, 1, 64), False)
    np.testing.assert_array_equal(part, whole[:, :, 2:])


@needs_interpreter
def test_gradients_do_not_flow_through_the_selection(interpreted_kernel):
    """The kernel has no derivative and needs none; attention under its mask has one."""
    q, k = random_array(1, 192, 2, 64, jnp.bfloat16), random_array(1, 192, 1, 64, seed=1)
    plan = plan_for(2, 3)

    def attend(q, k, mask=None):
        mask = plan.mask(0, q, k) if mask is None else mask
        out = dot_product_attention(q, k, k, mask=mask, implementation="xla")
        return jnp.square(out.astype(jnp.float32)).sum()

    found = jax.grad(attend, (0, 1))(q, k)
    assert interpreted_kernel
    mask = plan.mask(0, q, k)
    wanted = jax.grad(functools.partial(attend, mask=mask), (0, 1))(q, k)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@needs_newer_jax
def test_a_training_step_lowers_for_cuda(monkeypatch):
    """Layers in a scan, recomputed in the backward: three kernels each way, for the whole batch."""
    monkeypatch.setattr(scores, "why_not", lambda q, k, block: None)
    block_scores.estimate.clear_cache()
    plan = plan_for(2, 3)

    @jax.checkpoint
    def layer(x, number):
        mask = plan.mask(number, x, x[:, :, :1])
        return dot_product_attention(x, x, x, mask=mask, implementation="reference"), None

    def loss(x):
        return jax.lax.scan(layer, x, jnp.zeros(2, int))[0].astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((3, 192, 2, 64), jnp.bfloat16)
    text = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    block_scores.estimate.clear_cache()
    assert text.count("@mosaic_gpu") == 6
    assert "3x2x3x64xf32" in text  # [B, N, blocks, rows of a tile]


@pytest.mark.parametrize("selector", ["mean_query", "outlier_queries"])
@needs_newer_jax
def test_a_selection_is_three_kernels(selector, monkeypatch):
    """Its queries, the scores and the lists; nothing that XLA would have to launch a kernel for."""
    monkeypatch.setattr(scores, "why_not", lambda q, k, block: None)
    q, k = (jax.ShapeDtypeStruct((2, 320, heads, 128), jnp.bfloat16) for heads in (2, 1))
    counts = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    select = jax.jit(lambda q, k, counts: block_scores.select(selector, q, k, counts, 64).lists)
    text = select.trace(q, k, counts).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 3
    assert "stablehlo.reduce" not in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "cpu"}, "needs a Hopper GPU (H100, H200); this is a cpu"),
        ({"capability": (10, 0)}, "compute capability 9.0"),
        (
            {"version": (0, 10, 2)},
            "needs JAX 0.11 or newer, which needs Python 3.12 or newer; these",
        ),
        ({"dtype": "float32"}, "bfloat16 and float16; this is float32"),
        ({"query": "float32"}, "of one type; these are float32 and bfloat16"),
        ({"size": 96}, "heads of 64, 128 and 256; these are 96"),
        ({"block": 32}, "blocks of 64 and 128; these are 32"),
        ({}, None),
    ],
    ids=str,
)
def test_every_refusal_has_its_reason(change, reason, monkeypatch):
    """On a machine that claims to be an H200, one property of the call at a time is unsupported."""
    monkeypatch.setattr(_jax, "platform", lambda: change.get("platform", "gpu"))
    monkeypatch.setattr(_jax, "compute_capability", lambda: change.get("capability", (9, 0)))
    monkeypatch.setattr(_jax, "version", lambda: change.get("version", (0, 11, 2)))
    k = jax.ShapeDtypeStruct((256, 1, change.get("size", 64)), change.get("dtype", "bfloat16"))
    q = jax.ShapeDtypeStruct(k.shape, change.get("query", k.dtype))
    said = scores.why_not(q, k, change.get("block", 64))
    assert (said is None) if reason is None else (reason in said)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("batch", "T", "N", "size", "block"),
    [(3, 8192, 9, 64, 128), (3, 301, 4, 64, 128), (2, 200, 2, 128, 64), (2, 77, 1, 64, 64)],
    ids=str,
)
def test_on_a_card_means_are_over_the_tokens_of_every_block(batch, T, N, size, block):
    """Heads that do not fill the last tile, and those that fill exactly one, with a short block."""
    from xsake.backends.hopper import means as hopper_means

    q = random_array(batch, T, N, size)
    found = np.asarray(hopper_means.means(q, block, scale=3.0), np.float64)
    np.testing.assert_allclose(found, exact_means(q, block, 3), rtol=2**-8, atol=1e-5)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("layers", "T", "heads", "size", "block"),
    [(5, 8192, (9, 3), 64, 128), (3, 2048, (8, 8), 64, 64), (3, 4001, (4, 2), 128, 128)],
    ids=str,
)
def test_on_a_card_stacked_layers_score_as_plain_jax_does(
    layers, T, heads, size, block, monkeypatch
):
    """Each layer by itself, and all in a loop, where XLA passes addresses inside the stack."""
    q = random_array(layers, T, heads[0], size) / 2
    k = random_array(layers, T, heads[1], size, seed=1)
    estimate = functools.partial(block_scores.mean_query, block=block)

    def in_a_loop(q, k):
        one = functools.partial(jax.tree.map, lambda x: x[None])
        return jax.lax.map(lambda x: jax.vmap(estimate)(*one(x))[0], (q, k))

    assert scores.why_not(q[0], k[0], block) is None
    alone = np.stack([np.asarray(jax.jit(estimate)(q[i], k[i])) for i in range(layers)])
    together = np.asarray(jax.jit(in_a_loop)(q, k))
    monkeypatch.setattr(scores, "why_not", lambda *_: "compared with")
    exactly = [x.astype(jnp.float32) for x in (q, k)]
    want = np.stack([np.asarray(estimate(*(x[i] for x in exactly))) for i in range(layers)])
    seen = np.tri(want.shape[-1], dtype=bool)
    # a mean query is rounded to bfloat16, and logits are as large as 50
    np.testing.assert_allclose(alone[..., seen], want[..., seen], atol=0.3)
    np.testing.assert_array_equal(together[..., seen], alone[..., seen])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("warpgroups", [2, 3, 4])
@pytest.mark.parametrize("q_groups", [1, 2])
@pytest.mark.parametrize("keys_per_peak", [1, 4])
@pytest.mark.parametrize(
    ("R", "S", "heads", "size", "block"),
    [
        (16 * 16, 2048, (3, 3), 128, 128),
        (16 * 32, 2045, (4, 2), 64, 64),
        (16 * 3, 333, (2, 1), 256, 128),
    ],
    ids=str,
)
def test_on_a_card_every_tiling_sums_over_the_keys_of_every_block(
    R, S, heads, size, block, warpgroups, q_groups, keys_per_peak
):
    from xsake.backends.hopper import scores as hopper_scores

    queries = random_array(2, R, heads[0], size) / 8
    k = random_array(2, S, heads[1], size, seed=1)
    tiling = hopper_scores.ScoresTiling(warpgroups, q_groups=q_groups)
    how = {"causal": True, "parts": 16, "keys_per_peak": keys_per_peak, "tiling": tiling}
    run = functools.partial(hopper_scores.scores, block=block, **how)
    got = np.asarray(jax.jit(run)(queries, k))
    want = exact(queries, k, block, keys_per_peak)
    seen = np.repeat(np.tri(R // 16, want.shape[-1], dtype=bool), 16, 0)
    np.testing.assert_allclose(got[..., seen], want[..., seen], rtol=1e-5, atol=1e-4)
    assert np.isneginf(got[..., ~seen]).all()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("block", [64, 128])
def test_on_a_card_sums_that_a_float32_cannot_hold_are_right_too(block):
    """Warps with such rows beside warps without."""
    from xsake.backends.hopper import scores as hopper_scores

    queries, k = shifted(random_array(1, 256, 2, 128) / 8, random_array(1, 1024, 2, 128, seed=1))
    run = jax.jit(functools.partial(hopper_scores.scores, block=block, causal=False))
    np.testing.assert_allclose(run(queries, k), exact(queries, k, block), rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("selector", block_scores.BY_KERNEL)
@pytest.mark.parametrize(
    ("batch", "T", "heads", "size", "block", "band"),
    [(2, 8192, (4, 2), 64, 64, 0), (3, 2045, (9, 3), 128, 128, 2), (1, 32768, (2, 2), 128, 128, 0)],
    ids=str,
)
def test_on_a_card_the_lists_hold_the_best_blocks(
    batch, T, heads, size, block, band, selector, monkeypatch
):
    """All but nearly equal ones are those of plain JAX; a mapped axis and a loop change nothing."""
    q = random_array(batch, T, heads[0], size) / 2
    k = random_array(batch, T, heads[1], size, seed=1)
    n = -(-T // block)
    counts = np.random.default_rng(T).integers(0, n, (heads[0], n)).astype(np.int32)
    assert scores.why_not(q, k, block) is None

    def select(q, k):
        return block_scores.select(selector, q, k, jnp.asarray(counts), block, band)

    assert "best_blocks" in jax.jit(select).lower(q, k).as_text()
    found = jax.jit(select)(q, k)
    for arrays in (
        jax.jit(jax.vmap(select))(q[:, None], k[:, None]),
        jax.jit(lambda *x: jax.lax.map(lambda x: select(*x), x))(q[:, None], k[:, None]),
    ):
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(arrays), strict=True):
            np.testing.assert_array_equal(one, np.asarray(other).reshape(one.shape))
    monkeypatch.setattr(scores, "BY_KERNEL", {})
    plain = jax.jit(functools.partial(select))  # another function, which is traced again
    assert "best_blocks" not in plain.lower(q, k).as_text()
    want = plain(q, k)
    for name in ("kv_start", "kv_count", "full_count"):
        np.testing.assert_array_equal(getattr(found, name), getattr(want, name), err_msg=name)
    same = np.asarray(found.blocks() == want.blocks())[..., np.tri(n, dtype=bool)]
    assert same.mean() > 0.999
