"""The trainer's side: recompute the log-probs of a rollout's stored steps through the same transformer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from omnibatch.adapters.base import RolloutAdapter
from omnibatch.algorithms import sde_arguments, training_fields
from omnibatch.lora import requested_lora
from omnibatch.request import DiffusionOutput, OmniDiffusionRequest
from omnibatch.sde import SampledStep, sample_step, schedule_coefficients
from omnibatch.step_batch import StepBatch, pad_rows
from omnibatch.step_state import PromptEncoding, StepRequestState
from omnibatch.validation import require_positive_integer


def replay_log_probs(
    adapter: RolloutAdapter,
    outputs: Sequence[DiffusionOutput],
    *,
    micro_batch_size: int | None = None,
    requires_grad: bool = False,
) -> list[torch.Tensor]:
    """Recompute log-probs of stored steps.

    With the rollout's weights and ``micro_batch_size`` equal to its ``rows_per_forward`` the result equals the
    rollout's log-probs to the bit, so the first ratio of a policy update is exactly 1.

    Args:
        adapter: as for :func:`replay_steps`, like the other arguments.

    Returns:
        One float32 ``(n, W)`` per output, in order, on the adapter's device.

    Raises:
        ValueError: naming an output that has no log-probs to recompute.
    """
    steps = replay_steps(adapter, outputs, micro_batch_size=micro_batch_size, requires_grad=requires_grad)
    return [window.log_probs for window in steps]


class ReplayedSteps(NamedTuple):
    """What the transformer makes of an output's stored steps.

    Two policies' predictions for one step are Gaussians of the same width, so their KL divergence, per element as
    log-probs are, is ``(means - reference.means).square().flatten(2).mean(2) / (2 * noise_scales**2)``.

    Attributes:
        log_probs: float32 ``(n, W)``, of the stored next latents.
        means: float32 ``(n, W, ...)``, the predicted means of the next latents.
        noise_scales: float32 ``(W,)``, the standard deviations around them.
    """

    log_probs: torch.Tensor
    means: torch.Tensor
    noise_scales: torch.Tensor


def replay_steps(
    adapter: RolloutAdapter,
    outputs: Sequence[DiffusionOutput],
    *,
    micro_batch_size: int | None = None,
    requires_grad: bool = False,
) -> list[ReplayedSteps]:
    """Take the stored steps again, each from its stored latents.

    All steps of all outputs are folded into the batch.

    Args:
        adapter: over the trainer's transformer, in training mode or not.
        outputs: finished, of an algorithm with an SDE window.
        micro_batch_size: rows of a transformer call, exactly; ``None`` takes all rows in one call.
        requires_grad: whether the result can be differentiated. The graph of all calls is then held, so a trainer
            passes as many outputs at a time as its memory takes.

    Returns:
        One for each output, in order, on the adapter's device.

    Raises:
        ValueError: naming an output that has no log-probs to recompute.
    """
    steps = []
    for output, window in zip(outputs, _replay(adapter, outputs, micro_batch_size, requires_grad)):
        assert output.sde_window is not None
        scales = _coefficients(adapter, output)[slice(*output.sde_window), 2]
        steps.append(
            ReplayedSteps(
                torch.stack([step.log_prob for step in window], dim=1),
                torch.stack([step.mean for step in window], dim=1),
                scales.float().to(adapter.device),
            )
        )
    return steps


@dataclass(frozen=True)
class ReplayReport:
    """How a replay differs from its rollout.

    Attributes:
        mean_log_ratio: mean absolute difference of replayed log-probs from the rollout's, over all steps.
        largest_log_ratio: its maximum.
        largest_mean_difference: the largest difference of any element of the predicted mean from the rollout's, which
            is read off the stored next latents and the seed's noise. A next latent is drawn around the predicted mean,
            so a wrong velocity can give the right log-prob, but not the right mean. ``None`` for requests that brought
            their own generators, whose noise cannot be drawn again.
        is_exact: whether all log-probs are equal to the bit.
    """

    mean_log_ratio: float
    largest_log_ratio: float
    largest_mean_difference: float | None
    is_exact: bool


def compare_replay(
    adapter: RolloutAdapter, outputs: Sequence[DiffusionOutput], *, micro_batch_size: int | None = None
) -> ReplayReport:
    """Replay outputs and report how log-probs and predicted means differ from the rollout's.

    Raises:
        ValueError: naming an output that has no log-probs to recompute.
    """
    windows = replay_steps(adapter, outputs, micro_batch_size=micro_batch_size)
    ratios, mean_differences, exact = [], [], True
    for output, window in zip(outputs, windows):
        replayed, stored = window.log_probs.cpu(), output.trajectory_log_probs
        assert stored is not None
        ratios.append((replayed - stored).abs().flatten())
        exact &= torch.equal(replayed, stored)
        means = _rollout_means(adapter, output)
        if means is not None:
            mean_differences.append((window.means.cpu() - means).abs().max())
    ratio = torch.cat(ratios)
    known = len(mean_differences) == len(windows)
    return ReplayReport(
        mean_log_ratio=float(ratio.mean()),
        largest_log_ratio=float(ratio.max()),
        largest_mean_difference=float(torch.stack(mean_differences).max()) if known else None,
        is_exact=exact,
    )


def stack_outputs(outputs: Sequence[DiffusionOutput], algorithm: str = "flow_grpo") -> dict[str, torch.Tensor]:
    """The rows of many outputs in one tensor a field, as a trainer takes its micro-batches from.

    Args:
        outputs: finished, in any number.
        algorithm: whose fields are stacked, under its own names.

    Returns:
        The tensors of :func:`omnibatch.algorithms.training_fields`, ``(rows, ...)``, text padded with zeros and masks
        with false to the longest, windows with zeros; ``sigmas`` ``(rows, T + 1)``, ``sde_windows`` ``(rows, 2)`` and
        ``guidance`` ``(rows,)`` beside them. Where some rows are guided, negative embeddings of the others are zeros.
        Any other field that some outputs lack is left out.

    Raises:
        ValueError: naming an output of a failed request.
    """
    if not outputs:
        return {}
    per_output = []
    for output in outputs:
        count = len(output.seeds)
        beside = {
            "sigmas": None if output.sigmas is None else output.sigmas.expand(count, -1),
            "sde_windows": torch.tensor([output.sde_window] * count),
        }
        per_output.append(training_fields(output, algorithm) | beside)
    stacked = {}
    for name in per_output[0]:
        tensors = [fields.get(name) for fields in per_output]
        if name.startswith("negative_") and any(tensor is not None for tensor in tensors):
            # The start of an unguided output's own text has the right shape for the zeros, which are padded below.
            own = [fields.get(name.removeprefix("negative_")) for fields in per_output]
            tensors = [
                torch.zeros_like(text[:, :1]) if tensor is None and text is not None else tensor
                for tensor, text in zip(tensors, own)
            ]
        given = [tensor for tensor in tensors if tensor is not None]
        if len(given) == len(outputs):
            longest = max(tensor.shape[1] for tensor in given)
            stacked[name] = torch.stack([pad_rows(row, longest) for tensor in given for row in tensor])
    stacked["guidance"] = torch.tensor([float(output.guidance) for output in outputs for _ in output.seeds])
    return stacked


def _replay(
    adapter: RolloutAdapter, outputs: Sequence[DiffusionOutput], micro_batch_size: int | None, requires_grad: bool
) -> list[list[SampledStep]]:
    """Each output's window, a step after the other."""
    if not isinstance(adapter, RolloutAdapter):
        raise ValueError(f"adapter must be a RolloutAdapter for a replay, got {type(adapter).__name__}")
    if micro_batch_size is not None:
        require_positive_integer("micro_batch_size", micro_batch_size)
    results: list[list[SampledStep]] = [[] for _ in outputs]
    by_shape: dict[Any, list[tuple[int, int, StepRequestState]]] = {}
    for index, output in enumerate(outputs):
        for step, state in enumerate(_window_states(adapter, output)):
            by_shape.setdefault(state.shape_key, []).append((index, step, state))
    for members in by_shape.values():
        batch = StepBatch([state for _, _, state in members], micro_batch_size)
        batch.gather()
        after = [outputs[index].trajectory_latents[:, step + 1] for index, step, _ in members]  # type: ignore[index]
        with torch.set_grad_enabled(requires_grad):
            taken = sample_step(
                batch.latents,
                adapter.denoise_step(batch),
                batch.coefficients,
                next_sample=torch.cat(after).to(adapter.device),
                rows_per_sum=micro_batch_size,
            )
        rows = zip(*(tensor.split(batch.row_counts) for tensor in taken))
        for (index, _, _), parts in zip(members, rows):
            results[index].append(SampledStep(*parts))
    return results


