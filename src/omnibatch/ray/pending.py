"""A request on its way through a pool."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import ray

from omnibatch.request import DiffusionOutput, OmniDiffusionRequest, OmniDiffusionSamplingParams


@dataclass(eq=False)
class PendingRequest:
    """A request that has not ended.

    Attributes:
        given: as the user gave it.
        sent: as it is sent, with a seed.
        ended: where its output is awaited.
        reference: of the output, once it was sent.
        call: the task that awaits it.
    """

    given: OmniDiffusionRequest
    sent: OmniDiffusionRequest
    ended: Future[DiffusionOutput]
    reference: ray.ObjectRef | None = None
    call: asyncio.Task[None] | None = None


def group_of(request: OmniDiffusionRequest) -> Hashable:
    """Equal for requests whose prompt is encoded once if they share a replica."""
    try:
        prompt = request.prompt_field("prompt")
    except (ValueError, AttributeError):
        # The replica's engine will say how it is malformed.
        prompt = None
    return prompt if isinstance(prompt, str) else request.request_id


def with_seed(request: OmniDiffusionRequest) -> OmniDiffusionRequest:
    """The request with a seed of its own, so that running it again gives the same result."""
    sampling = request.sampling_params
    if not isinstance(sampling, OmniDiffusionSamplingParams):
        return request
    if sampling.seed is not None or sampling.generator is not None:
        return request
    return replace(request, sampling_params=replace(sampling, seed=secrets.randbelow(2**31)))
