import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hads.draws import SOFTMAXES, attention, blocks_of, dense, spread, tokens_of
from xsake import block_scores, selection
from xsake.cli.hads import _print_profile
from xsake.hads import (
    Profile,
    budget,
    calibrate,
    files,
    measure,
    observed,
    profile,
    row_blocks,
)
from xsake.hads.files import hash_of
from xsake.hads.partial import Partial
from xsake.hads.profile import check_curves, check_documents
from xsake.hads.statistics import Statistics, block_mass, factors, retained_mass
from xsake.server.served import numbers

BLOCK = 16
CURVES = ("static", "mean_query", "oracle")  # one choice everywhere, so that little is compiled


def row_means(x, T):
    """[N, T, ...] -> [N, n, ...]: mean over the queries of each row block."""
    return np.stack([x[:, i : i + BLOCK].mean(1) for i in range(0, T, BLOCK)], 1)


def some_order(n, seed):
    return jnp.asarray(np.random.default_rng(seed).random((4, n, n)), jnp.float32)


def measured(q, k, v, kernel, softmax):
    n = row_blocks.count_blocks(len(q), BLOCK)
    before = some_order(n, 1), some_order(n, 2)
    how = {"block": BLOCK, "curves": CURVES, "before": before, "softmax": softmax}
    return measure(q, k, v, kernel, **how)


def outcomes(softmax, T, block):
    """How many blocks of keys, and sinks, each query sees."""
    first = 0 if softmax.window is None else np.maximum(np.arange(T) - int(softmax.window) + 1, 0)
    return np.arange(T) // block - first // block + (1 if softmax.sinks is None else 2)


@pytest.mark.parametrize(("T", "kind"), [(100, "plain"), (9, "plain"), (100, "cap, window, sinks")])
def test_streamed_statistics_equal_the_direct_ones(T, kind):
    """Entropies, mass and sensitivity of a T x T softmax in float64, at even and odd lengths."""
    q, k, v, kernel = attention(T)
    softmax = SOFTMAXES[kind]
    got = measured(q, k, v, kernel, softmax)
    p, out = dense(q, k, v, softmax)
    sinks = 1 - p.sum(-1)
    entropy = spread(p, sinks)[:, 1:] / np.log(outcomes(softmax, T, 1)[1:])
    np.testing.assert_allclose(got.entropy, entropy.mean(-1), rtol=1e-5, atol=1e-5)
    mass = blocks_of(p, BLOCK)
    np.testing.assert_allclose(got.mass, row_means(mass, T), atol=1e-5)
    np.testing.assert_allclose(got.retained[:, -1], 1, atol=1e-5)
    if T > BLOCK:
        late = spread(mass, sinks)[:, BLOCK:] / np.log(outcomes(softmax, T, BLOCK)[BLOCK:])
        np.testing.assert_allclose(got.block_entropy, late.mean(-1), atol=1e-5)
    w, values = np.asarray(kernel, np.float64), np.repeat(np.asarray(v, np.float64), 2, axis=1)
    norm = (np.einsum("nth,nhw->tw", out, w) ** 2).sum(-1).mean()
    np.testing.assert_allclose(got.norm, norm, rtol=1e-4)
    j = 0
    u = np.einsum("nts,snh->nth", p[:, :, :BLOCK], values[:BLOCK])
    change = np.einsum("nth,nhw->ntw", u - mass[:, :, j, None] * out, w)
    want = row_means((change**2).sum(-1), T) / norm
    np.testing.assert_allclose(got.sensitivity[:, :, j], want, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("selector", "kind"),
    [
        ("oracle", "plain"),
        ("static", "plain"),
        ("mean_query", "plain"),
        ("static", "cap, window, sinks"),
    ],
)
def test_cost_curves_are_what_dropping_blocks_costs(selector, kind):
    """For every count: KL and projected output error of the renormalised sparse softmax."""
    T, n = 100, 7
    q, k, v, kernel = attention(T)
    p, out = dense(q, k, v, SOFTMAXES[kind])
    mass = blocks_of(p, BLOCK)
    got = measured(q, k, v, kernel, SOFTMAXES[kind])
    orders = {
        "oracle": (got.mass, got.sensitivity),
        "static": (some_order(n, 1), some_order(n, 2)),
        "mean_query": (block_scores.mean_query(q, k, BLOCK),) * 2,
    }[selector]
    values = np.repeat(np.asarray(v, np.float64), 2, axis=1)
    w = np.asarray(kernel, np.float64)
    norm = (np.einsum("nth,nhw->tw", out, w) ** 2).sum(-1).mean()
    for count in (2, 3, 5):
        counts = np.minimum(np.maximum(count, row_blocks.floors(n)), row_blocks.ceilings(n))
        for policy, scores in zip(("kl", "output"), orders, strict=True):
            keep = np.asarray(selection.keep_top(scores, counts))
            kept = np.einsum("ntj,ntj->nt", mass, np.repeat(keep, BLOCK, 1)[:, :T])
            kept += 1 - p.sum(-1)
            if policy == "kl":
                want = row_means(-np.log(kept), T)
            else:
                sparse = np.where(tokens_of(keep, BLOCK, T), p, 0) / kept[..., None]
                change = np.einsum("nts,snh->nth", sparse, values) - out
                want = row_means((np.einsum("nth,nhw->ntw", change, w) ** 2).sum(-1), T) / norm
            curve = np.asarray(got.cost[policy][selector])
            np.testing.assert_allclose(curve[:, 2:, count - 1], want[:, 2:], rtol=2e-3, atol=1e-5)


