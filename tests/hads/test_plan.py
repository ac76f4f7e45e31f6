import dataclasses
import gc
import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.hads.draws import attention
from tests.hads.test_budget import draw_mass
from tests.model.families import LLAMA, random_model, random_tokens
from xsake import dot_product_attention
from xsake.hads import Plan, Profile, budget, make, row_blocks
from xsake.hads.gains import gains
from xsake.hads.profile import Facts
from xsake.hads.row_blocks import stretched
from xsake.hads.statistics import DENSITIES, SELECTORS, Statistics
from xsake.hads.terms import Terms, check_terms
from xsake.model import KVCache
from xsake.model.generate import prefill

BLOCK, N_ROWS = 16, 8


def profile_of(layers=2, heads=4, n=N_ROWS, seed=0):
    """A profile with the cost curves of a random block mass."""
    mass = draw_mass(layers, heads, n, seed).astype(np.float32)
    kl, output, loss = budget.surrogate(mass), budget.additive(mass**2), budget.additive(mass**3)
    cost = {
        policy: {name: x.astype(np.float32) for name in ("static", "mean_query", "pooled")}
        for policy, x in (("kl", kl), ("output", output), ("loss", loss))
    }
    entropies = np.random.default_rng(seed).uniform(0.1, 1, (layers, heads))
    retained = np.zeros((layers, heads, len(DENSITIES)))
    statistics = Statistics(
        mass, mass**2, entropies, entropies, retained, cost, np.ones(layers, np.float32), mass**3
    )
    facts = Facts(n * BLOCK, BLOCK, 0, 4, "a model", "a text")
    return Profile(statistics, {}, np.stack([mass, mass]), facts)


def test_gains_are_computed_once_and_dropped_with_their_profile():
    profile = profile_of()
    make(profile, 0.5, "kl", "pooled")
    found = gains(profile, "kl", "pooled")
    assert gains(profile, "kl", "pooled") is found
    with pytest.raises(ValueError, match="read-only"):
        found[:] = 0
    held = weakref.ref(profile), weakref.ref(found)
    del profile, found
    gc.collect()
    assert [x() for x in held] == [None, None]


@pytest.mark.parametrize("selector", ["static", "mean_query"])
@pytest.mark.parametrize("policy", budget.POLICIES)
def test_plans_realise_the_density_asked_for(policy, selector):
    plan = make(profile_of(), 0.5, policy, selector)
    assert plan.counts.sum() == round(0.5 * 2 * 4 * 36)
    np.testing.assert_allclose(plan.density, 0.5, atol=1e-9)
    if selector == "static":
        masks = [plan.mask(layer) for layer in range(2)]
        visited = sum(int(mask.kv_count.sum()) for mask in masks)
        assert visited == plan.counts.sum()


@pytest.mark.parametrize("length", [16, 127, 300])
@pytest.mark.parametrize("selector", ["static", "mean_query"])
def test_masks_from_plans_obey_causality_at_any_length(selector, length):
    """No token of the future, the first block and the diagonal kept, the density met."""
    plan = make(profile_of(), 0.7, "kl", selector)
    q, k, _, _ = attention(length)
    mask = plan.mask(1, q[None], k[None])
    tokens = np.asarray(mask.to_dense(heads=4))[0]
    assert not tokens[:, ~np.tri(length, dtype=bool)].any()
    assert tokens[:, np.arange(length), np.arange(length)].all()
    assert tokens[:, :, 0].all()
    assert not mask.overflow
    n = row_blocks.count_blocks(length, BLOCK)
    at = plan.at(length)
    least = row_blocks.floors(n).sum() / (n * (n + 1) / 2)
    assert abs(at.counts.sum() - max(0.7, least) * 8 * n * (n + 1) / 2) <= 0.5


@pytest.mark.parametrize("length", [64, 128, 192])
def test_a_plan_made_for_a_length_is_drawn_at_that_length(length):
    """Not at the length of calibration, 128, to which its row blocks would be stretched."""
    plan = make(profile_of(), 0.8, "kl", "static", length=length)
    assert plan.length == length
    assert plan.mask(0).shape == (length, length)
    np.testing.assert_array_equal(plan.mask(0).kv_count[0], plan.counts[0])
    assert f"for texts of {length:,} tokens, calibrated at 128" in str(plan)


def test_the_length_of_a_calibrated_plan_may_end_inside_a_block():
    plan = make(profile_of(), 0.6, "kl", "static")
    terms = dataclasses.replace(plan.terms, length=125)
    assert dataclasses.replace(plan, terms=terms).length == 125


