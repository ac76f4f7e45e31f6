import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hads.draws import SOFTMAXES, attention, dense, tokens_of
from tests.hads.test_correction import BLOCK, T, by_definition, problem
from xsake.evaluate.quality import compare, compare_predictions, mean_and_error, paired_gap

corrections = functools.partial(compare, block=BLOCK, corrected=jnp.array([True, False]))


@pytest.mark.parametrize("kind", SOFTMAXES)
def test_quality_is_that_of_the_masked_softmax(kind):
    """KL, recall and projected errors of a T x T softmax in float64; odd length, GQA."""
    q, k, v, keep, _ = problem()
    kernel = attention(T)[3]
    everything = jnp.ones_like(keep)
    both = jnp.stack([everything, keep])
    got = corrections(q, k, v, kernel, both, softmax=SOFTMAXES[kind])
    got = jax.tree.map(lambda x: x[::-1], got)
    p, out = dense(q, k, v, SOFTMAXES[kind])
    w, values = np.asarray(kernel, np.float64), np.repeat(np.asarray(v, np.float64), 2, axis=1)
    visible = np.where(tokens_of(keep, BLOCK, T), p, 0)
    sinks = 1 - p.sum(-1)
    kept = visible.sum(-1) + sinks
    sparse = visible / kept[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        # the definition, Σ sparse ln(sparse / dense), which is -ln(mass kept)
        kl = np.nansum(np.where(sparse > 0, sparse * np.log(sparse / p), 0), -1)
    kl = (kl - sinks / kept * np.log(kept)).mean(-1)
    np.testing.assert_allclose(got.kl[0], kl, rtol=1e-4)
    np.testing.assert_allclose(got.recall[0], kept.mean(-1), rtol=1e-5)
    change = np.einsum("nts,snh->nth", sparse, values) - out
    norm = (np.einsum("nth,nhw->tw", out, w) ** 2).sum()
    by_head = (np.einsum("nth,nhw->ntw", change, w) ** 2).sum((1, 2)) / norm
    np.testing.assert_allclose(got.head_error[0], by_head, rtol=1e-3)
    layer = (np.einsum("nth,nhw->tw", change, w) ** 2).sum() / norm
    np.testing.assert_allclose(got.error[0], layer, rtol=1e-3)
    np.testing.assert_allclose(got.kl[1], 0, atol=1e-6)
    np.testing.assert_allclose(got.error[1], 0, atol=1e-9)


@pytest.mark.parametrize("kind", SOFTMAXES)
def test_the_error_with_centroids_is_that_of_corrected_attention(kind):
    q, k, v, keep, _ = problem()
    kernel = attention(T)[3]
    both = jnp.stack([keep, keep])
    got = corrections(q, k, v, kernel, both, softmax=SOFTMAXES[kind])
    w, out = np.asarray(kernel, np.float64), dense(q, k, v, SOFTMAXES[kind])[1]
    change = by_definition(q, k, v, np.asarray(keep), SOFTMAXES[kind]).transpose(1, 0, 2) - out
    norm = (np.einsum("nth,nhw->tw", out, w) ** 2).sum()
    layer = (np.einsum("nth,nhw->tw", change, w) ** 2).sum() / norm
    np.testing.assert_allclose(got.error[0], layer, rtol=1e-3)
    assert got.error[0] != got.error[1]
    np.testing.assert_array_equal(got.kl[0], got.kl[1])


@pytest.mark.parametrize("T", [9, 8])
def test_predictions_are_compared_token_by_token(T):
    draw = np.random.default_rng(0)
    dense_hidden, sparse_hidden = draw.normal(size=(2, T, 6)).astype(np.float32)
    head = draw.normal(size=(6, 11)).astype(np.float32)
    tokens = draw.integers(0, 11, T)
    got = compare_predictions(
        jnp.asarray(dense_hidden),
        jnp.asarray(sparse_hidden),
        jnp.asarray(tokens),
        lambda x: x @ head,
        at_once=4,
    )
    p, r = (jax.nn.log_softmax(x[:-1] @ head) for x in (dense_hidden, sparse_hidden))
    at = np.arange(T - 1), tokens[1:]
    np.testing.assert_allclose(got.loss, -np.asarray(r)[at].mean(), rtol=1e-5)
    np.testing.assert_allclose(got.dense_loss, -np.asarray(p)[at].mean(), rtol=1e-5)
    np.testing.assert_allclose(got.logit_kl, (np.exp(p) * (p - r)).sum(-1).mean(), rtol=1e-5)


def test_standard_errors_are_over_documents():
    mean, error = mean_and_error([1.0, 2.0, 3.0])
    assert mean == 2
    np.testing.assert_allclose(error, 1 / np.sqrt(3))
    assert mean_and_error([1.0]) == (1, None)


def test_a_paired_gap_has_the_error_of_the_differences_not_of_the_documents():
    dense = np.array([2.0, 3.0, 4.0, 5.0])  # documents differ by nats, methods by hundredths
    mean, error = paired_gap(dense + np.log1p([0.01, 0.02, 0.01, 0.02]), dense)
    assert mean == pytest.approx(0.015)
    assert error == pytest.approx(np.std([0.01, 0.02, 0.01, 0.02], ddof=1) / 2)
    assert mean_and_error(dense)[1] > 50 * error
