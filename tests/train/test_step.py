"""One update: what it sums, what it skips, what it never compiles twice."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from tests.train.corpus import changed, config, token_file
from xsake.data.stream import Batch, Stream
from xsake.hads import Plan
from xsake.hads.terms import Terms
from xsake.train import planning, step


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return Stream([token_file(tmp_path_factory.mktemp("text"))], 48, seed=1)


@pytest.fixture
def whole(tmp_path):
    return config(tmp_path).static


slope = jax.jit(jax.value_and_grad(step.summed_loss, has_aux=True), static_argnums=3)


def gradient_of(whole, batch):
    parameters = step.initial(whole).parameters
    (_, (loss, count, _)), gradient = slope(parameters, batch, None, whole)
    return float(loss), float(count), jax.tree.map(np.asarray, gradient)


def assert_close(one, other):
    """float32 sums in another order: a few ulp of the largest entry of each parameter."""
    assert one.keys() == other.keys()
    for name in one:
        scale = np.abs(other[name]).max()
        np.testing.assert_allclose(one[name], other[name], atol=1e-5 * scale, rtol=0, err_msg=name)


def test_accumulation_of_4_equals_a_batch_4_times_as_large(whole, stream):
    """Micro-batches have unequal numbers of targets, so a mean of means would differ."""
    batch = stream.batch(0, 4)
    batch.weights[0, 5:] = 0
    assert len(set(batch.weights.sum(1))) > 1
    found = []
    for pieces in (1, 4):
        how = changed(whole, data__rows=4, optimizer__accumulate=pieces)
        sums = jax.jit(step.summed_gradient, static_argnums=3)
        found.append(sums(step.initial(how).parameters, batch, None, how))
    ((loss, targets, _), one), ((same, told, _), four) = jax.tree.map(np.asarray, found)
    assert loss == pytest.approx(same, rel=1e-6)
    assert targets == told == batch.weights.sum()
    assert_close(one, four)


def test_packed_documents_equal_separate_ones(whole):
    """Three documents in one row, and each in its own row; the remaining tokens have weight 0."""
    draw = np.random.default_rng(0)
    lengths = [20, 11, 17]
    tokens = draw.integers(1, 320, (1, 49)).astype(np.int32)
    segments = np.repeat([0, 1, 2], lengths)[None].astype(np.int32)
    weights = np.ones((1, 48), np.float32)
    weights[0, np.cumsum(lengths) - 1] = 0
    row = tokens[:, :-1], tokens[:, 1:], segments, weights
    packed = Batch(*(np.pad(x, ((0, 2), (0, 0))).astype(x.dtype) for x in row))
    alone = [np.zeros_like(x) for x in packed]
    begins = np.cumsum([0, *lengths])
    for row, (first, last) in enumerate(itertools.pairwise(begins)):
        for new, old in zip(alone, packed, strict=True):
            new[row, : last - first] = old[0, first:last]
        alone[2][row] = 0
    loss, count, gradient = gradient_of(whole, packed)
    other_loss, other_count, other = gradient_of(whole, Batch(*alone))
    assert count == other_count == 45
    assert loss == pytest.approx(other_loss, rel=1e-6)
    assert_close(gradient, other)


def test_a_loss_in_parts_equals_the_loss_at_once(whole, stream):
    batch = stream.batch(3, 3)
    loss, count, gradient = gradient_of(whole, batch)
    part, same, other = gradient_of(changed(whole, compute__loss_tokens=40), batch)
    assert count == same
    assert loss == pytest.approx(part, rel=1e-6)
    assert_close(other, gradient)


def loss_of_logits(whole, batch):
    model = step.transformer(whole, step.initial(whole).parameters)
    logits = np.asarray(model(batch.tokens, segment_ids=batch.segment_ids), np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    said = np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
    return -(said * batch.weights).sum()


def test_the_loss_is_that_of_the_logits(whole, stream):
    batch = stream.batch(1, 3)
    loss, count, _ = gradient_of(whole, batch)
    assert loss == pytest.approx(loss_of_logits(whole, batch), rel=1e-6)
    assert count == batch.weights.sum()


@pytest.mark.second_python
def test_the_loss_of_capped_logits_is_theirs(whole, stream):
    """The model's logits are capped; those of the loss, which never stores them, too."""
    batch, plain = stream.batch(1, 3), loss_of_logits(whole, stream.batch(1, 3))
    whole = changed(whole, model__final_soft_cap=0.05)
    loss, _ = jax.jit(step.evaluation_loss, static_argnums=3)(
        step.initial(whole).parameters, batch, None, whole
    )
    assert float(loss) == pytest.approx(loss_of_logits(whole, batch), rel=1e-6)
    assert abs(float(loss) / plain - 1) > 1e-4