@pytest.mark.parametrize(("n", "density", "lengths"), [(31, 0.5, (30, 58)), (32, 0.6, (26, 28))])
def test_other_lengths_have_the_calibrated_counts_and_the_mean_density_beyond(n, density, lengths):
    """To the last bit: it decides which of several equally near row blocks is rounded up."""
    plan = make(profile_of(1, 2, n), density, "uniform")
    beyond = (plan.counts / row_blocks.ceilings(n))[..., -(n // 4) :].mean(-1, keepdims=True)
    for m in lengths:
        target = np.concatenate([plan.counts, beyond * np.arange(n + 1, m + 1)], -1)
        want = budget.filled(target[..., :m], density, m).counts
        np.testing.assert_array_equal(plan.at(m * BLOCK).counts, want)


def test_settings_that_are_numpy_numbers_are_saved(tmp_path, as_users_call_it):
    settings = {"density": np.float32(0.75), "top_p": np.float32(0.9), "end_weight": np.int64(16)}
    plan = make(profile_of(), **settings)
    plan.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan").terms == plan.terms
    assert {name: getattr(plan.terms, name) for name in settings} == settings


def test_settings_may_be_scalar_arrays_of_jax(tmp_path, as_users_call_it):
    settings = {"density": 0.75, "top_p": 0.5, "end_weight": 16, "length": 300}
    arrays = {name: jnp.asarray(x) for name, x in settings.items()}
    plan, want = make(profile_of(), **arrays), make(profile_of(), **settings)
    assert plan.terms == want.terms
    np.testing.assert_array_equal(plan.counts, want.counts)
    np.testing.assert_array_equal(plan.at(jnp.int32(100)).counts, want.at(100).counts)
    np.testing.assert_array_equal(
        plan.decode_budget(jnp.float32(0.5)), want.decode_budget(np.float32(0.5))
    )
    plan.save(tmp_path / "plan")
    with pytest.raises(ValueError, match=r"density must be above 0 and at most 1, got .*Tracer"):
        jax.jit(lambda density: make(profile_of(), density).counts)(0.5)


def test_scores_for_a_shorter_text_are_the_top_left_corner():
    """Row block i sees the same keys in a shorter text, so the calibrated order applies."""
    scores = np.random.default_rng(0).random((1, 2, 8, 8))
    np.testing.assert_array_equal(stretched(scores, 5), scores[..., :5, :5])


def test_scores_for_a_longer_text_keep_distances_near_the_diagonal_and_block_0():
    scores = np.broadcast_to(np.arange(8.0), (8, 8))
    wide = stretched(scores, 20)
    np.testing.assert_array_equal(wide[:8, :8], np.where(np.tri(8), scores, 0))
    assert wide[19, 19] == 7
    assert wide[19, 17] == 5
    assert wide[19, 0] == 0
    assert (np.diff(wide[19]) >= 0).all()  # columns stay in order


def test_a_plan_gives_masks_under_jit_with_a_traced_layer():
    """Other counts, the same compiled code."""
    plan = make(profile_of(), 0.5, "kl", "mean_query")
    other = dataclasses.replace(
        plan, counts=np.minimum(plan.counts + 1, row_blocks.ceilings(N_ROWS))
    )
    q, k, v, _ = attention(N_ROWS * BLOCK)
    traced = []

    @jax.jit
    def run(plan, layer):
        traced.append(layer)
        mask = plan.mask(layer, q[None], k[None])
        return dot_product_attention(q[None], k[None], v[None], mask=mask), mask.kv_count

    for given in (plan, other):
        for layer in range(2):
            out, counts = run(given, layer)
            np.testing.assert_array_equal(counts[0], given.counts[layer])
            assert np.isfinite(np.asarray(out)).all()
    assert len(traced) == 1


def test_batch_rows_choose_their_own_blocks():
    plan = make(profile_of(), 0.5, "kl", "mean_query")
    pairs = [attention(N_ROWS * BLOCK, seed=seed)[:2] for seed in (0, 1)]
    q, k = (jnp.stack(x) for x in zip(*pairs, strict=True))
    blocks = np.asarray(plan.blocks(0, q, k))
    assert blocks.shape == (2, 4, N_ROWS, N_ROWS)
    for b, (q_one, k_one) in enumerate(pairs):
        np.testing.assert_array_equal(blocks[b], plan.blocks(0, q_one[None], k_one[None])[0])
    assert (blocks[0] != blocks[1]).any()


@pytest.mark.parametrize("top_p", [pytest.param(None, marks=pytest.mark.slow), 0.6])
@pytest.mark.parametrize("selector", SELECTORS)
def test_the_mask_of_a_chunk_equals_its_rows_of_the_whole_mask(selector, top_p):
    """Chunks from three places, under jit; what follows a chunk is not yet written."""
    plan = make(profile_of(), 0.5, "entropy", selector, top_p=top_p)
    S = N_ROWS * BLOCK
    q, k, _, _ = (x[None] for x in attention(S))
    whole = plan.mask(1, q, k).to_dense(heads=4)

    @jax.jit
    def part(q, k, first):
        mask = plan.mask(1, q, k, first=first)
        return mask.to_dense(heads=4), mask.overflow

    for first in (0, 2 * BLOCK, 5 * BLOCK):
        last = first + 3 * BLOCK
        written = jnp.where((jnp.arange(S) < last)[:, None, None], k, 0)
        found, overflow = part(q[:, first:last], written, first)
        # past_query lacks the queries before the chunk: its first row block uses its own
        known = BLOCK if selector == "past_query" and first else 0
        np.testing.assert_array_equal(found[:, :, known:], whole[:, :, first + known : last])
        assert not overflow


def test_a_part_that_reaches_past_the_text_or_splits_a_block():
    plan = make(profile_of(), 0.5, "kl", "mean_query")
    S = N_ROWS * BLOCK
    q, k, _, _ = (x[None] for x in attention(S))
    whole = np.asarray(plan.blocks(0, q, k))
    padded = jnp.concatenate([q[:, -BLOCK:], q[:, : 2 * BLOCK]], axis=1)
    found = np.asarray(plan.blocks(0, padded, k, first=S - BLOCK))
    np.testing.assert_array_equal(found[:, :, 0], whole[:, :, -1])
    with pytest.raises(
        ValueError, match="the chunk length 40 is not a multiple of the plan's block size 16"
    ):
        plan.mask(0, q[:, :40], k, first=0)
    for first in (-BLOCK, 1, S):
        with pytest.raises(ValueError, match=f"first must be a multiple of .*, got {first}"):
            plan.mask(0, padded, k, first=first)
    with pytest.raises(ValueError, match="q has heads of 8, k of 4"):
        plan.mask(0, q, k[..., :4])
    with pytest.raises(ValueError, match=r"q must be \[B, length, heads, H\], got"):
        plan.mask(0, q[0], k)


def test_a_prompt_read_in_chunks_under_a_plan_is_the_prompt_read_at_once():
    """The same last hidden state, and another one than that of dense attention."""
    model = random_model(LLAMA)
    plan = make(profile_of(heads=LLAMA.heads), 0.5, "kl", "mean_query")
    S = N_ROWS * BLOCK
    prompt = [random_tokens(LLAMA, S).tolist()]

    def read(mask, chunk):
        return prefill(model, KVCache.empty(LLAMA, 1, S), prompt, mask=mask, chunk=chunk)[1]

    whole, dense = read(plan, S), read(None, S)
    np.testing.assert_allclose(read(plan, 4 * BLOCK), whole, atol=1e-5)
    assert np.abs(whole - dense).max() > 1e-3


def test_with_past_query_logits_do_not_depend_on_later_tokens():
    """This includes later tokens of the same block; it does not hold for mean_query."""
    model = random_model(LLAMA)
    S = N_ROWS * BLOCK
    tokens = random_tokens(LLAMA, S)
    changed = jnp.where(jnp.arange(S) > 4 * BLOCK + 3, (tokens + 1) % LLAMA.vocab_size, tokens)

    def gap(selector):
        plan = make(profile_of(heads=LLAMA.heads), 0.5, "entropy", selector)
        logits = jax.jit(lambda tokens: model(tokens[None], mask=plan)[0])
        one, other = (logits(x)[: 4 * BLOCK + 4] for x in (tokens, changed))
        return float(jnp.abs(one - other).max())

    assert gap("past_query") < 1e-5
    assert gap("mean_query") > 1e-3


def test_top_p_visits_no_more_than_the_budget():
    plan = make(profile_of(), 0.6, "kl", "mean_query", top_p=0.7)
    q, k, _, _ = attention(N_ROWS * BLOCK)
    kept = np.asarray(plan.blocks(0, q[None], k[None])).sum(-1)[0]
    assert (kept <= plan.counts[0]).all()
    assert (kept >= row_blocks.floors(N_ROWS)).all()
    assert kept.sum() < plan.counts[0].sum()


def test_top_p_of_a_static_plan_stops_at_that_share_of_the_calibrated_mass():
    profile = profile_of()
    plan = make(profile, 1.0, "kl", "static", top_p=0.8)
    kept = np.asarray(plan.blocks(0))[0]
    mass = profile.statistics.mass[0]
    share = (mass * kept).sum(-1)
    assert (share >= 0.8 - 1e-6).all()
    # the selection is minimal: without its weakest block that is not forced it is below top_p
    loose = np.where(kept & ~row_blocks.forced(N_ROWS), mass, np.inf).min(-1)
    more = np.isfinite(loose)
    assert more.any()
    assert (share - loose)[more].max() < 0.8


@pytest.mark.parametrize("selector", ["static", "mean_query"])
def test_plans_survive_save_and_load_bit_for_bit(tmp_path, selector):
    plan = make(profile_of(), 0.5, "kl", selector, top_p=0.9).validated({"kl": 0.05})
    plan.save(tmp_path / "plan")
    again = Plan.load(tmp_path / "plan", model_hash="a model")
    assert again.terms == plan.terms
    assert jax.tree.structure(again) == jax.tree.structure(plan)
    for a, b in zip(jax.tree.leaves(plan), jax.tree.leaves(again), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_a_plan_for_another_model_is_refused(tmp_path):
    make(profile_of(), 0.5).save(tmp_path / "plan")
    with pytest.raises(ValueError, match="the plan is for model a model, this is another"):
        Plan.load(tmp_path / "plan", model_hash="another")
    with pytest.raises(ValueError, match="cannot be read as a plan"):
        Plan.load(tmp_path / "none")


def rewritten(path, header=(), **arrays):
    """Changes header fields and arrays of a saved plan, without its checksum; None removes one."""
    with safe_open(path, framework="numpy") as file:
        known = json.loads(file.metadata()["xsake"])
        found = {name: file.get_tensor(name) for name in list(file.keys())} | arrays
    known = known | {"checksum": None} | dict(header) if isinstance(header, dict) else header
    text = known if isinstance(known, str) else json.dumps(drop_none(known))
    save_file(drop_none(found), path, {"xsake": text})


def drop_none(values):
    return {name: x for name, x in values.items() if x is not None}


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("[1, 2]", "the header of .* must hold a JSON object, got list"),
        ("{", "the header of .* is not JSON"),
        (DEEP, "the header of .* is nested too deeply"),
        ({"schema": None}, "has schema None, this version reads 1"),
        ({"block": 0}, "block must be a whole number of at least 1, got 0; make the plan again"),
        ({"block": -16}, "block must be a whole number of at least 1, got -16"),
        ({"block": "x"}, "'block' must be a whole number, got 'x'"),
        ({"block": True}, "'block' must be a whole number, got True"),
        ({"block": None}, "the header of .* lacks 'block'"),
        ({"band": -1}, "band must be a whole number of at least 0, got -1"),
        ({"notes": 3}, "'notes' must be a list of text, got 3"),
        ({"density": float("nan")}, "density must be above 0 and at most 1, got nan"),
        ({"validation": DEEP}, "its validation is nested too deeply"),
        ({"validation": "[]"}, "its validation must hold a JSON object"),
        ({"selector": "nope"}, "selector 'nope' is not one of"),
        ({"colour": 1}, "has 'colour', which this version does not know"),
        ({"realised_density": None}, "says density None but its counts have"),
        ({"realised_density": "x"}, "says density x but its counts have"),
    ],
)
def test_a_plan_with_a_wrong_header_is_refused_in_one_sentence(tmp_path, header, message):
    path = tmp_path / "plan"
    make(profile_of(), 0.5).save(path)
    rewritten(path, header)
    with pytest.raises(ValueError, match=message):
        Plan.load(path)


def test_a_plan_with_wrong_or_permuted_arrays_is_refused(tmp_path):
    path = tmp_path / "plan"
    plan = make(profile_of(), 0.5)
    counts = np.asarray(plan.counts)
    for arrays, message in (
        (
            {"counts": counts.astype(np.float32)},
            r"counts must be int32 \[layers, heads, row blocks",
        ),
        ({"counts": counts[0]}, r"got int32 \[4, 8\]"),
        ({"counts": counts + 1}, "more than there are"),
        ({"counts": None, "other": counts}, r"it has the arrays \['other'\], not \['counts'\]"),
    ):
        plan.save(path)
        rewritten(path, {}, **arrays)
        with pytest.raises(ValueError, match=message):
            Plan.load(path)
    plan.save(path)
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    save_file({"counts": np.ascontiguousarray(counts[:, ::-1])}, path, metadata)
    with pytest.raises(ValueError, match="is damaged: its checksum is not that of its contents"):
        Plan.load(path)
    plan.save(path)
    rewritten(path, {"checksum": None})  # as files were before there was a checksum
    np.testing.assert_array_equal(Plan.load(path).counts, counts)


@pytest.mark.parametrize("density", [float("nan"), float("inf"), 0.0, "x", True, None])
def test_a_density_that_is_no_share_is_refused(density):
    """The tests check types before `make` does, so what is no float goes to its check itself."""
    message = "density must be above 0 and at most 1, got"
    with pytest.raises(ValueError, match=message):
        row_blocks.check_density(density)
    if isinstance(density, float):
        with pytest.raises(ValueError, match=message):
            make(profile_of(), density)
        with pytest.raises(ValueError, match=message):
            make(profile_of(), 0.5).decode_budget(density)


def test_plans_have_the_permissions_of_the_umask(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    make(profile_of(), 0.5).save(tmp_path / "plan")
    profile_of().save(tmp_path / "profile")
    modes = [(tmp_path / name).stat().st_mode for name in ("plan", "profile")]
    assert modes == [plain.stat().st_mode] * 2
    assert sorted(x.name for x in tmp_path.iterdir()) == ["plain", "plan", "profile"]


def test_wrong_requests_say_what_to_do():
    profile = profile_of()
    with pytest.raises(ValueError, match="policy 'best' is not one of"):
        make(profile, 0.5, "best")
    with pytest.raises(ValueError, match="selector 'oracle' is not one of"):
        make(profile, 0.5, "kl", "oracle")
    with pytest.raises(ValueError, match="top_p must be above 0 and at most 1, got 0"):
        make(profile, 0.5, top_p=0.0)
    with pytest.raises(ValueError, match="top_p must be above 0 and at most 1, got True"):
        check_terms("kl", "mean_query", True, 1.0)
    with pytest.raises(ValueError, match=r"density 0\.1 is below 0\.417"):
        make(profile, 0.1)
    plan = make(profile, 0.5)
    with pytest.raises(ValueError, match=r"call plan.mask\(layer, q, k\)"):
        plan.mask(0)
    with pytest.raises(ValueError, match="layer 2 is out of range: the plan has 2 layers"):
        make(profile, 0.5, "kl", "static").mask(2)
    for layer in ("first", 0.5, True, None, [0]):
        with pytest.raises(TypeError, match="layer must be the number of a layer, got"):
            make(profile, 0.5, "kl", "static").mask(layer)
    with pytest.raises(ValueError, match=r"call plan.at\(300\) before the plan enters jit"):
        jax.jit(lambda plan: plan.at(300).counts)(plan)


def test_a_plan_prints_and_plots():
    plan = make(profile_of(), 0.5).validated({"perplexity_gap": 0.01})
    drawn = str(plan)
    assert "realised density 0.5000" in drawn
    assert "perplexity_gap: 0.01" in drawn
    assert len([line for line in drawn.splitlines() if line.strip()[:1].isdigit()]) == 2
    axes = plan.plot()
    np.testing.assert_allclose(axes.images[0].get_array(), plan.shares)


@pytest.mark.parametrize("density", [0.1, 0.5, 0.9])
def test_decode_budgets_follow_the_last_row_block_and_meet_the_density(density):
    counts = np.ones((2, 4, 8), np.int32)
    counts[..., -1] = [[2, 2, 4, 8], [2, 3, 4, 5]]
    terms = Terms(density=0.8, policy="kl", selector="mean_query", block=16, length=128)
    shares = Plan(counts, None, terms).decode_budget(density)
    assert shares.mean() == pytest.approx(density, abs=1e-6)
    assert shares.max() <= 1
    whole = shares < 1
    ratio = (shares / counts[..., -1])[whole]
    assert ratio.max() == pytest.approx(ratio.min())


@pytest.mark.parametrize("length", [0, -4])
def test_a_length_without_tokens_is_refused(length):
    with pytest.raises(ValueError, match=f"length must be at least 1 token, got {length}"):
        make(profile_of(), 0.5, length=length)
    with pytest.raises(ValueError, match=f"length must be at least 1 token, got {length}"):
        make(profile_of(), 0.5).at(length)


@pytest.mark.parametrize("length", [1.5, "x", True, None])
def test_a_length_that_is_no_whole_number_is_refused(length, as_users_call_it):
    plan, message = (
        make(profile_of(), 0.5),
        f"length must be a whole number of tokens, got {length!r}",
    )
    if length is not None:
        with pytest.raises(ValueError, match=message):
            make(profile_of(), 0.5, length=length)
    for ask in (plan.at, lambda x: plan.check_lengths([x]), lambda x: plan.padded(x, 300)):
        with pytest.raises(ValueError, match=message):
            ask(length)
