"""xsake.integrations.flax: modules of NNX and Linen compute what they do with Flax's own attention.

Where nothing else is said, masks leave every query a key: without one, Flax returns a mean.
"""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from tests import oracle
from tests.hads.test_plan import profile_of
from xsake import BlockMask, hads, masks
from xsake.integrations.flax import attend as integration
from xsake.integrations.flax import attention
from xsake.masks.rule import Rule, Tokens

B, T, N, WIDTH = 2, 12, 2, 8
VOCABULARY = 11
RULE = masks.causal() & (masks.first(1) | masks.sliding_window(3, 0))
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (B, T + 1))
LIMIT = 1e-5  # of losses, gradients and parameters that are about 1


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def zeros(*shape):
    return jnp.zeros(shape)


# ------------------------------------------------------------------------------------------ a model


class Nnx(nnx.Module):
    """Embedding, attention, logits."""

    def __init__(self, *, rngs, **attention_fn):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            N, WIDTH, decode=False, keep_rngs=False, rngs=rngs, **attention_fn
        )

    def __call__(self, tokens, mask):
        x = self.embedding(tokens)
        return self.embedding.attend(x + self.attention(x, mask=mask))


class Linen(linen.Module):
    """The same."""

    attention_fn: dict

    @linen.compact
    def __call__(self, tokens, mask):
        embedding = linen.Embed(VOCABULARY, WIDTH)
        x = embedding(tokens)
        y = linen.MultiHeadDotProductAttention(N, **self.attention_fn)(x, mask=mask)
        return embedding.attend(x + y)


def functional(kind, attention_fn):
    """(parameters, (parameters, tokens, mask) -> logits)."""
    if kind == "nnx":
        abstract = nnx.eval_shape(lambda: Nnx(rngs=nnx.Rngs(0), **attention_fn))
        graph, parameters = nnx.split(abstract)
        apply = lambda p, *inputs: nnx.merge(graph, p)(*inputs)  # noqa: E731
    else:
        model = Linen(attention_fn)
        inputs = zeros(B, T).astype(int), zeros(1, 1, T, T)
        parameters = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))
        apply = model.apply
    return jax.tree.map(lambda x: normal(*x.shape, seed=x.size), parameters), apply


def trained(kind, **attention_fn):
    """Losses, gradients and parameters of two steps of gradient descent."""
    parameters, apply = functional(kind, attention_fn)
    flax = {"nnx": nnx, "linen": linen}[kind]

    @jax.jit
    def step(parameters, tokens):
        def loss(parameters):
            mask = flax.make_causal_mask(tokens[:, 1:])
            logits = apply(parameters, tokens[:, :-1], mask)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradient = jax.value_and_grad(loss)(parameters)
        return value, gradient, jax.tree.map(lambda p, g: p - 0.05 * g, parameters, gradient)

    first, one, parameters = step(parameters, TOKENS)
    second, two, parameters = step(parameters, TOKENS)
    assert second < first
    return jax.tree.leaves((first, one, second, two, parameters))


@pytest.mark.parametrize(("kind", "backend"), [("nnx", "xla"), ("linen", "reference")])
def test_a_model_trains_as_with_flaxs_own_attention(kind, backend):
    """With the float mask of make_causal_mask, traced."""
    attend = attention(implementation=backend)
    for ours, theirs in zip(trained(kind, attention_fn=attend), trained(kind), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=LIMIT)


# -------------------------------------------------------------------------------------------- masks


@pytest.fixture
def passed(monkeypatch):
    """The arguments that `attention` passes to dot_product_attention, which does not run."""
    calls = []

    def record(q, k, v, bias, mask, **more):
        calls.append(dict(bias=bias, mask=mask, **more))
        return v

    monkeypatch.setattr(integration, "dot_product_attention", record)
    return calls


def seen(mask):
    """Token pairs [B, N, T, S] of a mask."""
    if isinstance(mask, BlockMask):
        return np.broadcast_to(mask.to_dense(), (B, N, T, T))
    if isinstance(mask, Rule):
        mask = mask.allows(Tokens.at(*jnp.ogrid[:B, :N, :T, :T]))
    return np.broadcast_to(mask, (B, N, T, T))


