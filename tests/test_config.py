"""The engine's knobs."""

import pytest

from omnibatch import ExecutionMode, RolloutConfig


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        ({}, ExecutionMode.SERIAL),
        ({"max_num_seqs": 8}, ExecutionMode.REQUEST),
        ({"max_num_seqs": 8, "request_batch_max_wait_ms": 10}, ExecutionMode.REQUEST),
        ({"step_execution": True}, ExecutionMode.STEP),
        ({"step_execution": True, "max_num_seqs": 256}, ExecutionMode.STEP),
    ],
)
def test_mode_follows_from_the_knobs(arguments, mode):
    assert RolloutConfig(**arguments).mode is mode


@pytest.mark.parametrize("mode", list(ExecutionMode))
def test_for_mode_gives_that_mode(mode):
    config = RolloutConfig.for_mode(mode, 8, rows_per_forward=4)
    assert (config.mode, config.rows_per_forward) == (mode, 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step_execution", "true"),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_seqs", 2.0),
        ("rows_per_forward", 0),
        ("request_batch_max_wait_ms", -1),
        ("request_batch_max_wait_ms", float("inf")),
        ("request_batch_max_wait_ms", "10"),
    ],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*{value!r}"):
        RolloutConfig(**{field: value})


def test_the_modes_exclude_each_other():
    with pytest.raises(ValueError, match=r"mutually exclusive; drop request_batch_max_wait_ms .* or step_execution"):
        RolloutConfig(step_execution=True, request_batch_max_wait_ms=10)
