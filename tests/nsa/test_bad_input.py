"""Wrong calls: each is refused before anything is compiled, in a sentence that says what to do."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake import nsa
from xsake.backends.choice import BACKENDS

B, T, N, K, H = 2, 32, 4, 2, 8


pytestmark = pytest.mark.usefixtures("as_users_call_it")


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def ints(*shape):
    return np.zeros(shape, np.int32)


def attend(query=None, key=None, value=None, **call):
    """A valid call, with the given arguments replaced."""
    query = zeros(B, T, N, H) if query is None else query
    key = zeros(B, T, K, H) if key is None else key
    value = zeros(B, T, K, H) if value is None else value
    return xsake.native_sparse_attention(query, key, value, **call)


def packed(**call):
    return attend(zeros(1, T, N, H), zeros(1, T, K, H), zeros(1, T, K, H), **call)


def apply(indices, *args, **call):
    return xsake.apply_native_sparse_attention(
        zeros(B, T, N, H), zeros(B, T, K, H), zeros(B, T, K, H), indices, *args, **call
    )


def select(**call):
    return nsa.select_blocks(zeros(B, T, N, H), zeros(B, T, K, H), **call)


def explain(query=None, indices=None, **call):
    kv = zeros(B, T, K, H)
    query = zeros(B, T, N, H) if query is None else query
    return nsa.explain(query, kv, kv, INDICES if indices is None else indices, **call)


GATE = zeros(B, T, N)
INDICES = ints(B, T, K, 3)
NETWORK = {"w_in": zeros(32, H, 5), "w_out": zeros(5, H)}
UNREAD = (
    "compression pools blocks for a compressed branch or for score='nsa', and there is neither; "
    "leave it out"
)
STATIC = "under jax.jit name it in static_argnames, or bind it with functools.partial"
POOLINGS = (
    "block is compression_block, and keys and values of different sizes take a pair of poolings"
)
POSITIONS = "positions must be [block, H] = [32, 8] or [block, K, H] = [32, 2, 8]"

REFUSED = {
    "a query without a batch axis": (
        lambda: attend(zeros(T, N, H), zeros(T, K, H), zeros(T, K, H)),
        "query must be [B, T, N, H], got shape [32, 4, 8]; add a batch axis",
    ),
    "other keys than queries": (
        lambda: attend(key=zeros(B, 9, K, H), value=zeros(B, 9, K, H)),
        (
            "query has 32 tokens but key has 9; native sparse attention is self-attention "
            "(nsa.decode_step attends to a cache)"
        ),
    ),
    "heads that do not divide": (
        lambda: attend(key=zeros(B, T, 3, H), value=zeros(B, T, 3, H)),
        "query has 4 heads, which 3 key/value heads do not divide",
    ),
    "indices and g_cmp": (
        lambda: attend(g_cmp=GATE, block_indices=INDICES),
        (
            "g_cmp gates a compressed branch that would not select the blocks (block_indices do); "
            "pass compressed=True for both, or leave one out"
        ),
    ),
    "moba and g_cmp": (
        lambda: attend(g_cmp=GATE, score="moba"),
        (
            "g_cmp gates a compressed branch that would not select the blocks (score='moba' does); "
            "pass compressed=True for both, or leave one out"
        ),
    ),
    "g_cmp without its branch": (
        lambda: attend(g_cmp=GATE, compressed=False),
        "g_cmp needs the compressed branch, but compressed is False",
    ),
    "a compressed branch without its gate": (
        lambda: attend(g_slc=GATE, compressed=True),
        "compressed=True adds a branch, and g_slc is given, so g_cmp is needed too",
    ),
    "g_swa without a window": (
        lambda: attend(g_swa=GATE),
        "g_swa needs window_size, the number of tokens that a query sees",
    ),
    "a pooling beside moba's choice": (
        lambda: select(score="moba", compression=nsa.weighted_pooling(zeros(32))),
        UNREAD,
    ),
    "a pooling beside given blocks": (
        lambda: attend(block_indices=INDICES, compression=(len, "mean")),
        UNREAD,
    ),
    "a pooling that the window does not read": (
        lambda: attend(g_swa=GATE, window_size=4, compression=("mean", len)),
        UNREAD,
    ),
    "indices without the gate of their branch": (
        lambda: attend(g_swa=GATE, window_size=4, block_indices=INDICES),
        (
            "block_indices are for the selected branch, which is off because g_swa is given and "
            "g_slc is not; give g_slc too, or leave block_indices out"
        ),
    ),
    "a number for compressed": (
        lambda: attend(compressed=1),
        "compressed must be True, False or None, got 1",
    ),
    "a traced compressed": (
        lambda: jax.jit(attend)(compressed=True),
        f"compressed must be True, False or None, got a traced array; {STATIC}",
    ),
    "a traced block size": (
        lambda: jax.jit(attend)(block_size=16),
        f"block_size must be a plain integer, got a traced array; {STATIC}",
    ),
    "an axis outside of shard_map": (
        lambda: attend(axis="context"),
        (
            "axis 'context' is not a mesh axis here; make this call inside jax.shard_map over a "
            "mesh that has it"
        ),
    ),
    "a gate of another shape": (
        lambda: attend(g_slc=zeros(B, T, N * H)),
        (
            "g_slc must be [B, T, N] = [2, 32, 4], or that with a last axis of Hv = 8 or 1, "
            "got shape [2, 32, 32]"
        ),
    ),
    "a gate of integers": (
        lambda: attend(g_slc=ints(B, T, N)),
        "g_slc must be floating, got int32",
    ),
    "indices per block": (
        lambda: apply(ints(B, K, 2, 3)),
        "block_indices must be [B, T, K, C] with [B, T, K] = [2, 32, 2], got shape [2, 2, 2, 3]",
    ),
    "floating indices": (
        lambda: apply(zeros(B, T, K, 3)),
        "block_indices must hold integers, got float32",
    ),
    "no indices": (lambda: apply(None), "block_indices must be an array, got NoneType"),
    "counts of another shape": (
        lambda: apply(INDICES, ints(B, K, 2)),
        "block_counts must be a number or [B, T, K] = [2, 32, 2], got shape [2, 2, 2]",
    ),
    "a negative count": (
        lambda: apply(INDICES, -1),
        "block_counts must be an integer from 0 to 2147483647, got -1",
    ),
    "counts without indices": (
        lambda: attend(block_counts=4),
        (
            "block_counts says how many of the block_indices count, and there are none; "
            "num_selected is the number of blocks to select"
        ),
    ),
    "an unknown score": (
        lambda: attend(score="best"),
        "score must be one of ['nsa', 'moba', 'msa'], got 'best'",
    ),
    "no block": (
        lambda: attend(block_size=0),
        "block_size must be an integer from 1 to 2147483647, got 0",
    ),
    "no window": (
        lambda: attend(window_size=0),
        "window_size must be an integer from 1 to 2147483647, got 0",
    ),
    "no local block": (
        lambda: attend(local_blocks=0),
        "local_blocks must be an integer from 1 to 2147483647, got 0",
    ),
    "fewer blocks than forced ones": (
        lambda: attend(num_selected=2),
        (
            "num_selected = 2 is below the 3 blocks that are always selected (initial_blocks = 1, "
            "local_blocks = 2); raise it or lower those"
        ),
    ),
    "a stride that does not divide": (
        lambda: attend(compression_stride=24),
        "compression_block must be a multiple of compression_stride = 24, got 32",
    ),
    "a stride that does not divide the block": (
        lambda: attend(compression_block=48, compression_stride=24),
        "block_size must be a multiple of compression_stride = 24, got 64",
    ),
    "an unknown compression": (
        lambda: attend(compression="max"),
        (
            "compression must be 'mean', a function [B, P, block, K, H] -> [B, P, K, H], or a pair "
            "of those for keys and values, got 'max'"
        ),
    ),
    "a pooling of the wrong shape": (
        lambda: attend(compression=lambda blocks: blocks),
        (
            "compression must turn key blocks [2, 1, 32, 2, 8] into [2, 1, 2, 8], got "
            "[2, 1, 32, 2, 8]; a pair of functions pools keys and values apart"
        ),
    ),
    "a pooling of no array": (
        lambda: attend(compression=lambda blocks: 1.0),
        (
            "compression must turn key blocks [2, 1, 32, 2, 8] into [2, 1, 2, 8], got 1.0; a pair "
            "of functions pools keys and values apart"
        ),
    ),
    "pooling weights of another block": (
        lambda: attend(compression=nsa.weighted_pooling(zeros(16))),
        (f"weights must be [block] = [32] or [block, K] = [32, 2], got shape [16]; {POOLINGS}"),
    ),
    "integer pooling weights": (
        lambda: attend(compression=nsa.weighted_pooling(ints(32))),
        "weights must be floating, got int32",
    ),
    "one position for all tokens of a block": (
        lambda: attend(compression=nsa.weighted_pooling(zeros(32), zeros(1, H))),
        f"{POSITIONS}, got shape [1, 8]; {POOLINGS}",
    ),
    "one position in a pooling network": (
        lambda: attend(compression=nsa.mlp_pooling(**NETWORK, positions=zeros(1, H))),
        f"{POSITIONS}, got shape [1, 8]; {POOLINGS}",
    ),
    "a pooling network of another block": (
        lambda: attend(compression=nsa.mlp_pooling(**NETWORK | {"w_in": zeros(16, H, 5)})),
        f"w_in must be [block, H, M] = [32, 8, 5], got shape [16, 8, 5]; {POOLINGS}",
    ),
    "a pooling network with another result": (
        lambda: attend(compression=nsa.mlp_pooling(**NETWORK | {"w_out": zeros(5, 3)})),
        f"w_out must be [M, H] = [5, 8], got shape [5, 3]; {POOLINGS}",
    ),
    "one bias for all hidden units": (
        lambda: attend(compression=nsa.mlp_pooling(**NETWORK, b_in=zeros(1))),
        f"b_in must be [M] = [5], got shape [1]; {POOLINGS}",
    ),
    "one bias for all results": (
        lambda: attend(compression=nsa.mlp_pooling(**NETWORK, b_out=zeros(1))),
        f"b_out must be [H] = [8], got shape [1]; {POOLINGS}",
    ),
    "msa without an indexer": (
        lambda: attend(score="msa", index_key=zeros(B, T, 1, 4)),
        "score='msa' needs index_query",
    ),
    "an indexer for nsa": (
        lambda: attend(index_query=zeros(B, T, K, 4)),
        "index_query is for score='msa', but score is 'nsa'; leave it out",
    ),
    "an indexer of other heads": (
        lambda: attend(score="msa", index_query=zeros(B, T, N, 4), index_key=zeros(B, T, 1, 4)),
        "index_query must be [B, T, K, Hi] with [B, T, K] = [2, 32, 2], got shape [2, 32, 4, 4]",
    ),
    "index keys of another size": (
        lambda: attend(score="msa", index_query=zeros(B, T, K, 4), index_key=zeros(B, T, 1, 5)),
        "index_key must be [2, 32, 2, 4] or [2, 32, 1, 4], got shape [2, 32, 1, 5]",
    ),
    "an indexer of integers": (
        lambda: attend(score="msa", index_query=zeros(B, T, K, 4), index_key=ints(B, T, 1, 4)),
        "index_key must be floating, got int32",
    ),
    "an indexer beside given blocks": (
        lambda: attend(score="msa", index_query=zeros(B, T, K, 4), block_indices=INDICES),
        (
            "index_query selects blocks, but block_indices are given or the selected branch is "
            "off; leave it out"
        ),
    ),
    "cu_seqlens of a batch": (
        lambda: attend(cu_seqlens=np.array([0, 32])),
        (
            "cu_seqlens describes sequences packed into one batch row, but query has 2; use "
            "segment_ids [B, T]"
        ),
    ),
    "cu_seqlens that fall": (
        lambda: packed(cu_seqlens=np.array([0, 9, 4, 32])),
        "cu_seqlens must rise from 0 to at most T = 32, got [0, 9, 4, 32]",
    ),
    "cu_seqlens of one number": (
        lambda: packed(cu_seqlens=np.array([32])),
        "cu_seqlens must be [sequences + 1]: 0 and the end of every sequence, got shape [1]",
    ),
    "two descriptions of sequences": (
        lambda: packed(cu_seqlens=np.array([0, 32]), segment_ids=ints(1, T)),
        "segment_ids and cu_seqlens both say which tokens form a sequence; give one",
    ),
    "token_indices that contradict": (
        lambda: packed(cu_seqlens=np.array([0, 9, 32]), token_indices=np.arange(T)),
        (
            "token_indices say that token 9 has position 9, but with these cu_seqlens it has 0; "
            "give one of the two"
        ),
    ),
    "token_indices that do not begin at 0": (
        lambda: packed(token_indices=np.arange(5, T + 5)),
        (
            "token_indices must count the tokens of every sequence from 0, but token 0 has "
            "position 5; leave them out, or give segment_ids"
        ),
    ),
    "token_indices that fall": (
        lambda: packed(token_indices=np.array([0, 1, 2, 1, *[0] * (T - 4)])),
        (
            "token_indices must count the tokens of every sequence from 0, but token 3 has "
            "position 1 after 2; leave them out, or give segment_ids"
        ),
    ),
    "pairs of token_indices that do not begin at 0": (
        lambda: packed(token_indices=np.stack([np.zeros(T, int), np.arange(1, T + 1)], 1)),
        (
            "token_indices must count the tokens of every sequence from 0, but token 0 has "
            "position 1; leave them out, or give segment_ids"
        ),
    ),
    "token_indices of another length": (
        lambda: packed(token_indices=np.arange(9)),
        "token_indices must be positions [32] or (sequence, position) pairs [32, 2], got shape [9]",
    ),
    "an unknown implementation": (
        lambda: apply(INDICES, implementation="triton"),
        (
            "implementation 'triton' is not one of ['hopper', 'xla', 'reference'], which compute "
            "the selected branch (dense, tpu: only calls without one); leave it out for the "
            "fastest that can run"
        ),
    ),
    "an unknown implementation without tokens": (
        lambda: nsa.select_blocks(zeros(1, 0, N, H), zeros(1, 0, K, H), implementation="triton"),
        (
            f"implementation 'triton' is not one of {list(BACKENDS)}; leave it out for the fastest "
            "that can run"
        ),
    ),
    "an unknown implementation of moba's choice": (
        lambda: select(score="moba", implementation="triton"),
        (
            f"implementation 'triton' is not one of {list(BACKENDS)}; leave it out for the fastest "
            "that can run"
        ),
    ),
    "an unknown compression beside moba's choice": (
        lambda: select(score="moba", compression="max"),
        (
            "compression must be 'mean', a function [B, P, block, K, H] -> [B, P, K, H], or a pair "
            "of those for keys and values, got 'max'"
        ),
    ),
    "floating indices to explain": (
        lambda: explain(indices=zeros(B, T, K, 3)),
        "block_indices must hold integers, got float32",
    ),
    "a query without a batch axis to explain": (
        lambda: nsa.explain(zeros(T, N, H), zeros(T, K, H), zeros(T, K, H), INDICES),
        "query must be [B, T, N, H], got shape [32, 4, 8]; add a batch axis",
    ),
    "no block to explain": (
        lambda: explain(block_size=0),
        "block_size must be an integer from 1 to 2147483647, got 0",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, sentence = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=f"(?m)^{re.escape(sentence)}$"):
        call()


def test_a_backend_says_why_it_cannot_run(monkeypatch):
    class Never:
        @staticmethod
        def why_not(call):
            return "needs another machine"

    monkeypatch.setitem(nsa.selected.BACKENDS, "never", Never)
    monkeypatch.setattr(nsa.selected, "NAMES", [*nsa.selected.NAMES, "never"])
    sentence = "implementation 'never' cannot run the selected branch: it needs another machine"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        apply(INDICES, implementation="never")
    shape = jax.ShapeDtypeStruct((B, T, K, H), jnp.float32)
    answer = nsa.explain(shape, shape, shape, INDICES)
    assert nsa.explain(shape, shape, shape, INDICES, segment_ids=[0] * T).reasons == answer.reasons
    assert answer.chosen == "xla"
    assert answer.reasons["never"] == "needs another machine"
    asked = nsa.explain(shape, shape, shape, INDICES, implementation="never")
    assert asked.chosen is None
    assert "asked for, but needs another machine" in str(asked)
