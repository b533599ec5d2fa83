"""The flow-matching sampler: one reverse step and its log-prob, for many rows at once.

Each supported step is affine in the sample ``x`` and the velocity ``v``: with ``e ~ N(0, 1)``

    mean = sample_weight * x + velocity_weight * v        next = mean + noise_scale * e

and each log-prob is a shifted, scaled mean of squares of ``next - mean``. The weights depend on the noise levels
alone, so they are worked out once per request in float64, and rows that differ in noise level, sampler, step or
number of steps all take their step in the same vectorised call.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import torch

SDE_TYPES = ("sde", "cps", "dance_sde")

# Beyond these, log-probs do not fit into float32.
SMALLEST_NOISE, LARGEST_NOISE = 1e-4, 100.0
NOISE_LEVELS = "0 or a number from 1e-4 to 100"


def is_noise_level(value: float) -> bool:
    """Whether a step can be taken with this much noise."""
    return value == 0 or SMALLEST_NOISE <= value <= LARGEST_NOISE


@dataclass(frozen=True)
class StepCoefficients:
    """One reverse step in numbers. The log-prob is ``log_prob_offset - log_prob_weight * mean((next - mean)^2)``."""

    sample_weight: float
    velocity_weight: float
    noise_scale: float
    log_prob_weight: float
    log_prob_offset: float


def step_coefficients(
    sigma: float,
    next_sigma: float,
    *,
    noise_level: float = 0.0,
    sde_type: str = "sde",
    first_sigma: float | None = None,
) -> StepCoefficients:
    """The coefficients of one reverse step from ``sigma`` to ``next_sigma``.

    Args:
        sigma: current noise level, in (0, 1].
        next_sigma: the next one, in [0, sigma).
        noise_level: a in the papers; 0 is the deterministic Euler step, which has no log-prob.
        sde_type: ``"sde"`` (Flow-GRPO, arXiv 2505.05470), ``"cps"`` (arXiv 2509.05952) or ``"dance_sde"``
            (DanceGRPO, arXiv 2505.07818).
        first_sigma: the schedule's second noise level, which replaces sigma in ``sde``'s variance where sigma is 1
            and the formula would divide by zero.

    Raises:
        ValueError: naming the field and its value.

    Example:
        >>> step_coefficients(0.5, 0.25)  # doctest: +ELLIPSIS
        StepCoefficients(sample_weight=1.0, velocity_weight=-0.25, noise_scale=0.0, ...)
    """
    if sde_type not in SDE_TYPES:
        raise ValueError(f"sde_type must be one of {', '.join(SDE_TYPES)}, got {sde_type!r}")
    if not is_noise_level(noise_level):
        raise ValueError(f"noise_level must be {NOISE_LEVELS}, got {noise_level!r}")
    if not 0 <= next_sigma < sigma <= 1:
        raise ValueError(f"sigmas must fall within [0, 1], got a step from {sigma!r} to {next_sigma!r}")
    dt = next_sigma - sigma
    if noise_level == 0:
        return StepCoefficients(1.0, dt, 0.0, 0.0, 0.0)
    if sde_type == "cps":
        std = next_sigma * math.sin(noise_level * math.pi / 2)
        # max: rounding may put the difference of two equal squares just below zero.
        kept_noise = math.sqrt(max(next_sigma**2 - std**2, 0.0))
        sample_weight = (1 - next_sigma) + kept_noise
        velocity_weight = -sigma * (1 - next_sigma) + (1 - sigma) * kept_noise
        return StepCoefficients(sample_weight, velocity_weight, std, 1.0, 0.0)
    if sde_type == "sde":
        variance_sigma = sigma if sigma < 1 else next_sigma if first_sigma is None else first_sigma
        variance = noise_level**2 * sigma / (1 - variance_sigma)
    else:
        variance = noise_level**2
    drift = variance / (2 * sigma) * dt
    noise_scale = math.sqrt(-dt * variance)
    return StepCoefficients(
        sample_weight=1 + drift,
        velocity_weight=dt + (1 - sigma) * drift,
        noise_scale=noise_scale,
        log_prob_weight=1 / (2 * noise_scale**2),
        log_prob_offset=-math.log(noise_scale) - 0.5 * math.log(2 * math.pi),
    )


@lru_cache(maxsize=256)
def schedule_coefficients(
    sigmas: tuple[float, ...], window: tuple[int, int], *, noise_level: float, sde_type: str
) -> torch.Tensor:
    """Coefficients of a whole schedule: SDE steps inside the window, Euler steps outside.

    Args:
        sigmas: ``T + 1`` noise levels, falling, the last one 0.
        window: first SDE step and the one after the last.

    Returns:
        float32 ``(T, 5)`` on the CPU, a row a step, in the order of :class:`StepCoefficients`' fields. Requests with
        equal arguments get the same tensor.
    """
    start, end = window
    rows = [
        step_coefficients(
            sigmas[index],
            sigmas[index + 1],
            noise_level=noise_level if start <= index < end else 0.0,
            sde_type=sde_type,
            first_sigma=sigmas[1],
        )
        for index in range(len(sigmas) - 1)
    ]
    table = torch.tensor([astuple(row) for row in rows], dtype=torch.float64)
    return table.reshape(-1, len(fields(StepCoefficients))).to(torch.float32)


class SampledStep(NamedTuple):
    """Rows after one reverse step: ``next_sample`` and ``mean`` ``(R, ...)``, ``log_prob`` ``(R,)``, all float32."""

    next_sample: torch.Tensor
    mean: torch.Tensor
    log_prob: torch.Tensor


def sample_step(
    sample: torch.Tensor,
    velocity: torch.Tensor,
    coefficients: torch.Tensor,
    *,
    noise: torch.Tensor | None = None,
    next_sample: torch.Tensor | None = None,
    rows_per_sum: int | None = None,
) -> SampledStep:
    """Take one reverse step for R rows, or score a step that was taken.

    Args:
        sample: ``(R, ...)`` float32.
        velocity: the model's prediction, same shape.
        coefficients: ``(R, 5)`` float32, one row of :func:`schedule_coefficients` each.
        noise: standard normal, same shape as ``sample``; ``None`` where no row draws any.
        next_sample: the step's known result; then nothing is drawn and its log-prob is returned.
        rows_per_sum: sum squares over exactly this many rows at a time. A device may sum a row in another order when
            there are more or fewer of them, so this makes a log-prob's bits the row's own.

    Returns:
        The step. A row whose step is deterministic has log-prob 0, which means nothing.
    """
    sample = sample.float()
    per_row = (-1,) + (1,) * (sample.dim() - 1)
    sample_weight, velocity_weight, noise_scale, log_prob_weight, log_prob_offset = coefficients.unbind(1)
    mean = sample_weight.view(per_row) * sample + velocity_weight.view(per_row) * velocity.float()
    if next_sample is None:
        next_sample = mean if noise is None else mean + noise_scale.view(per_row) * noise
    square = (next_sample.float() - mean).square()
    return SampledStep(next_sample, mean, log_prob_offset - log_prob_weight * _mean_of_rows(square, rows_per_sum))


def _mean_of_rows(values: torch.Tensor, rows_per_sum: int | None) -> torch.Tensor:
    if rows_per_sum is not None:
        filling = values.new_zeros((-len(values) % rows_per_sum, *values.shape[1:]))
        chunks = torch.cat([values, filling]).split(rows_per_sum)
        return torch.cat([_mean_of_rows(chunk, None) for chunk in chunks])[: len(values)]
    # The last axis first: one long sum is split over threads when there is a single row, and then a row's bits would
    # depend on how many rows there are.
    return values.mean(dim=-1).reshape(len(values), -1).mean(dim=1)