def test_factors_have_the_norms_of_the_projection_even_if_it_is_rank_deficient():
    """Of the second head four rows repeat the others; the third head's projection is 0."""
    rng = np.random.default_rng(0)
    kernel, x = rng.standard_normal((3, 8, 24)), rng.standard_normal((3, 50, 8))
    kernel[1, 4:], kernel[2] = kernel[1, :4], 0
    root, unit = (np.asarray(a) for a in factors(jnp.asarray(kernel, jnp.float32)))
    np.testing.assert_allclose(root @ unit, kernel, atol=1e-4)
    want = np.linalg.norm(x @ kernel, axis=-1)
    np.testing.assert_allclose(np.linalg.norm(x @ root, axis=-1), want, rtol=1e-3, atol=1e-6)


def test_statistics_without_outputs_are_those_with_them():
    """Mass and entropies need no values; what does is NaN."""
    q, k, v, kernel = attention(100)
    softmax = SOFTMAXES["cap, window, sinks"]
    want = measured(q, k, v, kernel, softmax)
    got = measure(q, k, v, kernel, block=BLOCK, softmax=softmax, outputs=False)
    for name in ("mass", "entropy", "block_entropy", "retained"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-7)
    assert np.isnan(got.sensitivity).all()
    assert np.isnan(got.norm)


def test_by_products_of_attention_are_the_statistics_of_chunks(monkeypatch):
    """What a Hopper GPU does, on a backend that computes the by-products in plain JAX."""
    q, k, v, _ = attention(100)
    softmax = SOFTMAXES["cap, window, sinks"]._replace(soft_cap=None, window=None)
    monkeypatch.setattr(observed, "has_by_products", lambda *_: True)
    observe = functools.partial(observed.observe, block=BLOCK)
    got = jax.jit(lambda q, k, softmax: observe(q, k, softmax=softmax))(q, k, softmax)
    p, _ = dense(q, k, v, softmax)
    sinks, mass = 1 - p.sum(-1), blocks_of(p, BLOCK)
    np.testing.assert_allclose(got.mass, row_means(mass, 100), atol=1e-5)
    for found, weights, first in ((got.entropy, p, 1), (got.block_entropy, mass, BLOCK)):
        late = spread(weights, sinks)[:, first:] / np.log(outcomes(softmax, 100, first)[first:])
        np.testing.assert_allclose(found, late.mean(-1), rtol=1e-5)


