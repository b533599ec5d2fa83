"""Whole requests through one ``forward()``: an adapter's own, or the one that follows from its lifecycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from omnibatch.config import ExecutionMode
from omnibatch.dispatch import supported_modes
from omnibatch.request import DiffusionOutput, OmniDiffusionRequest
from omnibatch.request_batch import DiffusionRequestBatch, split_diffusion_output_by_request
from omnibatch.step_batch import StepBatch
from omnibatch.step_state import StepRequestState


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


def run_wave(adapter: Any, requests: Sequence[OmniDiffusionRequest]) -> list[DiffusionOutput]:
    """Run requests through an adapter's own ``forward()`` and put what goes wrong into the outputs.

    Returns:
        One output per request, in order. A bad request has its own error, a fault of ``forward()`` is everybody's.
    """
    errors: dict[str, Exception] = {}
    for request in requests:
        try:
            request.validate()
        except ValueError as error:
            errors[request.request_id] = error
    good = [request for request in requests if request.request_id not in errors]
    outputs: dict[str, DiffusionOutput] = {}
    try:
        outputs = {output.request_id: output for output in (run_packed_forward(adapter, good) if good else [])}
    except Exception as error:
        errors |= dict.fromkeys((request.request_id for request in good), error)
    return [outputs.get(name) or DiffusionOutput(name, error=errors[name]) for name in (r.request_id for r in requests)]


@torch.no_grad()
def forward_lifecycle(adapter: Any, req: OmniDiffusionRequest | DiffusionRequestBatch) -> list[DiffusionOutput]:
    """Run whole requests together through an adapter's lifecycle, from prompts to pictures.

    Returns:
        One output per request, in order.

    Raises:
        ValueError: when a request is bad, or when the requests' latents differ in shape.
    """
    requests = req.requests if isinstance(req, DiffusionRequestBatch) else [req]
    states = [StepRequestState(request) for request in requests]
    for state in states:
        adapter.prepare_encode(state)
    if len({state.shape_key for state in states}) > 1:
        sizes = sorted({str(state.image_size) for state in states})
        raise ValueError(f"requests of one forward must have one picture size, got {', '.join(sizes)}")
    batch = StepBatch(states)
    while active := [state for state in states if not state.denoise_completed]:
        if not batch.fits(active):
            batch = StepBatch(active)
        batch.gather()
        adapter.step_scheduler(batch, adapter.denoise_step(batch))
        for state, rows in zip(active, batch.largest_forward_of):
            state.rows_per_forward = max(state.rows_per_forward, rows)
    adapter.post_decode(states)
    return [state.to_output() for state in states]
