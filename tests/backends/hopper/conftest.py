"""BlockMasks have intervals in these tests, as on a GPU."""

import pytest

from xsake.masks import intervals


@pytest.fixture(autouse=True)
def kernels_read_intervals(monkeypatch):
    monkeypatch.setattr(intervals, "are_read", lambda: True)
