"""Whole requests packed for one ``forward()``, and the helpers that adapter authors collate and split with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from omnibatch.output_split import rows_of_requests, split_diffusion_output_by_request
from omnibatch.request import OmniDiffusionRequest, OmniDiffusionSamplingParams, prompt_field

__all__ = [
    "DiffusionRequestBatch",
    "collate_prompt_mask",
    "collate_prompt_rows",
    "sample_per_sample_sde_windows",
    "split_diffusion_output_by_request",
]

Prompts = Sequence[str | dict[str, Any]]


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

    def collate_request_tensors(self, attr: str, default: torch.Tensor | None = None) -> torch.Tensor | None:
        """One sampling parameter of all requests, such as ``latents``, joined along its first axis.

        Args:
            attr: name of a field of :class:`~omnibatch.OmniDiffusionSamplingParams` that holds a tensor or ``None``.
            default: returned when no request has it.

        Raises:
            ValueError: naming the field when only some requests have it, or when the shapes do not fit together.
        """
        tensors = [getattr(sampling, attr) for sampling in self.sampling_params_list]
        if all(tensor is None for tensor in tensors):
            return default
        _require_all_or_none(tensors, self.request_ids, attr)
        if len({tensor.shape[1:] for tensor in tensors}) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise ValueError(f"{attr} must have one shape behind the first axis, got {shapes}")
        return torch.cat(tensors)

    def collate_request_generators(
        self,
        num_outputs_per_prompt: int | Sequence[int],
        default: Sequence[torch.Generator] | torch.Generator | None = None,
    ) -> Sequence[torch.Generator] | torch.Generator | None:
        """One generator per row, each request's rows together.

        Args:
            num_outputs_per_prompt: rows of each request, one number for all or one each.
            default: returned when no request brings a generator or a seed.

        Raises:
            ValueError: when there is another number of numbers than of requests, or a request is bad.
        """
        if all(sampling.generator is None and sampling.seed is None for sampling in self.sampling_params_list):
            return default
        counts = rows_of_requests(num_outputs_per_prompt, len(self.requests))
        per_request = [
            replace(sampling, num_outputs_per_prompt=count)
            for sampling, count in zip(self.sampling_params_list, counts)
        ]
        for sampling in per_request:
            sampling.validate()
        return [generator for sampling in per_request for generator in sampling.draw_generators()]


def collate_prompt_rows(
    prompts: Prompts,
    aliases: Sequence[str],
    default_value: torch.Tensor | Sequence[Sequence[int]] | None,
    *,
    device: torch.device | str,
    field_name: str,
    pad_value: float = 0,
    pad_side: str = "right",
    target_len: int | None = None,
) -> tuple[torch.Tensor, list[int]] | tuple[None, None]:
    """Collate one row of values per prompt, such as token ids, into a padded tensor.

    Args:
        prompts: the requests' prompts.
        aliases: names the field goes by, the first found wins.
        default_value: ``(N, L)`` used when no prompt has the field.
        device: where the result is made.
        field_name: what errors call the field.
        pad_value: fills short rows.
        pad_side: ``"right"`` or ``"left"``, where the filling goes.
        target_len: pad to this length instead of the longest row's.

    Returns:
        A tensor ``(N, L)`` of the rows' dtype and the rows' own lengths; ``(None, None)`` without field and default.

    Raises:
        ValueError: naming the field when only some prompts have it, when a row is not one-dimensional or longer than
            ``target_len``, or when the default has another number of rows than there are prompts.

    Example:
        >>> collate_prompt_rows([{"ids": [1, 2, 3]}, {"ids": [4]}], ["ids"], None, device="cpu", field_name="ids")
        (tensor([[1, 2, 3],
                [4, 0, 0]]), [3, 1])
    """
    if pad_side not in ("right", "left"):
        raise ValueError(f"pad_side must be 'right' or 'left', got {pad_side!r}")
    rows = _prompt_rows(prompts, aliases, default_value, device, field_name)
    if rows is None:
        return None, None
    lengths = [len(row) for row in rows]
    length = max(lengths) if target_len is None else target_len
    if max(lengths) > length:
        raise ValueError(f"{field_name} must have at most target_len = {length} values a row, got {max(lengths)}")
    dtype = reduce(torch.promote_types, (row.dtype for row in rows))
    collated = torch.full((len(rows), length), pad_value, dtype=dtype, device=device)
    for index, row in enumerate(rows):
        collated[index, slice(len(row)) if pad_side == "right" else slice(length - len(row), length)] = row
    return collated, lengths


def collate_prompt_mask(
    prompts: Prompts,
    aliases: Sequence[str],
    default_value: torch.Tensor | Sequence[Sequence[int]] | None,
    *,
    device: torch.device | str,
    field_name: str,
    token_lengths: Sequence[int] | None,
    target_seq_len: int,
    pad_side: str = "right",
) -> torch.Tensor | None:
    """Collate the prompts' masks: the explicit ones, else those that the token lengths imply, else none.

    Args:
        prompts: the requests' prompts.
        aliases: names the mask goes by, the first found wins.
        default_value: ``(N, L)`` used when no prompt has a mask.
        device: where the result is made.
        field_name: what errors call the mask.
        token_lengths: tokens of each row, as :func:`collate_prompt_rows` returns them, or ``None``.
        target_seq_len: L; explicit masks are padded with false or cut to it.
        pad_side: the side on which the rows were padded.

    Returns:
        bool ``(N, L)``, or ``None`` when there is neither a mask nor lengths.

    Raises:
        ValueError: as :func:`collate_prompt_rows`.

    Example:
        >>> collate_prompt_mask(["a", "b"], ["mask"], None, device="cpu", field_name="mask",
        ...                     token_lengths=[2, 1], target_seq_len=2)
        tensor([[ True,  True],
                [ True, False]])
    """
    left = pad_side == "left"
    rows = _prompt_rows(prompts, aliases, default_value, device, field_name)
    if rows is not None:
        cut = [row.bool()[-target_seq_len:] if left else row.bool()[:target_seq_len] for row in rows]
    elif token_lengths is not None:
        if len(token_lengths) != len(prompts):
            raise ValueError(f"{field_name}: token_lengths must hold {len(prompts)} lengths, got {len(token_lengths)}")
        ones = torch.ones(target_seq_len, dtype=torch.bool, device=device)
        cut = [ones[: min(length, target_seq_len)] for length in token_lengths]
    else:
        return None
    mask = torch.zeros(len(cut), target_seq_len, dtype=torch.bool, device=device)
    for index, row in enumerate(cut):
        mask[index, slice(target_seq_len - len(row), None) if left else slice(len(row))] = row
    return mask


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
    if not 0 <= low < high <= num_timesteps:
        raise ValueError(f"sde_window_range must lie within the {num_timesteps} steps, got [{low}, {high}]")
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


def _prompt_rows(
    prompts: Prompts,
    aliases: Sequence[str],
    default_value: torch.Tensor | Sequence[Sequence[int]] | None,
    device: torch.device | str,
    field_name: str,
) -> list[torch.Tensor] | None:
    """One 1-D tensor per prompt, from the prompts or the default."""
    values: list[Any] = [prompt_field(prompt, *aliases) for prompt in prompts]
    if all(value is None for value in values):
        if default_value is None:
            return None
        values = [default_value] if torch.as_tensor(default_value[0]).dim() == 0 else list(default_value)
        if len(values) != len(prompts):
            raise ValueError(f"{field_name}: the default must have {len(prompts)} rows, got {len(values)}")
    _require_all_or_none(values, [f"prompt {index}" for index in range(len(prompts))], field_name)
    rows = [torch.as_tensor(value, device=device) for value in values]
    rows = [row[0] if row.dim() == 2 and len(row) == 1 else row for row in rows]
    for index, row in enumerate(rows):
        if row.dim() != 1:
            raise ValueError(f"{field_name} of prompt {index} must be one row, got the shape {tuple(row.shape)}")
    return rows


def _require_all_or_none(values: Sequence[Any], owners: Sequence[str], name: str) -> None:
    missing = [owner for owner, value in zip(owners, values) if value is None]
    if missing:
        raise ValueError(f"{name} must be given for all of the batch or for none of it, {missing[0]} lacks it")
