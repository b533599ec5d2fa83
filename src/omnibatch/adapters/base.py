"""The adapter interface, and all of it that is not one model's business.

An adapter serves a model in every mode through four lifecycle methods. This base class writes them for
flow-matching models; a model's file fills in what differs, in pipeline order: :meth:`~RolloutAdapter.prompt_tokens`,
:meth:`~RolloutAdapter.encode_tokens` and :meth:`~RolloutAdapter.guidance_scale`, :meth:`~RolloutAdapter.latent_shape`,
:meth:`~RolloutAdapter.predict_velocity`, :meth:`~RolloutAdapter.decode_latents`; and where the defaults do not fit,
:meth:`~RolloutAdapter.given_embeddings`, :meth:`~RolloutAdapter.image_size`, :meth:`~RolloutAdapter.draw_latents`,
:meth:`~RolloutAdapter.default_sigmas` and :meth:`~RolloutAdapter.guide`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from omnibatch.adapters.noise_schedules import NoiseSchedules
from omnibatch.adapters.prompts import EncodingCache, given_embeddings, prompt_digest
from omnibatch.algorithms import sde_arguments, validate_algorithm
from omnibatch.lora import active_lora, lora_rows, lora_scales, requested_lora
from omnibatch.packed_forward import forward_lifecycle
from omnibatch.request import DiffusionOutput, OmniDiffusionRequest, OmniDiffusionSamplingParams
from omnibatch.request_batch import DiffusionRequestBatch
from omnibatch.sde import sample_step, schedule_coefficients
from omnibatch.step_batch import ForwardRows, StepBatch
from omnibatch.step_state import PromptEncoding, StepRequestState

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


class RolloutAdapter(ABC):
    """One model, served in every mode. It keeps no request's state and knows no scheduler.

    What each lifecycle method may touch:

    * ``prepare_encode(state)`` fills the state's fields; it is the only one that reads the request.
    * ``denoise_step(input_batch)`` reads a gathered batch and writes nothing: it is repeated when memory runs out.
    * ``step_scheduler(input_batch, noise_pred)`` draws from the rows' generators and scatters the new latents, which
      moves each state one step on.
    * ``post_decode(states, decode_rows)`` sets ``images`` of states that are done.

    Args:
        pipeline: the diffusers pipeline whose modules do the work; they are shared, not copied.
        algorithm: the training algorithm that reads the rollouts.
    """

    supports_request_batch = True
    # Whether the transformer takes a mask over its text. Without one it attends to padding, which then has a length of
    # the model's own.
    has_text_mask = True
    default_max_sequence_length = 512
    largest_max_sequence_length = 1024

    def __init__(self, pipeline: DiffusionPipeline, algorithm: str = "flow_grpo"):
        self.pipeline: Any = pipeline
        self.algorithm = validate_algorithm(algorithm)
        # Asked for in every step, and walking the modules for it takes a while.
        self._first_weight: tuple[Any, torch.Tensor] | None = None
        self._schedules = NoiseSchedules()
        self._encodings = EncodingCache()

    @property
    def transformer(self) -> Any:
        return self.pipeline.transformer

    @property
    def device(self) -> torch.device:
        return self._weight.device

    @property
    def _weight(self) -> torch.Tensor:
        transformer = self.transformer
        if self._first_weight is None or self._first_weight[0] is not transformer:
            self._first_weight = transformer, next(transformer.parameters())
        return self._first_weight[1]

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    # What a model's file fills in, in pipeline order.

    def given_embeddings(self, request: OmniDiffusionRequest, prefix: str) -> PromptEncoding | None:
        """The embeddings that the request brings, or ``None``.

        Args:
            request: whose prompt it is.
            prefix: ``""`` for the prompt, ``"negative_"`` for the negative prompt.
        """
        width = self.transformer.config.joint_attention_dim
        return given_embeddings(request, prefix, self._weight, width, has_mask=self.has_text_mask)

    @abstractmethod
    def prompt_tokens(self, request: OmniDiffusionRequest, prefix: str) -> Hashable:
        """Token ids of the request's prompt, given or made from its text; equal ones are encoded once."""

    @abstractmethod
    def encode_tokens(self, tokens: Any, max_sequence_length: int) -> PromptEncoding:
        """Run the text encoders over what :meth:`prompt_tokens` returned."""

    @abstractmethod
    def guidance_scale(self, request: OmniDiffusionRequest) -> float:
        """The request's guidance scale; 1 or less means that the negative branch is skipped."""

    @abstractmethod
    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one row's latents, as the transformer takes them."""

    def draw_latents(self, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        """One row's initial latents, float32, drawn as the diffusers pipeline draws them."""
        return torch.randn(self.latent_shape(height, width), generator=generator, device=generator.device)

    def default_sigmas(self, num_inference_steps: int) -> list[float] | None:
        """Sigmas the pipeline passes to its scheduler when the user gives none."""
        return None

    @abstractmethod
    def predict_velocity(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: ForwardRows, image_size: tuple[int, int]
    ) -> torch.Tensor:
        """One transformer call: latents ``(r, ...)`` in the model's dtype, timesteps float32 ``(r,)``."""

    def guide(self, positive: torch.Tensor, negative: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Combine the branches, ``(G, ...)`` float32 each, with scales ``(G,)``."""
        scale = scale.view(-1, *[1] * (positive.dim() - 1))
        return negative + scale * (positive - negative)

    @abstractmethod
    def decode_latents(self, latents: torch.Tensor, image_size: tuple[int, int]) -> torch.Tensor:
        """Pictures ``(n, 3, H, W)`` in [-1, 1] from final latents ``(n, ...)`` float32."""

    # The lifecycle.

    def shape_key(self, request: OmniDiffusionRequest) -> Hashable:
        """What must be equal for two requests to share a forward, known before anything is encoded."""
        return self.image_size(request.sampling_params)

    def prepare_encode(self, state: StepRequestState) -> None:
        """Turn a request into a state ready for its first step: encoded prompts, noise, schedule.

        Raises:
            ValueError: naming the field, its value and what would be right.
        """
        request, sampling = state.request, state.sampling
        request.validate()
        height, width = state.image_size = self._validated_size(sampling)
        max_sequence_length = self._max_sequence_length(sampling)
        state.generators = sampling.draw_generators()
        state.seeds = [generator.initial_seed() for generator in state.generators]
        state.sigmas, state.timesteps = self._noise_schedule(sampling, height, width)

        arguments = sde_arguments(
            sampling.extra_args,
            len(state.timesteps),
            algorithm=self.algorithm,
            seed=state.seeds[0],
            group_seed=prompt_digest(request),
        )
        state.sde_window, state.logprobs = arguments.window, arguments.logprobs
        state.noisy = arguments.noise_level > 0
        coefficients = schedule_coefficients(
            tuple(state.sigmas.tolist()),
            arguments.window,
            noise_level=arguments.noise_level,
            sde_type=arguments.sde_type,
        )
        state.schedule = torch.cat([state.timesteps[:, None], coefficients], dim=1).to(self.device)

        state.prompt_encoding = self.encode_prompt(request, max_sequence_length, "")
        state.guidance = self.guidance_scale(request)
        if state.guidance > 1:
            state.negative_encoding = self.encode_prompt(request, max_sequence_length, "negative_")
        state.lora = requested_lora(self.transformer, sampling)
        state.latents = self._initial_latents(sampling, height, width, state.generators, arguments.shared_noise)
        if state.must_branch:
            state.branch()

    def denoise_step(self, input_batch: StepBatch) -> torch.Tensor:
        """Predict the velocity of every row of a gathered batch.

        Returns:
            float32 ``(R, ...)``, guided where the row is guided.
        """
        latents = input_batch.latents
        model_latents = latents.to(self.dtype)
        total = input_batch.num_rows + len(input_batch.guided_rows)
        velocity = latents.new_empty((total, *latents.shape[1:]))
        image_size = input_batch.states[0].image_size
        any_lora = any(state.lora is not None for state in input_batch.states)
        active = active_lora(self.transformer) if any_lora else []
        for rows in input_batch.forwards:
            scales = lora_scales(rows.lora, active, latents.device)
            with lora_rows(self.transformer, scales):
                prediction = self.predict_velocity(
                    model_latents[rows.source], input_batch.timesteps[rows.source], rows, image_size
                )
            velocity[rows.target] = prediction[: rows.num_rows].float()
        positive, negative = velocity.split([input_batch.num_rows, len(input_batch.guided_rows)])
        if len(negative):
            guided = self.guide(positive[input_batch.guided_rows], negative, input_batch.guidance)
            return positive.index_copy(0, input_batch.guided_rows, guided)
        return positive

    def step_scheduler(self, input_batch: StepBatch, noise_pred: torch.Tensor) -> None:
        """Take one reverse step for every row and hand the rows back to their requests."""
        step = sample_step(
            input_batch.latents,
            noise_pred,
            input_batch.coefficients,
            noise=input_batch.draw_noise(),
            rows_per_sum=input_batch.rows_per_forward,
        )
        input_batch.scatter(step.next_sample, step.log_prob)

    def post_decode(self, states: Sequence[StepRequestState], decode_rows: int = 1) -> None:
        """Decode the pictures of finished requests of one picture size.

        Args:
            states: finished.
            decode_rows: rows that the VAE takes at most. Its kernels may round differently for different numbers, so
                with 1 a picture's bits depend on its latents alone.
        """
        states = [state for state in states if state.sampling.output_type != "latent"]
        if not states:
            return
        image_size = states[0].image_size
        chunks = torch.cat([state.latents for state in states]).split(decode_rows)
        pictures = torch.cat([self.decode_latents(chunk, image_size).float() for chunk in chunks])
        images = pictures.mul_(0.5).add_(0.5).clamp_(0, 1).mul_(255).round_().to(torch.uint8).cpu()
        for state, rows in zip(states, images.split([state.num_outputs for state in states])):
            state.images = rows

    def forward(self, req: OmniDiffusionRequest | DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Run whole requests together, as :func:`omnibatch.packed_forward.forward_lifecycle` does."""
        return forward_lifecycle(self, req)

    # Pieces of prepare_encode.

    @torch.no_grad()
    def encode_prompt(self, request: OmniDiffusionRequest, max_sequence_length: int, prefix: str) -> PromptEncoding:
        """Encode the request's prompt (``prefix`` ``""``) or its negative prompt (``"negative_"``).

        Equal prompts in flight, and the last few, are encoded once as long as the encoders' weights stay the same.
        """
        given = self.given_embeddings(request, prefix)
        if given is not None:
            return given.cut(max_sequence_length)
        names = ("prompt_token_ids", "prompt_ids", "extra_prompt_ids", "prompt")
        value = request.prompt_field(*(prefix + name for name in names))
        # A text stands for itself, so that a group's prompt is not even tokenized twice.
        prompt = value if isinstance(value, str) else self.prompt_tokens(request, prefix)
        return self._encodings.get(
            (prompt, max_sequence_length),
            [getattr(self.pipeline, name, None) for name in TEXT_ENCODERS],
            lambda: self.encode_tokens(self.prompt_tokens(request, prefix), max_sequence_length),
        )

    def forget_prompts(self) -> None:
        """Drop the cached encodings.

        For changes of a text encoder that go unnoticed: writing through ``.data``, adding or replacing modules.
        """
        self._encodings = EncodingCache()

    @property
    def size_multiple(self) -> int:
        """The VAE's reduction times the patch size, of which height and width must be multiples, in pixels."""
        return self.pipeline.vae_scale_factor * 2

    def image_tokens(self, height: int, width: int) -> int:
        """Tokens that the transformer makes of a picture."""
        return (height // self.size_multiple) * (width // self.size_multiple)

    def image_size(self, sampling: OmniDiffusionSamplingParams) -> tuple[int, int]:
        """Height and width in pixels: the request's, or the model's default."""
        in_latents = getattr(self.pipeline, "default_sample_size", None) or self.transformer.config.sample_size
        default = in_latents * self.pipeline.vae_scale_factor
        return sampling.height or default, sampling.width or default

    def _validated_size(self, sampling: OmniDiffusionSamplingParams) -> tuple[int, int]:
        height, width = self.image_size(sampling)
        for name, value in (("height", height), ("width", width)):
            if value % self.size_multiple:
                raise ValueError(f"{name} must be a multiple of {self.size_multiple}, got {value}")
        return height, width

    def _max_sequence_length(self, sampling: OmniDiffusionSamplingParams) -> int:
        length = sampling.max_sequence_length or self.default_max_sequence_length
        if length > self.largest_max_sequence_length:
            raise ValueError(f"max_sequence_length must be at most {self.largest_max_sequence_length}, got {length}")
        return length

    def _noise_schedule(
        self, sampling: OmniDiffusionSamplingParams, height: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sigmas ``(T + 1,)`` and timesteps ``(T,)``, float32 on the CPU."""
        steps = sampling.num_inference_steps
        sigmas = self.default_sigmas(steps) if sampling.sigmas is None else [float(s) for s in sampling.sigmas]
        return self._schedules.get(self.pipeline.scheduler, steps, sigmas, self.image_tokens(height, width))

    def _initial_latents(
        self,
        sampling: OmniDiffusionSamplingParams,
        height: int,
        width: int,
        generators: list[torch.Generator],
        shared: bool,
    ) -> torch.Tensor:
        """Rows ``(n, ...)``; one row when the outputs share it."""
        # Every stream gives its latents, used or not: its next numbers are the noise of the first step, which must not
        # be those again, and must not depend on where the latents came from.
        drawn = [self.draw_latents(height, width, generator) for generator in generators]
        if sampling.latents is None:
            return torch.stack(drawn[:1] if shared else drawn).to(self.device)
        shape = (1 if shared else sampling.num_outputs_per_prompt, *self.latent_shape(height, width))
        if tuple(sampling.latents.shape) != shape:
            raise ValueError(f"latents must have the shape {shape}, got {tuple(sampling.latents.shape)}")
        if not torch.isfinite(sampling.latents).all():
            raise ValueError("latents must be finite")
        return sampling.latents.detach().to(self.device, torch.float32, copy=True)
