"""Sequences packed into one batch row: where a token's own sequence begins, and what it may see.

    segment ids   7 7 7 7 2 2 2 -1 -1       a run of equal ids is a sequence; negative = padding
    number        0 0 0 0 1 1 1 -1 -1
    first         0 0 0 0 4 4 4  7  8       blocks are counted from here
    last          0 1 2 3 4 5 6 -1 -1       the last key that the token sees: its own

`cu_seqlens` and `token_indices` of other libraries become segment ids first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake.arguments import per_token
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


def sequences_of(
    batch: int, length: int, *, segment_ids: Any, cu_seqlens: Any, token_indices: Any
) -> Sequences:
    """The sequences that one of three arguments describes, or one sequence in every batch row."""
    if segment_ids is not None:
        for name, x in (("cu_seqlens", cu_seqlens), ("token_indices", token_indices)):
            if x is not None:
                raise ValueError(
                    f"segment_ids and {name} both say which tokens form a sequence; give one"
                )
        ids = per_token("segment_ids", segment_ids, batch, length)
    elif cu_seqlens is not None:
        ids = _ids_of_lengths(cu_seqlens, batch, length)
        if token_indices is not None:
            _check_agreement(ids, token_indices, batch, length)
    elif token_indices is not None:
        ids = _ids_of_tokens(token_indices, batch, length)
    else:
        return ONE_SEQUENCE
    assert ids is not None
    return _of_ids(ids)


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


def _ids_of_lengths(cu_seqlens: Any, batch: int, length: int) -> Array:
    """Segment ids [1, T] of cumulative lengths: sequence i holds tokens cu[i] … cu[i + 1] - 1."""
    _one_row("cu_seqlens", batch)
    ends = integers("cu_seqlens", cu_seqlens)
    if ends.ndim != 1 or ends.shape[0] < 2:
        raise ValueError(
            "cu_seqlens must be [sequences + 1]: 0 and the end of every sequence, "
            f"got shape {list(ends.shape)}"
        )
    if not isinstance(ends, jax.core.Tracer):
        known = np.asarray(ends)
        if known[0] != 0 or (np.diff(known) < 0).any() or known[-1] > length:
            raise ValueError(
                f"cu_seqlens must rise from 0 to at most T = {length}, got {known.tolist()}"
            )
    token = jnp.arange(length, dtype=jnp.int32)
    ids = jnp.searchsorted(ends, token, side="right").astype(jnp.int32) - 1
    return jnp.where(ids < ends.shape[0] - 1, ids, -1)[None]


def _ids_of_tokens(token_indices: Any, batch: int, length: int) -> Array:
    """Segment ids [1, T] of positions [T], or of pairs (sequence, position) [T, 2]."""
    _one_row("token_indices", batch)
    given = _tokens(token_indices, length)
    if given.ndim == 2:
        return given[None, :, 0]
    return jnp.cumsum(given == 0, dtype=jnp.int32)[None] - 1


def _tokens(token_indices: Any, length: int) -> Array:
    given = integers("token_indices", token_indices)
    if given.shape not in ((length,), (length, 2)):
        raise ValueError(
            f"token_indices must be positions [{length}] or (sequence, position) pairs "
            f"[{length}, 2], got shape {list(given.shape)}"
        )
    return given


def _check_agreement(ids: Array, token_indices: Any, batch: int, length: int) -> None:
    """Raises if token_indices do not repeat what cu_seqlens say, where both can be read."""
    given = _tokens(token_indices, length)
    if isinstance(ids, jax.core.Tracer) or isinstance(given, jax.core.Tracer):
        return
    position = np.asarray(_of_ids(ids).positions(length))[0]
    real = np.asarray(ids)[0] >= 0
    said = np.asarray(given if given.ndim == 1 else given[:, 1])
    if (said != position)[real].any():
        at = int(np.flatnonzero((said != position) & real)[0])
        raise ValueError(
            f"token_indices say that token {at} has position {said[at]}, but with these cu_seqlens "
            f"it has {position[at]}; give one of the two"
        )
