"""The policy `loss`: output errors weighed by the gradient of the model's loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hads.draws import SOFTMAXES, attention, blocks_of, dense, tokens_of
from tests.hads.test_profile import BLOCK, CURVES, Seen, row_means, some_order
from tests.model.families import FAMILIES, LLAMA, random_model, random_tokens
from xsake import block_scores, selection
from xsake.evaluate import methods, needle, table
from xsake.hads import Profile, budget, calibrate, make, measure, row_blocks
from xsake.model.attend import by_mask
from xsake.model.observer import Observer
from xsake.model.positions import document_positions

T, N_ROWS = 100, 7


@pytest.mark.parametrize(
    ("selector", "kind"),
    [
        ("oracle", "plain"),
        ("mean_query", "plain"),
        ("static", "cap, window, sinks"),
    ],
)
def test_cost_curves_are_what_dropping_blocks_does_to_the_loss(selector, kind):
    """For every count: (g · change of output)² of the renormalised sparse softmax, in float64."""
    q, k, v, kernel = attention(T)
    gradient = np.random.default_rng(3).normal(size=(T, *kernel.shape[:2])).astype(np.float32)
    before = tuple(some_order(N_ROWS, seed) for seed in (1, 2, 4))
    how = {"block": BLOCK, "curves": CURVES, "before": before, "softmax": SOFTMAXES[kind]}
    got = measure(q, k, v, kernel, gradient=jnp.asarray(gradient), **how)
    p, out = dense(q, k, v, SOFTMAXES[kind])
    values = np.repeat(np.asarray(v, np.float64), 2, axis=1)
    g = np.moveaxis(gradient.astype(np.float64), 1, 0)
    mass = blocks_of(p, BLOCK)
    u = np.einsum("nts,snh->nth", p[:, :, :BLOCK], values[:BLOCK])
    dropped = ((u - mass[:, :, 0, None] * out) * g).sum(-1)
    want = row_means(dropped**2, T)
    np.testing.assert_allclose(got.loss_sensitivity[:, :, 0], want, rtol=1e-3, atol=1e-6)
    scores = {
        "oracle": got.loss_sensitivity,
        "static": before[2],
        "mean_query": block_scores.mean_query(q, k, BLOCK),
    }[selector]
    for count in (2, 3, 5):
        counts = np.clip(count, row_blocks.floors(N_ROWS), row_blocks.ceilings(N_ROWS))
        keep = np.asarray(selection.keep_top(scores, counts))
        kept = np.einsum("ntj,ntj->nt", mass, np.repeat(keep, BLOCK, 1)[:, :T]) + 1 - p.sum(-1)
        sparse = np.where(tokens_of(keep, BLOCK, T), p, 0) / kept[..., None]
        change = np.einsum("nts,snh->nth", sparse, values) - out
        want = row_means((change * g).sum(-1) ** 2, T)
        curve = np.asarray(got.cost["loss"][selector])
        np.testing.assert_allclose(curve[:, 2:, count - 1], want[:, 2:], rtol=2e-3, atol=1e-5)


@pytest.fixture(scope="module")
def model():
    return random_model(LLAMA, scan=False)


@pytest.fixture(scope="module")
def profile(model):
    documents = random_tokens(LLAMA, (2, 64))
    return Observer(model).profile(documents, block=BLOCK, curves=CURVES, loss=True)


def loss_of(model, tokens, layer, change):
    """Σ -ln p of the next token if `change` [T, N, H] is added to a layer's attention output."""
    length = len(tokens)
    attend = by_mask(model.config, None, 1, length)

    def changed(number, q, k, v, state, *more):
        out, state = attend(number, q, k, v, state, *more)
        return out + jnp.where(number == layer, 1, 0) * change, state

    hidden, _ = model.run(tokens[None], document_positions(1, length), changed)
    likely = jax.nn.log_softmax(model.logits(hidden[0, :-1]), axis=-1)
    return -jnp.take_along_axis(likely, tokens[1:, None], 1).sum()


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "mixed windows"])
def test_gradients_are_those_of_the_summed_loss(family):
    """Against central differences of the loss along random directions, in every layer."""
    model = random_model(FAMILIES[family])
    config, tokens = model.config, jnp.asarray(random_tokens(LLAMA, 40))
    subject = Observer(model)
    got = np.asarray(jax.jit(subject.bare.loss_gradients)(subject.weights, tokens[None]))
    assert got.shape == (config.layers, 40, config.heads, config.head_size)
    loss = jax.jit(lambda layer, change: loss_of(model, tokens, layer, change))
    for layer in range(config.layers):
        # along the gradient of every other position: the product is not a sum of random signs
        direction = got[layer] * (np.arange(40) % 2)[:, None, None]
        step = 1e-2 / np.linalg.norm(direction)
        ahead, behind = (float(loss(layer, jnp.asarray(s * direction))) for s in (step, -step))
        np.testing.assert_allclose((ahead - behind) / (2 * step), (direction**2).sum(), rtol=1e-2)


