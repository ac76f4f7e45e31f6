"""generate: prompts in, tokens out, through a cache that is filled in chunks and read in blocks.

    prompts ─ prefill, chunk after chunk ─ first token ─ bursts of decode steps ─ tokens
               attention as the model's,                 one query a row against the cache:
               or by a mask                              dense, or a budget of blocks per head

Rows are left-aligned and need not be equal: each has its own length in the cache. A burst is one
compiled loop of some steps, after which the host hands tokens on; its cache is updated in place.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake.block_mask import BLOCK, BlockMask
from xsake.masks.rule import Rule
from xsake.model.attend import Reading, by_cache, by_chunk, by_mask, is_made
from xsake.model.config import Config
from xsake.model.kv_cache import KVCache
from xsake.model.sampling import Sampling, sample
from xsake.model.transformer import Transformer

__all__ = ["Completion", "Sampling", "generate", "stream"]

CHUNK = 2048  # prompt tokens of one pass
BURST = 16  # decode steps between two looks of the host
REFRESH = 4  # decode steps that a choice of blocks serves
FORCED = 2  # blocks that a token always reads: the first and its own
SPAN = 256  # the shortest stretch of the cache that a step is compiled for; doubled as it fills


class Completion(NamedTuple):
    """A row's new tokens and, with the last of them, why it ended.

    "stop": at a stop token, which is left out; "length": at max_tokens; None: it goes on.
    """

    tokens: list[int]
    reason: str | None


def generate(
    model: Transformer, prompts: Sequence[Sequence[int]], **options: Any
) -> list[Completion]:
    """All of `stream` at once: a Completion for every prompt.

    >>> from flax import nnx
    >>> from xsake.model import PRESETS, Transformer, generate
    >>> model = Transformer(PRESETS["tiny"], rngs=nnx.Rngs(0))
    >>> [len(row.tokens) for row in generate(model, [[1, 2, 3], [4]], max_tokens=3, stop=())]
    [3, 3]
    """
    rows = [Completion([], None) for _ in prompts]
    for news in stream(model, prompts, **options):
        rows = [
            Completion(row.tokens + new.tokens, row.reason or new.reason)
            for row, new in zip(rows, news, strict=True)
        ]
    return rows


def stream(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 64,
    sampling: Sampling | None = None,
    stop: Sequence[int] | None = None,
    mask: Any = None,
    budget: Any = None,
    refresh: int = REFRESH,
    chunk: int = CHUNK,
    burst: int = BURST,
) -> Iterator[list[Completion]]:
    """Yields what is new for every prompt: first one token each, then up to `burst` at a time.

    A model that decodes much is faster as `model.unstacked()`.

    Args:
      model: computes, and keeps its cache, in its own dtype.
      prompts: token ids, one list a row; lengths may differ.
      max_tokens: new tokens of a row at most.
      sampling: default greedy.
      stop: tokens that end a row; default the config's eos.
      mask: narrows attention while prompts are read: a Rule, or a callable (layer, q, k) ->
        BlockMask. For prompts longer than `chunk` the callable takes `first` too: the position of
        the first query; k then holds all keys from position 0 on, and what lies after the queries
        is not yet written. A mask that has `at`, as a plan has, is made mask.at(tokens) before.
      budget: what a head reads of the cache for one token; None: all. Whole numbers are blocks,
        fractions a share of the blocks so far, rounded up; one for all, [heads] or [layers, heads];
        with one for each kv head, the query heads of a group choose and read together. The first
        block and the current one are always among them.
      refresh: one token in so many chooses blocks, by its exact attention to all keys so far; those
        that follow read the same. 1 is the most faithful, more is faster.
      chunk: prompt tokens of one pass.
      burst: tokens between two yields.
    """
    config = model.config
    lengths = _check_prompts(config, prompts, max_tokens)
    for name, value in (("chunk", chunk), ("burst", burst), ("refresh", refresh)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    budget = None if budget is None else check_budget(config, budget)
    _check_mask(mask, int(lengths.max()) > chunk, chunk)
    return _stream(
        model,
        prompts,
        lengths,
        max_tokens,
        sampling or Sampling(),
        _ended_by(config.eos if stop is None else stop),
        mask,
        budget,
        refresh,
        chunk,
        burst,
    )


def _stream(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    lengths: np.ndarray,
    max_tokens: int,
    sampling: Sampling,
    stop: np.ndarray,
    mask: Any,
    budget: np.ndarray | None,
    refresh: int,
    chunk: int,
    burst: int,
) -> Iterator[list[Completion]]:
    longest = int(lengths.max())
    cache = KVCache.empty(model.config, len(prompts), longest + max_tokens - 1, dtype=model.dtype)
    cache, hidden = prefill(model, cache, prompts, mask=mask, chunk=chunk)
    seed, draw = np.uint32(sampling.seed), dataclasses.replace(sampling, seed=0)
    token, done = _first(model, hidden, cache.length, seed, stop, sampling=draw)
    made, left = jnp.where(done, -1, token)[:, None], max_tokens - 1
    was_done = np.zeros(len(prompts), bool)
    while True:
        tokens, is_done = np.asarray(made), np.asarray(done)
        ended = left == 0
        yield [
            Completion(
                [int(t) for t in row if t >= 0],
                None if before else "stop" if now else "length" if ended else None,
            )
            for row, before, now in zip(tokens, was_done, is_done, strict=True)
        ]
        if ended or is_done.all():
            return
        steps, was_done = min(burst, left), is_done
        longest += steps
        left -= steps
        span = _span(longest, cache)
        cache, token, done, made = _burst(
            model,
            cache,
            token,
            done,
            seed,
            stop,
            np.int32(steps),
            budget,
            sampling=draw,
            span=span,
            entries=entries_of(budget, span, cache.block, refresh),
            refresh=refresh,
            burst=burst,
        )


# ------------------------------------------------------------------------------------------ prompts


def prefill(
    model: Transformer,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    *,
    mask: Any = None,
    chunk: int = CHUNK,
) -> tuple[KVCache, Array]:
    """Reads the prompts into an empty cache: (cache, the last token's hidden state [B, width])."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    cache.check_room(int(lengths.max()))
    if mask is not None and jax.tree_util.all_leaves([mask]):
        mask = jax.tree_util.Partial(mask)  # a plain function: static under jit
    if lengths.max() <= chunk:
        # few lengths are compiled for; run-time masks look at whole blocks, so theirs stay close
        step = min(256, max(16, 1 << (int(lengths.max()) - 1).bit_length()))
        step = BLOCK if is_made(mask) else step
        tokens = _padded(prompts, -(-int(lengths.max()) // step) * step)
        mask = mask.at(tokens.shape[1]) if hasattr(mask, "at") else mask
        return _prefill_whole(model, cache, tokens, jnp.asarray(lengths), mask)
    hidden = jnp.zeros((len(prompts), model.config.width), model.dtype)
    count = -(-int(lengths.max()) // chunk)
    tokens = _padded(prompts, count * chunk)
    span = _span(int(lengths.max()), cache)
    mask = mask.at(span) if hasattr(mask, "at") else mask
    for first in range(0, count * chunk, chunk):
        cache, hidden = _prefill_chunk(
            model,
            cache,
            tokens[:, first : first + chunk],
            jnp.clip(lengths - first, 0, chunk),
            np.int32(first),
            mask,
            hidden,
            span=span,
        )
    return cache, hidden


@functools.partial(jax.jit, donate_argnames="cache")
def _prefill_whole(
    model: Transformer, cache: KVCache, tokens: Array, count: Array, mask: Any
) -> tuple[KVCache, Array]:
    B, T = tokens.shape
    inside = by_mask(model.config, mask, B, T, implementation=model.implementation)

    def attend(layer: Any, q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
        return inside(layer, q, k, v, None)[0], cache.append(layer, k, v, count)

    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    hidden, cache = model.run(tokens, positions, attend, cache)
    return cache.advance(count), hidden[jnp.arange(B), count - 1]


@functools.partial(jax.jit, static_argnames="span", donate_argnames="cache")
def _prefill_chunk(
    model: Transformer,
    cache: KVCache,
    tokens: Array,
    count: Array,
    first: Array,
    mask: Any,
    last: Array,
    *,
    span: int,
) -> tuple[KVCache, Array]:
    """T tokens at positions first … of which row b has count[b]; `last` is kept for ended rows."""
    B, T = tokens.shape
    positions = jnp.broadcast_to(first + jnp.arange(T), (B, T))
    attend = by_chunk(model.config, mask, positions, count, span, model.implementation)
    hidden, cache = model.run(tokens, positions, attend, cache)
    here = hidden[jnp.arange(B), jnp.maximum(count - 1, 0)]
    return cache.advance(count), jnp.where((count > 0)[:, None], here, last)


# ------------------------------------------------------------------------------------------- decode


@functools.partial(jax.jit, static_argnames="sampling")
def _first(
    model: Transformer, hidden: Array, position: Array, seed: Any, stop: Any, *, sampling: Sampling
) -> tuple[Array, Array]:
    token = sample(model.logits(hidden), sampling, seed, position)
    return token, (token[:, None] == stop).any(-1)


@functools.partial(
    jax.jit,
    static_argnames=("sampling", "span", "entries", "refresh", "burst"),
    donate_argnames="cache",
)
def _burst(
    model: Transformer,
    cache: KVCache,
    token: Array,
    done: Array,
    seed: Any,
    stop: Any,
    steps: Any,
    budget: Any,
    *,
    sampling: Sampling,
    span: int,
    entries: int,
    refresh: int,
    burst: int,
) -> tuple[KVCache, Array, Array, Array]:
    """Up to `steps` tokens for every row that is not done, int32 [B, burst]; -1 where none."""
    reading = None if budget is None else Reading(jnp.asarray(budget), entries, refresh)

    def goes_on(state: Any) -> Array:
        i, *_, done, _ = state
        return (i < steps) & ~done.all()

    def step(state: Any, anew: bool = False) -> Any:
        i, cache, lists, token, done, made = state
        count = (~done).astype(jnp.int32)
        hidden, cache, lists = advance(model, cache, lists, token, count, span, reading, anew=anew)
        token = sample(model.logits(hidden), sampling, seed, cache.length)
        done = done | (token[:, None] == stop).any(-1)
        return i + 1, cache, lists, token, done, made.at[:, i].set(jnp.where(done, -1, token))

    made = jnp.full((token.shape[0], burst), -1, jnp.int32)
    lists = None if reading is None else reading.nothing(token.shape[0])
    state = (jnp.int32(0), cache, lists, token, done, made)

    def refreshed(state: Any) -> Any:
        """One step that chooses, and those that read what it chose."""
        state = step(state, anew=True)
        return lax.while_loop(lambda state: goes_on(state) & (state[0] % refresh > 0), step, state)

    state = lax.while_loop(goes_on, step if reading is None else refreshed, state)
    _, cache, _, token, done, made = state
    return cache, token, done, made


def advance(
    model: Transformer,
    cache: KVCache,
    lists: Any,
    token: Array,
    count: Array,
    span: int,
    reading: Reading | None,
    *,
    anew: bool,
) -> tuple[Array, KVCache, Any]:
    """One token a row through the model: (hidden [B, width], the cache with it, the lists)."""
    positions = cache.length[:, None]
    attend = by_cache(model.config, positions, count, span, reading, anew=anew)
    state = cache if reading is None else (cache, lists)
    hidden, state = model.run(token[:, None], positions, attend, state)
    cache, lists = (state, None) if reading is None else state
    return hidden[:, 0], cache.advance(count), lists


# ------------------------------------------------------------------------------------------- checks


def _check_prompts(config: Config, prompts: Any, max_tokens: int) -> np.ndarray:
    """The prompts' lengths, int32 [B]."""
    if not len(prompts):
        raise ValueError("prompts must be a list of lists of token ids, got none")
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty; a model needs one token to go on from")
        if not all(0 <= token < config.vocab_size for token in prompt):
            raise ValueError(
                f"prompt {i} has a token outside 0 … {config.vocab_size - 1}; "
                "was it made by this model's tokenizer?"
            )
        if len(prompt) >= config.context:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens, which fills the model's context of "
                f"{config.context}; shorten it"
            )
        if len(prompt) + max_tokens > config.context:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens, which with max_tokens = {max_tokens} "
                f"exceeds the model's context of {config.context}; shorten it, or ask for at "
                f"most {config.context - len(prompt)}"
            )
    return np.array([len(prompt) for prompt in prompts], np.int32)


def _check_mask(mask: Any, in_chunks: bool, chunk: int) -> None:
    if mask is None or isinstance(mask, Rule):
        return
    if isinstance(mask, BlockMask) or not callable(mask):
        raise TypeError(
            "mask must be a rule of xsake.masks or a callable (layer, q, k) -> BlockMask, "
            f"got {type(mask).__name__}"
        )
    if in_chunks and "first" not in inspect.signature(mask).parameters:
        raise ValueError(
            f"a prompt is longer than chunk = {chunk}, and mask takes no `first` to be asked for "
            "a part of it; raise chunk"
        )


def check_budget(config: Config, budget: Any) -> np.ndarray:
    """The budget as [layers, L], L = heads or kv_heads."""
    given = np.asarray(budget)
    if given.dtype == bool or not np.issubdtype(given.dtype, np.number):
        raise TypeError(f"budget must be numbers, got {given.dtype}")
    wide = given if given.ndim else np.full(config.heads, given)
    wide = np.broadcast_to(wide, (config.layers, wide.shape[-1])) if wide.ndim == 1 else wide
    if wide.ndim != 2 or wide.shape not in (
        (config.layers, config.heads),
        (config.layers, config.kv_heads),
    ):
        raise ValueError(
            f"budget must be one number, [heads] or [layers, heads] with layers = {config.layers} "
            f"and heads = {config.heads} or {config.kv_heads}, got shape {list(given.shape)}"
        )
    if np.issubdtype(wide.dtype, np.floating):
        if not ((wide > 0) & (wide <= 1)).all():
            raise ValueError(
                "a budget of fractions must be above 0 and at most 1, "
                f"got {wide.min()} to {wide.max()}; whole numbers count blocks"
            )
        return wide.astype(np.float32)
    if wide.min() < FORCED:
        raise ValueError(
            f"a budget of {wide.min()} blocks is below {FORCED}: the first and the current block "
            "are always read"
        )
    return wide.astype(np.int32)


def _span(needed: int, cache: KVCache) -> int:
    """A stretch of the cache that holds so many tokens: 256, 512, 1024 … or all of it."""
    span = SPAN
    while span < needed:
        span *= 2
    return min(span, cache.capacity)


def entries_of(budget: np.ndarray | None, span: int, block: int, reach: int) -> int:
    """Blocks that all lists of a row can have together, in the layer that has most."""
    if budget is None:
        return 0
    blocks = span // block
    forced = FORCED - (1 - reach) // block  # a choice for many tokens reaches into more blocks
    wanted = np.ceil(budget * blocks) if budget.dtype == np.float32 else budget
    return int(np.clip(wanted, forced, max(forced, blocks)).sum(1).max())


def _ended_by(tokens: Sequence[int]) -> np.ndarray:
    """Stop tokens, int32, filled up with -1: one more of them is no reason to compile again."""
    filled = np.full(-(-len(tokens) // 8) * 8 or 8, -1, np.int32)
    filled[: len(tokens)] = tokens
    return filled


def _padded(prompts: Sequence[Sequence[int]], length: int) -> Array:
    rows = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(rows)
