"""Adapters that bring their own ``forward()`` and no lifecycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from omnibatch.config import ExecutionMode
from omnibatch.dispatch import supported_modes
from omnibatch.request import DiffusionOutput, OmniDiffusionRequest
from omnibatch.request_batch import DiffusionRequestBatch, split_diffusion_output_by_request


@torch.no_grad()
def run_packed_forward(adapter: Any, requests: Sequence[OmniDiffusionRequest]) -> list[DiffusionOutput]:
    """Run whole requests through an adapter's ``forward()``.

    Args:
        adapter: its ``forward()`` takes a :class:`~omnibatch.DiffusionRequestBatch` when it sets
            ``supports_request_batch = True``, else one request; it returns one output per request or one packed output.
        requests: checked, and of one picture size.

    Returns:
        One output per request, in order, with the requests' ids.

    Raises:
        ValueError: when ``forward()`` returned another number of outputs, or a packed output that cannot be split.
    """
    batch = DiffusionRequestBatch(requests)
    takes_batches = ExecutionMode.REQUEST in supported_modes(adapter)
    result = adapter.forward(batch if takes_batches else requests[0])
    if isinstance(result, DiffusionOutput):
        counts = [request.sampling_params.num_outputs_per_prompt for request in requests]
        result = split_diffusion_output_by_request(result, batch, num_outputs_per_prompt=counts)
    if len(result) != len(requests):
        raise ValueError(f"forward() must return an output per request, {len(requests)}, got {len(result)}")
    return [replace(output, request_id=request.request_id) for request, output in zip(requests, result)]
