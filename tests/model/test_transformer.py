"""The transformer: its options, its masks, what can be observed, what it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.draws import FAST_COMPILATION
from tests.model.families import (
    FAMILIES,
    LLAMA,
    SOME_FAMILIES,
    random_model,
    random_tokens,
    weights,
)
from xsake import BlockMask, masks
from xsake.model import Transformer, parameter_shapes
from xsake.model.transformer import Observation

ROUNDING = 1e-4  # of float32 logits of size about 10: the order of sums may differ
T = 40

jit = functools.partial(jax.jit, compiler_options=FAST_COMPILATION)


@functools.cache
def model(config=LLAMA, implementation="reference", **options):
    """The backends agree, and have tests of their own; this one compiles fastest."""
    return random_model(config, implementation=implementation, **options)


@jit
def logits(model, tokens, mask=None, segment_ids=None):
    return model(tokens, mask=mask, segment_ids=segment_ids)


def tokens(batch=2, length=T, seed=0):
    return random_tokens(LLAMA, (batch, length), seed)


def largest(a, b):
    """By NumPy: JAX would compile a program for every shape."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


# ------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_scanned_unrolled_and_unstacked_layers_give_the_same_logits(family):
    config = FAMILIES[family]
    scanned = model(config)
    expected = logits(scanned, tokens())
    assert expected.shape == (2, T, config.vocab_size)
    assert float(jnp.abs(expected).max()) > 1  # weights large enough for a difference to show
    assert largest(logits(scanned.unstacked(), tokens()), expected) < ROUNDING
    if family == "mixed windows":  # the one whose layers differ in more than weights
        assert largest(logits(model(config, scan=False), tokens()), expected) < ROUNDING


def test_every_parameter_has_a_gradient_which_scan_and_remat_leave_as_it_is():
    """Of a config that has every parameter there is."""
    config = dataclasses.replace(FAMILIES["gpt2"], gated=True, qk_norm=True, tied=False)

    @jit
    def gradient(model):
        return jax.grad(lambda model: jnp.square(model(tokens(1, 16))).mean())(model)

    expected = gradient(model(config)).parameters()
    again = gradient(model(config, remat=True, scan=False)).parameters()
    for name, wanted in expected.items():
        by_layer = wanted if name.startswith("layers.") else wanted[None]
        assert (jnp.abs(by_layer).reshape(len(by_layer), -1).max(1) > 1e-4).all(), name
        assert largest(again[name], wanted) < 1e-4 * float(jnp.abs(wanted).max()), name


def test_bfloat16_keeps_float32_parameters_and_logits():
    """RMS error of the logits: two layers round the residual stream a few times, by 2⁻⁸ each."""
    half = model(dtype="bfloat16")
    assert {x.dtype for x in half.parameters().values()} == {jnp.dtype("float32")}
    found, expected = logits(half, tokens()), logits(model(), tokens())
    assert found.dtype == jnp.float32
    error = jnp.sqrt(jnp.square(found - expected).mean() / jnp.square(expected).mean())
    assert 0 < float(error) < 8 * 2**-8


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_every_axis_of_every_parameter_has_a_name(family):
    config = FAMILIES[family]
    state = nnx.state(model(config))
    specs = nnx.to_flat_state(nnx.get_partition_spec(state))
    sizes = {
        "vocab": config.vocab_size,
        "context": config.context,
        "layers": config.layers,
        "embed": config.width,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_size": config.head_size,
        "mlp": config.mlp_width,
    }
    named = {
        ".".join(path): tuple(sizes[axis] for axis in spec.get_value()) for path, spec in specs
    }
    assert named == parameter_shapes(config)
    apart = nnx.state(model(config).unstacked())
    for path, spec in nnx.to_flat_state(nnx.get_partition_spec(apart)):
        name = ".".join(x for x in path if isinstance(x, str))
        without_layers = parameter_shapes(config)[name][name.startswith("layers.") :]
        assert tuple(sizes[axis] for axis in spec.get_value()) == without_layers


def test_the_initial_model_is_nearly_uniform():
    fresh = jit(lambda: Transformer(LLAMA, rngs=nnx.Rngs(0), implementation="reference"))()
    loss = -jax.nn.log_softmax(logits(fresh, tokens()))[..., 0].mean()
    assert float(loss) == pytest.approx(np.log(LLAMA.vocab_size), rel=0.05)


