"""The rows of many requests that take their next step together, laid out in transformer calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from omnibatch.step_state import PromptEncoding, StepRequestState

# With fixed rows, a prompt is padded to a multiple of this many tokens: few enough shapes to fill calls, and a
# length that depends on nothing but the prompt itself.
TEXT_LENGTH_MULTIPLE = 32


@dataclass(frozen=True, eq=False)
class ForwardRows:
    """The rows of one transformer call and their conditioning; ``r`` rows, of which the first ``num_rows`` count.

    Attributes:
        source: int64 ``(r,)``, the batch row each call row computes (dummy rows repeat the first).
        target: int64 ``(num_rows,)``, where each result belongs: positive rows first, then the guided rows' negatives.
        num_rows: call rows whose results are kept.
        prompt_embeds: ``(r, L, D)``.
        prompt_embeds_mask: bool ``(r, L)``; ``None`` when the model has no text mask or nothing is padded.
        pooled_prompt_embeds: ``(r, P)`` or ``None``.
        lora: what each row's request asks for.
    """

    source: torch.Tensor
    target: torch.Tensor
    num_rows: int
    prompt_embeds: torch.Tensor
    prompt_embeds_mask: torch.Tensor | None
    pooled_prompt_embeds: torch.Tensor | None
    lora: list[dict[str, float] | None]


class StepBatch:
    """The rows of requests that take their next step together: ``R`` rows, one per output.

    Conditioning does not change from step to step, so a batch is kept as long as its members stay the same and only
    :meth:`gather` runs anew.

    Args:
        states: prepared states of equal latent shape.
        rows_per_forward: rows of a transformer call, exactly; ``None`` takes all rows in one call.

    Attributes:
        largest_forward_of: for each state, the most rows that a transformer call with rows of it takes.
    """

    def __init__(self, states: Sequence[StepRequestState], rows_per_forward: int | None = None):
        self.states = list(states)
        self.device = self.states[0].latents.device
        self.row_counts = [len(state.latents) for state in self.states]
        self._rows = [state for state, count in self._members() for _ in range(count)]
        guided = [index for index, state in enumerate(self._rows) if state.do_true_cfg]
        self.num_rows = len(self._rows)
        self._places = [place for place, count in enumerate(self.row_counts) for _ in range(count)]
        self._state_of_row = to_device(torch.tensor(self._places), self.device)
        self._schedules = pad_sequence([state.schedule for state in self.states], batch_first=True)
        self.guided_rows = to_device(torch.tensor(guided, dtype=torch.long), self.device)
        self.guidance = to_device(torch.tensor([self._rows[index].guidance for index in guided]), self.device)
        self.lay_out(rows_per_forward)
        self.latents = torch.empty(0)
        self.timesteps = torch.empty(0)
        self.coefficients = torch.empty(0)

    def fits(self, states: Sequence[StepRequestState]) -> bool:
        """Whether these states are the batch's members, with as many rows as before."""
        return self.states == states and self.row_counts == [len(state.latents) for state in states]

    def lay_out(self, rows_per_forward: int | None) -> None:
        """Lay the rows out in transformer calls, anew when their size changes."""
        self.rows_per_forward = rows_per_forward
        self.largest_forward_of = [0] * len(self.states)
        self.forwards = list(self._forwards())

    @property
    def largest_forward(self) -> int:
        """The most rows that a transformer call of this batch takes."""
        return max(self.largest_forward_of)

    def gather(self) -> None:
        """Collect what changes from step to step: latents ``(R, ...)``, timesteps ``(R,)``, coefficients ``(R, 5)``."""
        self.latents = torch.cat([state.latents for state in self.states])
        steps = to_device(torch.tensor([state.step_index for state in self.states]), self.device)
        schedule = self._schedules[self._state_of_row, steps[self._state_of_row]]
        self.timesteps, self.coefficients = schedule[:, 0], schedule[:, 1:]

    def scatter(self, next_latents: torch.Tensor, log_probs: torch.Tensor) -> None:
        """Give each request its rows back, record its window and move it one step on.

        Args:
            next_latents: ``(R, ...)`` float32.
            log_probs: ``(R,)`` float32.
        """
        rows = zip(self.states, next_latents.split(self.row_counts), log_probs.split(self.row_counts))
        for state, latents, log_prob in rows:
            if state.step_index == state.sde_window[0]:
                state.trajectory_latents.append(state.latents)
            if state.in_window:
                state.trajectory_latents.append(latents)
                if state.logprobs and state.noisy:
                    state.trajectory_log_probs.append(log_prob)
            state.latents = latents
            state.step_index += 1
            if state.must_branch:
                state.branch()

    def draw_noise(self) -> torch.Tensor | None:
        """Standard normal ``(R, ...)`` float32: each noisy row from its own generator, zeros elsewhere.

        Returns:
            ``None`` when no row draws noise in this step.
        """
        drawing = [state.noisy and state.in_window for state in self.states]
        if not any(drawing):
            return None
        rows = []
        for draws, (state, count) in zip(drawing, self._members()):
            shape = state.latents.shape[1:]
            if draws:
                rows += [torch.randn(shape, generator=g, device=g.device).cpu() for g in state.generators]
            else:
                rows += [torch.zeros(shape)] * count
        return to_device(torch.stack(rows), self.device)

    def _members(self) -> Iterator[tuple[StepRequestState, int]]:
        return zip(self.states, self.row_counts)

    def _forwards(self) -> Iterator[ForwardRows]:
        entries = [(index, state.prompt_encoding) for index, state in enumerate(self._rows)]
        for index, state in enumerate(self._rows):
            if state.negative_encoding is not None:
                entries.append((index, state.negative_encoding))
        longest = max(len(encoding.prompt_embeds) for _, encoding in entries)
        by_length: dict[int, list[int]] = {}
        for target, (_, encoding) in enumerate(entries):
            if encoding.prompt_embeds_mask is None:
                length = len(encoding.prompt_embeds)
            elif self.rows_per_forward is None:
                length = longest
            else:
                length = padded_text_length(len(encoding.prompt_embeds))
            by_length.setdefault(length, []).append(target)
        for length, targets in by_length.items():
            size = self.rows_per_forward or len(targets)
            for start in range(0, len(targets), size):
                yield self._forward(entries, targets[start : start + size], length, size)

    def _forward(
        self,
        entries: list[tuple[int, PromptEncoding]],
        targets: list[int],
        length: int,
        size: int,
    ) -> ForwardRows:
        # Dummy rows repeat a real one, so that they cannot overflow into anything.
        chosen = [entries[target] for target in targets + [targets[0]] * (size - len(targets))]
        for index, _ in chosen:
            place = self._places[index]
            self.largest_forward_of[place] = max(self.largest_forward_of[place], size)
        # A group's rows share one encoding: it is padded once.
        place_of: dict[PromptEncoding, int] = {}
        rows = [place_of.setdefault(encoding, len(place_of)) for _, encoding in chosen]
        encodings, places = list(place_of), to_device(torch.tensor(rows), self.device)
        masks = [pad_rows(e.prompt_embeds_mask, length) for e in encodings if e.prompt_embeds_mask is not None]
        # An all-true mask would only keep attention off its fast kernels; with fixed rows it stays, because a row's
        # bits must not depend on whether its neighbours are padded.
        if self.rows_per_forward is None and all(bool(mask.all()) for mask in masks):
            masks = []
        pooled = [e.pooled_prompt_embeds for e in encodings if e.pooled_prompt_embeds is not None]
        return ForwardRows(
            source=to_device(torch.tensor([index for index, _ in chosen]), self.device),
            target=to_device(torch.tensor(targets), self.device),
            num_rows=len(targets),
            prompt_embeds=torch.stack([pad_rows(e.prompt_embeds, length) for e in encodings])[places],
            prompt_embeds_mask=to_device(torch.stack(masks), self.device)[places] if masks else None,
            pooled_prompt_embeds=torch.stack(pooled)[places] if pooled else None,
            lora=[self._rows[index].lora for index, _ in chosen],
        )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on the device, without making the host wait for what the device does."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def padded_text_length(length: int) -> int:
    """Text length of a row when rows are fixed: its prompt's own, rounded up.

    Example:
        >>> padded_text_length(5), padded_text_length(40)
        (32, 64)
    """
    return -(-length // TEXT_LENGTH_MULTIPLE) * TEXT_LENGTH_MULTIPLE


def pad_rows(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Append zeros to the first axis of ``(L, ...)`` up to ``length``."""
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, length - len(tensor)])
