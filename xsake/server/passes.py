"""The compiled passes of the page Play: one dense pass over a text, one sparse pass for a method.

    tokens [P], of which `length` are the text ─┬─ read    masses, scores, entropies; hidden states
                                                └─ sparse  hidden states, with a method's blocks

A text is padded to one of a few lengths, so that many texts share a compiled program. Padding
comes after the text: causality hides it from every token of the text, and the mean query of a last
row block that is short is kept by filling the row block up with that mean.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, PyTree

from xsake import block_scores, selection
from xsake.block_mask import BlockMask
from xsake.hads import chunks
from xsake.hads.statistics import AnyArray, entropy
from xsake.model.observer import Observer

# Where a sparse pass has its blocks from: given, or ranked on each layer's own input.
SOURCES = ("given", "mean_query", "mass")
ROWS_AT_ONCE = 256  # of logits, which are vocab_size floats each


class Seen(NamedTuple):
    """What a dense pass sees in every layer; only rows below the text's length are meaningful."""

    mass: Float[AnyArray, "*layers N P n"]  # attention of every query to every block
    entropy: Float[AnyArray, "*layers N P"]  # of every query over tokens, ÷ ln(visible keys)
    block_entropy: Float[AnyArray, "*layers N P"]  # over blocks, ÷ ln(visible blocks)
    scores: Float[AnyArray, "*layers N n n"]  # of mean_query
    row_mass: Float[AnyArray, "*layers N n n"]  # log of a row block's mean mass: the oracle's score


@functools.partial(jax.jit, static_argnames=("subject", "block"))
def read(
    weights: PyTree, tokens: Int[Array, " P"], length: Any, *, subject: Observer, block: int
) -> tuple[Seen, Float[Array, "P width"]]:
    """(what every head attends to, final hidden states) with dense attention."""
    P = len(tokens)
    layers, N, n = subject.layers, subject.heads, P // block

    def fold(layer: Any, seen: Any, carry: Seen) -> Seen:
        q, k = seen.q[0], seen.k[0]
        new = _seen(q, k, block, length)
        return jax.tree.map(lambda every, x: every.at[layer].set(x), carry, new)

    start = Seen(
        jnp.zeros((layers, N, P, n)),
        jnp.zeros((layers, N, P)),
        jnp.zeros((layers, N, P)),
        jnp.zeros((layers, N, n, n)),
        jnp.zeros((layers, N, n, n)),
    )
    found = subject.observe(weights, tokens[None], fold, start)
    return found, subject.hidden(weights, tokens)


def _seen(q: Array, k: Array, block: int, length: Any) -> Seen:
    """`Seen` of one layer."""
    cut = chunks.cut(q, k, block)

    def part(number: Array) -> tuple[Array, ...]:
        chunk = cut.attend(number)
        chunk = chunk._replace(real=chunk.positions < length)
        mass = chunk.p.sum(-1)
        keys = jnp.maximum(chunk.positions + 1, 2).astype(jnp.float32)
        blocks = jnp.maximum(chunk.positions // block + 1, 2).astype(jnp.float32)
        tokens = chunk.p.reshape(*chunk.p.shape[:2], -1)
        return (
            mass,
            entropy(tokens) / jnp.log(keys),
            entropy(mass) / jnp.log(blocks),
            chunk.mean(mass),
        )

    found = lax.map(part, jnp.arange(cut.chunks))
    # [chunks, N, rows, …] -> [N, chunks · rows, …], without the padding of the last chunk
    mass, of_tokens, of_blocks, rows = (
        jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in found
    )
    P = q.shape[0]
    return Seen(
        mass[:, :P],
        of_tokens[:, :P],
        of_blocks[:, :P],
        block_scores.estimate("mean_query", filled(q, block, length), k, block),
        jnp.log(rows[:, : cut.n] + 1e-30),
    )


def filled(q: Float[Array, "P N H"], block: int, length: Any) -> Float[Array, "P N H"]:
    """q with the mean of the text's last row block in the padding: means of row blocks stay."""
    position = jnp.arange(q.shape[0])
    last = (length - 1) // block * block
    own = ((position >= last) & (position < length)).astype(jnp.float32)
    mean = (q * own[:, None, None]).sum(0) / own.sum()
    return jnp.where((position < length)[:, None, None], q, mean[None]).astype(q.dtype)


@functools.partial(jax.jit, static_argnames=("subject", "block"))
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
) -> Float[Array, "P width"]:
    """Final hidden states if every layer visits a method's blocks only.

    Args:
      weights: of the subject.
      tokens: the text and its padding.
      length: of the text.
      counts: blocks that each row block keeps, if they are ranked.
      given: the blocks, if they are given.
      source: index into SOURCES, traced: all methods share a compiled program.
      subject: the model.
      block: tokens per block.
    """

    def by_query(q: Array, k: Array, layer: Any) -> Array:
        scores = block_scores.estimate("mean_query", filled(q, block, length), k, block)
        return selection.keep_top(scores, counts[layer])

    def by_mass(q: Array, k: Array, layer: Any) -> Array:
        return selection.keep_top(_row_mass(q, k, block, length), counts[layer])

    def as_given(q: Array, k: Array, layer: Any) -> Array:
        return given[layer]

    def choose(layer: Any, q: Array, k: Array, v: Array, kernel: Array) -> BlockMask:
        blocks = lax.switch(source, [as_given, by_query, by_mass], q[0], k[0], layer)
        return selection.to_mask(blocks, len(tokens), block)

    return subject.sparse_hidden(weights, tokens, choose)


def _row_mass(q: Array, k: Array, block: int, length: Any) -> Array:
    """`baselines.oracle` of the first `length` tokens."""
    cut = chunks.cut(q, k, block)

    def mass(number: Array) -> Array:
        chunk = cut.attend(number)
        return chunk._replace(real=chunk.positions < length).mean(chunk.p.sum(-1))

    found = lax.map(mass, jnp.arange(cut.chunks))
    rows = jnp.moveaxis(found, 0, 1).reshape(q.shape[1], -1, cut.n)[:, : cut.n]
    return jnp.log(rows + 1e-30)


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
