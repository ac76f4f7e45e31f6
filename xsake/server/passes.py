"""The compiled passes of the page Play: one dense pass over a text, one sparse pass for a method.

    tokens [P], of which `length` are the text ─┬─ read         masses, entropies; hidden states
                                                ├─ sparse       hidden states, by a method's blocks
                                                └─ sparse_last  the same of the last token

A text is padded to one of a few lengths, so that many texts share a compiled program. Padding
comes after the text: causality hides it from every token of the text, and `block_scores.filled`
keeps it out of the mean query of a short last row block.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int, PyTree

from xsake import block_scores, dot_product_attention, selection
from xsake.hads import chunks
from xsake.hads.chunks import Chunk, Chunks, Softmax
from xsake.hads.statistics import AnyArray
from xsake.model import Transformer
from xsake.model.attend import by_mask
from xsake.model.observer import Observer
from xsake.model.positions import document_positions
from xsake.parallel import sharding

# Where a sparse pass has its blocks from: given, or ranked on each layer's own input.
SOURCES = ("given", "mean_query", "mass")
ROWS_AT_ONCE = 256  # of logits, which are vocab_size floats each
# (layer, q, k, softmax) -> the blocks that the layer visits
Chosen = Callable[[Any, Array, Array, Softmax], Bool[Array, "N n n"]]


class Seen(NamedTuple):
    """What a dense pass sees in every layer; only rows below the text's length are meaningful."""

    mass: Float[AnyArray, "*layers N P n"]  # attention of every query to every block
    entropy: Float[AnyArray, "*layers N P"]  # of every query over tokens, ÷ ln(visible keys)
    block_entropy: Float[AnyArray, "*layers N P"]  # over blocks, ÷ ln(visible blocks)
    scores: Float[AnyArray, "*layers N n n"]  # of mean_query
    row_mass: Float[AnyArray, "*layers N n n"]  # log of a row block's mean mass: the oracle's score
    sinks: Float[AnyArray, "*layers N P"]  # attention of every query to sinks, if there are any


@functools.partial(jax.jit, static_argnames=("subject", "block"))
def read(
    weights: PyTree, tokens: Int[Array, " P"], length: Any, *, subject: Observer, block: int
) -> tuple[Seen, Float[Array, "P width"]]:
    """(what every head attends to, final hidden states) with dense attention."""
    P = len(tokens)
    layers, N, n = subject.layers, subject.heads, P // block
    model = nnx.merge(subject.graph, weights)
    how: Any = {"implementation": subject.implementation, "mesh": model.mesh}
    attend = by_mask(model.config, None, 1, P, **how)

    def watched(
        layer: Any, q: Array, k: Array, v: Array, found: Seen, *sinks: Array
    ) -> tuple[Array, Seen]:
        out, _ = attend(layer, q, k, v, None, *sinks)
        q, k = sharding.everywhere((q, k), model.mesh)
        new = _seen(q[0], k[0], block, length, model.softmax(layer))
        return out, jax.tree.map(lambda every, x: every.at[layer].set(x), found, new)

    start = Seen(
        jnp.zeros((layers, N, P, n)),
        jnp.zeros((layers, N, P)),
        jnp.zeros((layers, N, P)),
        jnp.zeros((layers, N, n, n)),
        jnp.zeros((layers, N, n, n)),
        jnp.zeros((layers, N, P)),
    )
    hidden, found = model.run(tokens[None], document_positions(1, P), watched, start)
    return found, hidden[0]


