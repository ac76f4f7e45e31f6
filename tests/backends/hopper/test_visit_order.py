"""In which order the backward visits row blocks."""

from __future__ import annotations

import types

import pytest

from tests.conditions import needs_newer_jax
from xsake.backends import Sizes
from xsake.backends.options import BackwardTiling


@needs_newer_jax
@pytest.mark.parametrize(
    ("sizes", "does_not_fit"),
    [
        (Sizes(1, 65536, 4096, 64, 4, 128, 128), True),  # NSA's compressed branch
        (Sizes(1, 65536, 65536, 64, 4, 128, 128), True),
        (Sizes(1, 16384, 16384, 16, 16, 64, 64), False),  # slower from the last block on
        (Sizes(1, 16384, 16384, 16, 16, 128, 128), False),
        (Sizes(4, 4096, 4096, 16, 16, 128, 128), False),
    ],
)
def test_row_blocks_are_visited_from_the_last_where_they_do_not_fit_into_l2(sizes, does_not_fit):
    from xsake.backends.hopper.backward_columns import bytes_read_together

    shape = types.SimpleNamespace(sizes=sizes, block=(128, 128))
    assert (bytes_read_together(shape) > BackwardTiling().l2_bytes) == does_not_fit
