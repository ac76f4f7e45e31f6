"""generate: prompts in, tokens out, through a KV cache that is filled in chunks.

    prompts ─ prefill, chunk after chunk ─ first token ─ bursts of decode steps ─ tokens
               attention as the model's,                 one query per sequence against the cache:
               or by a mask                              all of it, or a budget of blocks per head

Prompts may differ in length: each sequence has its own length in the cache. Decode runs in bursts,
compiled loops of up to `burst` steps that update the cache in place; after each, the host yields
the new tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake.block_mask import BLOCK
from xsake.block_mask.input_mask import InputMask, MaskFunction, as_input_mask
from xsake.decode import REFRESH, CacheReader, Chosen
from xsake.hads import Plan
from xsake.masks.rule import Rule
from xsake.model import kv_cache
from xsake.model.attend import by_cache, by_chunk, by_mask
from xsake.model.config import Config
from xsake.model.kv_cache import KVCache
from xsake.model.prompts import check_prompts, check_stop, padded, padded_stop
from xsake.model.sampling import Sampling, check_whole, sample
from xsake.model.sparse.attend import by_prompt, by_sparse_cache
from xsake.model.sparse.cache import SparseCache
from xsake.model.transformer import Transformer
from xsake.parallel import sharding
from xsake.parallel.mesh import sizes_of

__all__ = ["Completion", "GenerateOptions", "Sampling", "generate", "stream"]

CHUNK = 2048  # prompt tokens of one pass
BURST = 16  # decode steps per host synchronisation
SPAN = 256  # the shortest part of the cache that a step is compiled for; doubled as it fills

if TYPE_CHECKING:
    PromptMask = Rule | InputMask | MaskFunction | None
    Prompts = Sequence[Sequence[int]]
    StopTokens = Sequence[int] | None
    Draw = Sampling | None
else:
    PromptMask = Any  # at run time `as_input_mask` raises for other types
    Prompts = StopTokens = Draw = Any  # `GenerateOptions` raises
AnyCache = KVCache | SparseCache  # of a model with dense attention, with sparse attention
Cache = TypeVar("Cache", bound=AnyCache)


class Completion(NamedTuple):
    """A sequence's new tokens and why it ended.

    "stop": at a stop token, which is left out; "length": at max_tokens; None: it has not ended, or
    ended in an earlier piece.
    """

    tokens: list[int]
    reason: str | None


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """How `generate` and `stream` read prompts and make tokens; they take the fields as keywords.

    Attributes:
      max_tokens: maximum number of new tokens per sequence.
      sampling: how a token is sampled; default greedy.
      stop: tokens that end a sequence; default the config's eos.
      mask: restricts attention while prompts are read: a Rule, an InputMask such as a Plan, or a
        function (layer, q, k) -> BlockMask. Prompts longer than `chunk` need a Rule or an InputMask
        that accepts `first`; `InputMask.of(function, chunked=True)` wraps a function as one.
        A Plan must be of this model: of its layers and heads and, if the model is stacked and in
        float32 as for calibration, of its weights.
        InputMasks are adapted by `mask.padded` to the longest prompt and the length that it is
        padded to: whole blocks, or in chunked prefill a power of two, at most the capacity of the
        cache. Padding has no part in what they select.
      budget: how much of the cache each head reads per token; default all. Integers are blocks,
        fractions a share of the blocks so far, rounded up. Shape [], [heads] or [layers, heads].
        heads may be N or K; with K, the query heads of a kv head share one selection. The first
        block and the current one are always read.
      refresh: blocks are reselected every `refresh` tokens and at the start of each burst, by exact
        attention to all keys so far; the tokens in between read the same blocks. 1 is the most
        faithful, more is faster.
      chunk: prompt tokens of one pass; a model with sparse attention reads all in one, in memory
        linear in their number.
      burst: tokens between two yields.
    """

    max_tokens: int = 64
    sampling: Draw = None
    stop: StopTokens = None
    mask: PromptMask = None
    budget: Any = None
    refresh: int = REFRESH
    chunk: int = CHUNK
    burst: int = BURST

    def __post_init__(self) -> None:
        for name in ("max_tokens", "chunk", "burst", "refresh"):
            check_whole(name, getattr(self, name), 1)
        if not isinstance(self.sampling, Sampling | None):
            raise ValueError(
                f"sampling must be a Sampling or None, got {self.sampling!r}; "
                "write Sampling(temperature=0.8)"
            )
        object.__setattr__(self, "mask", _prompt_mask(self.mask))

    def check(self, config: Config, prompts: Prompts) -> None:
        """Raises if a model of this config cannot read these prompts with these options."""
        check_prompts(config, prompts, self.max_tokens)
        check_stop(config, self.stop)
        if config.is_sparse and self.mask is not None:
            raise ValueError(
                f"mask restricts dense attention, but this model has attention = "
                f"{config.attention!r}, which selects its own blocks; leave mask out"
            )
        if isinstance(self.mask, InputMask):
            self.mask.check(config.layers, config.heads)
            self.mask.check_lengths(map(len, prompts))
        in_chunks = max(map(len, prompts)) > self.chunk
        if in_chunks and isinstance(self.mask, InputMask) and not self.mask.chunked:
            raise ValueError(
                f"a prompt is longer than chunk = {self.chunk}, which needs a mask that accepts "
                "`first`; raise chunk, or wrap the function with InputMask.of(function, "
                "chunked=True) if it accepts `first`"
            )

    def reader(self, config: Config) -> CacheReader:
        """How new tokens read the cache; the budget is checked here."""
        if config.is_sparse and self.budget is not None:
            raise ValueError(
                f"budget is for dense attention, but this model has attention = "
                f"{config.attention!r}, which reads sparse.num_selected blocks; leave budget out"
            )
        return CacheReader.of(
            self.budget,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            block=kv_cache.BLOCK,
            refresh=self.refresh,
        )


def generate(model: Transformer, prompts: Prompts, **options: Any) -> list[Completion]:
    """All of `stream` at once: a Completion for every prompt.

    >>> from flax import nnx
    >>> from xsake.model import PRESETS, Transformer, generate
    >>> model = Transformer(PRESETS["tiny"], rngs=nnx.Rngs(0))
    >>> [len(row.tokens) for row in generate(model, [[1, 2, 3], [4]], max_tokens=3, stop=())]
    [3, 3]
    """
    pieces = stream(model, prompts, **options)
    rows = [Completion([], None) for _ in prompts]
    for news in pieces:
        rows = [
            Completion(row.tokens + new.tokens, row.reason or new.reason)
            for row, new in zip(rows, news, strict=True)
        ]
    return rows


def stream(model: Transformer, prompts: Prompts, **options: Any) -> Iterator[list[Completion]]:
    """Yields the new tokens of every prompt: first one each, then up to `burst` at a time.

    For long generations use `model.unstacked()`, which decodes faster.

    Args:
      model: its dtype is used for compute and for the KV cache.
      prompts: token ids, one list per sequence; lengths may differ.
      **options: the fields of `GenerateOptions`.
    """
    given = GenerateOptions(**options)
    given.check(model.config, prompts)
    _check_mesh(model, len(prompts))
    if isinstance(given.mask, Plan) and given.mask.terms.model_hash:
        _check_weights(model, given.mask)
    return _stream(model, prompts, given, given.reader(model.config))


def _stream(
    model: Transformer,
    prompts: Prompts,
    options: GenerateOptions,
    reader: CacheReader,
) -> Iterator[list[Completion]]:
    config, sampling = model.config, options.sampling or Sampling()
    stop = padded_stop(config.eos if options.stop is None else options.stop)
    longest, left = max(map(len, prompts)), options.max_tokens - 1
    how: Any = {"dtype": model.dtype}
    cache: AnyCache
    if config.is_sparse:
        cache = SparseCache.empty(config, len(prompts), longest + left, **how)
    else:
        cache = KVCache.empty(config, len(prompts), longest + left, block=reader.block, **how)
    cache = _placed(cache, model, sharding.put)
    cache, hidden = prefill(model, cache, prompts, mask=options.mask, chunk=options.chunk)
    # the seed is an argument, so that another one does not recompile
    seed, sampling = np.uint32(sampling.seed), dataclasses.replace(sampling, seed=0)
    token, done = _first(model, hidden, cache.length, seed, stop, sampling=sampling)
    new = jnp.where(done, -1, token)[:, None]
    was_done = np.zeros(len(prompts), bool)
    while True:
        tokens, is_done = np.asarray(new), np.asarray(done)
        yield _completions(tokens, was_done, is_done, is_last=left == 0)
        if left == 0 or is_done.all():
            return
        steps, was_done = min(options.burst, left), is_done
        longest, left = longest + steps, left - steps
        cache, token, done, new = _burst(
            model,
            cache,
            token,
            done,
            seed,
            stop,
            np.int32(steps),
            reader.over(_span(longest, cache)),
            sampling=sampling,
            burst=options.burst,
        )


def _completions(
    tokens: np.ndarray, was_done: np.ndarray, is_done: np.ndarray, *, is_last: bool
) -> list[Completion]:
    """One piece of every sequence; negative tokens are padding."""
    return [
        Completion(
            [int(t) for t in row if t >= 0],
            None if before else "stop" if now else "length" if is_last else None,
        )
        for row, before, now in zip(tokens, was_done, is_done, strict=True)
    ]


# ------------------------------------------------------------------------------------------ prompts


def prefill(
    model: Transformer,
    cache: AnyCache,
    prompts: Prompts,
    *,
    mask: PromptMask = None,
    chunk: int = CHUNK,
) -> tuple[AnyCache, Array]:
    """Reads the prompts into an empty cache: (cache, the last token's hidden state [B, width])."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    longest, mask = int(lengths.max()), _prompt_mask(mask)
    if isinstance(mask, InputMask):
        mask.check_lengths(lengths.tolist())
    cache.check_capacity(longest)
    if isinstance(cache, SparseCache) or longest <= chunk:
        # Pad to a few lengths, so that few programs are compiled; an InputMask selects whole
        # blocks, so its prompts are padded to the next one.
        step = min(256, max(16, 1 << (longest - 1).bit_length()))
        if isinstance(mask, InputMask):
            step = BLOCK
        tokens = padded(prompts, -(-longest // step) * step)
        mask = mask.padded(longest, tokens.shape[1]) if isinstance(mask, InputMask) else mask
        return _prefill_whole(model, cache, tokens, jnp.asarray(lengths), mask)
    hidden = jnp.zeros((len(prompts), model.config.width), model.dtype)
    count = -(-longest // chunk)
    tokens = padded(prompts, count * chunk)
    span = _span(longest, cache)
    mask = mask.padded(longest, span) if isinstance(mask, InputMask) else mask
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


def _prompt_mask(mask: PromptMask) -> Rule | InputMask | None:
    if mask is None or isinstance(mask, Rule):
        return mask
    return as_input_mask(mask, "a rule of xsake.masks")


@functools.partial(jax.jit, donate_argnames="cache")
def _prefill_whole(
    model: Transformer,
    cache: AnyCache,
    tokens: Array,
    count: Array,
    mask: Rule | InputMask | None,
) -> tuple[AnyCache, Array]:
    B, T = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    if isinstance(cache, SparseCache):
        by_count = by_prompt(model.config, count, model.implementation, model.mesh)
        hidden, filled = model.run(tokens, positions, by_count, cache, scan=False)
        return _placed(filled, model), hidden[jnp.arange(B), count - 1]
    how: Any = {"implementation": model.implementation, "mesh": model.mesh}
    inside = by_mask(model.config, mask, B, T, count=count, **how)

    def attend(
        layer: Any, q: Array, k: Array, v: Array, cache: Any, *sinks: Array
    ) -> tuple[Array, Any]:
        return inside(layer, q, k, v, None, *sinks)[0], cache.append(layer, k, v, count)

    hidden, filled = model.run(tokens, positions, attend, cache)
    return _placed(filled.advance(count), model), hidden[jnp.arange(B), count - 1]


@functools.partial(jax.jit, static_argnames="span", donate_argnames="cache")
def _prefill_chunk(
    model: Transformer,
    cache: KVCache,
    tokens: Array,
    count: Array,
    first: Array,
    mask: Rule | InputMask | None,
    last: Array,
    *,
    span: int,
) -> tuple[KVCache, Array]:
    """One chunk of T tokens from position `first` on, of which count[b] are sequence b's own.

    A sequence that ended in an earlier chunk keeps its hidden state, `last`.
    """
    B, T = tokens.shape
    positions = jnp.broadcast_to(first + jnp.arange(T), (B, T))
    how = (model.implementation, model.mesh)
    attend = by_chunk(model.config, mask, positions, count, span, *how)
    hidden, cache = model.run(tokens, positions, attend, cache)
    here = hidden[jnp.arange(B), jnp.maximum(count - 1, 0)]
    return _placed(cache.advance(count), model), jnp.where((count > 0)[:, None], here, last)


# ------------------------------------------------------------------------------------------- decode


@functools.partial(jax.jit, static_argnames="sampling")
def _first(
    model: Transformer, hidden: Array, position: Array, seed: Any, stop: Any, *, sampling: Sampling
) -> tuple[Array, Array]:
    token = sample(model.logits(hidden), sampling, seed, position)
    return token, (token[:, None] == stop).any(-1)


@functools.partial(jax.jit, static_argnames=("sampling", "burst"), donate_argnames="cache")
def _burst(
    model: Transformer,
    cache: AnyCache,
    token: Array,
    done: Array,
    seed: Any,
    stop: Any,
    steps: Any,
    reader: CacheReader,
    *,
    sampling: Sampling,
    burst: int,
) -> tuple[AnyCache, Array, Array, Array]:
    """Up to `steps` tokens for every sequence that is not done, int32 [B, burst]; else -1."""

    def is_running(state: Any) -> Array:
        i, *_, done, _ = state
        return (i < steps) & ~done.all()

    def step(state: Any, reselect: bool = False) -> Any:
        i, read, token, done, new = state
        count = (~done).astype(jnp.int32)
        hidden, read = decode_step(model, reader, read, token, count, reselect=reselect)
        token = sample(model.logits(hidden), sampling, seed, read[0].length)
        done = done | (token[:, None] == stop).any(-1)
        return i + 1, read, token, done, new.at[:, i].set(jnp.where(done, -1, token))

    def refreshed(state: Any) -> Any:
        """One step that selects blocks, followed by the steps that reuse the selection."""
        state = step(state, reselect=True)

        def reuses(state: Any) -> Array:
            return is_running(state) & (state[0] % reader.refresh > 0)

        return lax.while_loop(reuses, step, state)

    B = token.shape[0]
    new = jnp.full((B, burst), -1, jnp.int32)
    state = (jnp.int32(0), (cache, reader.nothing_chosen(B)), token, done, new)
    body = step if reader.budget is None else refreshed
    _, (cache, _), token, done, new = lax.while_loop(is_running, body, state)
    return _placed(cache, model), token, done, new


def decode_step(
    model: Transformer,
    reader: CacheReader,
    state: tuple[AnyCache, Chosen | None],
    token: Array,
    count: Array,
    *,
    reselect: bool,
) -> tuple[Array, tuple[AnyCache, Chosen | None]]:
    """One token of every sequence through the model: (hidden [B, width], the next state).

    Args:
      model: the one that the cache was filled by.
      reader: which part of the cache is read.
      state: (cache, selected blocks); the initial selection is `reader.nothing_chosen(batch)`.
      token: int [B].
      count: int [B], 1 where the token is appended to the cache, else 0; a SparseCache appends
        every one.
      reselect: select blocks by these tokens' attention, or reuse those in the state.
    """
    positions = state[0].length[:, None]
    if isinstance(state[0], SparseCache):
        by_step = by_sparse_cache(model.config)
        hidden, longer = model.run(token[:, None], positions, by_step, state[0], scan=False)
        return hidden[:, 0], (longer, None)
    attend = by_cache(model.config, reader, positions, count, reselect=reselect)
    hidden, (cache, chosen) = model.run(token[:, None], positions, attend, state)
    return hidden[:, 0], (cache.advance(count), chosen)


# ------------------------------------------------------------------------------------------- checks


def _check_mesh(model: Transformer, prompts: int) -> None:
    """Raises if the model's mesh cannot share these prompts."""
    sizes = sizes_of(model.mesh)
    if sizes.context > 1:
        raise ValueError(
            f"mesh.context = {sizes.context} splits whole texts, but generation appends to a "
            "cache; use mesh.tensor"
        )
    shares = sizes.data * sizes.fsdp
    if prompts > 1 and prompts % shares:
        raise ValueError(
            f"{prompts} prompts are not divisible by mesh.data × mesh.fsdp = {shares}; give a "
            "multiple of that, or one at a time"
        )


def _placed(
    cache: Cache, model: Transformer, place: Callable[..., Any] = lax.with_sharding_constraint
) -> Cache:
    """The cache on the model's mesh as the table says; `place` differs outside of jit."""
    mesh = model.mesh
    if mesh is None:
        return cache
    found: Any
    if isinstance(cache, SparseCache):
        found = cache.map(lambda layer: place(layer, sharding.shardings_of(layer, mesh)))
    else:
        found = place(cache, sharding.shardings_of(cache, mesh))
    return found  # type: ignore[no-any-return]


_hashes: weakref.WeakKeyDictionary[Transformer, tuple[list[Any], str]] = weakref.WeakKeyDictionary()


def _check_weights(model: Transformer, plan: Plan) -> None:
    """Refuses a plan of other weights, if these can be compared with those of a calibration.

    The hash is that of stacked float32 parameters. It is computed once for a model, and again when
    one of its arrays was replaced.
    """
    arrays = list(model.parameters().values())
    if not model.is_stacked or any(x.dtype != jnp.float32 for x in arrays):
        return
    known, found = _hashes.get(model, ([], ""))
    if len(known) != len(arrays) or any(x() is not y for x, y in zip(known, arrays, strict=True)):
        found = model.hash()
        _hashes[model] = [weakref.ref(x) for x in arrays], found
    plan.check_model(found)


def _span(needed: int, cache: AnyCache) -> int:
    """A part of the cache that holds `needed` tokens: 256, 512, 1024 … slots, or all of it."""
    if isinstance(cache, SparseCache):
        return cache.capacity  # a step gathers what it selects, whatever the capacity
    span = SPAN
    while span < needed:
        span *= 2
    return min(span, cache.capacity)
