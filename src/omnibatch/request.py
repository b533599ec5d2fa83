"""What a user asks for and what comes back: requests, their sampling parameters, outputs and errors."""

from __future__ import annotations

import itertools
import secrets
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omnibatch.validation import is_finite, is_integer, require_positive_integer

OUTPUT_TYPES = ("image", "latent", "both")

# Seeds stay below 2**63 because torch.Generator.manual_seed takes a signed 64-bit integer.
MAX_SEED = 2**63 - 1


@dataclass
class OmniDiffusionSamplingParams:
    """How one request is sampled. ``None`` means "as the model's diffusers pipeline does by default".

    Args:
        height: picture height in pixels.
        width: picture width in pixels.
        num_inference_steps: denoising steps, each one transformer forward a guidance branch.
        sigmas: noise levels to start from instead of the model's own spacing, strictly decreasing in (0, 1];
            the model's scheduler still applies its shift to them, as in diffusers.
        guidance_scale: classifier-free guidance of SD3-like models; 1 or less skips the negative branch.
        true_cfg_scale: classifier-free guidance of Qwen-Image; needs a negative prompt, 1 or less skips the branch.
        num_outputs_per_prompt: how many pictures the request makes.
        seed: noise of output ``i`` comes from a CPU generator seeded ``seed + i``; ``None`` draws a seed,
            which the output reports.
        generator: generators to draw from instead of ``seed``, one, or one per output; each serves one request, since
            its stream goes on with every draw.
        latents: initial latents, float ``(num_outputs_per_prompt, ...)`` in the model's latent layout.
        max_sequence_length: longest prompt in text tokens; longer ones are cut, as the pipelines do.
        output_type: ``"latent"`` leaves out the decoding, ``"image"`` and ``"both"`` do it; the output has the latents
            either way.
        lora_request: name of a PEFT adapter of the transformer; ``None`` takes the transformer as it stands.
        lora_scale: multiplies the adapter's own scaling; 0 is the base model.
        extra_args: the algorithm's own arguments (``noise_level``, ``sde_type``, ``sde_window_size``,
            ``sde_window_range``, ``sde_window_scope``, ``sde_window_seed``, ``logprobs``, ``shared_noise``); what they
            mean and default to says :func:`omnibatch.algorithms.sde_arguments`.
    """

    height: int | None = None
    width: int | None = None
    num_inference_steps: int = 10
    sigmas: Sequence[float] | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    num_outputs_per_prompt: int = 1
    seed: int | None = None
    generator: torch.Generator | Sequence[torch.Generator] | None = None
    latents: torch.Tensor | None = None
    max_sequence_length: int | None = None
    output_type: str = "image"
    lora_request: str | None = None
    lora_scale: float | None = None
    extra_args: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        """Check everything that does not depend on the model.

        Raises:
            ValueError: naming the field, its value and what would be right.
        """
        for name in ("num_inference_steps", "num_outputs_per_prompt"):
            require_positive_integer(name, getattr(self, name))
        for name in ("height", "width", "max_sequence_length"):
            if getattr(self, name) is not None:
                require_positive_integer(name, getattr(self, name))
        for name in ("guidance_scale", "true_cfg_scale", "lora_scale"):
            value = getattr(self, name)
            if value is not None and not is_finite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        if self.seed is not None and not (is_integer(self.seed) and 0 <= self.seed <= MAX_SEED):
            raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, got {self.seed!r}")
        if self.output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type must be one of {', '.join(OUTPUT_TYPES)}, got {self.output_type!r}")
        if self.lora_request is not None and not isinstance(self.lora_request, str):
            raise ValueError(f"lora_request must be the name of an adapter, got {self.lora_request!r}")
        if not isinstance(self.extra_args, dict):
            raise ValueError(f"extra_args must be a dict, got {type(self.extra_args).__name__}")
        if self.sigmas is not None:
            self._validate_sigmas()
        if self.latents is not None and not isinstance(self.latents, torch.Tensor):
            raise ValueError(f"latents must be a tensor, got {type(self.latents).__name__}")
        if self.latents is not None and not self.latents.is_floating_point():
            raise ValueError(f"latents must be of a floating-point dtype, got {self.latents.dtype}")
        generators = self.generator if isinstance(self.generator, (list, tuple)) else [self.generator]
        strange = [generator for generator in generators if not isinstance(generator, torch.Generator)]
        if self.generator is not None and strange:
            raise ValueError(f"generator must be a torch.Generator or a list of them, got {strange[0]!r}")
        if isinstance(self.generator, Sequence) and len(self.generator) != self.num_outputs_per_prompt:
            raise ValueError(
                f"generator must be one generator or one per output (num_outputs_per_prompt = "
                f"{self.num_outputs_per_prompt}), got a list of {len(self.generator)}"
            )

    def _validate_sigmas(self) -> None:
        assert self.sigmas is not None
        try:
            sigmas = [float(sigma) for sigma in self.sigmas]
        except (TypeError, ValueError):
            raise ValueError(f"sigmas must be numbers, got {self.sigmas!r}") from None
        if len(sigmas) != self.num_inference_steps:
            raise ValueError(
                f"sigmas must hold num_inference_steps = {self.num_inference_steps} values, got {len(sigmas)}"
            )
        if not all(0 < sigma <= 1 for sigma in sigmas) or any(a <= b for a, b in itertools.pairwise(sigmas)):
            raise ValueError(f"sigmas must be strictly decreasing in (0, 1], got {sigmas}")

    def draw_generators(self) -> list[torch.Generator]:
        """One noise generator per output, so that any one output can be made again alone.

        Returns:
            ``num_outputs_per_prompt`` generators. With ``generator`` given as a single one, outputs after the
            first get generators seeded from its next draws, since rows must never share a stream.
        """
        count = self.num_outputs_per_prompt
        if isinstance(self.generator, Sequence):
            return list(self.generator)
        if self.generator is not None:
            seeds = [int(torch.randint(2**62, (1,), generator=self.generator)) for _ in range(count - 1)]
            return [self.generator] + [torch.Generator().manual_seed(seed) for seed in seeds]
        first = secrets.randbelow(2**31) if self.seed is None else int(self.seed)
        return [torch.Generator().manual_seed(first + index) for index in range(count)]


