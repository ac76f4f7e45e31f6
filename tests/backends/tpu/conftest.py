"""The kernels run in the TPU interpreter here, with its race detector."""

import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from xsake.backends import tpu
from xsake.masks import intervals

WITH_RACES = pltpu.InterpretParams(detect_races=True)


@pytest.fixture
def interpreted(monkeypatch):
    """Every kernel of the test is interpreted; one that was, and a race in none of them."""
    states, new_state = [], interpret_pallas_call.RaceDetectionState

    def recorded(*args, **named):
        states.append(new_state(*args, **named))
        return states[-1]

    monkeypatch.setattr(interpret_pallas_call, "RaceDetectionState", recorded)
    monkeypatch.setattr(tpu, "interpret", WITH_RACES)
    monkeypatch.setattr(intervals, "are_read", lambda: True)  # as on a TPU
    pltpu.reset_tpu_interpret_mode_state()
    yield
    assert states, "no kernel was interpreted"
    assert not any(state.races_found for state in states)
