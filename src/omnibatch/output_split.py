"""One packed result back into one output per request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omnibatch.request import DiffusionOutput, OmniDiffusionRequest

if TYPE_CHECKING:
    from omnibatch.request_batch import DiffusionRequestBatch

# Tensors with a row per output. Everything else is shared by all rows: a schedule may happen to be as long as the
# batch, so what is sliced is known by name, never by length.
PER_ROW_FIELDS = (
    "output",
    "latents",
    "trajectory_latents",
    "trajectory_log_probs",
    "prompt_embeds",
    "prompt_embeds_mask",
    "pooled_prompt_embeds",
    "negative_prompt_embeds",
    "negative_prompt_embeds_mask",
    "negative_pooled_prompt_embeds",
)
PER_ROW_CUSTOM_FIELDS = ("all_latents", "all_log_probs", "latents_clean", *PER_ROW_FIELDS)
# Timesteps come as one row per output or as one schedule for all; the number of axes tells which.
TIMESTEP_FIELDS = ("trajectory_timesteps", "all_timesteps", "train_timesteps")
SHARED_FIELDS = ("timesteps", "sigmas")


def split_diffusion_output_by_request(
    result: DiffusionOutput,
    req: OmniDiffusionRequest | DiffusionRequestBatch,
    *,
    num_outputs_per_prompt: int | Sequence[int],
) -> list[DiffusionOutput]:
    """Split the output of one packed ``forward()`` into one output per request, in order.

    Args:
        result: its per-row tensors hold the rows of all requests, each request's rows together. Timesteps with two
            axes are per row, with one axis shared; ``timesteps`` and ``sigmas`` are shared.
        req: what was run.
        num_outputs_per_prompt: rows of each request, one number for all or one each.

    Raises:
        ValueError: naming the field whose number of rows does not fit, or a field of ``custom_output`` of which it is
            not known whether it is per row; or when ``timesteps`` or ``sigmas`` are per row.
    """
    requests = [req] if isinstance(req, OmniDiffusionRequest) else req.requests
    counts = rows_of_requests(num_outputs_per_prompt, len(requests))
    total = sum(counts)
    fields = {name: getattr(result, name) for name in (*PER_ROW_FIELDS, "trajectory_timesteps", "seeds")}
    shared = {name: getattr(result, name) for name in SHARED_FIELDS}
    for name, value in {**shared, **fields, **result.custom_output}.items():
        if _is_per_row(name, value) and len(value) != total:
            raise ValueError(f"{name} must have {total} rows, one per output, got {len(value)}")
    outputs, first = [], 0
    for request, count in zip(requests, counts):
        rows = slice(first, first + count)
        first += count
        outputs.append(
            replace(
                result,
                request_id=request.request_id,
                **_rows_of(fields, rows),
                custom_output=_rows_of(result.custom_output, rows),
                stage_times=dict(result.stage_times),
            )
        )
    return outputs


def rows_of_requests(num_outputs_per_prompt: int | Sequence[int], num_requests: int) -> list[int]:
    """Rows of each request, from one number for all or one each."""
    if not isinstance(num_outputs_per_prompt, Sequence):
        return [int(num_outputs_per_prompt)] * num_requests
    if len(num_outputs_per_prompt) != num_requests:
        raise ValueError(f"num_outputs_per_prompt must hold {num_requests} numbers, got {len(num_outputs_per_prompt)}")
    return list(num_outputs_per_prompt)


def _rows_of(fields: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    return {name: value[rows] if _is_per_row(name, value) else value for name, value in fields.items()}


def _is_per_row(name: str, value: Any) -> bool:
    if name == "seeds":
        return bool(value)
    if not isinstance(value, (torch.Tensor, np.ndarray, list)):
        return False
    if name in SHARED_FIELDS:
        if np.ndim(value) > 1:
            raise ValueError(f"{name} is shared by all rows and must have one axis, got shape {tuple(np.shape(value))}")
        return False
    if name in TIMESTEP_FIELDS:
        return np.ndim(value) > 1
    if name not in PER_ROW_CUSTOM_FIELDS:
        known = ", ".join((*PER_ROW_CUSTOM_FIELDS, *TIMESTEP_FIELDS, *SHARED_FIELDS))
        raise ValueError(
            f"custom_output: it is not known whether {name!r} has a row per output; known are {known}; "
            "what all rows share may have any other name as a tuple"
        )
    return True
