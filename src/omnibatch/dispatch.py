"""Which mode, and why."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple

from omnibatch.config import ExecutionMode

STEP_METHODS = ("prepare_encode", "denoise_step", "step_scheduler", "post_decode")

# On equal times the document's order decides: step-wise, request-level, serial.
PREFERENCE = (ExecutionMode.STEP, ExecutionMode.REQUEST, ExecutionMode.SERIAL)


class ModeChoice(NamedTuple):
    """A mode and the reason for it, in words."""

    mode: ExecutionMode
    reason: str


def missing_step_methods(adapter: object) -> list[str]:
    """The lifecycle methods that step-wise execution needs and the adapter lacks."""
    return [name for name in STEP_METHODS if not callable(getattr(adapter, name, None))]


def supported_modes(adapter: object) -> list[ExecutionMode]:
    """The modes an adapter can run, read from its own signals, the preferred one first.

    Step-wise needs the four lifecycle methods; request-level needs ``supports_request_batch = True`` and a
    ``forward``. Serial always works.
    """
    modes = []
    if not missing_step_methods(adapter):
        modes.append(ExecutionMode.STEP)
    if getattr(adapter, "supports_request_batch", False) is True and callable(getattr(adapter, "forward", None)):
        modes.append(ExecutionMode.REQUEST)
    return [*modes, ExecutionMode.SERIAL]


def require_mode(adapter: object, mode: ExecutionMode) -> None:
    """Raise a ``ValueError`` that says what is missing and what would work, unless the adapter can run the mode."""
    supported = supported_modes(adapter)
    if mode in supported:
        return
    missing = (
        ", ".join(missing_step_methods(adapter)) if mode is ExecutionMode.STEP else "supports_request_batch = True"
    )
    raise ValueError(
        f"{type(adapter).__name__} cannot run mode {mode.value!r}: it lacks {missing}; "
        f"it can run {', '.join(known.value for known in supported)}"
    )


def wave_size(adapter: object, max_num_seqs: int) -> int:
    """How many requests of a wave the adapter takes: ``max_num_seqs``, or 1, with a warning, if it takes no batches."""
    if max_num_seqs > 1 and ExecutionMode.REQUEST not in supported_modes(adapter):
        warnings.warn(
            f"{type(adapter).__name__} does not set supports_request_batch = True: its requests run one by one, and "
            f"max_num_seqs = {max_num_seqs} has no effect",
            stacklevel=3,
        )
        return 1
    return max_num_seqs


def choose_mode(
    adapter: object,
    measured: Mapping[ExecutionMode, float] | None = None,
    *,
    wish: ExecutionMode | None = None,
    tolerance: float = 0.03,
) -> ModeChoice:
    """Pick a mode by the four rules, in order: faster when measured; else step-wise; else request-level; else serial.

    Args:
        adapter: what will run.
        measured: seconds for the same work in each mode, where known.
        wish: a mode that is asked for, which wins if the adapter can run it.
        tolerance: modes within this share of the fastest count as tied.

    Raises:
        ValueError: when the adapter lacks the mode that is asked for: what is missing, and what would work.
    """
    if wish is not None:
        require_mode(adapter, wish)
        return ModeChoice(wish, "asked for")
    supported = supported_modes(adapter)
    times = {mode: seconds for mode, seconds in (measured or {}).items() if mode in supported}
    if len(times) > 1:
        fastest = min(times.values())
        tied = [mode for mode in PREFERENCE if times.get(mode, float("inf")) <= fastest * (1 + tolerance)]
        if len(tied) == 1:
            return ModeChoice(tied[0], f"{tied[0].value} was measured fastest ({fastest:.3g} s)")
        names = ", ".join(mode.value for mode in tied)
        return ModeChoice(tied[0], f"{names} were measured within {tolerance:.0%}; {tied[0].value} is preferred")
    reasons = {
        ExecutionMode.STEP: "not measured; the adapter has the step lifecycle",
        ExecutionMode.REQUEST: "not measured; the adapter has no step lifecycle but takes request batches",
        ExecutionMode.SERIAL: "the adapter supports no batching",
    }
    return ModeChoice(supported[0], reasons[supported[0]])