def _window_states(adapter: RolloutAdapter, output: DiffusionOutput) -> list[StepRequestState]:
    """The request as it stood before each step of its window."""
    sampling = output.sampling_params
    if sampling is None or output.trajectory_latents is None or output.trajectory_log_probs is None:
        raise ValueError(f"output {output.request_id!r} has no log-probs to recompute")
    assert output.sigmas is not None
    assert output.sde_window is not None
    assert output.timesteps is not None
    start, end = output.sde_window
    schedule = torch.cat([output.timesteps[:, None], _coefficients(adapter, output)], dim=1).to(adapter.device)
    positive, negative = (_encoding(adapter, output, prefix) for prefix in ("", "negative_"))
    assert positive is not None
    states = []
    for step in range(start, end):
        state = StepRequestState(OmniDiffusionRequest("", sampling, output.request_id))
        state.latents = output.trajectory_latents[:, step - start].to(adapter.device)
        state.image_size = adapter.image_size(sampling)
        state.sigmas, state.timesteps, state.schedule = output.sigmas, output.timesteps, schedule
        state.prompt_encoding, state.negative_encoding, state.guidance = positive, negative, output.guidance
        state.lora = requested_lora(adapter.transformer, sampling)
        state.step_index = step
        states.append(state)
    return states


def _coefficients(adapter: RolloutAdapter, output: DiffusionOutput) -> torch.Tensor:
    assert output.sampling_params is not None
    assert output.sigmas is not None
    assert output.sde_window is not None
    sigmas = tuple(output.sigmas.tolist())
    arguments = sde_arguments(output.sampling_params.extra_args, len(sigmas) - 1, algorithm=adapter.algorithm)
    return schedule_coefficients(
        sigmas, output.sde_window, noise_level=arguments.noise_level, sde_type=arguments.sde_type
    )


