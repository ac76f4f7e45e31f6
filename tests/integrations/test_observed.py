"""HADS on models that XSAKE did not make: profile, plan, equal density, quality table."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from xsake import BlockMask, hads, masks
from xsake.evaluate import methods, table
from xsake.integrations.flax import attention, observed
from xsake.integrations.flax.layer import Layer
from xsake.integrations.flax.linen import SelfAttention

VOCABULARY, WIDTH, N, LAYERS = 32, 16, 2, 2
T, BLOCK = 72, 16  # five row blocks, the last one short
DENSITY = 0.7
CLOSE = 1e-5
RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(0, VOCABULARY, T).astype(np.int32) for _ in range(3)]
TOKENS = np.stack(DOCUMENTS[:2])


class Block(nnx.Module):
    """Attention and a product, each behind a norm."""

    def __init__(self, *, rngs, **how):
        self.first, self.second = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            N, WIDTH, decode=False, keep_rngs=False, rngs=rngs, **how
        )
        self.product = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.first(x), mask=mask)
        return x + nnx.gelu(self.product(self.second(x)))


class Decoder(nnx.Module):
    """A decoder as a user writes one; nothing in it knows of XSAKE."""

    def __init__(self, *, rngs, attention_fns=None, causal=True):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        how = [{"attention_fn": f} for f in attention_fns] if attention_fns else [{}] * LAYERS
        # later layers are made, and so stored, first: their number is the order of the calls
        made = [Block(rngs=rngs, **x) for x in reversed(how)]
        self.upper, self.lower = made
        self.causal = causal

    def __call__(self, tokens):
        x = 3 * self.embedding(tokens)
        mask = nnx.make_causal_mask(tokens) if self.causal else None
        for block in (self.lower, self.upper):
            x = block(x, mask)
        return self.embedding.attend(x)


def decoder(**how):
    model = Decoder(rngs=nnx.Rngs(0), **how)
    for block in (model.lower, model.upper):  # heads that prefer some keys, as trained ones do
        block.attention.query.kernel[...] *= 6
    return model


@functools.cache
def subject():
    return observed(decoder())


@functools.cache
def profile():
    return subject().profile(DOCUMENTS[:2], block=BLOCK, curves=("static", "mean_query"))


@pytest.mark.second_python
def test_the_profile_is_of_what_every_layer_attends_to():
    """Block mass of both layers, from q and k that an attention_fn of the test's own kept."""
    kept = []

    def keep(query, key, value, **rest):
        kept.append((np.asarray(query), np.asarray(key)))
        return nnx.dot_product_attention(query, key, value, **rest)

    decoder(attention_fns=[keep] * LAYERS)(TOKENS)
    assert (subject().layers, subject().heads) == (LAYERS, N)
    assert profile().facts.model_hash == subject().hash
    for layer, (q, k) in enumerate(kept):
        logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
        p = np.exp(np.where(np.tri(T, dtype=bool), logits, -np.inf))
        p = np.pad(p / p.sum(-1, keepdims=True), ((0, 0),) * 3 + ((0, -T % BLOCK),))
        mass = p.reshape(*p.shape[:3], -1, BLOCK).sum(-1).mean(0)  # [N, T, n]
        mass = np.stack([mass[:, i : i + BLOCK].mean(1) for i in range(0, T, BLOCK)], axis=1)
        np.testing.assert_allclose(profile().statistics.mass[layer], mass, atol=1e-4)


@pytest.mark.second_python
def test_the_model_runs_under_a_plan():
    """As does one that was built with attention(plan, layer=…); at density 1 nothing changes."""
    plan = hads.make(profile(), DENSITY, "kl", "mean_query")
    weighted = np.random.default_rng(1).standard_normal((*TOKENS.shape, VOCABULARY))

    @jax.jit
    def run(weights, plan):
        out, pull_back = jax.vjp(lambda weights: subject()(weights, TOKENS, plan), weights)
        return out, *pull_back(weighted.astype(out.dtype))

    sparse, ours = run(subject().weights, plan)
    graph, state = nnx.split(
        decoder(attention_fns=[attention(plan, layer=i) for i in range(LAYERS)])
    )

    @jax.jit
    def rebuilt(state):
        out, pull_back = jax.vjp(lambda state: nnx.merge(graph, state)(TOKENS), state)
        return out, *pull_back(weighted.astype(out.dtype))

    also_sparse, theirs = rebuilt(state)
    np.testing.assert_allclose(sparse, also_sparse, atol=CLOSE)
    dense = jax.jit(subject())(subject().weights, TOKENS)
    np.testing.assert_allclose(dense, decoder()(TOKENS), atol=CLOSE)
    assert np.abs(sparse - dense).max() > 1e-2
    largest = max(np.abs(x).max() for x in jax.tree.leaves(theirs))  # a key's bias has none
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, atol=CLOSE * largest)
    all_blocks = hads.make(profile(), 1.0, "kl", "mean_query")
    np.testing.assert_allclose(run(subject().weights, all_blocks)[0], dense, atol=CLOSE)