@pytest.mark.slow
def test_a_profile_has_the_cost_of_dropping_blocks_in_every_layer(model):
    """The gradient by another route, the change of the output by attention over kept blocks."""
    tokens = jnp.asarray(random_tokens(LLAMA, 64))
    subject = Observer(model)
    profile = subject.profile([np.asarray(tokens)], block=BLOCK, curves=("mean_query",), loss=True)
    layers = []
    model.observe(tokens[None], lambda layer, seen, carry: layers.append(seen), None)
    gradient = jax.jit(jax.grad(lambda x, number: loss_of(model, tokens, number, x)))
    for number, seen in enumerate(layers):
        g = gradient(jnp.zeros(seen.out.shape[1:]), number)
        q, k, v = (x[0] for x in (seen.q, seen.k, seen.v))
        p, out = dense(q, k, v)
        for count in (2, 3):
            scores = block_scores.mean_query(q, k, BLOCK)
            counts = np.clip(count, row_blocks.floors(4), row_blocks.ceilings(4))
            kept = np.where(tokens_of(selection.keep_top(scores, counts), BLOCK, 64), p, 0)
            values = np.repeat(np.asarray(v, np.float64), 2, axis=1)
            sparse = np.einsum("nts,snh->nth", kept / kept.sum(-1, keepdims=True), values)
            change = (np.moveaxis(np.asarray(g, np.float64), 1, 0) * (sparse - out)).sum(-1)
            want = row_means(change**2, 64)[:, 2:]
            got = profile.cost("loss", "mean_query")[number, :, 2:, count - 1]
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-5 * want.max())


def test_a_head_that_the_loss_does_not_depend_on_gets_no_budget():
    """Its output error is the largest of all; `output` gives it most, `loss` the forced blocks."""
    q, k, v, kernel = attention(128, sharp=0.5)
    kernel = kernel.at[2].multiply(30)

    def observe(weights, tokens, fold, carry):
        return fold(0, Seen(q[None], k[None], v[None], kernel), carry)

    def gradients(weights, tokens):
        g = np.random.default_rng(0).normal(size=(1, 128, 4, 8)).astype(np.float32)
        return jnp.asarray(g * (np.arange(4) != 2)[:, None])

    how = {"layers": 1, "heads": 4, "block": BLOCK, "curves": ("mean_query",)}
    documents = [np.zeros(128, np.int32)] * 2
    profile = calibrate(observe, {}, documents, gradients=gradients, **how)
    plans = {x: make(profile, 0.6, x, "mean_query") for x in ("output", "loss")}
    assert plans["output"].shares[0].argmax() == 2
    assert (plans["loss"].counts[0, 2] == row_blocks.floors(8)).all()
    assert "layer 0, head 2 gains nothing" in plans["loss"].terms.notes[0]


