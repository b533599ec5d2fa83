"""The state of one request while it is denoised."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from omnibatch.request import DiffusionOutput, OmniDiffusionRequest, OmniDiffusionSamplingParams


@dataclass(frozen=True, eq=False)
class PromptEncoding:
    """One encoded prompt: ``prompt_embeds`` ``(L, D)``, ``prompt_embeds_mask`` bool ``(L,)`` on the CPU or ``None`` for
    models without a text mask, ``pooled_prompt_embeds`` ``(P,)`` or ``None``."""

    prompt_embeds: torch.Tensor
    prompt_embeds_mask: torch.Tensor | None = None
    pooled_prompt_embeds: torch.Tensor | None = None

    def cut(self, length: int) -> PromptEncoding:
        """At most this many tokens, as diffusers cuts masked text; unmasked text has its length for a reason."""
        if self.prompt_embeds_mask is None or len(self.prompt_embeds) <= length:
            return self
        return PromptEncoding(self.prompt_embeds[:length], self.prompt_embeds_mask[:length], self.pooled_prompt_embeds)


@dataclass(eq=False)
class StepRequestState:
    """All that one request has become. ``n`` is its number of outputs, ``T`` its steps.

    ``prepare_encode`` fills every field below ``request``; ``step_scheduler`` moves ``latents``, ``step_index`` and the
    trajectory; ``post_decode`` sets ``images``. Nobody else writes here.

    Attributes:
        generators: noise source of each output.
        seeds: their seeds.
        prompt_encoding: the prompt, shared by the request's outputs.
        negative_encoding: the negative prompt, or ``None`` when the request is not guided.
        guidance: scale of the guidance.
        image_size: height and width in pixels.
        latents: float32 ``(n, ...)``, where the request stands now; one row as long as all outputs share it.
        sigmas: float32 ``(T + 1,)`` on the CPU.
        timesteps: float32 ``(T,)`` on the CPU.
        schedule: float32 ``(T, 6)`` on the device, a row a step: the timestep, then the sampler's coefficients.
        lora: scale of each LoRA, or ``None`` for the transformer as it stands.
        sde_window: ``(start, end)`` in steps.
        noisy: whether the window's steps draw noise.
        logprobs: whether log-probs are returned.
        step_index: steps done.
        shared_steps: of these, steps that all outputs took as one row.
        trajectory_latents: latents before each step of the window and after its last, each ``(n, ...)``.
        trajectory_log_probs: one ``(n,)`` a step of the window.
        rows_per_forward: the most rows a transformer call with these rows took.
        images: uint8 ``(n, 3, H, W)`` on the CPU.
        stage_times: seconds per stage, kept by the engine.
        extra: an adapter's own per-request values.
    """

    request: OmniDiffusionRequest
    generators: list[torch.Generator] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    prompt_encoding: PromptEncoding = field(default_factory=lambda: PromptEncoding(torch.empty(0)))
    negative_encoding: PromptEncoding | None = None
    guidance: float = 1.0
    image_size: tuple[int, int] = (0, 0)
    latents: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    sigmas: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    timesteps: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    schedule: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    lora: dict[str, float] | None = None
    sde_window: tuple[int, int] = (0, 0)
    noisy: bool = False
    logprobs: bool = False
    step_index: int = 0
    shared_steps: int = 0
    trajectory_latents: list[torch.Tensor] = field(default_factory=list)
    trajectory_log_probs: list[torch.Tensor] = field(default_factory=list)
    rows_per_forward: int = 0
    images: torch.Tensor | None = None
    stage_times: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def sampling(self) -> OmniDiffusionSamplingParams:
        return self.request.sampling_params

    @property
    def num_outputs(self) -> int:
        return self.sampling.num_outputs_per_prompt

    @property
    def do_true_cfg(self) -> bool:
        return self.negative_encoding is not None

    @property
    def total_steps(self) -> int:
        return len(self.timesteps)

    @property
    def current_timestep(self) -> torch.Tensor:
        return self.timesteps[self.step_index]

    @property
    def denoise_completed(self) -> bool:
        return self.step_index >= self.total_steps

    @property
    def in_window(self) -> bool:
        """Whether the coming step belongs to the SDE window."""
        return self.sde_window[0] <= self.step_index < self.sde_window[1]

    @property
    def shape_key(self) -> Hashable:
        """What must be equal for two requests to share a forward.

        The picture size belongs to it: packed latents of 64 x 128 and 128 x 64 pixels look alike.
        """
        return self.image_size, tuple(self.latents.shape[1:])

    @property
    def must_branch(self) -> bool:
        """Whether outputs that share a row reach their window, and need rows of their own."""
        reached = self.step_index >= self.sde_window[0] or self.denoise_completed
        return len(self.latents) < self.num_outputs and reached

    def branch(self) -> None:
        """Give each output a row of its own; until now they shared one."""
        self.shared_steps = self.step_index
        self.latents = self.latents.expand(self.num_outputs, *self.latents.shape[1:]).clone()

    def to_output(self) -> DiffusionOutput:
        """The finished request's result, on the CPU."""
        # Clones, so that whoever edits an output edits nothing that other requests share.
        latents = self.latents.to("cpu", copy=True)
        start, end = self.sde_window
        log_probs = torch.stack(self.trajectory_log_probs, dim=1).cpu() if self.trajectory_log_probs else None
        return DiffusionOutput(
            request_id=self.request_id,
            output=latents if self.images is None else self.images,
            latents=latents,
            trajectory_latents=torch.stack(self.trajectory_latents, dim=1).cpu(),
            trajectory_log_probs=log_probs,
            trajectory_timesteps=self.timesteps[start:end].repeat(self.num_outputs, 1),
            timesteps=self.timesteps.clone(),
            sigmas=self.sigmas.clone(),
            sde_window=self.sde_window,
            **self._per_output(self.prompt_encoding),
            **self._per_output(self.negative_encoding, "negative_"),
            sampling_params=self.sampling,
            guidance=self.guidance if self.do_true_cfg else 1.0,
            seeds=self.seeds,
            num_steps=self.step_index,
            shared_steps=self.shared_steps,
            rows_per_forward=self.rows_per_forward,
            stage_times=self.stage_times,
        )

    def _per_output(self, encoding: PromptEncoding | None, prefix: str = "") -> dict[str, Any]:
        """The encoding's tensors, one row per output, on the CPU, keyed by their names."""
        fields = {} if encoding is None else vars(encoding)
        return {
            prefix + name: tensor.cpu().expand(self.num_outputs, *tensor.shape).clone()
            for name, tensor in fields.items()
            if tensor is not None
        }
