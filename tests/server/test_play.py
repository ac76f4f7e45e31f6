"""What the page Play shows is what the library computes for the same text, unpadded."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model import test_gemma
from tests.server.conftest import client_of
from xsake import hads, selection, shipped
from xsake.data import text as texts
from xsake.evaluate.methods import Activations, oracle_counts
from xsake.evaluate.quality import compare, compare_predictions
from xsake.hads import baselines
from xsake.model.observer import Observer
from xsake.server import passes
from xsake.server.reader import METHODS, LargeTextError

BLOCK, DENSITY = 16, 0.6
CLOSE = 2e-4  # float32 sums in another order; probabilities and nats


@pytest.fixture(scope="module")
def story():
    (found,) = texts.documents([shipped.HELD_OUT_TEXT])
    return found[:420]


@pytest.fixture(scope="module")
def read(shipped_client, story):
    answer = shipped_client.post("/api/play/texts", json={"text": story})
    assert answer.status_code == 200
    return answer.json()


@pytest.fixture(scope="module")
def reader(shipped_client, read):
    return shipped_client.app.state.served.reader()


@pytest.fixture(scope="module")
def seen(reader, read):
    """Every layer's attention on the text as it is, without padding."""
    tokens = jnp.asarray([token["id"] for token in read["tokens"]])
    subject = reader.subject

    def fold(layer, seen, carry):
        new = Activations(seen.q[0], seen.k[0], seen.v[0], seen.kernel)
        return jax.tree.map(lambda every, x: every.at[layer].set(x), carry, new)

    @jax.jit
    def observed(weights):
        shape = (subject.layers, len(tokens), subject.heads, 32)
        width = reader.config.width
        kernel = jnp.zeros((subject.layers, subject.heads, 32, width))
        start = Activations(*(jnp.zeros(shape) for _ in range(3)), kernel)
        return subject.observe(weights, tokens[None], fold, start)

    return tokens, observed(subject.weights)


def layer_of(seen, layer):
    return jax.tree.map(lambda x: x[layer], seen[1])


