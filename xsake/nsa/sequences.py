"""Sequences packed into one batch row: where a token's own sequence begins, and what it may see.

    segment ids   7 7 7 7 2 2 2 -1 -1       a run of equal ids is a sequence; negative = padding
    number        0 0 0 0 1 1 1 -1 -1
    first         0 0 0 0 4 4 4  7  8       blocks are counted from here
    last          0 1 2 3 4 5 6 -1 -1       the last key that the token sees: its own

`cu_seqlens` and `token_indices` of other libraries become segment ids first. Values of theirs that
describe no sequences raise; where they are traced, `Sound` turns the results into NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake.arguments import per_token
from xsake.backends import scale_gradient
from xsake.masks.integers import integers


class Sequences(NamedTuple):
    """One sequence in every batch row if all are None; else int32 [B|1, T] each."""

    number: Array | None = None  # of the token's sequence, from 0; -1: padding
    first: Array | None = None  # index of the first token of its sequence
    last: Array | None = None  # its own index; -1: padding

    @property
    def are_packed(self) -> bool:
        """Whether a batch row may hold more than one sequence."""
        return self.number is not None

    def positions(self, length: int) -> Array:
        """Positions in the own sequence, int32 [B|1, T]; negative: padding."""
        if self.first is None or self.last is None:
            return jnp.arange(length, dtype=jnp.int32)[None]
        return self.last - self.first


ONE_SEQUENCE = Sequences()


class Sound(NamedTuple):
    """Whether traced cu_seqlens and token_indices describe sequences."""

    holds: Array | None = None  # bool []; None: they do, or there are none

    def gradients(self, *arrays: Array) -> tuple[Array, ...]:
        """The arrays, whose gradients are NaN unless it holds."""
        if self.holds is None:
            return arrays
        factor = jnp.where(self.holds, 1.0, jnp.nan)
        return tuple(scale_gradient(x, factor) for x in arrays)

    def result(self, x: Array) -> Array:
        """x, or NaN everywhere unless it holds; -1 of block numbers."""
        if self.holds is None:
            return x
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.where(self.holds, x, -1)
        return x * jnp.where(self.holds, 1.0, jnp.nan).astype(x.dtype)  # gradients are NaN too


SOUND = Sound()


def sequences_of(
    batch: int, length: int, *, segment_ids: Any, cu_seqlens: Any, token_indices: Any
) -> Sequences:
    """The sequences that `describe` returns."""
    given = {"cu_seqlens": cu_seqlens, "token_indices": token_indices}
    return describe(batch, length, segment_ids=segment_ids, **given)[0]


def describe(
    batch: int, length: int, *, segment_ids: Any, cu_seqlens: Any, token_indices: Any
) -> tuple[Sequences, Sound]:
    """The sequences that one of three arguments describes, or one sequence in every batch row."""
    sound: list[Array] = []
    if segment_ids is not None:
        for name, x in (("cu_seqlens", cu_seqlens), ("token_indices", token_indices)):
            if x is not None:
                raise ValueError(
                    f"segment_ids and {name} both say which tokens form a sequence; give one"
                )
        ids = per_token("segment_ids", segment_ids, batch, length)
    elif cu_seqlens is not None:
        ids = _ids_of_lengths(cu_seqlens, batch, length, sound)
        if token_indices is not None:
            tokens = _tokens(token_indices, length)
            _check_positions(ids, tokens, sound, beside_lengths=True)
    elif token_indices is not None:
        _one_row("token_indices", batch)
        tokens = _tokens(token_indices, length)
        # every 0 begins a sequence
        ids = jnp.cumsum(tokens == 0, dtype=jnp.int32) - 1 if tokens.ndim == 1 else tokens[:, 0]
        ids = ids[None]
        _check_positions(ids, tokens, sound)
    else:
        return ONE_SEQUENCE, SOUND
    assert ids is not None
    return _of_ids(ids), Sound(jnp.stack(sound).all()) if sound else SOUND


@jax.jit
def _of_ids(ids: Array) -> Sequences:
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    # Two paddings are never one sequence: their ids do not matter.
    begins = jnp.concatenate(
        [jnp.ones_like(ids[:, :1], bool), (ids[:, 1:] != ids[:, :-1]) | (ids[:, 1:] < 0)], axis=1
    )
    first = lax.cummax(jnp.where(begins, index, 0), axis=1).astype(jnp.int32)
    real = ids >= 0
    number = jnp.cumsum(begins & real, axis=1, dtype=jnp.int32) - 1
    last = jnp.broadcast_to(index, ids.shape)
    return Sequences(jnp.where(real, number, -1), first, jnp.where(real, last, -1))


def _one_row(name: str, batch: int) -> None:
    if batch != 1:
        raise ValueError(
            f"{name} describes sequences packed into one batch row, but query has {batch}; "
            "use segment_ids [B, T]"
        )


def _ids_of_lengths(cu_seqlens: Any, batch: int, length: int, sound: list[Array]) -> Array:
    """Segment ids [1, T] of cumulative lengths: sequence i holds tokens cu[i] … cu[i + 1] - 1.

    Whether traced ones are lengths is added to `sound`.
    """
    _one_row("cu_seqlens", batch)
    ends = integers("cu_seqlens", cu_seqlens)
    if ends.ndim != 1 or ends.shape[0] < 2:
        raise ValueError(
            "cu_seqlens must be [sequences + 1]: 0 and the end of every sequence, "
            f"got shape {list(ends.shape)}"
        )
    known = _read(ends)
    rise = (known[0] == 0) & (known[1:] >= known[:-1]).all() & (known[-1] <= length)
    if isinstance(rise, jax.core.Tracer):
        sound.append(rise)
    elif not rise:
        raise ValueError(
            f"cu_seqlens must rise from 0 to at most T = {length}, got {known.tolist()}"
        )
    token = jnp.arange(length, dtype=jnp.int32)
    ids = jnp.searchsorted(ends, token, side="right").astype(jnp.int32) - 1
    return jnp.where(ids < ends.shape[0] - 1, ids, -1)[None]


def _read(x: Array) -> Any:
    """x as a NumPy array where its values can be read."""
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def _tokens(token_indices: Any, length: int) -> Array:
    """Positions [T], or pairs (sequence, position) [T, 2]."""
    given = integers("token_indices", token_indices)
    if given.shape not in ((length,), (length, 2)):
        raise ValueError(
            f"token_indices must be positions [{length}] or (sequence, position) pairs "
            f"[{length}, 2], got shape {list(given.shape)}"
        )
    return given


def _check_positions(
    ids: Array, tokens: Array, sound: list[Array], beside_lengths: bool = False
) -> None:
    """Raises unless the tokens of every sequence are counted from 0; traced ones go to `sound`.

    Padding has any position: negative ids in pairs, and tokens after the last of the cu_seqlens.
    """
    position = _read(_of_ids(ids).positions(ids.shape[1]))[0]
    said = _read(tokens if tokens.ndim == 1 else tokens[:, 1])
    agrees = said == position
    if tokens.ndim == 2 or beside_lengths:
        agrees = agrees | (_read(ids)[0] < 0)
    if isinstance(agrees, jax.core.Tracer):
        sound.append(agrees.all())
        return
    if agrees.all():
        return
    at = int(np.flatnonzero(~agrees)[0])
    if beside_lengths:
        raise ValueError(
            f"token_indices say that token {at} has position {said[at]}, but with these cu_seqlens "
            f"it has {position[at]}; give one of the two"
        )
    before = f" after {said[at - 1]}" if at else ""
    raise ValueError(
        "token_indices must count the tokens of every sequence from 0, but token "
        f"{at} has position {said[at]}{before}; leave them out, or give segment_ids"
    )
