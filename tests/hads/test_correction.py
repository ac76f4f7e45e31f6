import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hads.draws import SOFTMAXES, attention, capped, dense
from xsake import block_scores, dot_product_attention, masks, selection
from xsake.hads import corrected_attention, row_blocks
from xsake.hads.chunks import PLAIN

BLOCK, T, N_ROWS = 16, 100, 7


def problem(count=3, sharp=2.0):
    q, k, v, _ = attention(T, sharp=sharp)
    counts = np.minimum(count, row_blocks.ceilings(N_ROWS))
    keep = selection.keep_top(block_scores.estimate("mean_query", q, k, BLOCK), counts)
    return q, k, v, keep, selection.to_mask(keep, T, BLOCK)


def by_definition(q, k, v, keep, softmax=PLAIN):
    """Softmax over visited tokens and one centroid of size 16 for each dropped block before.

    A dropped block has a centroid if all queries of the row block see all of it.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    window = T if softmax.window is None else int(softmax.window)
    out = np.zeros((T, 4, 8))
    for t in range(T):
        for n in range(4):
            logits, values = [], []
            if softmax.sinks is not None:
                logits, values = [float(softmax.sinks[n])], [np.zeros(8)]
            for j in range(t // BLOCK + 1):
                keys = slice(max(j * BLOCK, t - window + 1), min((j + 1) * BLOCK, t + 1))
                if keep[n, t // BLOCK, j]:
                    logits += list(capped(k[keys, n] @ q[t, n] / np.sqrt(8), softmax))
                    values += list(v[keys, n])
                elif min((t // BLOCK + 1) * BLOCK, T) - j * BLOCK <= window:
                    logit = capped(k[keys, n].mean(0) @ q[t, n] / np.sqrt(8), softmax)
                    logits.append(logit + np.log(BLOCK))
                    values.append(v[keys, n].mean(0))
            p = np.exp(np.array(logits) - max(logits))
            out[t, n] = p @ np.array(values) / p.sum()
    return out


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("plain", marks=pytest.mark.slow),
        pytest.param("cap, window, sinks", marks=pytest.mark.second_python),
    ],
)
def test_dropped_blocks_stand_in_as_their_centroids(kind):
    q, k, v, keep, mask = problem()
    softmax = SOFTMAXES[kind]
    if softmax.window is not None:
        mask = mask & masks.sliding_window(int(softmax.window) - 1, 0)
    cap = None if softmax.soft_cap is None else float(softmax.soft_cap)
    how = {"logits_soft_cap": cap, "sinks": softmax.sinks}
    got = corrected_attention(q[None], k[None], v[None], mask, **how)[0]
    np.testing.assert_allclose(got, by_definition(q, k, v, np.asarray(keep), softmax), atol=2e-5)


def test_nothing_dropped_is_plain_attention():
    q, k, v, _, mask = problem(count=N_ROWS)
    got = jax.jit(corrected_attention)(q[None], k[None], v[None], mask)[0]
    np.testing.assert_allclose(got, dense(q, k, v)[1].transpose(1, 0, 2), atol=2e-5)


def test_the_correction_brings_the_output_of_broad_heads_closer():
    q, k, v, _, mask = problem(sharp=0.5)
    want = dense(q, k, v)[1].transpose(1, 0, 2)
    plain = dot_product_attention(q[None], k[None], v[None], mask=mask)[0]
    corrected = jax.jit(corrected_attention)(q[None], k[None], v[None], mask)[0]
    assert jnp.abs(corrected - want).mean() < 0.5 * jnp.abs(plain - want).mean()


def test_gradients_flow_through_the_centroids():
    """Along a random direction, against central differences, for q, k and v at once."""
    q, k, v, _, mask = problem()
    weight = jax.random.normal(jax.random.key(5), (T, 4, 8))

    @jax.jit
    def loss(q, k, v):
        return (corrected_attention(q[None], k[None], v[None], mask)[0] * weight).sum()

    direction = [jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate((q, k, v))]
    gradients = jax.grad(loss, (0, 1, 2))(q, k, v)
    slope = sum(jnp.vdot(g, d) for g, d in zip(gradients, direction, strict=True))
    step = 1e-2
    ends = [
        loss(*(x + sign * step * d for x, d in zip((q, k, v), direction, strict=True)))
        for sign in (1, -1)
    ]
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=2e-2)
    assert all(np.isfinite(np.asarray(g)).all() for g in gradients)