NEGATIVE_FIELDS = (
    "negative_prompt",
    "negative_prompt_token_ids",
    "negative_prompt_ids",
    "negative_prompt_mask",
    "negative_extra_prompt_ids",
    "negative_prompt_embeds",
    "negative_prompt_embeds_mask",
    "negative_pooled_prompt_embeds",
)


@dataclass
class OmniDiffusionRequest:
    """One logical request: a prompt, how to sample it, and an id.

    Args:
        prompt: the text, or a dict with any of ``prompt``, ``negative_prompt``, ``prompt_token_ids`` (or
            ``prompt_ids``), ``prompt_mask``, ``negative_prompt_ids``, ``negative_prompt_mask``,
            ``extra_prompt_ids`` and ``negative_extra_prompt_ids`` (ids per tokenizer), ``prompt_embeds``,
            ``prompt_embeds_mask``, ``pooled_prompt_embeds`` and their ``negative_`` forms. A field that is
            absent is looked for in the dict ``additional_information``.
        sampling_params: see :class:`OmniDiffusionSamplingParams`.
        request_id: unique among the requests in flight; made up when not given.

    Example:
        >>> request = OmniDiffusionRequest('a sign that says "7"', OmniDiffusionSamplingParams(seed=1), "seven")
        >>> request.prompt_field("prompt")
        'a sign that says "7"'
    """

    prompt: str | dict[str, Any]
    sampling_params: OmniDiffusionSamplingParams = field(default_factory=OmniDiffusionSamplingParams)
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def validate(self) -> None:
        """Check everything that does not depend on the model.

        Raises:
            ValueError: naming the field, its value and what would be right.
        """
        validate_request_id(self.request_id)
        if not isinstance(self.prompt, (str, dict)):
            raise ValueError(f"prompt must be a string or a dict, got {type(self.prompt).__name__}")
        for name in self.prompt if isinstance(self.prompt, dict) else ():
            # Trainers put fields of their own beside the known ones. A slip in a negative one would go unseen, since
            # the request would be unguided; one in a positive one shows by what is missing.
            if str(name).startswith("neg") and name not in NEGATIVE_FIELDS:
                raise ValueError(f"prompt has no field {name!r}; known are {', '.join(NEGATIVE_FIELDS)}")
        if not isinstance(self.sampling_params, OmniDiffusionSamplingParams):
            given = type(self.sampling_params).__name__
            raise ValueError(f"sampling_params must be OmniDiffusionSamplingParams, got {given}")
        self.sampling_params.validate()

    def prompt_field(self, *names: str) -> Any:
        """The first of these fields that the prompt holds, or ``None``."""
        return prompt_field(self.prompt, *names)