# -------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_a_later_token_changes_nothing_before_it(family):
    changed = tokens()
    changed[:, 25] = (changed[:, 25] + 1) % 90
    a, b = (logits(model(FAMILIES[family]), x) for x in (tokens(), changed))
    assert (a[:, :25] == b[:, :25]).all()
    assert (a[:, 25] != b[:, 25]).any()


def test_a_window_of_w_is_the_token_and_w_minus_1_before_it():
    one_layer = dataclasses.replace(LLAMA, layers=1, window=9)
    a = logits(model(one_layer), tokens())
    for back, differs in ((8, True), (9, False)):
        changed = tokens()
        changed[:, 30 - back] = (changed[:, 30 - back] + 1) % 90
        assert (logits(model(one_layer), changed)[:, 30] != a[:, 30]).any() == differs


RULE = masks.first(3) | masks.sliding_window(6, 0)


def stacked(*rules):
    """One mask a layer; their rules are arrays, so that they stack."""
    at = jnp.arange(T)
    made = [
        BlockMask.from_rule(masks.array(rule(0, 0, at[:, None], at)) & masks.causal(), (T, T))
        for rule in rules
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *made)


def test_a_rule_a_block_mask_and_a_callable_say_the_same():
    expected = logits(model(), tokens(), RULE)
    assert largest(expected, logits(model(), tokens())) > 0.1
    one = BlockMask.from_rule(RULE & masks.causal(), (T, T), block=16)
    ways = {
        "one BlockMask": one,
        "not causal by itself": BlockMask.from_rule(RULE, (T, T), block=16),
        "one for each layer": stacked(RULE, RULE),
        "a callable": jax.tree_util.Partial(lambda one, layer, q, k: one, one),
    }
    for name, mask in ways.items():
        assert largest(logits(model(), tokens(), mask), expected) < ROUNDING, name


def test_each_layer_has_its_own_mask():
    """Layer 1 alone has a window: as the config's own, as a stacked mask, as a callable."""
    config = dataclasses.replace(LLAMA, window=7, window_layers=(1,))
    expected = logits(model(config), tokens())
    rules = masks.causal(), masks.sliding_window(6, 0)
    both = stacked(*rules)
    by_layer = jax.tree_util.Partial(
        lambda both, layer, q, k: jax.tree.map(lambda x: x[layer], both), both
    )
    for made, mask in (
        (model(), both),
        (model(), by_layer),
        (model(scan=False), both),
        (model(implementation="xla"), both),
    ):
        assert largest(logits(made, tokens(), mask), expected) < ROUNDING
    assert largest(logits(model(), tokens(), stacked(*rules[::-1])), expected) > 0.1


def test_a_callable_sees_the_layers_q_and_k():
    """The mask is made at run time: a query value's sign decides whether block 0 is dropped."""

    def chosen(layer, q, k):
        assert (q.shape, k.shape) == ((2, T, 4, 8), (2, T, 2, 8))
        keep = jnp.ones((2, 4, 3, 3), bool).at[:, :, 2, 0].set(q[:, 0, :, 0] > 0)
        return BlockMask.from_dense(keep, masks.causal(), shape=(T, T), block=16)

    found = logits(model(), tokens(), jax.tree_util.Partial(chosen))
    dense = logits(model(), tokens())
    assert largest(found[:, :32], dense[:, :32]) < ROUNDING
    assert largest(found[:, 32:], dense[:, 32:]) > 0.1


def test_new_mask_contents_do_not_trace_again():
    traced = []

    @jit
    def counted(model, tokens, mask):
        traced.append(1)
        return model(tokens, mask=mask)

    causal = masks.causal()
    results = [
        counted(model(), tokens(), stacked(*rules)) for rules in ((RULE, causal), (causal, RULE))
    ]
    assert len(traced) == 1
    assert largest(*results) > 0.1


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_packed_documents_are_as_if_alone(family):
    lengths = [7, 20, 13]
    ids = np.broadcast_to(np.repeat([5, 2, 9], lengths), (2, T))
    packed = tokens()
    found = logits(model(FAMILIES[family]), packed, None, ids)
    for first, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        # the document at the start of a row, and other text after it, which it cannot see
        alone = np.concatenate([packed[:, first : first + length], tokens(2, T - length, 7)], 1)
        expected = logits(model(FAMILIES[family]), alone)[:, :length]
        assert largest(found[:, first : first + length], expected) < ROUNDING