def test_a_profile_without_outputs_says_so():
    """It has no sensitivity to rank by, and no cost curves."""
    with pytest.raises(
        ValueError, match=r"curves is \('oracle',\), but outputs=False measures none"
    ):
        calibrate(print, {}, [np.arange(4)], layers=1, heads=1, curves=("oracle",), outputs=False)
    square, each = np.zeros((1, 1, 2, 2)), np.zeros((1, 1))
    curves = np.zeros((1, 1, 20))
    found = Statistics(square, square * np.nan, each, each, curves, {}, np.zeros(1))
    made = Profile(found, {}, np.stack([square] * 2), profile.Facts(4, 2, 0, 1, "", ""))
    assert made.scores("entropy") is found.mass
    with pytest.raises(ValueError, match="no sensitivity, which the policy 'output' ranks by"):
        made.scores("output")


def test_block_mass_in_chunks_equals_the_direct_computation():
    q, k, v, _ = attention(100)
    mass = blocks_of(dense(q, k, v)[0], 16)
    want = np.stack([mass[:, i : i + 16].mean(1) for i in range(0, 100, 16)], 1)
    np.testing.assert_allclose(block_mass(q, k, 16, queries_at_once=32), want, atol=1e-5)


@pytest.mark.optimized
def test_memory_is_linear_in_length():
    """The compiler's temporary bytes; nothing of this size is run."""

    def temporary(T):
        shape = [jax.ShapeDtypeStruct((T, *rest), jnp.float32) for rest in ((2, 8), (1, 8), (1, 8))]
        kernel = jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)
        compiled = measure.lower(*shape, kernel, block=128).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporary(4096), temporary(16384)
    assert large < 5 * small  # T² would be 16 times


class Seen(NamedTuple):
    q: Any
    k: Any
    v: Any
    kernel: Any


def seen_by(layer, tokens, weights=1.0):
    """Random q, k, v of a layer, seeded by the document's first token."""
    seed = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), layer), tokens[0, 0])
    draw, T = jax.random.split(seed, 3), tokens.shape[1]
    q = 2 * jax.random.normal(draw[0], (1, T, 4, 8)) * weights
    k, v = (jax.random.normal(key, (1, T, 2, 8)) for key in draw[1:])
    return Seen(q, k, v, jnp.ones((4, 8, 12)) * jnp.arange(1, 13))


def observe(weights, tokens, fold, carry):
    """A model of two layers, scanned as a real one is."""

    def step(carry, layer):
        return fold(layer, seen_by(layer, tokens, weights), carry), None

    return jax.lax.scan(step, carry, jnp.arange(2))[0]


def documents(count, T=70):
    return [np.full(T, i, np.int32) for i in range(count)]


def calibrated(documents):
    how = dict(layers=2, heads=4, block=BLOCK, seed=5, curves=CURVES)
    return calibrate(observe, jnp.ones(()), documents, **how)


def test_one_document_has_no_standard_error(tmp_path, capsys):
    """NaN, which files keep and tables print as a dash: 0 would claim certainty."""
    profile = calibrated(documents(1))
    profile.save(tmp_path / "profile")
    for found in (profile, Profile.load(tmp_path / "profile")):
        for name, x in found.errors.items():
            assert np.isnan(x).all(), name
            assert (x.dtype, x.shape) == (np.float32, getattr(profile.statistics, name).shape)
    assert numbers(profile.errors["entropy"]) == [[None] * 4] * 2  # null in JSON
    _print_profile(profile)
    said = capsys.readouterr().out
    assert "–" in said
    assert "nan" not in said
    assert "±" in said


def test_a_profile_is_the_mean_over_documents_with_its_standard_error():
    profile = calibrated(documents(3))
    single = [calibrated([x]) for x in documents(3)]
    for name in ("mass", "entropy", "retained"):
        each = np.stack([getattr(x.statistics, name) for x in single])
        np.testing.assert_allclose(getattr(profile.statistics, name), each.mean(0), atol=1e-6)
        error = each.std(0, ddof=1) / np.sqrt(3)
        np.testing.assert_allclose(profile.errors[name], error, atol=1e-5)
    halves = np.stack([x.statistics.mass for x in single])
    np.testing.assert_allclose(profile.mass_halves[0], halves[[0, 2]].mean(0), atol=1e-6)
    np.testing.assert_allclose(profile.mass_halves[1], halves[1], atol=1e-6)
    said = profile.agreement(0.6)
    assert 0 < said["mass_distance"] < 1
    assert -1 <= said["budget_correlation"] <= 1


