"""Reader: the model reads a text once, with dense attention; then a method at a density is cheap.

    text ─ read ─ Text: tokens, masses [layers, N, T, n], entropies      kept, by a hash of the text
                    └─ measured(method, density) ─┬─ blocks, density, KL, mass kept  NumPy
                                                  └─ next-token distribution         sparse pass

Masses and KL are of the dense pass, so that methods are compared on the same attention. Predictions
are of a pass in which every layer is sparse.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from xsake import selection, shipped
from xsake.data.tokenizer import Tokenizer
from xsake.evaluate.methods import oracle_counts
from xsake.hads import Profile, baselines, make, row_blocks
from xsake.model import huggingface
from xsake.model.observer import Observer
from xsake.model.on_mesh import mesh_for_text
from xsake.parallel.mesh import ONE_DEVICE, MeshSizes
from xsake.server import passes

HADS, ORACLE = "hads", "oracle"
METHODS = {
    HADS: "every head has its own budget, by its profile; the queries of this text pick its blocks",
    "sink_window": "the first block and the nearest ones",
    "sliding_window": "the nearest blocks",
    "longformer": "the first two blocks and the nearest ones",
    "bigbird": "the first block, half nearest, half random",
    "strided": "a third nearest, the rest at a stride",
    "random": "random blocks",
    ORACLE: "HADS's budgets, and the blocks of highest mass, which only dense attention knows",
}
SMALLEST = 16  # blocks that a text is padded to, at least: fewer programs to compile
KEPT_PASSES = 4  # hidden states of a text's last sparse passes that are kept: P · width floats each
KEPT_PREDICTIONS = 128  # next-token distributions of a text that are kept: vocab_size floats each


class UnknownTextError(LookupError):
    """The text was never read, or others took its space."""


class LargeTextError(ValueError):
    """What the text needs is more than may be kept of all texts."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The blocks of a method: those on the dense pass, and how a sparse pass selects its own."""

    blocks: Bool[np.ndarray, "layers N n n"]
    counts: Int[np.ndarray, "layers N n"]
    source: str  # one of `passes.SOURCES`
    band: int = 0  # forced blocks before the diagonal

    @property
    def shares(self) -> Float[np.ndarray, "layers N"]:
        """Every head's density."""
        n = self.counts.shape[-1]
        return self.blocks.sum((2, 3)) / (n * (n + 1) / 2)


@dataclasses.dataclass(eq=False)
class Text:
    """A text that was read."""

    id: str
    text: str
    tokens: Int[np.ndarray, " P"]  # padded
    length: int
    block: int
    is_cut: bool
    offsets: list[tuple[int, int]]
    seen: passes.Seen
    dense: Float[np.ndarray, "P width"]
    dense_next: Float[np.ndarray, " vocab"]  # log-probabilities
    seconds: float
    # by method and density: final hidden states, and log-probabilities of the next token
    sparse: collections.OrderedDict[tuple[str, float], np.ndarray] = dataclasses.field(
        default_factory=collections.OrderedDict
    )
    next: collections.OrderedDict[tuple[str, float], np.ndarray] = dataclasses.field(
        default_factory=collections.OrderedDict
    )

    @property
    def n(self) -> int:
        """Blocks of the text."""
        return row_blocks.count_blocks(self.length, self.block)

    @property
    def nbytes(self) -> int:
        """Of all arrays that are kept for the text."""
        arrays = (self.tokens, *self.seen, self.dense, self.dense_next)
        return sum(x.nbytes for x in (*arrays, *self.sparse.values(), *self.next.values()))

    def entropy(self) -> Float[np.ndarray, "layers N"]:
        """Of tokens, mean over queries but the first, as `hads.measure` has it."""
        return _mean(np.asarray(self.seen.entropy)[..., 1 : self.length])

    def block_entropy(self) -> Float[np.ndarray, "layers N"]:
        """Of blocks, mean over queries but those of the first block."""
        return _mean(np.asarray(self.seen.block_entropy)[..., self.block : self.length])

    def row_mass(self, layer: int, head: int) -> Float[np.ndarray, "n n"]:
        """Mean mass that each row block gives to each block, of one head."""
        return np.exp(np.asarray(self.seen.row_mass)[layer, head, : self.n, : self.n])

    def kept(
        self, blocks: Bool[np.ndarray, "*lead n n"], head: tuple[int, ...] = ()
    ) -> Float[np.ndarray, "*lead n block"]:
        """The mass that every query keeps, sinks included; NaN in the last row block's padding.

        `blocks` are of all layers and heads, or of the one at the index `head`.
        """
        n, block = self.n, self.block
        mass = np.asarray(self.seen.mass)[head][..., : n * block, :n]
        mass = mass.reshape(*mass.shape[:-2], n, block, n)
        kept = np.matmul(mass, blocks.astype(np.float32)[..., None])[..., 0]
        kept += np.asarray(self.seen.sinks)[head][..., : n * block].reshape(kept.shape)
        kept[..., np.arange(n * block).reshape(n, block) >= self.length] = np.nan
        return kept