def test_packed_documents_under_a_block_mask_do_not_meet():
    ids = np.broadcast_to(np.repeat([0, 1], [16, 24]), (2, T))
    everything = BlockMask.from_rule(masks.everything(), (T, T), block=16)
    expected = logits(model(), tokens(), None, ids)
    assert largest(logits(model(), tokens(), everything, ids), expected) < ROUNDING


# ------------------------------------------------------------------------------------------ observe


@pytest.mark.parametrize("options", [{}, {"scan": False}])
def test_observing_hands_over_what_each_layer_computed(options):
    """Every layer's out is the softmax of its q and k on its v, and its kernel the model's own."""
    watched = model(FAMILIES["qwen3"], implementation="xla", **options)
    layers = watched.config.layers

    def fold(layer, seen, carry):
        return jax.tree.map(lambda all_, x: all_.at[layer].set(x), carry, seen)

    N, K, H = 4, 2, 16
    sizes = [(2, T, N, H), (2, T, K, H), (2, T, K, H), (2, T, N, H), (N, H, 32)]
    carry = Observation(*(jnp.zeros((layers, *size)) for size in sizes))
    q, k, v, out, kernel, _ = jit(lambda m, t: m.observe(t, fold, carry))(watched, tokens())
    assert (kernel == weights(watched.config)["layers.out.kernel"]).all()
    k, v = (np.repeat(x, N // K, axis=3) for x in (k, v))
    s = np.einsum("lbqnh,lbknh->lbnqk", q, k) / np.sqrt(H)
    p = jax.nn.softmax(jnp.where(np.tri(T, dtype=bool), s, -np.inf))
    np.testing.assert_allclose(np.einsum("lbnqk,lbknh->lbqnh", p, v), out, atol=1e-5)
    assert largest(q[0], q[1]) > 0.1


def test_observing_keeps_one_layers_queries_alive():
    """Temporary memory of a fold that keeps a number a layer does not grow with the layers."""

    def temporary_bytes(layers):
        config = dataclasses.replace(LLAMA, layers=layers)
        watched = model(config)

        def fold(layer, seen, carry):
            return carry.at[layer].set(seen.q.sum() + seen.out.sum())

        run = jit(lambda m, t: m.observe(t, fold, jnp.zeros(layers)))
        memory = run.lower(watched, tokens()).compile().memory_analysis()
        return memory.temp_size_in_bytes

    one_q = 2 * T * 4 * 8 * 4
    assert temporary_bytes(8) - temporary_bytes(2) < one_q


# --------------------------------------------------------------------------------------- parameters


def test_a_model_of_its_own_parameters_is_the_same():
    again = Transformer.of(LLAMA, model().parameters(), implementation="reference")
    assert (logits(again, tokens()) == logits(model(), tokens())).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.up.bias": np.zeros((2, 48))}, "'layers.up.bias' is not one that this config"),
        ({"norm.scale": None}, r"'norm.scale' of shape \[32\] is missing"),
        ({"norm.scale": np.zeros(31)}, r"'norm.scale' must have shape \[32\], got \[31\]"),
    ],
)
def test_parameters_that_do_not_fit_are_named(change, message):
    given = {name: x for name, x in (weights(LLAMA) | change).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        Transformer.of(LLAMA, given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"tokens": np.zeros(4, np.int32)}, r"tokens must be int \[B, T\], got int32 \[4\]"),
        ({"tokens": np.zeros((1, 4))}, r"tokens must be int \[B, T\], got float"),
        ({"segment_ids": np.zeros((1, T), np.int32)}, r"segment_ids must be \[2, 40\] as tokens"),
        ({"positions": np.zeros(T, np.int32)}, r"positions must be \[2, 40\] as tokens"),
        ({"mask": stacked(RULE, RULE, RULE)}, "leading axis of layers = 2 on every array"),
    ],
)
def test_what_a_pass_cannot_take_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        model()(**({"tokens": tokens()} | call))


def test_a_mask_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"got ndarray; masks.array\(mask\) converts a bool array"):
        model()(tokens(), mask=np.ones((T, T), bool))
    with pytest.raises(TypeError, match=r"mask\(layer, q, k\) must return a BlockMask, got int"):
        model()(tokens(), mask=lambda layer, q, k: 3)


def test_learned_positions_end_with_the_context():
    short = model(dataclasses.replace(FAMILIES["gpt2"], context=32))
    with pytest.raises(ValueError, match="40 tokens are more than the 32 positions"):
        short(tokens())