@pytest.mark.second_python
def test_methods_are_compared_at_equal_density():
    names = ("sliding_window", "static/kl", "mean_query/output")
    found = table.measure_methods(
        subject(), methods.at_density(profile(), DENSITY, T, names=names), DOCUMENTS[2:], BLOCK
    )
    n = -(-T // BLOCK)
    blocks = round(DENSITY * LAYERS * N * n * (n + 1) / 2)
    for row in found:
        assert row["realised_density_ratio"] == pytest.approx(
            blocks / (LAYERS * N * n * (n + 1) / 2)
        )
        assert 0 < row["recall"] < 1
        assert row["logit_kl"] > 0
    rows = {row["method"]: row for row in found}
    assert rows["static/kl"]["kl"] < rows["sliding_window"]["kl"]


class Linen(linen.Module):
    """Two layers; the second is called first."""

    @linen.compact
    def __call__(self, tokens):
        embedding = linen.Embed(VOCABULARY, WIDTH)
        x, mask = 3 * embedding(tokens), linen.make_causal_mask(tokens)
        for name in ("b", "a"):
            x = x + linen.MultiHeadDotProductAttention(N, name=name)(linen.RMSNorm()(x), mask=mask)
        return embedding.attend(x)


@pytest.mark.second_python
def test_a_linen_model_is_observed_without_a_change():
    model = Linen()
    variables = model.init(jax.random.key(0), TOKENS)
    found = observed(model, variables)
    assert (found.layers, found.heads) == (LAYERS, N)
    kernels = found.observe(variables, TOKENS, lambda layer, seen, xs: [*xs, seen.kernel], [])
    for name, kernel in zip("ba", kernels, strict=True):
        np.testing.assert_array_equal(kernel, variables["params"][name]["out"]["kernel"])
    own = model.apply(variables, TOKENS)
    np.testing.assert_allclose(found(variables, TOKENS), own, atol=CLOSE)

    def choose(layer, q, k):
        return masks_of(layer, T)

    sparse = found(variables, TOKENS, choose)
    assert np.abs(sparse - own).max() > 1e-2
    np.testing.assert_allclose(model.apply(variables, TOKENS), own, atol=CLOSE)  # as it was


def masks_of(layer, length):
    rule = masks.causal() & masks.sliding_window(3 + layer, 0)
    return BlockMask.from_rule(rule, (length, length), block=BLOCK)


def flax_with(**how):
    return functools.partial(nnx.dot_product_attention, **how)


def of_functions(function):
    return observed(decoder(attention_fns=[function] * LAYERS))


def windowed(query, key, value, *, mask=None, **others):
    """A window of the user's own, which no argument shows."""
    at = np.arange(query.shape[1])
    near = at[:, None] - at <= 20
    return nnx.dot_product_attention(query, key, value, mask=mask * near, **others)


PADDING = VOCABULARY - 1


class Padded(Decoder):
    """Hides padding, by an array as mask."""

    def __call__(self, tokens):
        x = 3 * self.embedding(tokens)
        hidden = nnx.make_attention_mask(jnp.ones_like(tokens), tokens != PADDING)
        mask = nnx.combine_masks(nnx.make_causal_mask(tokens), hidden)
        for block in (self.lower, self.upper):
            x = block(x, mask)
        return self.embedding.attend(x)


def choose(layer, q, k):
    return masks_of(layer, q.shape[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: observed(nnx.Embed(4, 4, rngs=nnx.Rngs(0))), "the model calls no module with an"),
        (lambda: observed(decoder(causal=False)), "layer 0 sees later tokens, but HADS plans"),
        (
            lambda: of_functions(windowed),
            "layer 0 has the attention_fn windowed, and what it computes is not known; pass",
        ),
        (
            lambda: of_functions(flax_with(bias=np.zeros((2, 2), np.float32))),
            "layer 0 adds a bias to its logits, which HADS does not plan",
        ),
        (
            lambda: a_layer(nnx.dot_product_attention, dropout_rate=0.1),
            "dropout_rate=0.1 would drop attention weights",
        ),
        (
            lambda: of_functions(attention(masks.chunked(8))),
            r"layer 0 has the rule chunked\(8\), but HADS plans causal attention and sliding wind",
        ),
        (
            lambda: of_functions(attention(masks_of(0, 2))),
            "layer 0 has a BlockMask, which is for one length; give its rule",
        ),
        (lambda: of_functions(attention(choose, layer=0)), "layer 0 has a plan already"),
        (
            lambda: of_functions(flax_with(scale=2.0)),
            "layer 0 calls its attention_fn with arguments that Flax's does not take: .* 'scale'",
        ),
        (
            lambda: observed(decoder(), computes={windowed: masks.causal()}),
            r"computes must be \{function: attention\(…\)\} with .* got Window",
        ),
        (lambda: observed(None), "model must be an nnx.Module or a linen.Module, got NoneType"),
        (
            lambda: observed(Linen()),
            r"Linen is a linen.Module, .* pass observed\(model, variables\)",
        ),
        (lambda: observed(decoder(), {}), "Decoder is an nnx.Module, which has its parameters"),
        (
            lambda: observed(decoder(), call=lambda model, tokens: (model(tokens), 1)),
            r"must return logits \[B, T, vocab\], but for tokens \[1, 2\] it returns tuple; pass",
        ),
        (
            lambda: observed(decoder(), projection=lambda module: None),
            "the output projection must be an array, got NoneType",
        ),
        (
            lambda: subject().profile([np.zeros(3)], block=BLOCK),
            "document 0 must be token ids, got float64",
        ),
        (
            lambda: subject().profile(DOCUMENTS[:1], block=BLOCK, loss=True),
            "loss=True needs gradients of the loss .* leave it out",
        ),
        (
            lambda: observed(decoder(), projection=lambda module: jnp.zeros((3, 4))),
            r"the output projection must be \[N, Hv, width\] or .* got shape \[3, 4\]; pass",
        ),
    ],
)
def test_models_that_cannot_be_planned_are_refused(make, message):
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=message):
        make()