SEE = oracle.allowed(
    ("and", ("causal",), ("or", ("first", 1), ("sliding_window", 3, 0))), B, N, T, T
)[0, 0]
PADDING = np.arange(T) < np.array([T, T // 2])[:, None, None, None]  # [B, 1, 1, T]


@functools.cache
def a_block_mask():
    return BlockMask.from_rule(RULE, (T, T), block=16)


# (the mask of `attention`, the mask of the call)
WAYS = {
    "rule": lambda: (RULE, PADDING),
    "int array": lambda: (SEE.astype(np.int32), PADDING),
    "float array": lambda: (SEE.astype(np.float32), PADDING.astype(np.float32)),
    "block mask": lambda: (a_block_mask(), PADDING),
    "rule in the call": lambda: (PADDING, RULE),
    "block mask in the call": lambda: (masks.array(PADDING), a_block_mask()),
    "all in the call": lambda: (None, PADDING & SEE),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_mask_of_the_module_and_that_of_the_call_are_intersected(way, passed):
    q = np.zeros((B, T, N, 4), np.float32)
    mask, call_mask = WAYS[way]()
    attention(mask)(q, q, q, mask=call_mask)
    np.testing.assert_array_equal(
        seen(passed[0]["mask"]), np.broadcast_to(SEE & PADDING, (B, N, T, T))
    )


def test_a_plan_gives_the_mask_of_its_layer(passed):
    """It is called with the layer, q and k."""
    q, k = (np.full((1, T, N, 4), value, np.float32) for value in (1, 2))
    calls = []

    def plan(*arguments):
        calls.append(arguments)
        return a_block_mask()

    attention(plan, layer=3)(q, k, k)
    ((layer, given_q, given_k),) = calls
    assert (layer, np.max(given_q), np.max(given_k)) == (3, 1, 2)
    assert passed[0]["mask"] is a_block_mask()


def test_a_plan_of_hads_is_taken():
    plan = hads.make(profile_of(heads=N), 0.5, "output", "mean_query")
    q = jax.ShapeDtypeStruct((B, plan.terms.length, N, 4), jnp.float32)
    assert jax.eval_shape(attention(plan, layer=1), q, q, q).shape == q.shape
    with pytest.raises(ValueError, match="layer 2 is out of range"):
        jax.eval_shape(attention(plan, layer=2), q, q, q)


def test_any_number_of_batch_axes():
    """None, and two of which the mask has one: the reshaped call equals Flax's own."""
    q, mask = normal(2, 3, 4, 1, 2), normal(2, 1, 1, 4, 4) > 0
    mask, bias = mask.at[..., 0].set(True), normal(3, 1, 4, 4)

    @jax.jit
    def run(q, mask, bias):
        attend = attention(implementation="reference")
        ours = attend(q, q, q, bias, mask), attend(*[q[0, 0]] * 3, mask=mask[0, 0])
        own = linen.dot_product_attention
        return ours, (own(q, q, q, bias, mask), own(*[q[0, 0]] * 3, mask=mask[0, 0]))

    for ours, theirs in zip(*run(q, mask, bias), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=LIMIT)


def test_a_rule_holds_in_decode_mode():
    """Token by token as in the whole text, though Flax does not pass the query's position."""
    x = normal(B, T, WIDTH)
    attend = attention(RULE, decode=True, implementation="reference")
    layer = nnx.MultiHeadAttention(N, WIDTH, attention_fn=attend, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache(x.shape)
    graph, state = nnx.split(layer)

    @jax.jit
    def run(state):
        def step(state, token):
            layer = nnx.merge(graph, state)
            return nnx.split(layer)[1], layer(token[:, None])[:, 0]

        decoded = jax.lax.scan(step, state, x.swapaxes(0, 1))[1].swapaxes(0, 1)
        return decoded, nnx.merge(graph, state)(x, decode=False)

    decoded, whole = run(state)
    np.testing.assert_allclose(decoded, whole, atol=LIMIT)


def test_a_traced_mask_of_other_numbers_makes_the_output_nan():
    q = normal(1, 4, 1, 2)

    @jax.jit
    def run(mask):
        attend = functools.partial(attention(implementation="reference"), mask=mask)
        return jax.value_and_grad(lambda q: attend(q, q, q).sum())(q)

    causal = np.tri(4, dtype=np.float32)
    assert all(np.isfinite(x).all() for x in run(causal))
    assert all(np.isnan(x).all() for x in run((1 - causal) * -1e9))


# ----------------------------------------------------------------------------------------- refusals


def call(fn=None, queries=T, keys=T, **arguments):
    q, k = zeros(B, queries, N, 4), zeros(B, keys, N, 4)
    return jax.eval_shape(lambda: (fn or attention())(q, k, k, **arguments))


def module(sow_weights=False, **arguments):
    layer = nnx.MultiHeadAttention(
        N, WIDTH, attention_fn=attention(), decode=False, rngs=nnx.Rngs(0), **arguments
    )
    return layer(zeros(B, T, WIDTH), sow_weights=sow_weights)


def linen_module(sow_weights=False, **arguments):
    layer = linen.MultiHeadDotProductAttention(N, attention_fn=attention(), **arguments)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    return jax.eval_shape(lambda: layer.init(rngs, zeros(B, T, WIDTH), sow_weights=sow_weights))


ADDITIVE = np.where(np.tri(T, dtype=bool), 0, -1e9).astype(np.float32)
LAST = np.ones((B, 1, 1, T), bool)
REFUSED = {
    "dropout, nnx": (
        lambda: module(dropout_rate=0.1, deterministic=False),
        NotImplementedError,
        r"dropout_rate=0.1.*deterministic=True",
    ),
    "dropout, linen": (
        lambda: linen_module(dropout_rate=0.1, deterministic=False),
        NotImplementedError,
        r"dropout_rate=0.1.*deterministic=True",
    ),
    "weights, nnx": (lambda: module(sow_weights=True), NotImplementedError, "sow_weights.*own"),
    "weights, linen": (
        lambda: linen_module(sow_weights=True),
        NotImplementedError,
        "sow_weights.*own",
    ),
    "einsum": (
        lambda: linen_module(
            qk_attn_weights_einsum_cls=lambda: jnp.einsum,
            attn_weights_value_einsum_cls=lambda: jnp.einsum,
        ),
        NotImplementedError,
        "qk_attn_weights_einsum.*leave it out",
    ),
    "algorithm": (
        lambda: call(precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32),
        NotImplementedError,
        "precision=.*BF16_BF16_F32.*Precision",
    ),
    "additive mask": (lambda: call(mask=jnp.asarray(ADDITIVE)), ValueError, "float32.*mask == 0"),
    "additive mask, fixed": (lambda: attention(ADDITIVE), ValueError, "float32.*mask == 0"),
    "mask of another type": (lambda: call(mask="causal"), TypeError, "mask must be.*str"),
    "mask of another batch": (
        lambda: call(mask=np.ones((3, 1, T, T), bool)),
        ValueError,
        r"mask must be broadcastable.*\[3, 1, 12, 12\]",
    ),
    "plan without layer": (lambda: attention(lambda *x: x), ValueError, "layer=…"),
    "layer without plan": (lambda: attention(RULE, layer=2), ValueError, "layer=2.*leave"),
    "plan for one query": (
        lambda: call(attention(lambda *x: x, layer=0), queries=1),
        ValueError,
        "1 queries and 12 keys.*decode mode",
    ),
    "rule for one query": (
        lambda: call(attention(RULE), queries=1, mask=LAST),
        ValueError,
        "sliding_window.*position.*decode=True",
    ),
    "is_causal for one query": (
        lambda: call(queries=1, mask=LAST, is_causal=True),
        ValueError,
        "causal.*position.*decode=True",
    ),
    "block mask for one query": (
        lambda: call(attention(a_block_mask()), queries=1, mask=LAST),
        ValueError,
        r"12 queries.*attention\(rule, decode=True\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_with_the_remedy(name):
    wrong, exception, words = REFUSED[name]
    with pytest.raises(exception, match=words) as caught:
        wrong()
    assert len(str(caught.value)) < 300, "one sentence"


def test_what_can_be_honoured_is_taken():
    """Precision is a lower bound; dropout that is off; one query whose position is told."""
    for precision in (None, "highest", jax.lax.Precision.HIGH, ("high", "default")):
        call(precision=precision, force_fp32_for_softmax=True)
    call(dropout_rate=0.1, deterministic=True, dropout_rng=jax.random.key(0))
    call(attention(RULE, decode=False), queries=1, mask=LAST)
    assert call(dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert call(
        promote_dtype=lambda x, dtype: [a.astype(dtype or jnp.float16) for a in x]
    ).dtype == (jnp.float16)


@pytest.mark.by_version
@pytest.mark.parametrize("flax", [nnx, linen], ids=["nnx", "linen"])
def test_no_argument_of_flax_is_dropped(flax):
    """Linen drops what the signature of an attention_fn does not name."""
    ours = inspect.signature(attention()).parameters
    assert set(inspect.signature(flax.dot_product_attention).parameters) <= set(ours)
