"""The least time a rollout's transformer forwards can take: their operations over the device's own matrix rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from omnibatch.adapters.base import RolloutAdapter
from omnibatch.request import OmniDiffusionRequest
from omnibatch.step_batch import StepBatch
from omnibatch.step_state import StepRequestState


def matrix_rate(device: torch.device, dtype: torch.dtype, repeats: int = 9) -> float:
    """Floating-point operations a second that the device reaches on one large matrix product, the median of several."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(repeats + 3):
        synchronize(device)
        started = time.perf_counter()
        a @ b
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(seconds[3:])


def rollout_operations(adapter: RolloutAdapter, requests: Iterable[OmniDiffusionRequest]) -> float:
    """Floating-point operations of all transformer forwards that the requests need, attention included.

    Each row counts with its own text, unpadded and in a call of its own; requests of one prompt count alike. Count
    before the transformer is compiled or given another attention backend, which the counter cannot look into.
    """
    per_prompt: dict[int, float] = {}
    total = 0.0
    for request in requests:
        key = id(request.prompt)
        if key not in per_prompt:
            per_prompt[key] = _step_operations(adapter, request)
        total += per_prompt[key] * request.sampling_params.num_outputs_per_prompt
    return total


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def _step_operations(adapter: Any, request: OmniDiffusionRequest) -> float:
    state = StepRequestState(request)
    adapter.prepare_encode(state)
    state.latents = state.latents[:1]
    batch = StepBatch([state])
    batch.gather()
    # The counter knows matrix products, and not every device's fused attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        adapter.denoise_step(batch)
    return counter.get_total_flops() * state.total_steps