def asked(client, read, path, method="hads", density=DENSITY, **more):
    query = {"method": method, "density": density, **more}
    answer = client.get(f"/api/play/texts/{read['id']}/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def kept_by(reader, seen, method):
    """bool [layers, N, n, n]: the blocks of a method, by the library, on the unpadded text."""
    T = len(seen[0])
    n = -(-T // BLOCK)
    profile = hads.Profile.load(shipped.PROFILES[0])
    if method == "hads":
        plan = hads.make(profile, DENSITY, length=T)
        blocks = jax.vmap(lambda layer, q, k: plan.blocks(layer, q[None], k[None])[0])
        return np.asarray(blocks(jnp.arange(8), seen[1].q, seen[1].k))
    if method == "oracle":
        counts = oracle_counts(profile, DENSITY, "kl", T)
        scores = jax.lax.map(lambda x: baselines.oracle(*x, BLOCK), (seen[1].q, seen[1].k))
        return np.asarray(selection.keep_top(scores, counts))
    return baselines.fixed(method, DENSITY, 8, 8, n)


def test_a_text_is_read_in_tokens_that_cover_it(read, story, reader):
    assert "".join(token["text"] for token in read["tokens"][1:]) == story
    assert [token["id"] for token in read["tokens"]] == reader.tokenizer.encode(story)
    assert all(story[x["begin"] : x["end"]] == x["text"] for x in read["tokens"][1:])
    assert (read["block"], read["is_cut"], read["profile"]) == (16, False, "profile-16")
    assert read["length"] % BLOCK  # the last row block is short, which padding must not change


def test_entropies_are_those_of_the_library(read, seen):
    for layer in (0, 5):
        found = hads.measure(*layer_of(seen, layer)[:4], block=BLOCK, curves=())
        assert np.asarray(read["entropy"][layer]) == pytest.approx(
            np.asarray(found.entropy), abs=CLOSE
        )
        blocks = np.asarray(read["block_entropy"][layer])
        assert blocks == pytest.approx(np.asarray(found.block_entropy), abs=CLOSE)


@pytest.mark.parametrize(
    "method", ["hads", pytest.param("sink_window", marks=pytest.mark.slow), "bigbird", "oracle"]
)
def test_blocks_mass_and_kl_are_those_of_the_library(shipped_client, read, reader, seen, method):
    found = asked(shipped_client, read, "method", method, predict=False)
    kept = kept_by(reader, seen, method)
    n = kept.shape[-1]
    assert found["density_ratio"] == pytest.approx(kept.sum() / (64 * n * (n + 1) / 2))
    layer, head = 4, 1
    shown = asked(shipped_client, read, f"heads/{layer}/{head}", method)
    assert np.array_equal(shown["chosen"], kept[layer, head])
    quality = compare(*layer_of(seen, layer)[:4], jnp.asarray(kept[layer])[None], block=BLOCK)
    assert np.asarray(found["kl"][layer]) == pytest.approx(np.asarray(quality.kl[0]), abs=CLOSE)
    recall = np.asarray(quality.recall[0])
    assert np.asarray(found["recall"][layer]) == pytest.approx(recall, abs=CLOSE)
    mass = np.exp(np.asarray(baselines.oracle(*layer_of(seen, layer)[:2], BLOCK)))[head]
    assert np.asarray(shown["mass"]) == pytest.approx(mass, abs=CLOSE)
    dropped = (mass * ~kept[layer, head]).sum(-1)
    assert np.asarray(shown["dropped"]) == pytest.approx(dropped, abs=CLOSE)


@pytest.mark.parametrize(
    "method", ["hads", *(pytest.param(x, marks=pytest.mark.slow) for x in ("bigbird", "oracle"))]
)
def test_the_next_word_is_what_the_copied_python_prints(shipped_client, read, method):
    found = asked(shipped_client, read, "method", method)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(found["python"], {})
    wanted = [line.split(" ", 1) for line in printed.getvalue().splitlines()]
    assert len(wanted) == 5
    for (probability, word), shown in zip(wanted, found["next"], strict=False):
        assert shown["probability"] == pytest.approx(float(probability), abs=CLOSE)
        assert shown["text"] == eval(word)


@pytest.mark.slow
def test_words_along_the_text_are_compared_as_the_library_compares_them(
    shipped_client, read, reader, seen
):
    found = asked(shipped_client, read, "words", "sink_window")
    tokens, subject = seen[0], reader.subject
    kept = jnp.asarray(kept_by(reader, seen, "sink_window"))

    @jax.jit
    def passes(weights):
        def choose(layer, *attention):
            return selection.to_mask(kept[layer], len(tokens), BLOCK)

        dense = subject.hidden(weights, tokens)
        sparse = subject.sparse_hidden(weights, tokens, choose)
        logits = lambda x: subject.logits(weights, x)  # noqa: E731
        best = [logits(x)[:-1].argmax(-1) for x in (dense, sparse)]
        return compare_predictions(dense, sparse, tokens, logits), best

    wanted, (dense, sparse) = passes(subject.weights)
    assert found["logit_kl"] == pytest.approx(float(wanted.logit_kl), abs=CLOSE)
    assert found["loss_nats"] == pytest.approx(float(wanted.loss), abs=CLOSE)
    assert found["dense_loss_nats"] == pytest.approx(float(wanted.dense_loss), abs=CLOSE)
    changed = [word["position"] for word in found["changed"]]
    assert changed == np.flatnonzero(np.asarray(dense != sparse)).tolist()


def test_a_density_that_was_shown_before_runs_no_pass(shipped_client, read, monkeypatch):
    first = asked(shipped_client, read, "method", "random", 0.7)
    for name in ("sparse", "sparse_last"):
        monkeypatch.setattr(passes, name, None)  # a pass would raise
    again = asked(shipped_client, read, "method", "random", 0.7)
    assert again["next"] == first["next"]


def test_nothing_changes_at_density_1(shipped_client, read):
    found = asked(shipped_client, read, "method", "random", 1.0)
    assert found["mean_recall"] == pytest.approx(1, abs=1e-5)
    assert found["next_kl"] == pytest.approx(0, abs=1e-5)
    assert [x["id"] for x in found["next"]] == [x["id"] for x in read["dense_next"]]
    assert asked(shipped_client, read, "words", "random", 1.0)["changed"] == []


def test_the_model_names_its_methods_and_the_heads_of_its_examples(shipped_client, read):
    model = shipped_client.get("/api/play/model").json()
    assert [x["name"] for x in model["methods"]] == list(METHODS)
    assert model["longest"] == {"16": 512, "64": 2048}
    heads = {x["name"]: (x["layer"], x["head"]) for x in model["examples"]}
    assert len(set(heads.values())) == 4
    assert heads["a long text"] == (None, None)
    assert all(0 <= layer < 8 for layer, _ in list(heads.values())[:3])


@pytest.mark.parametrize(
    ("path", "query", "status", "why"),
    [
        ("method", {"density": 0.01}, 422, "density 0.01 is below"),
        ("method", {"density": 0.9, "method": "magic"}, 422, "method 'magic' is not one of"),
        ("method", {"density": "nan"}, 422, ""),
        ("method", {}, 422, ""),
        ("heads/8/0", {"density": 0.9}, 404, "the model has 8 layers of 8 heads"),
        ("heads/-1/0", {"density": 0.9}, 422, ""),
    ],
)
def test_what_cannot_be_asked_of_a_text_is_refused(shipped_client, read, path, query, status, why):
    answer = shipped_client.get(f"/api/play/texts/{read['id']}/{path}", params=query)
    assert answer.status_code == status
    assert why in str(answer.json()["detail"])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"text": ""}, 422),
        ({"text": "a" * 20_001}, 413),
        ({"text": "a", "block": 17}, 422),
        ({"text": "\ud800"}, 422),
        ({"text": 3}, 422),
        ({}, 422),
    ],
)
def test_what_is_not_a_text_is_refused(shipped_client, body, status):
    content = str(body).replace("'", '"')
    answer = shipped_client.post(
        "/api/play/texts", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status


def test_a_text_that_is_not_kept_is_404(shipped_client):
    answer = shipped_client.get("/api/play/texts/none/method?density=0.5")
    assert answer.status_code == 404
    assert "send it again" in answer.json()["detail"]


def test_texts_are_kept_up_to_a_number_of_bytes(reader, read, monkeypatch):
    """The last one stays; what alone needs more than all may is refused with what fits."""
    text = reader.text(read["id"])
    size = len(text.tokens)
    assert sum(x.nbytes for x in text.seen) == reader._bytes(size, BLOCK)
    assert text.nbytes > reader._bytes(size, BLOCK) + text.dense.nbytes
    others = {name: dataclasses.replace(text, id=name) for name in ("b", "c", "d")}
    monkeypatch.setattr(reader, "_texts", collections.OrderedDict(others))
    monkeypatch.setattr(reader, "_most_bytes", 2 * text.nbytes)
    reader._evict()
    assert list(reader._texts) == ["c", "d"]
    monkeypatch.setattr(reader, "_most_bytes", 1)
    reader._evict()
    assert list(reader._texts) == ["d"]
    monkeypatch.setattr(reader, "_most_bytes", reader._bytes(512, BLOCK) - 1)
    with pytest.raises(LargeTextError, match=r"of 300 tokens .* MiB are .* at most 256 tokens"):
        reader._check_bytes(300, BLOCK)
    reader._check_bytes(256, BLOCK)


def test_a_text_that_is_too_large_is_413(shipped_client, reader, monkeypatch):
    monkeypatch.setattr(reader, "_most_bytes", 1000)
    answer = shipped_client.post("/api/play/texts", json={"text": "not read before"})
    assert answer.status_code == 413
    assert "0 MiB are kept of all texts; raise Limits.text_bytes" in answer.json()["detail"]


def test_one_head_is_computed_alone(reader, read):
    text = reader.text(read["id"])
    blocks = reader.choice(text, "hads", DENSITY).blocks
    np.testing.assert_array_equal(text.kept(blocks[3, 5], (3, 5)), text.kept(blocks)[3, 5])


@pytest.mark.parametrize(
    "text",
    [
        "<|endoftext|>",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("a", "é" * 30, "\x00\x1b", "𝕏 🙂 ﷽")),
    ],
)
def test_odd_texts_are_read(shipped_client, text):
    answer = shipped_client.post("/api/play/texts", json={"text": text})
    assert answer.status_code == 200
    found = answer.json()
    density = found["least_density_ratio"]
    query = {"density": min(1, density + 0.01), "predict": False}
    answer = shipped_client.get(f"/api/play/texts/{found['id']}/method", params=query)
    assert answer.status_code == 200