def _seen(q: Array, k: Array, block: int, length: Any, softmax: Softmax) -> Seen:
    """`Seen` of one layer."""

    def part(chunk: Chunk, keys: Array) -> tuple[Array, ...]:
        mass = chunk.p.sum(-1)
        visible, blocks = (softmax.outcomes(chunk.positions, size) for size in (1, block))
        return (
            mass,
            _token_entropy(chunk, keys, softmax) / jnp.log(visible),
            chunk.entropy(mass) / jnp.log(blocks),
            chunk.mean(mass),
            chunk.with_sinks(jnp.zeros(mass.shape[:2])),
        )

    mass, of_tokens, of_blocks, rows, sinks = _by_chunks(q, k, block, length, softmax, part)
    P = q.shape[0]
    return Seen(
        mass[:, :P],
        of_tokens[:, :P],
        of_blocks[:, :P],
        block_scores.estimate("mean_query", block_scores.filled(q, length, block), k, block),
        jnp.log(rows[:, : P // block] + 1e-30),
        sinks[:, :P],
    )


def _by_chunks(
    q: Array,
    k: Array,
    block: int,
    length: Any,
    softmax: Softmax,
    function: Callable[[Chunk, Array], Any],
) -> Any:
    """function(chunk, its keys) of all chunks of queries, [N, rows, …]; kv blocks are padded to n.

    A chunk attends to the keys before the end of its strip, so that most of what causality forbids
    is not computed.
    """
    cut = chunks.cut(q, k, block, softmax=softmax)
    edges = sorted({cut.chunks * i // block_scores.STRIPS for i in range(block_scores.STRIPS + 1)})
    found = []
    for begin, end in itertools.pairwise(edges):
        blocks = min(end * cut.per_chunk, cut.n)
        strip = cut._replace(k=cut.k[: blocks * block], n=blocks)

        def one(number: Array, strip: Chunks = strip) -> Any:
            chunk = strip.attend(number)
            return function(chunk._replace(real=chunk.positions < length), strip.k)

        found.append(jax.tree.map(_flat(cut.n), lax.map(one, jnp.arange(begin, end))))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *found)


def _flat(n: int) -> Callable[[Array], Array]:
    """[chunks, N, rows, blocks] -> [N, chunks · rows, n], and [chunks, N, rows] likewise."""

    def flat(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        x = x.reshape(x.shape[0], -1, *x.shape[3:])
        return jnp.pad(x, ((0, 0), (0, 0), (0, n - x.shape[2]))) if x.ndim == 3 else x

    return flat


def _token_entropy(chunk: Chunk, keys: Array, softmax: Softmax) -> Float[Array, "N Q"]:
    """-Σ p ln p = logsumexp - Σ p s, with Σ p s = q · Σ p k / √H: a product, not logarithms.

    With a soft cap or sinks s is another one, or p has another sum: then by logarithms.
    """
    Q, N, H = chunk.q.shape
    if softmax.soft_cap is not None or softmax.sinks is not None:
        return chunk.entropy(chunk.p.reshape(N, Q, -1))
    K = keys.shape[1]
    p = chunk.p.reshape(K, N // K, Q, -1)
    mean_key = jnp.einsum("kgqs,skh->kgqh", p, keys, preferred_element_type=jnp.float32)
    mean_logit = jnp.einsum("qnh,nqh->nq", chunk.q, mean_key.reshape(N, Q, H)) / math.sqrt(H)
    return chunk.logsumexp - mean_logit


@functools.partial(jax.jit, static_argnames=("subject", "block", "band"))
def sparse(
    weights: PyTree,
    tokens: Int[Array, " P"],
    length: Any,
    counts: Int[Array, "layers N n"],
    given: Bool[Array, "layers N n n"],
    source: Any,
    *,
    subject: Observer,
    block: int,
    band: int = 0,
) -> Float[Array, "P width"]:
    """Final hidden states if every layer visits a method's blocks only.

    Args:
      weights: of the subject.
      tokens: the text and its padding.
      length: of the text.
      counts: blocks that each row block keeps, if they are ranked; at least the forced ones and
        at most those that causality allows, so that comparing ranks is `selection.keep_top`.
      given: the blocks, if they are given.
      source: index into SOURCES, traced: all methods share a compiled program.
      subject: the model.
      block: tokens per block.
      band: forced blocks before the diagonal, if they are ranked.
    """
    model, P = nnx.merge(subject.graph, weights), len(tokens)
    chosen = _chosen(counts, given, source, length, block, band)
    attend = _by_chosen(model, chosen, block, subject.implementation)
    return model.run(tokens[None], document_positions(1, P), attend)[0][0]


def _by_chosen(
    model: Transformer, chosen: Chosen, block: int, implementation: str | None
) -> Callable[..., tuple[Array, Any]]:
    """The attention of a layer with all queries, for `Transformer.run`."""

    def attend(
        layer: Any, q: Array, k: Array, v: Array, state: Any, *sinks: Array
    ) -> tuple[Array, Any]:
        P, seen = q.shape[1], sharding.everywhere((q[0], k[0]), model.mesh)
        mask = selection.to_mask(chosen(layer, *seen, model.softmax(layer)), P, block)
        how: Any = {"implementation": implementation, "mesh": model.mesh}
        return by_mask(model.config, mask, 1, P, **how)(layer, q, k, v, state, *sinks)

    return attend


def _chosen(counts: Array, given: Array, source: Any, length: Any, block: int, band: int) -> Chosen:
    """The blocks by one of SOURCES."""

    def by_query(q: Array, k: Array, layer: Any, softmax: Softmax) -> Array:
        queries = block_scores.filled(q, length, block)
        scores = block_scores.estimate("mean_query", queries, k, block)
        return selection.ranks(scores, band) < counts[layer][..., None]

    def by_mass(q: Array, k: Array, layer: Any, softmax: Softmax) -> Array:
        scores = _row_mass(q, k, block, length, softmax)
        return selection.ranks(scores, band) < counts[layer][..., None]

    def as_given(q: Array, k: Array, layer: Any, softmax: Softmax) -> Array:
        return given[layer]

    sources = [as_given, by_query, by_mass]
    return lambda layer, q, k, softmax: lax.switch(source, sources, q, k, layer, softmax)


@functools.partial(jax.jit, static_argnames=("subject", "block", "band"))
def sparse_last(
    weights: PyTree,
    tokens: Int[Array, " P"],
    length: Any,
    counts: Int[Array, "layers N n"],
    given: Bool[Array, "layers N n n"],
    source: Any,
    *,
    subject: Observer,
    block: int,
    band: int = 0,
) -> Float[Array, "1 width"]:
    """`sparse` of the text's last token: the last layer computes its row block only."""
    model, P = nnx.merge(subject.graph, weights), len(tokens)
    chosen = _chosen(counts, given, source, length, block, band)
    row = (length - 1) // block
    rows = functools.partial(
        lax.dynamic_slice_in_dim, start_index=row * block, slice_size=block, axis=1
    )
    of_all = _by_chosen(model, chosen, block, subject.implementation)

    def attend(
        layer: Any, q: Array, k: Array, v: Array, state: Any, *sinks: Array
    ) -> tuple[Array, Any]:
        if q.shape[1] == P:  # not the last layer, unless the text is one row block
            return of_all(layer, q, k, v, state, *sinks)
        softmax = model.softmax(layer)
        # scores of a row block depend on its own queries only: the others may be zeros
        zeros = jnp.zeros((1, P, *q.shape[2:]), q.dtype)
        queries = lax.dynamic_update_slice_in_dim(zeros, q, row * block, 1)
        blocks = chosen(layer, queries[0], k[0], softmax)
        own, key = row * block + jnp.arange(block)[:, None], jnp.arange(P)[None]
        near = key <= own if softmax.window is None else (key <= own) & (key > own - softmax.window)
        mask = jnp.repeat(blocks[:, row], block, axis=-1)[:, None] & near
        how: Any = {"implementation": subject.implementation, "sinks": sinks[0] if sinks else None}
        cap = model.config.soft_cap
        return dot_product_attention(q, k, v, mask=mask[None], logits_soft_cap=cap, **how), state

    hidden, _ = model.run(tokens[None], document_positions(1, P), attend, rows=rows)
    return lax.dynamic_slice_in_dim(hidden[0], (length - 1) % block, 1)


def _row_mass(q: Array, k: Array, block: int, length: Any, softmax: Softmax) -> Array:
    """`baselines.oracle` of the first `length` tokens."""

    def mass(chunk: Chunk, keys: Array) -> Array:
        return chunk.mean(chunk.p.sum(-1))

    rows = _by_chunks(q, k, block, length, softmax, mass)
    return jnp.log(rows[:, : q.shape[0] // block] + 1e-30)


@functools.partial(jax.jit, static_argnames=("subject",))
def log_probabilities(
    weights: PyTree, hidden: Float[Array, "R width"], *, subject: Observer
) -> Float[Array, "R vocab"]:
    """Of the next token after each of R tokens."""
    return jax.nn.log_softmax(subject.logits(weights, hidden), axis=-1)


class Words(NamedTuple):
    """Predictions along a text; entry i is about token i + 1."""

    best: Int[AnyArray, "*both P"]  # the most likely token: dense, sparse
    best_probability: Float[AnyArray, "*both P"]
    loss: Float[AnyArray, "*both P"]
    kl: Float[AnyArray, "*chunks P"]  # KL(dense ‖ sparse)


@functools.partial(jax.jit, static_argnames=("subject",))
def words(
    weights: PyTree,
    dense: Float[Array, "P width"],
    sparse: Float[Array, "P width"],
    tokens: Int[Array, " P"],
    *,
    subject: Observer,
) -> Words:
    """Compares the predictions of two passes at every token."""
    P, rows = len(tokens), min(ROWS_AT_ONCE, len(tokens))

    def part(inputs: tuple[Array, Array, Array]) -> Words:
        *hidden, following = inputs
        p, r = (jax.nn.log_softmax(subject.logits(weights, x), axis=-1) for x in hidden)
        both = jnp.stack([p, r])
        return Words(
            both.argmax(-1),
            jnp.exp(both.max(-1)),
            -jnp.take_along_axis(both, following[None, :, None], -1)[..., 0],
            (jnp.exp(p) * (p - r)).sum(-1),
        )

    following = jnp.concatenate([tokens[1:], tokens[:1]])
    cut = [x.reshape(P // rows, rows, *x.shape[1:]) for x in (dense, sparse, following)]
    found = lax.map(part, tuple(cut))
    best, probability, loss = (jnp.moveaxis(x, 0, 1).reshape(2, P) for x in found[:3])
    return Words(best, probability, loss, found.kl.reshape(P))
