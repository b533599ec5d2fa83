"""Noise schedules as the model's own scheduler makes them."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

# Every request of a training step has the same one or two schedules.
MAX_REMEMBERED = 64


class NoiseSchedules:
    """Makes schedules, and remembers the last ones."""

    def __init__(self) -> None:
        # With the scheduler beside each, since an id means its object only as long as that is alive.
        self._known: dict[Hashable, tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def get(
        self, scheduler: Any, num_inference_steps: int, sigmas: Sequence[float] | None, image_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The schedule that a diffusers scheduler would set; the scheduler itself is left alone.

        Its object keeps one step index for whoever used it last, which requests must not share.

        Args:
            scheduler: the pipeline's.
            num_inference_steps: T.
            sigmas: T noise levels to start from, or ``None`` for the scheduler's spacing.
            image_tokens: tokens of a picture, on which a dynamically shifted schedule depends.

        Returns:
            Sigmas ``(T + 1,)`` and timesteps ``(T,)``, float32 on the CPU.

        Raises:
            ValueError: when the scheduler leaves the schedule undefined.
        """
        shift = dynamic_shift(scheduler.config, image_tokens)
        key = (id(scheduler), scheduler.shift, num_inference_steps, None if sigmas is None else tuple(sigmas), shift)
        if key not in self._known:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            self._known[key] = scheduler, *_make(copy.copy(scheduler), num_inference_steps, sigmas, shift)
        return self._known[key][1:]


def dynamic_shift(config: Mapping[str, Any], image_tokens: int) -> float | None:
    """The shift ``mu`` of a schedule that depends on the picture's size; ``None`` for a static one.

    It is a straight line through ``base_shift`` at ``base_image_seq_len`` tokens and ``max_shift`` at
    ``max_image_seq_len``, with diffusers' defaults for what the scheduler's configuration leaves out.

    Example:
        >>> dynamic_shift({"use_dynamic_shifting": True, "max_shift": 0.9, "max_image_seq_len": 8192}, 8192)
        0.9
    """
    if not config.get("use_dynamic_shifting"):
        return None
    base_tokens, most_tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base_shift, most_shift = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (most_shift - base_shift) / (most_tokens - base_tokens)
    return image_tokens * slope + (base_shift - slope * base_tokens)


def _make(
    scheduler: Any, num_inference_steps: int, sigmas: Sequence[float] | None, shift: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments: dict[str, Any] = {"num_inference_steps": num_inference_steps} if sigmas is None else {"sigmas": sigmas}
    if shift is not None:
        arguments["mu"] = shift
    # Stretching a single sigma to the terminal one divides zero by zero.
    with np.errstate(invalid="ignore"):
        scheduler.set_timesteps(device="cpu", **arguments)
    if not torch.isfinite(scheduler.sigmas).all():
        raise ValueError(
            "num_inference_steps must be larger, since this model's noise schedule is undefined for so few, "
            f"got {num_inference_steps}"
        )
    return scheduler.sigmas, scheduler.timesteps
