"""The counted work of the `tpu` kernels on a mask that is counted by hand."""

import pytest

from xsake.bench.suites import tpu_estimate

pytestmark = pytest.mark.second_python

BLOCKS, BLOCK, HEADS, H = 8, 128, tpu_estimate.N, tpu_estimate.H


def test_work_is_that_of_the_visits():
    forward, backward = tpu_estimate.estimate("causal", BLOCK, BLOCKS * BLOCK)
    visits = HEADS * BLOCKS * (BLOCKS + 1) // 2
    assert forward["visits"] == visits
    assert forward["operations"] == 4 * visits * BLOCK**2 * H
    assert backward["operations"] == (6 + 8) * visits * BLOCK**2 * H
    # The first two row blocks of a head begin with the same kv block.
    tile, kv_blocks = 2 * BLOCK * H, visits - HEADS
    logsumexp = 4 * BLOCK * 128
    wanted = kv_blocks * 2 * tile + HEADS * BLOCKS * (2 * tile + logsumexp)
    assert forward["copied_bytes"] == wanted
    # Two columns of kv blocks of one head follow each other with different row blocks.
    scalars, kv_heads = 2 * 4 * BLOCK, tpu_estimate.K
    dq = kv_blocks * 2 * tile + HEADS * BLOCKS * (3 * tile + scalars)
    dk_dv = visits * (2 * tile + scalars) + kv_heads * BLOCKS * 4 * tile
    assert backward["copied_bytes"] == pytest.approx(dq + dk_dv, rel=0.05)
    # The least time is that of the scarcer peak.
    for chip, peak in tpu_estimate.CHIPS.items():
        products = backward["operations"] / peak["operations_per_second"]
        memory = backward["copied_bytes"] / peak["bytes_per_second"]
        assert backward[f"{chip}_least_seconds"] == max(products, memory)
        assert backward[f"{chip}_limit"] == ("products" if products > memory else "memory")