@pytest.mark.slow
def test_a_model_without_a_profile_is_shown_with_fixed_patterns():
    """GPT-2 with a small context; the package's profiles are of another model."""
    path = Path(__file__).parent.parent / "model" / "fixtures" / "gpt2"
    with client_of(model=path) as client:
        model = client.get("/api/play/model").json()
        assert (model["is_shipped"], model["examples"]) == (False, [])
        assert "hads" not in [method["name"] for method in model["methods"]]
        read = client.post("/api/play/texts", json={"text": "It was a dark night."}).json()
        assert (read["profile"], read["block"]) == (None, 64)
        found = asked(client, read, "method", "sink_window", 1.0)
        assert found["next_kl"] == pytest.approx(0, abs=1e-5)
        answer = client.get(f"/api/play/texts/{read['id']}/method?method=hads&density=1")
        assert answer.status_code == 422
        assert "needs a profile of this model with blocks of 64" in answer.json()["detail"]


@pytest.mark.second_python
@pytest.mark.parametrize(
    "kind", ["gpt_oss_attention", pytest.param("gemma2", marks=pytest.mark.slow)]
)
def test_soft_caps_windows_and_sinks_are_read_as_the_library_measures_them(kind):
    subject = Observer(test_gemma.MODELS[kind]())
    tokens = np.random.default_rng(0).integers(0, subject.vocab_size, 32)
    found, _ = passes.read(subject.weights, jnp.asarray(tokens), 32, subject=subject, block=4)
    np.testing.assert_allclose(found.mass.sum(-1) + found.sinks, 1, atol=1e-5)
    wanted = subject.profile([tokens], block=4, curves=()).statistics
    np.testing.assert_allclose(found.entropy[..., 1:].mean(-1), wanted.entropy, atol=1e-5)
    blocks = found.block_entropy[..., 4:].mean(-1)
    np.testing.assert_allclose(blocks, wanted.block_entropy, atol=1e-5)
    np.testing.assert_allclose(np.exp(found.row_mass), wanted.mass, atol=1e-5)


@pytest.mark.second_python
@pytest.mark.parametrize(
    "kind", ["gpt_oss_attention", pytest.param("gemma2", marks=pytest.mark.slow)]
)
def test_the_last_token_alone_has_the_hidden_states_of_the_whole_pass(kind):
    """Windows, soft caps, sinks, shared kv heads; the last row block is short."""
    subject = Observer(test_gemma.MODELS[kind]())
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, subject.vocab_size, 32)
    given = baselines.fixed("random", 0.6, subject.layers, subject.heads, 8)
    counts = given.sum(-1, dtype=np.int32)
    for source in range(len(passes.SOURCES)):
        inputs = (subject.weights, jnp.asarray(tokens), 30, counts, given, source)
        whole = passes.sparse(*inputs, subject=subject, block=4)
        last = passes.sparse_last(*inputs, subject=subject, block=4)
        np.testing.assert_allclose(last[0], whole[29], atol=1e-5)
