"""How an engine packs rollouts."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from enum import Enum


class ExecutionMode(Enum):
    """What is batched: nothing, whole requests, or the denoising steps of requests in flight."""

    SERIAL = "serial"
    REQUEST = "request"
    STEP = "step"


@dataclass(frozen=True)
class RolloutConfig:
    """The knobs of a :class:`~omnibatch.RolloutEngine`.

    Args:
        step_execution: true for step-wise continuous batching.
        max_num_seqs: requests in flight (step-wise) or in a wave (request-level). Without ``step_execution``, 1 is
            serial execution.
        request_batch_max_wait_ms: how long a wave may wait for more arrivals, in milliseconds; request-level only.
        rows_per_forward: rows that every transformer call takes, exactly: more are split over calls, fewer are filled
            up with rows whose results are dropped. ``None`` takes all rows in one call.
        decode_rows: rows that a VAE call takes at most. ``None`` takes 8, or 1 with ``rows_per_forward``, since a
            picture's last bits may depend on how many are decoded together.

    Raises:
        ValueError: naming the field, its value and what would be right.

    Example:
        >>> RolloutConfig(step_execution=True, max_num_seqs=8).mode
        <ExecutionMode.STEP: 'step'>
    """

    step_execution: bool = False
    max_num_seqs: int = 1
    request_batch_max_wait_ms: float = 0
    rows_per_forward: int | None = None
    decode_rows: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.step_execution, bool):
            raise ValueError(f"step_execution must be true or false, got {self.step_execution!r}")
        _require_count("max_num_seqs", self.max_num_seqs)
        for name in ("rows_per_forward", "decode_rows"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name))
        wait = self.request_batch_max_wait_ms
        if not (isinstance(wait, numbers.Real) and not isinstance(wait, bool) and wait >= 0 and math.isfinite(wait)):
            raise ValueError(f"request_batch_max_wait_ms must be a finite number of at least 0, got {wait!r}")
        if self.step_execution and wait > 0:
            raise ValueError(
                f"step_execution=True excludes request_batch_max_wait_ms={wait!r}: the modes are mutually exclusive; "
                "drop request_batch_max_wait_ms for step-wise or step_execution for request-level batching"
            )

    @property
    def mode(self) -> ExecutionMode:
        if self.step_execution:
            return ExecutionMode.STEP
        return ExecutionMode.REQUEST if self.max_num_seqs > 1 else ExecutionMode.SERIAL

    @classmethod
    def for_mode(cls, mode: ExecutionMode, max_num_seqs: int, *, rows_per_forward: int | None = None) -> RolloutConfig:
        """The configuration that runs a mode at a capacity; serial execution takes one request whatever is given."""
        return cls(
            step_execution=mode is ExecutionMode.STEP,
            max_num_seqs=1 if mode is ExecutionMode.SERIAL else max_num_seqs,
            rows_per_forward=rows_per_forward,
        )


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