@pytest.fixture
def eager(whole):
    """One config, and so one program, for the tests that follow."""
    return changed(
        whole,
        data__rows=1,
        optimizer__learning_rate=1e-2,
        optimizer__weight_decay=0.0,
        optimizer__ema_decay=0.75,
        schedule__steps=400,
    )


def test_a_step_that_is_not_finite_changes_nothing_but_its_counts(eager, stream):
    whole = eager
    batch = stream.batch(0, 1)
    state = step.initial(whole)
    state, _ = step.compiled_update(state, batch, None, config=whole)
    before = jax.tree.map(np.array, state)
    poisoned = batch._replace(weights=np.where(batch.weights > 0, np.nan, 0).astype(np.float32))
    for count in (1, 2):
        state, said = step.compiled_update(state, poisoned, None, config=whole)
        assert (int(said.bad_steps), int(said.skipped_steps)) == (count, count)
    for name in ("parameters", "optimizer", "average"):
        old, new = getattr(before, name), getattr(state, name)
        jax.tree.map(np.testing.assert_array_equal, new, old)
    state, said = step.compiled_update(state, batch, None, config=whole)
    assert (int(said.bad_steps), int(said.skipped_steps), int(state.step)) == (0, 2, 4)
    moved = state.parameters["layers.up.kernel"] != before.parameters["layers.up.kernel"]
    assert np.asarray(moved).any()


def test_the_average_follows_the_parameters(eager, stream):
    state = step.initial(eager)
    first = jax.tree.map(np.array, state.parameters)
    state, _ = step.compiled_update(state, stream.batch(0, 1), None, config=eager)
    for name, x in state.average.items():
        expected = 0.75 * first[name] + 0.25 * np.asarray(state.parameters[name])
        ulp = np.spacing(np.abs(expected).max())
        np.testing.assert_allclose(x, expected, rtol=0, atol=2 * ulp)


@pytest.mark.slow
@pytest.mark.optimized
def test_the_model_overfits_one_batch(eager, stream):
    batch = stream.batch(0, 1)
    state = step.initial(eager)
    for _ in range(400):
        state, said = step.compiled_update(state, batch, None, config=eager)
        if float(said.loss) < 0.01:
            return
    pytest.fail(f"the loss is {float(said.loss)}")


def plan_of(counts, density):
    counts = np.broadcast_to(np.array(counts, np.int32), (2, 2, 3))
    return Plan(counts, None, Terms(density, "kl", "mean_query", 16, 48, notes=(str(counts),)))


def test_a_new_plan_changes_the_loss_without_recompiling(whole, stream):
    """And a plan that keeps every block is dense attention."""
    how = changed(whole, data__separate=False)
    batch = stream.batch(0, 2)
    before = step.compiled_loss._cache_size()
    parameters = step.initial(how).parameters
    found = [
        float(step.compiled_loss(parameters, batch, planning.argument(plan), config=how)[0])
        for plan in (plan_of([1, 2, 3], 1.0), plan_of([1, 2, 2], 0.8), plan_of([1, 2, 3], 0.9))
    ]
    assert step.compiled_loss._cache_size() == before + 1
    dense = float(step.compiled_loss(parameters, batch, None, config=how)[0])
    assert found[0] == found[2] == pytest.approx(dense, rel=1e-6)
    assert found[1] != found[0]