@dataclass(repr=False)
class DiffusionOutput:
    """What one request became. ``n`` is its number of outputs, ``T`` its steps, ``W`` its SDE window's size.

    All tensors are on the CPU. Trajectories, log-probs and latents are float32.

    Attributes:
        request_id: the request's id.
        output: pictures uint8 ``(n, 3, H, W)``, or the final latents float32 ``(n, ...)`` when the request's
            ``output_type`` is ``"latent"``; ``None`` when the request failed.
        latents: the final, clean latents ``(n, ...)``.
        trajectory_latents: ``(n, W + 1, ...)``, the latents before each step of the SDE window and after its last.
        trajectory_log_probs: ``(n, W)``, or ``None`` when not asked for or when the noise level is 0.
        trajectory_timesteps: ``(n, W)``, in the scheduler's units (1000 sigma).
        timesteps: ``(T,)``, all the timesteps used.
        sigmas: ``(T + 1,)``, all noise levels, ending in 0.
        sde_window: the window ``(start, end)`` in steps, ``end`` exclusive.
        prompt_embeds: ``(n, L, D)`` in the model's dtype, with ``prompt_embeds_mask`` bool ``(n, L)`` or ``None``
            for models without a text mask, and ``pooled_prompt_embeds`` ``(n, P)`` or ``None``; likewise
            ``negative_…``, ``None`` without guidance.
        sampling_params: as the request asked for it.
        guidance: scale of the guidance; 1 without.
        seeds: the seed of each output's generator. It makes the output again, unless the generator was your own and
            had been drawn from before.
        num_steps: denoising steps run.
        shared_steps: of these, steps before the SDE window that all outputs took as one row (``shared_noise``).
        rows_per_forward: the most rows that a transformer call with this request's rows took.
        stage_times: wall-clock seconds spent in ``queue``, ``encode``, ``denoise`` (shared with whatever ran in
            the same forwards) and ``decode``.
        weights_version: of the engine's weights that made this output.
        custom_output: further fields of an adapter that brings its own ``forward()``.
        error: what went wrong, or ``None``.
    """

    request_id: str
    output: torch.Tensor | None = None
    latents: torch.Tensor | None = None
    trajectory_latents: torch.Tensor | None = None
    trajectory_log_probs: torch.Tensor | None = None
    trajectory_timesteps: torch.Tensor | None = None
    timesteps: torch.Tensor | None = None
    sigmas: torch.Tensor | None = None
    sde_window: tuple[int, int] | None = None
    prompt_embeds: torch.Tensor | None = None
    prompt_embeds_mask: torch.Tensor | None = None
    pooled_prompt_embeds: torch.Tensor | None = None
    negative_prompt_embeds: torch.Tensor | None = None
    negative_prompt_embeds_mask: torch.Tensor | None = None
    negative_pooled_prompt_embeds: torch.Tensor | None = None
    sampling_params: OmniDiffusionSamplingParams | None = None
    guidance: float = 1.0
    seeds: list[int] = field(default_factory=list)
    num_steps: int = 0
    shared_steps: int = 0
    rows_per_forward: int = 0
    stage_times: dict[str, float] = field(default_factory=dict)
    weights_version: int = 0
    custom_output: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None

    def __repr__(self) -> str:
        """Name what is there, tensors by their shapes."""
        parts = []
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                parts.append(f"{name}={str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
            elif value not in (None, [], {}) and name != "sampling_params":
                parts.append(f"{name}={value!r}")
        return f"DiffusionOutput({', '.join(parts)})"

    def _repr_png_(self) -> bytes | None:
        """Show the pictures in a notebook."""
        from omnibatch.pictures import is_picture, picture_grid, png_bytes

        return png_bytes(picture_grid(list(self.output))) if is_picture(self.output) else None


class RequestAborted(RuntimeError):
    """The error of a request that was aborted before it finished."""


class RolloutError(RuntimeError):
    """Some requests failed; the others finished.

    Attributes:
        outputs: one :class:`DiffusionOutput` per request in the order given, failed ones with ``error`` set.
    """

    def __init__(self, outputs: list[DiffusionOutput]):
        self.outputs = outputs
        failed = [output for output in outputs if output.error is not None]
        lines = [f"{output.request_id}: {type(output.error).__name__}: {output.error}" for output in failed]
        super().__init__(f"{len(failed)} of {len(outputs)} requests failed\n" + "\n".join(lines))


def prompt_field(prompt: str | dict[str, Any], *names: str) -> Any:
    """The first of these fields that a prompt holds, itself or in ``additional_information``, or ``None``."""
    if isinstance(prompt, str):
        return prompt if "prompt" in names else None
    additional = prompt.get("additional_information") or {}
    if not isinstance(additional, Mapping):
        raise ValueError(f"additional_information must be a dict, got {type(additional).__name__}")
    for holder in (prompt, additional):
        for name in names:
            if holder.get(name) is not None:
                return holder[name]
    return None


def validate_request_id(request_id: Any) -> None:
    """Raise a ``ValueError`` unless the id is a non-empty string."""
    if not isinstance(request_id, str) or not request_id:
        raise ValueError(f"request_id must be a non-empty string, got {request_id!r}")


def requested_steps(request: OmniDiffusionRequest) -> int:
    """Denoising steps that a request asks for; 0 where what it asks for is no number."""
    steps = getattr(request.sampling_params, "num_inference_steps", 0)
    return int(steps) if is_integer(steps) else 0


def requested_outputs(sampling_params: Any) -> int:
    """Outputs that a request asks for; 1 where what it asks for is no number."""
    outputs = getattr(sampling_params, "num_outputs_per_prompt", 1)
    return int(outputs) if is_integer(outputs) else 1


def request_list(requests: Iterable[OmniDiffusionRequest]) -> list[OmniDiffusionRequest]:
    """The requests as a list, or a ``ValueError`` when it is a single one."""
    if isinstance(requests, OmniDiffusionRequest):
        raise ValueError("requests must be a list of requests, got a single one")
    return list(requests)
