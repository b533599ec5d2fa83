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


STEP_FASTEST = {SERIAL: 4.0, REQUEST: 2.0, STEP: 1.0}
REQUEST_FASTEST = {SERIAL: 4.0, REQUEST: 1.0, STEP: 2.0}
SERIAL_FASTEST = {SERIAL: 1.0, REQUEST: 4.0, STEP: 2.0}
TIED = {SERIAL: 1.01, REQUEST: 1.0, STEP: 1.02}
UNKNOWN: dict = {}

NOT_MEASURED = {
    STEP: "not measured; the adapter has the step lifecycle",
    REQUEST: "not measured; the adapter has no step lifecycle but takes request batches",
    SERIAL: "the adapter supports no batching",
}
FASTEST = "{} was measured fastest (1 s)"

# Adapter, measurement, and what follows without a wish: every combination.
TABLE = [
    (Both(), UNKNOWN, STEP, NOT_MEASURED[STEP]),
    (Both(), STEP_FASTEST, STEP, FASTEST.format("step")),
    (Both(), REQUEST_FASTEST, REQUEST, FASTEST.format("request")),
    (Both(), SERIAL_FASTEST, SERIAL, FASTEST.format("serial")),
    (Both(), TIED, STEP, "step, request, serial were measured within 3%; step is preferred"),
    (Lifecycle(), UNKNOWN, STEP, NOT_MEASURED[STEP]),
    (Lifecycle(), STEP_FASTEST, STEP, FASTEST.format("step")),
    (Lifecycle(), REQUEST_FASTEST, STEP, "step was measured fastest (2 s)"),
    (Lifecycle(), SERIAL_FASTEST, SERIAL, FASTEST.format("serial")),
    (Lifecycle(), TIED, STEP, "step, serial were measured within 3%; step is preferred"),
    (RequestBatching(), UNKNOWN, REQUEST, NOT_MEASURED[REQUEST]),
    (RequestBatching(), STEP_FASTEST, REQUEST, "request was measured fastest (2 s)"),
    (RequestBatching(), REQUEST_FASTEST, REQUEST, FASTEST.format("request")),
    (RequestBatching(), SERIAL_FASTEST, SERIAL, FASTEST.format("serial")),
    (RequestBatching(), TIED, REQUEST, "request, serial were measured within 3%; request is preferred"),
    (Forward(), UNKNOWN, SERIAL, NOT_MEASURED[SERIAL]),
    (Forward(), STEP_FASTEST, SERIAL, NOT_MEASURED[SERIAL]),
    (Forward(), REQUEST_FASTEST, SERIAL, NOT_MEASURED[SERIAL]),
    (Forward(), SERIAL_FASTEST, SERIAL, NOT_MEASURED[SERIAL]),
    (Forward(), TIED, SERIAL, NOT_MEASURED[SERIAL]),
]
MISSING = {
    STEP: "it lacks prepare_encode, denoise_step, step_scheduler, post_decode",
    REQUEST: "it lacks supports_request_batch = True",
}


@pytest.mark.parametrize("wish", [None, SERIAL, REQUEST, STEP])
@pytest.mark.parametrize(("adapter", "measured", "mode", "reason"), TABLE)
def test_every_combination_of_signals_wish_and_measurement(adapter, measured, mode, reason, wish):
    if wish is None:
        assert choose_mode(adapter, measured) == (mode, reason)
    elif wish in supported_modes(adapter):
        assert choose_mode(adapter, measured, wish=wish) == (wish, "asked for")
    else:
        works = ", ".join(known.value for known in supported_modes(adapter))
        with pytest.raises(ValueError, match=f"cannot run mode '{wish.value}': {MISSING[wish]}; it can run {works}"):
            choose_mode(adapter, measured, wish=wish)