def _encoding(adapter: RolloutAdapter, output: DiffusionOutput, prefix: str) -> PromptEncoding | None:
    embeds = getattr(output, f"{prefix}prompt_embeds")
    if embeds is None:
        return None
    mask = getattr(output, f"{prefix}prompt_embeds_mask")
    pooled = getattr(output, f"{prefix}pooled_prompt_embeds")
    return PromptEncoding(
        embeds[0].to(adapter.device, adapter.dtype),
        None if mask is None else mask[0],
        None if pooled is None else pooled[0].to(adapter.device, adapter.dtype),
    )


def _rollout_means(adapter: RolloutAdapter, output: DiffusionOutput) -> torch.Tensor | None:
    """The rollout's predicted means ``(n, W, ...)``: its next latents less the noise that the seeds draw again."""
    sampling = output.sampling_params
    assert sampling is not None
    assert output.trajectory_latents is not None
    assert output.sde_window is not None
    if sampling.generator is not None:
        return None
    generators = [torch.Generator().manual_seed(seed) for seed in output.seeds]
    for generator in generators:
        adapter.draw_latents(*adapter.image_size(sampling), generator)
    start, end = output.sde_window
    means = []
    for index, scale in enumerate(_coefficients(adapter, output)[start:end, 2].tolist()):
        after = output.trajectory_latents[:, index + 1]
        noise = torch.stack([torch.randn(after.shape[1:], generator=generator) for generator in generators])
        means.append(after - scale * noise)
    return torch.stack(means, dim=1)
