"""The choice of a mode."""

import pytest

from omnibatch.config import ExecutionMode
from omnibatch.dispatch import choose_mode, require_mode, supported_modes

SERIAL, REQUEST, STEP = ExecutionMode.SERIAL, ExecutionMode.REQUEST, ExecutionMode.STEP


class Forward:
    def forward(self, req): ...


class RequestBatching(Forward):
    supports_request_batch = True


class Lifecycle:
    def prepare_encode(self, state): ...

    def denoise_step(self, input_batch): ...

    def step_scheduler(self, state, noise_pred): ...

    def post_decode(self, state): ...


class Both(Lifecycle, RequestBatching): ...


class ThreeOfFour(Lifecycle):
    post_decode = None


@pytest.mark.parametrize(
    ("adapter", "modes"),
    [
        (Forward(), [SERIAL]),
        (RequestBatching(), [REQUEST, SERIAL]),
        (Lifecycle(), [STEP, SERIAL]),
        (Both(), [STEP, REQUEST, SERIAL]),
        (ThreeOfFour(), [SERIAL]),
    ],
)
def test_supported_modes_are_read_from_the_signals(adapter, modes):
    assert supported_modes(adapter) == modes


@pytest.mark.parametrize(
    ("adapter", "measured", "mode", "reason"),
    [
        (Both(), {STEP: 2.0, REQUEST: 1.0, SERIAL: 4.0}, REQUEST, "request was measured fastest"),
        (Both(), {STEP: 1.0, REQUEST: 1.01}, STEP, "within 3%; step is preferred"),
        (Both(), {SERIAL: 1.0, REQUEST: 1.01}, REQUEST, "request is preferred"),
        (Both(), None, STEP, "has the step lifecycle"),
        (Both(), {REQUEST: 1.0}, STEP, "not measured"),
        (RequestBatching(), None, REQUEST, "no step lifecycle"),
        (RequestBatching(), {STEP: 0.1, REQUEST: 1.0, SERIAL: 2.0}, REQUEST, "request was measured fastest"),
        (Forward(), None, SERIAL, "no batching"),
        (Both(), {STEP: 2.0, REQUEST: 2.0, SERIAL: 1.0}, SERIAL, "serial was measured fastest"),
    ],
)
def test_the_four_rules(adapter, measured, mode, reason):
    choice = choose_mode(adapter, measured)
    assert choice.mode is mode
    assert reason in choice.reason


def test_a_mode_that_is_missing_is_refused_with_what_would_work():
    require_mode(Both(), STEP)
    with pytest.raises(ValueError, match=r"cannot run mode 'step': it lacks post_decode; it can run serial"):
        require_mode(ThreeOfFour(), STEP)
    with pytest.raises(ValueError, match=r"lacks supports_request_batch = True; it can run step, serial"):
        require_mode(Lifecycle(), REQUEST)