def test_the_static_order_never_saw_the_document_it_is_measured_on():
    """The `static` cost curve of document 2 is measured with the block order of document 1."""
    profile, first = calibrated(documents(2)), calibrated(documents(1))
    seen = seen_by(1, documents(2)[1][None])
    want = measure(
        seen.q[0],
        seen.k[0],
        seen.v[0],
        seen.kernel,
        block=BLOCK,
        curves=CURVES,
        before=(first.statistics.mass[1], first.statistics.sensitivity[1]),
    )
    got = profile.cost("kl", "static")[1]
    np.testing.assert_allclose(got, want.cost["kl"]["static"], atol=1e-6)


def test_one_document_gives_static_curves_from_its_mass():
    profile = calibrated(documents(1))
    want = budget.surrogate(profile.statistics.mass)
    np.testing.assert_allclose(profile.cost("kl", "static"), want, atol=1e-6)
    assert profile.agreement() == {}


def test_the_surrogate_is_a_lower_bound_on_the_measured_cost():
    profile = calibrated(documents(1))
    gap = profile.cost("kl", "oracle") - budget.surrogate(profile.statistics.mass)
    assert gap.min() > -1e-5
    assert gap.mean() > 1e-3  # and the two differ, so that the gap says something


def test_a_profile_survives_save_and_load_bit_for_bit(tmp_path):
    profile = calibrated(documents(2))
    profile.save(tmp_path / "profile")
    again = Profile.load(tmp_path / "profile")
    assert again.facts == profile.facts
    assert again.facts.data_hash == hash_of(documents(2))
    assert repr(again).startswith("Profile(2 layers of ")
    for a, b in zip(jax.tree.leaves(profile), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(profile) == jax.tree.structure(again)


def test_an_interrupted_calibration_continues_bit_for_bit(tmp_path):
    """Killed after two of three documents, the same call measures the third and no other."""
    how = dict(layers=2, heads=4, block=BLOCK, seed=5)
    seen = []

    def kept(**settings):
        return Partial(tmp_path / "profile.partial", settings)

    def stop(done):
        seen.append(done)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(
            observe, jnp.ones(()), documents(3), **how, curves=CURVES, report=stop, partial=kept()
        )
    again = calibrate(
        observe,
        jnp.ones(()),
        documents(3),
        **how,
        curves=CURVES,
        report=seen.append,
        partial=kept(),
    )
    assert seen == [1, 2, 2, 3]
    whole = calibrated(documents(3))
    assert again.facts == whole.facts
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"another calibration \(it differs in documents, data_h"):
        calibrate(observe, jnp.ones(()), documents(2), **how, curves=CURVES, partial=kept())
    with pytest.raises(ValueError, match=r"it differs in dtype, curves"):
        calibrate(
            observe,
            jnp.ones(()),
            documents(3),
            **how,
            curves=("static",),
            partial=kept(dtype="bfloat16"),
        )


def test_files_that_are_no_profile_are_refused(tmp_path):
    path = tmp_path / "profile"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read as a profile"):
        Profile.load(path)
    profile = calibrated(documents(1))
    with pytest.raises(ValueError, match="no cost curves for 'pooled'"):
        profile.cost("kl", "pooled")
    with pytest.raises(ValueError, match=r"documents of one length, got lengths \[3, 4\]"):
        calibrate(observe, 1.0, [np.zeros(3, int), np.zeros(4, int)], layers=2, heads=4)