def _mean(x: Float[np.ndarray, "layers N rows"]) -> Float[np.ndarray, "layers N"]:
    return x.mean(-1) if x.shape[-1] else np.zeros(x.shape[:2], x.dtype)


def kl_of(kept: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """KL(sparse ‖ dense) of a query that keeps this mass."""
    return np.maximum(-np.log(np.maximum(kept, 1e-30)), 0)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A method at a density on a text."""

    choice: Choice
    kl: Float[np.ndarray, "layers N"]
    recall: Float[np.ndarray, "layers N"]
    next: Float[np.ndarray, " vocab"] | None  # log-probabilities
    seconds: float

    @property
    def density(self) -> float:
        """Of all layers and heads."""
        return float(self.choice.shares.mean())


class Reader:
    """A model, its profiles by block, and the texts that were read last."""

    def __init__(
        self,
        model: Path,
        profiles: Mapping[str, Profile],
        texts: int,
        text_bytes: int = 1 << 30,
        mesh: MeshSizes = ONE_DEVICE,
    ) -> None:
        devices = mesh_for_text(huggingface.examine(model).config, mesh)
        loaded = huggingface.load(model, mesh=devices)
        assert loaded.tokenizer is not None  # without one, load raises
        self.path, self.config = model, loaded.config
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.subject = Observer(loaded.model)
        self._is_split = devices is not None  # over several devices, which have all rows
        self.parameters = sum(x.size for x in loaded.model.parameters().values())
        self.profiles: dict[int, tuple[str, Profile]] = {}  # by block; the first of a block
        for name, profile in profiles.items():
            if profile.facts.model_hash == self.subject.hash:
                self.profiles.setdefault(profile.facts.block, (name, profile))
        self._texts: collections.OrderedDict[str, Text] = collections.OrderedDict()
        self._most, self._most_bytes, self._lock = texts, text_bytes, threading.Lock()

    @property
    def is_shipped(self) -> bool:
        """Whether this is the model that comes with the package."""
        return self.path == shipped.FOLDER

    @property
    def longest(self) -> dict[int, int]:
        """Tokens of the longest text, by block: what the profile was calibrated on."""
        if not self.profiles:
            return {64: min(self.config.context, 2048)}
        return {
            block: min(profile.facts.length, self.config.context)
            for block, (_, profile) in sorted(self.profiles.items())
        }

    def methods(self, block: int) -> list[str]:
        """Methods that need no profile, and those of the profile with this block."""
        known = block in self.profiles
        return [name for name in METHODS if known or name not in (HADS, ORACLE)]

    # ---------------------------------------------------------------------------------------- texts

    def text(self, id_: str) -> Text:
        """A text that was read; raises if it is not kept any more."""
        with self._lock:
            if id_ not in self._texts:
                raise UnknownTextError(
                    f"the server does not keep the text {id_[:40]!r} (any more); send it again"
                )
            self._texts.move_to_end(id_)
            return self._texts[id_]

    def read(self, text: str, block: int | None = None, most: int | None = None) -> Text:
        """Reads a text with dense attention, or returns what is kept of it.

        Args:
          text: what comes after the longest that can be read is left out.
          block: tokens per block; default the smallest in which the text can be read.
          most: tokens that are read at most.
        """
        encoded = self.tokenizer.inner.encode(text)
        ids, offsets = list(encoded.ids), list(encoded.offsets)
        block = self._block_for(len(ids), block)
        most = min(most or self.longest[block], self.longest[block])
        key = f"{self.subject.hash}/{block}/{most}/{text}".encode("utf-8", "replace")
        id_ = hashlib.sha256(key).hexdigest()[:20]
        with self._lock:
            if id_ in self._texts:
                self._texts.move_to_end(id_)
                return self._texts[id_]
        began = time.perf_counter()
        length = min(len(ids), most)
        self._check_bytes(length, block)
        tokens = np.zeros(padded(length, block), np.int32)
        tokens[:length] = ids[:length]
        weights = self.subject.weights
        seen, dense = passes.read(weights, tokens, length, subject=self.subject.bare, block=block)
        dense = np.asarray(dense)
        after = self._next(dense[length - 1 : length])
        found = Text(
            id=id_,
            text=text,
            tokens=tokens,
            length=length,
            block=block,
            is_cut=len(ids) > length,
            offsets=offsets[:length],
            seen=passes.Seen(*(np.asarray(x) for x in seen)),
            dense=dense,
            dense_next=after,
            seconds=time.perf_counter() - began,
        )
        with self._lock:
            self._texts[id_] = found
            self._evict()
        return found

    def _evict(self) -> None:
        """Drops the texts used longest ago, but not the last; the caller has the lock."""
        kept = sum(text.nbytes for text in self._texts.values())
        while len(self._texts) > 1 and (len(self._texts) > self._most or kept > self._most_bytes):
            kept -= self._texts.popitem(last=False)[1].nbytes

    def _check_bytes(self, length: int, block: int) -> None:
        """Raises for a text that alone is larger than all that may be kept."""
        size = padded(length, block)
        needed = self._bytes(size, block)
        if needed <= self._most_bytes:
            return
        while size > SMALLEST * block and self._bytes(size, block) > self._most_bytes:
            size //= 2
        fits = self._bytes(size, block) <= self._most_bytes
        raise LargeTextError(
            f"a text of {length:,} tokens in blocks of {block} needs {needed / 2**20:,.0f} MiB, "
            f"and at most {self._most_bytes / 2**20:,.0f} MiB are kept of all texts; "
            + (f"send at most {size:,} tokens" if fits else "raise Limits.text_bytes")
        )

    def _bytes(self, size: int, block: int) -> int:
        """Of `passes.Seen` for a text of `size` tokens, padded: nearly all that a text needs."""
        n = size // block
        return 4 * self.subject.layers * self.subject.heads * (size * (n + 3) + 2 * n * n)

    def _block_for(self, length: int, block: int | None) -> int:
        """The block asked for, or the smallest whose longest text is long enough."""
        longest = self.longest
        if block is None:
            return next((size for size in longest if length <= longest[size]), max(longest))
        if block not in longest:
            raise ValueError(f"block {block} is not one of {list(longest)}, which profiles have")
        return block

    def _next(self, last: Float[np.ndarray, "1 width"]) -> Float[np.ndarray, " vocab"]:
        """Log-probabilities of the token after the one with these hidden states."""
        return np.asarray(
            passes.log_probabilities(
                self.subject.weights, jnp.asarray(last), subject=self.subject.bare
            )
        )[0]

    # -------------------------------------------------------------------------------------- methods

    def choice(self, text: Text, method: str, density: float) -> Choice:
        """The blocks of a method, as the library selects them on the dense pass."""
        layers, heads, n = self.subject.layers, self.subject.heads, text.n
        if method not in METHODS:
            raise ValueError(f"method {method!r:.40} is not one of {list(METHODS)}")
        row_blocks.blocks_of_density(density, n, layers * heads)  # raises if it is too low
        if method not in (HADS, ORACLE):
            blocks = baselines.fixed(method, density, layers, heads, n)
            return Choice(blocks, blocks.sum(-1, dtype=np.int32), "given")
        if text.block not in self.profiles:
            raise ValueError(
                f"method {method!r} needs a profile of this model with blocks of {text.block}: "
                "make one with `xsake calibrate` and name it with --profiles"
            )
        profile = self.profiles[text.block][1]
        band = profile.facts.band
        if method == HADS:
            counts = np.asarray(make(profile, density, length=text.length).counts)
            source, scores = "mean_query", text.seen.scores
        else:
            counts = oracle_counts(profile, density, "kl", text.length)
            source, scores = "mass", text.seen.row_mass
        kept = selection.keep_top(scores[..., :n, :n], counts, band)
        return Choice(np.asarray(kept), counts, source, band)

    def measured(self, text: Text, method: str, density: float, predict: bool = True) -> Measured:
        """A method at a density: what it keeps of the dense attention, and what it predicts.

        Without `predict` there is no sparse pass, and the answer takes a few milliseconds.
        """
        began = time.perf_counter()
        choice = self.choice(text, method, density)
        kept = text.kept(choice.blocks)
        layers, heads = kept.shape[:2]
        kept = kept.reshape(layers, heads, -1)[..., : text.length]
        after = self._predicted(text, method, density, choice) if predict else None
        return Measured(
            choice, kl_of(kept).mean(-1), kept.mean(-1), after, time.perf_counter() - began
        )

    def _predicted(
        self, text: Text, method: str, density: float, choice: Choice
    ) -> Float[np.ndarray, " vocab"]:
        """The next token with a method's blocks; a slider that comes back finds it again."""
        key = (method, density)
        with self._lock:
            if key in text.next:
                text.next.move_to_end(key)
                return text.next[key]
            has_all = key in text.sparse  # words were asked for before
        if has_all or self._is_split:
            last = self.hidden(text, method, density, choice)[text.length - 1 :][:1]
        else:
            last = self._pass(passes.sparse_last, text, choice)
        found = self._next(last)
        with self._lock:
            text.next[key] = found
            while len(text.next) > KEPT_PREDICTIONS:
                text.next.popitem(last=False)
            self._evict()
        return found

    def hidden(
        self, text: Text, method: str, density: float, choice: Choice
    ) -> Float[np.ndarray, "P width"]:
        """Final hidden states of the sparse pass; a text's last few are kept."""
        key = (method, density)
        with self._lock:
            if key in text.sparse:
                text.sparse.move_to_end(key)
                return text.sparse[key]
        found = self._pass(passes.sparse, text, choice)
        with self._lock:
            text.sparse[key] = found
            while len(text.sparse) > KEPT_PASSES:
                text.sparse.popitem(last=False)
            self._evict()
        return found

    def _pass(
        self, run: Callable[..., Array], text: Text, choice: Choice
    ) -> Float[np.ndarray, "rows width"]:
        """One of the sparse passes, of the padded text."""
        n, size = text.n, len(text.tokens) // text.block
        given = np.zeros((*choice.counts.shape[:2], size, size), bool)
        given[..., np.arange(size), np.arange(size)] = True  # for the padding
        given[..., :n, :n] = choice.blocks
        counts = np.ones((*choice.counts.shape[:2], size), np.int32)
        counts[..., :n] = choice.counts
        source = passes.SOURCES.index(choice.source)
        given_all = (self.subject.weights, text.tokens, text.length, counts, given, source)
        how = {"subject": self.subject.bare, "block": text.block, "band": choice.band}
        return np.asarray(run(*given_all, **how))

    def words(self, text: Text, method: str, density: float) -> tuple[Choice, passes.Words]:
        """Predictions at every token, dense and sparse."""
        choice = self.choice(text, method, density)
        hidden = self.hidden(text, method, density, choice)
        found = passes.words(
            self.subject.weights, text.dense, hidden, text.tokens, subject=self.subject.bare
        )
        return choice, passes.Words(*(np.asarray(x) for x in found))


def padded(length: int, block: int) -> int:
    """What a text is padded to: a power of two times `block`.

    >>> padded(300, 16), padded(3, 64)
    (512, 1024)
    """
    blocks = max(SMALLEST, row_blocks.count_blocks(length, block))
    return block << math.ceil(math.log2(blocks))
