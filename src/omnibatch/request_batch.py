"""Whole requests packed for one ``forward()``, and the helpers that adapter authors draw windows with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omnibatch.request import OmniDiffusionRequest, OmniDiffusionSamplingParams


class DiffusionRequestBatch:
    """Requests that go through an adapter's ``forward()`` together.

    Args:
        requests: at least one request, with different ids.

    Raises:
        ValueError: when there is no request, or an id appears twice.
    """

    def __init__(self, requests: Sequence[OmniDiffusionRequest]):
        self.requests = list(requests)
        if not self.requests:
            raise ValueError("requests must hold at least one request")
        self._by_id = {request.request_id: request for request in self.requests}
        if len(self._by_id) != len(self.requests):
            repeated = next(name for name in self.request_ids if self.request_ids.count(name) > 1)
            raise ValueError(f"request_id {repeated!r} appears more than once in the batch")

    @property
    def num_reqs(self) -> int:
        return len(self.requests)

    @property
    def request_ids(self) -> list[str]:
        return [request.request_id for request in self.requests]

    @property
    def prompts(self) -> list[str | dict[str, Any]]:
        return [request.prompt for request in self.requests]

    @property
    def sampling_params_list(self) -> list[OmniDiffusionSamplingParams]:
        return [request.sampling_params for request in self.requests]

    @property
    def sampling_params(self) -> OmniDiffusionSamplingParams:
        """The one request's sampling parameters.

        Raises:
            ValueError: when the batch holds several requests, which may differ; use ``sampling_params_list``.
        """
        if len(self.requests) != 1:
            raise ValueError(f"sampling_params is for one request, the batch has {len(self.requests)}")
        return self.requests[0].sampling_params

    def get(self, request_id: str) -> OmniDiffusionRequest:
        """The request with this id.

        Raises:
            KeyError: when the batch has no such request.
        """
        return self._by_id[request_id]


def sample_per_sample_sde_windows(
    *,
    sde_window_size: int | None,
    sde_window_range: tuple[int, int],
    num_timesteps: int,
    batch_size: int,
    generator: torch.Generator | Sequence[torch.Generator] | None,
    device: torch.device,
) -> list[tuple[int, int]]:
    """Draw the SDE window of each sample.

    Args:
        sde_window_size: steps in the window; ``None`` takes all steps but the last, ``(0, num_timesteps - 1)``.
        sde_window_range: the window lies within ``[low, high)`` steps.
        num_timesteps: steps of the schedule.
        batch_size: B.
        generator: one generator a sample, each of which draws its own window, or one (or ``None``, torch's own),
            from which a single window is drawn that all samples share.
        device: where the draw is made; it must be the generators' device.

    Returns:
        B windows ``(start, end)``, ``end`` exclusive.

    Raises:
        ValueError: when the window does not fit, or the list of generators has another length than ``batch_size``.

    Example:
        >>> sample_per_sample_sde_windows(sde_window_size=None, sde_window_range=(0, 5), num_timesteps=10,
        ...                               batch_size=2, generator=None, device=torch.device("cpu"))
        [(0, 9), (0, 9)]
    """
    if sde_window_size is None:
        return [(0, max(num_timesteps - 1, 0))] * batch_size
    low, high = sde_window_range
    if not 1 <= sde_window_size <= high - low:
        raise ValueError(
            f"sde_window_size must be from 1 to the length of sde_window_range [{low}, {high}], got {sde_window_size}"
        )

    def draw(source: torch.Generator | None) -> tuple[int, int]:
        start = int(torch.randint(low, high - sde_window_size + 1, (1,), generator=source, device=device))
        return start, start + sde_window_size

    if isinstance(generator, Sequence):
        if len(generator) != batch_size:
            raise ValueError(f"generator must hold batch_size = {batch_size} generators, got {len(generator)}")
        return [draw(source) for source in generator]
    return [draw(generator)] * batch_size