def test_calibration_refuses_another_number_of_layers_or_heads(monkeypatch):
    """Fewer would be dropped, more stay empty; the model of `observe` has 2 layers of 4 heads."""
    blank = jax.tree.map(lambda x: x[0], profile._empty(1, 4, 5, ()))
    monkeypatch.setattr(profile, "measure", lambda *attention, **how: blank)  # compiles at once
    for layers, beyond in ((1, 1), (3, 0)):
        with pytest.raises(ValueError, match=f"observed in 2 layers, {beyond} of them beyond"):
            calibrate(observe, 1.0, documents(1), layers=layers, heads=4, block=BLOCK, curves=())
    with pytest.raises(ValueError, match="heads = 1, but the model has 4 query heads"):
        calibrate(observe, 1.0, documents(1), layers=2, heads=1, block=BLOCK, curves=())


@pytest.mark.parametrize(
    ("document", "how", "message"),
    [
        (np.array([3, 9]), {"vocab_size": 9}, "document 0 has token id 9, .* ids are from 0 to 8"),
        (np.array([3, -1]), {}, "document 0 has token id -1, .* tokenize the text with"),
        (np.array([], int), {}, r"document 0 must be token ids, got int64 \[0\]"),
        (np.array([1]), {"block": 0}, "block must be a whole number of at least 1, got 0"),
        (np.array([1]), {"block": -16}, "block must be a whole number of at least 1, got -16"),
        (np.array([1]), {"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        (np.array([1]), {"curves": ("nope",)}, "curves has 'nope', which is not one of"),
    ],
)
def test_calibration_refuses_wrong_input_before_it_runs(document, how, message):
    with pytest.raises(ValueError, match=message):
        calibrate(observe, 1.0, [document], **{"layers": 2, "heads": 4, **how})


def test_one_name_of_a_curve_and_one_document_are_not_several():
    with pytest.raises(TypeError, match=r"a tuple of names, got 'oracle'; pass \('oracle',\)"):
        check_curves("oracle", True)
    with pytest.raises(ValueError, match=r"each a 1-D array of token ids; the first is \[\]"):
        check_documents([np.array(1), np.array(2)], None)


def test_a_profile_with_wrong_facts_or_arrays_is_refused(tmp_path):
    """Saved again by `files.save`, so that the checksum is right."""
    path = tmp_path / "profile"
    calibrated(documents(1)).save(path)
    header, arrays = files.read(path, "profile", 1)
    mass = arrays["statistics/mass"]
    for header_change, change, message in (
        ({"block": 0}, {}, "block must be a whole number of at least 1, got 0"),
        ({"length": "x"}, {}, "'length' must be a whole number, got 'x'"),
        ({"block": 32}, {}, r"is float32 \[2, 4, 5, 5\], not float \[2, 4, 3, 3\]"),
        ({}, {"statistics/mass": mass[0]}, r"no array 'statistics/mass' \[layers"),
        ({}, {"statistics": mass}, "'statistics' is float32 .* which a profile does not have"),
        ({}, {"mass_halves": mass}, "array 'mass_halves' is float32"),
    ):
        files.save(path, "profile", 1, header | header_change, arrays | change)
        with pytest.raises(ValueError, match=message):
            Profile.load(path)
    del arrays["statistics/norm"]
    files.save(path, "profile", 1, header, arrays)
    with pytest.raises(ValueError, match="it has no array 'statistics/norm'; make the profile"):
        Profile.load(path)


def test_retained_mass_is_that_of_the_best_blocks():
    mass = jnp.array([[1.0, 0, 0, 0], [0.3, 0.7, 0, 0], [0.2, 0.2, 0.6, 0], [0.1, 0.2, 0.3, 0.4]])
    curve = np.asarray(retained_mass(mass[None]))[0]
    np.testing.assert_allclose(curve[-1], 1, atol=1e-6)
    np.testing.assert_allclose(curve[9], np.mean([1, 0.7, 0.8, 0.7]), atol=1e-6)  # density 0.5


def test_facts_are_static():
    profile = calibrated(documents(1))
    other = dataclasses.replace(profile, facts=dataclasses.replace(profile.facts, block=1))
    assert jax.tree.structure(profile) != jax.tree.structure(other)
