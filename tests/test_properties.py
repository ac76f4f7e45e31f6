"""Random calls against the oracle: forward, logsumexp and every gradient, on every CPU backend.

10 signatures x 5 contents, each on two backends. Each signature compiles once, whatever its
contents: hence few signatures and many contents. With --slow there are 14 signatures, 30 contents,
and 8 random signatures; `make fuzz` draws more of those.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.draws import BACKENDS, Contents, Signature, check, describe
from tests.fuzz import draw_contents, draw_signature
from tests.specs import Slot, later_heads_look_further, shifted_by_table

Q_IDS, KV_IDS = Slot("q_ids", "BT"), Slot("kv_ids", "BS")
Q_POSITIONS, KV_POSITIONS = Slot("q_positions", "BT"), Slot("kv_positions", "BS")
SEGMENTS = (("q_segment_ids", Q_IDS), ("kv_segment_ids", KV_IDS))
POSITIONS = (("q_positions", Q_POSITIONS), ("kv_positions", KV_POSITIONS))
LENGTHS = (
    ("query_seq_lengths", Slot("q_lengths", "B")),
    ("key_value_seq_lengths", Slot("kv_lengths", "B")),
)


SIGNATURES = {
    # sizes are B, T, S, N, K, H, Hv
    "segments and causality by keyword, permuted positions": Signature(
        (2, 97, 97, 4, 2, 16, 16),
        form="none",
        keywords=(("is_causal", True), *SEGMENTS, *POSITIONS),
    ),
    "random blocks of every head and row under a causal rule": Signature(
        (2, 130, 130, 6, 3, 8, 24),
        form="from_dense",
        rule=("causal",),
        block=(32, 16),
        blocks=Slot("bits", "BNij"),
    ),
    "random blocks of every kv head, T != S": Signature(
        (1, 75, 141, 6, 2, 8, 5),
        form="from_dense",
        block=(16, 64),
        blocks=Slot("bits", "1Kij"),
        sinks=(6,),
    ),
    "documents from a rule, bias of every pair": Signature(
        (2, 61, 61, 3, 3, 5, 8),
        form="from_rule",
        rule=("and", ("documents", Q_IDS, KV_IDS), ("sliding_window", 20, 7)),
        block=(16, 32),
        bias="BNTS",
    ),
    "window and sinks, bfloat16": Signature(
        (1, 150, 150, 4, 1, 24, 24),
        form="from_rule",
        rule=("and", ("sliding_window", 40, 0), ("documents", Slot("q_ids", "1T"), None)),
        block=(64, 32),
        sinks=(4, 2),
        dtype="bfloat16",
    ),
    "soft cap and segments, float16": Signature(
        (2, 70, 49, 2, 2, 16, 8),
        rule=("sliding_window", 30, 12),
        keywords=SEGMENTS,
        soft_cap=3.0,
        dtype="float16",
    ),
    "soft cap, sinks and a bias per key": Signature(
        (2, 33, 160, 4, 4, 8, 8),
        form="from_dense",
        rule=("or", ("first", 9), ("random", 0.4, 5, 16)),
        block=(32, 32),
        blocks=Slot("bits", "1Nij"),
        bias="B11S",
        sinks=(4,),
        soft_cap=2.5,
        scale=0.6,
    ),
    "a dense bool mask and a bias per head": Signature(
        (2, 45, 88, 4, 2, 8, 16),
        form="array",
        rule=("array", Slot("mask", "B1TS")),
        keywords=(("local_window_size", (60, 50)),),
        bias="1N11",
    ),
    "lengths, a window and a bias per query": Signature(
        (3, 90, 77, 2, 1, 16, 16),
        form="none",
        keywords=(("local_window_size", 31), *LENGTHS),
        bias="1NT1",
        sinks=(2, 3),
    ),
    "a prefix of each row or causality, at positions": Signature(
        (3, 64, 64, 2, 2, 8, 8),
        form="from_rule",
        rule=(
            "positions",
            ("or", ("prefix", Slot("prefix_lengths", "B")), ("causal",)),
            Q_POSITIONS,
            Slot("kv_positions", "1S"),
        ),
        block=(16, 16),
    ),
    "a function of b and n with a table": Signature(
        (2, 83, 101, 3, 1, 8, 8),
        form="from_rule",
        rule=("function", shifted_by_table, (Slot("table", "BN"),)),
        block=(32, 128),
        bias="11TS",
    ),
    "a function of n outside chunks, or an array per key": Signature(
        (2, 50, 50, 4, 2, 16, 5),
        rule=(
            "or",
            ("and", ("function", later_heads_look_further), ("not", ("chunked", 13))),
            ("array", Slot("mask", "1N1S")),
        ),
        keywords=POSITIONS,
        soft_cap=4.0,
        bias="B1T1",
    ),
    "random blocks per head, shared by the batch, with segments, bfloat16": Signature(
        (2, 128, 160, 4, 2, 16, 16),
        form="from_dense",
        rule=("not", ("strided", 3)),
        block=(128, 32),
        blocks=Slot("bits", "1Nij"),
        keywords=SEGMENTS,
        bias="1NTS",
        dtype="bfloat16",
    ),
    "one query, many keys": Signature(
        (2, 1, 155, 6, 1, 24, 8),
        form="from_dense",
        block=(16, 16),
        blocks=Slot("bits", "BNij"),
        keywords=(("key_value_seq_lengths", Slot("kv_lengths", "B")),),
        sinks=(6,),
    ),
}

CONTENTS = st.builds(
    Contents,
    seed=st.integers(0, 2**32 - 1),
    documents=st.integers(1, 6),
    padding=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    is_sorted=st.booleans(),
    order=st.sampled_from(["arange", "offset", "permuted", "repeated"]),
    keep=st.sampled_from([0.5, 0.0, 0.1, 0.9, 1.0]),
    magnitude=st.sampled_from([1.0, 0.3, 1.5]),
)


# Combinations of what other signatures have.
COMBINED = {
    "documents from a rule, bias of every pair",
    "lengths, a window and a bias per query",
    "a prefix of each row or causality, at positions",
    "random blocks per head, shared by the batch, with segments, bfloat16",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow) if x in COMBINED else x for x in SIGNATURES],
)
def test_results_match_the_oracle_for_any_array_values(name, request):
    signature = SIGNATURES[name]
    # `dense` has the formulas of `reference`
    backends = BACKENDS if request.config.getoption("--slow") else ("xla", "dense")

    @settings(
        max_examples=30 if request.config.getoption("--slow") else 3,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(CONTENTS)
    def every_number_is_near(contents):
        assert not check(signature, contents, backends), (describe(signature), contents)

    every_number_is_near()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_results_match_the_oracle_for_random_signatures(seed):
    rng = np.random.default_rng(seed)
    signature, contents = draw_signature(rng), draw_contents(rng)
    assert not check(signature, contents), (describe(signature), contents)