def test_a_profile_keeps_the_loss_in_its_file(profile, tmp_path):
    profile.save(tmp_path / "profile")
    again = Profile.load(tmp_path / "profile")
    assert jax.tree.structure(profile) == jax.tree.structure(again)
    for x, y in zip(jax.tree.leaves(profile), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(
        make(profile, 0.8, "loss", "static").scores, again.statistics.loss_sensitivity
    )


def test_other_policies_do_not_change_if_the_loss_is_measured(model, profile):
    plain = Observer(model).profile(random_tokens(LLAMA, (2, 64)), block=BLOCK, curves=CURVES)
    for policy in ("kl", "output"):
        for name in CURVES:
            np.testing.assert_allclose(
                plain.cost(policy, name), profile.cost(policy, name), rtol=1e-5, atol=1e-7
            )


@pytest.mark.parametrize("selector", ["static", "mean_query"])
def test_a_profile_without_the_loss_says_how_to_measure_it(model, profile, tmp_path, selector):
    """As files of before there was this policy."""
    statistics = profile.statistics
    cost = {name: x for name, x in statistics.cost.items() if name != "loss"}
    statistics = statistics._replace(cost=cost, loss_sensitivity=None)
    dataclasses.replace(profile, statistics=statistics).save(tmp_path / "old")
    old = Profile.load(tmp_path / "old")
    with pytest.raises(ValueError, match="calibrate with loss=True"):
        make(old, 0.8, "loss", selector)
    with pytest.raises(ValueError, match=r"needs a cost curve that the profile lacks .*--loss"):
        methods.at_density(old, 0.8, 64, names=[f"{selector}/loss"])
    assert not [name for name in methods.left_out(old) if "/loss" in name]
    assert not [name for name in methods.names_of(old) if "/loss" in name]


def test_the_profile_of_a_label_says_how_to_measure_the_loss(profile):
    """Whether --loss is what is missing depends on the profile that the method is made from."""
    cost = {name: x for name, x in profile.statistics.cost.items() if name != "loss"}
    without = dataclasses.replace(profile, statistics=profile.statistics._replace(cost=cost))
    name = "mean_query/loss from elsewhere"
    with pytest.raises(ValueError, match=r"lacks \(calibrate with --loss\)"):
        methods.check_names([name], {"": profile, "from elsewhere": without})
    cost = cost | {"loss": {"static": profile.statistics.cost["loss"]["static"]}}
    other = dataclasses.replace(profile, statistics=profile.statistics._replace(cost=cost))
    with pytest.raises(ValueError, match="cost curve that the profile lacks; those"):
        methods.check_names([name], {"": without, "from elsewhere": other})


def test_means_of_other_documents_that_do_not_fit_the_gradient_are_refused():
    q, k, v, kernel = attention(T)
    before = tuple(some_order(N_ROWS, seed) for seed in (1, 2, 4))
    how = {"block": BLOCK, "curves": ("static",)}
    with pytest.raises(ValueError, match=r"3 arrays, \(mass, sensitivity, loss_sen.*got 2"):
        measure(
            q, k, v, kernel, before=before[:2], gradient=jnp.zeros((T, *kernel.shape[:2])), **how
        )
    with pytest.raises(ValueError, match=r"2 arrays, \(mass, sensitivity\), got 3"):
        measure(q, k, v, kernel, before=before, **how)


def test_with_one_document_static_gets_the_sum_of_sensitivities(model):
    found = Observer(model).profile(
        random_tokens(LLAMA, (1, 64)), block=BLOCK, curves=("static",), loss=True
    )
    want = budget.additive(found.statistics.loss_sensitivity)
    np.testing.assert_allclose(found.cost("loss", "static"), want, rtol=1e-5)


def test_the_oracle_of_the_loss_ranks_by_the_gradient_on_the_input(model, profile):
    """Its blocks are those that `measure` gives with the gradient of the very document."""
    subject, tokens = Observer(model), random_tokens(LLAMA, 64, seed=5)
    names = ["oracle/loss", "static/loss"]
    made = methods.at_density(profile, 0.85, 64, names=names)
    found = table.measure_methods(subject, made, [tokens], BLOCK)
    assert {x["method"] for x in found} == set(names)
    oracle, other = sorted(made, key=lambda method: method.name)
    every = methods.sources_of(made)
    assert needle._sources(other, every) == ("given",)  # no backward pass for other methods
    assert needle._sources(oracle, every) == every == ("given", "loss_sensitivity")
    slopes = jax.jit(subject.bare.loss_gradients)(subject.weights, jnp.asarray(tokens)[None])

    @jax.jit
    def observed(weights, tokens, slopes):
        """(q, k, v, kernel) of every layer, and the blocks that it keeps."""
        given, kept = [], []

        def fold(layer, seen, carry):
            given.append((seen.q[0], seen.k[0], seen.v[0], seen.kernel))
            how = {"block": BLOCK, "curves": (), "gradient": slopes[layer]}
            scores = measure(*given[-1], **how).loss_sensitivity
            kept.append(selection.keep_top(scores, oracle.counts[layer]))

        subject.observe(weights, tokens[None], fold, None)
        return given, kept

    given, kept = observed(subject.weights, tokens, slopes)
    for layer, seen in enumerate(given):
        seen = methods.Activations(*seen, gradient=slopes[layer])
        np.testing.assert_array_equal(oracle.blocks(layer, seen, BLOCK), kept[layer])


def test_a_method_of_the_loss_without_a_gradient_says_so(profile):
    """Other methods need none; they compile their own source only."""
    seen = methods.Activations(*attention(64))
    oracle, other = (
        next(iter(methods.at_density(profile, 0.85, 64, names=[name])))
        for name in ("oracle/loss", "mean_query/kl")
    )
    with pytest.raises(ValueError, match=r"Activations\.gradient, which is None"):
        oracle.blocks(0, seen, BLOCK)
    want = selection.keep_top(block_scores.mean_query(*seen[:2], BLOCK), other.counts[0])
    np.testing.assert_array_equal(other.blocks(0, seen, BLOCK), want)


class WithoutGradients:
    """What `Subject` declares and no more, as models of `xsake.integrations.flax.observed` have."""

    def __init__(self, model):
        subject = Observer(model)
        for name in ("weights", "layers", "heads", "hash"):
            setattr(self, name, getattr(subject, name))
        for name in ("observe", "hidden", "sparse_hidden", "logits"):
            setattr(self, name, getattr(subject, name))
        self.bare = self


def test_the_oracle_of_the_loss_is_left_out_where_the_model_gives_no_gradients(
    model, profile, tmp_path, monkeypatch
):
    def measured(subject, found, *more):
        return [{"method": method.name} for method in found]

    monkeypatch.setattr(table, "measure_methods", measured)
    monkeypatch.setattr(table, "to_markdown", lambda found: "")
    documents = [random_tokens(LLAMA, 64, seed=5)]

    def run(subject, file, only=()):
        out = tmp_path / file
        [part] = table.run_table(subject, profile, documents, [0.85], out, only=only)[
            "densities"
        ].values()
        return {row["method"] for row in part["rows"]}, part["left_out"]

    rows, left_out = run(Observer(model), "with.json")
    assert "oracle/loss" in rows
    assert "oracle/loss" not in left_out
    rows, left_out = run(WithoutGradients(model), "without.json")
    assert {"static/loss", "oracle/kl"} < rows
    assert "oracle/loss" not in rows
    assert "oracle/loss" in left_out
    assert run(WithoutGradients(model), "named.json", ["oracle/loss"])[0] == {"oracle/loss"}
    tokens = jnp.asarray(documents[0])
    with pytest.raises(ValueError, match="which this model does not give; leave it out"):
        methods.gradients_of(WithoutGradients(model), {}, tokens, ("given", "loss_sensitivity"))