def a_layer(function, *args, **kwargs):
    q = jnp.zeros((1, 4, N, WIDTH // N))
    return Layer.of(0, function, {}, args, kwargs, q, q)


def test_what_a_layer_has_of_its_own_is_known():
    """For every length: a window may be longer than the texts of the profile."""
    own = attention(masks.sliding_window(400, 0), scale=0.5, logits_soft_cap=1.5)
    layer = a_layer(own, None, masks.sliding_window(900, 9))  # bias and mask by position
    assert (layer.softmax.window, layer.softmax.soft_cap) == (401, 1.5)
    np.testing.assert_allclose(layer.scaled(jnp.ones(3)), 0.5 * np.sqrt(WIDTH // N), rtol=1e-6)
    plain = a_layer(flax_with(is_causal=True), mask=None)
    assert plain.softmax == hads.chunks.PLAIN
    assert plain.rule == masks.causal()


@pytest.mark.second_python
def test_what_a_layer_has_of_its_own_is_kept_under_a_plan():
    how = {"implementation": "reference"}
    own = [
        attention(masks.sliding_window(12, 0), scale=0.9, **how),
        attention(logits_soft_cap=1.5, **how),
    ]
    found, tokens = observed(decoder(attention_fns=own)), TOKENS[:, :32]
    everything = BlockMask.from_rule(masks.causal(), (32, 32), block=BLOCK)

    @jax.jit
    def run(weights):
        def choose(layer, q, k):
            return everything

        plain = subject()(weights, tokens)
        return plain, found(weights, tokens), found(weights, tokens, choose)

    plain, dense, sparse = run(found.weights)
    assert np.abs(dense - plain).max() > 1e-2
    np.testing.assert_allclose(sparse, dense, atol=CLOSE)


@pytest.mark.second_python
def test_what_a_function_is_said_to_compute_is_checked_on_every_document():
    said = {windowed: attention(masks.sliding_window(20, 0))}
    observed(decoder(attention_fns=[windowed] * LAYERS), computes=said)._check_layers(DOCUMENTS[:2])
    padded = [x % PADDING for x in DOCUMENTS[:2]]
    padded[1][3] = PADDING  # a token that the model hides
    with pytest.raises(
        ValueError,
        match=r"layer 0 does not compute the causal .* on document 1 .* rounding explains",
    ):
        observed(Padded(rngs=nnx.Rngs(0))).profile(padded, block=BLOCK)


def half_only(query, key, value, *, left, **rest):
    """A window as a kernel has it that takes no float32."""
    if query.dtype != jnp.bfloat16:
        raise NotImplementedError(f"must be bfloat16, got {query.dtype}")
    return attention(masks.sliding_window(left, 0))(query, key, value, **rest)


@pytest.mark.second_python
@pytest.mark.parametrize("is_whole", [True, False], ids=["the partial", "the function inside"])
def test_a_named_function_may_be_a_partial_and_take_one_dtype(is_whole):
    function = functools.partial(half_only, left=20)
    model = decoder(attention_fns=[function] * LAYERS)
    for block in (model.lower, model.upper):
        own = block.attention
        for module in (own, own.query, own.key, own.value):
            module.dtype = jnp.bfloat16
    said = {function if is_whole else half_only: attention(masks.sliding_window(20, 0))}
    observed(model, computes=said)._check_layers(DOCUMENTS[:1])
    said = dict.fromkeys(said, attention(masks.sliding_window(3, 0)))
    with pytest.raises(ValueError, match="layer 0 does not compute the causal attention"):
        observed(model, computes=said)._check_layers(DOCUMENTS[:1])


@pytest.mark.second_python
def test_layers_are_compared_in_full_float32():
    """A GPU rounds the operands of products to TF32 unless it is told otherwise."""
    seen = []

    def noted(*args, **kwargs):
        seen.append(jax.config.jax_default_matmul_precision)
        return nnx.dot_product_attention(*args, **kwargs)

    said = {noted: attention()}
    observed(decoder(attention_fns=[noted] * LAYERS), computes=said)._check_layers(DOCUMENTS[:1])
    assert "highest" in seen


@pytest.mark.second_python
def test_a_model_that_was_profiled_can_be_freed():
    """JAX keeps static arguments of what it compiled; the weights must not be among them."""
    found = observed(decoder())
    found.profile(DOCUMENTS[:1], block=BLOCK, curves=("oracle",))
    kept = weakref.ref(jax.tree.leaves(found.weights)[0])
    assert found.bare.weights is None
    assert found.bare is found.bare.bare
    del found
    gc.collect()
    assert kept() is None


# ---------------------------------------------------------------------------- the module for Linen


def test_the_linen_module_has_the_parameters_and_results_of_flax():
    x = jnp.asarray(RNG.standard_normal((2, 24, WIDTH)), jnp.float32)
    theirs = linen.MultiHeadDotProductAttention(N)
    ours = SelfAttention(N, mask=masks.sliding_window(5, 0))
    variables = theirs.init(jax.random.key(0), x)
    shapes = jax.tree.map(jnp.shape, ours.init(jax.random.key(0), x))
    assert shapes == jax.tree.map(jnp.shape, variables)
    offset = np.arange(24)[:, None] - np.arange(24)
    seen = ((offset >= 0) & (offset <= 5))[None, None]
    expected = theirs.apply(variables, x, mask=jnp.asarray(seen))
    np.testing.assert_allclose(ours.apply(variables, x), expected, atol=CLOSE)


@pytest.mark.slow
def test_the_linen_module_takes_segments_kv_heads_and_plans():
    x = jnp.asarray(RNG.standard_normal((1, 24, WIDTH)), jnp.float32)
    ids = jnp.repeat(jnp.arange(2), 12)[None]
    module = SelfAttention(4, num_kv_heads=2, head_size=8)
    variables = module.init(jax.random.key(0), x)
    packed = module.apply(variables, x, segment_ids=ids)
    alone = module.apply(variables, x[:, 12:])
    np.testing.assert_allclose(packed[:, 12:], alone, atol=CLOSE)

    def planned(**more):
        def choose(layer, q, k):
            return masks_of(layer, 24)

        return SelfAttention(4, num_kv_heads=2, head_size=8, mask=choose, **more).apply(
            variables, x
        )

    window = SelfAttention(4, num_kv_heads=2, head_size=8, mask=masks.sliding_window(4, 0))
    np.testing.assert_allclose(planned(layer=1), window.apply(variables, x), atol=CLOSE)
    with pytest.raises(ValueError, match=r"SelfAttention\(…, layer=…\) needs the number"):
        planned()
    with pytest.raises(ValueError, match="num_heads = 3 does not divide the width 16"):
        SelfAttention(3).init(jax.random.key(0), x)
