"""Qwen-Image: packed latents, masked text, true classifier-free guidance with its norm rescaled."""

from __future__ import annotations

import warnings

import torch

from omnibatch.adapters.base import RolloutAdapter
from omnibatch.adapters.prompts import given_token_ids, prompt_text, require_in_vocabulary
from omnibatch.request import OmniDiffusionRequest
from omnibatch.step_batch import ForwardRows
from omnibatch.step_state import PromptEncoding


class QwenImageAdapter(RolloutAdapter):
    """Rollouts through a :class:`diffusers.QwenImagePipeline`."""

    default_max_sequence_length = 512
    largest_max_sequence_length = 1024

    # Encode.

    def tokenize(self, prompt: str) -> list[int]:
        """Token ids of a prompt within the model's template, as ``prompt_token_ids`` takes them."""
        text = self.pipeline.prompt_template_encode.format(prompt)
        longest = self.pipeline.tokenizer_max_length + self.pipeline.prompt_template_encode_start_idx
        return self.pipeline.tokenizer(text, max_length=longest, truncation=True).input_ids

    def prompt_tokens(self, request: OmniDiffusionRequest, prefix: str) -> tuple[int, ...]:
        token_ids = given_token_ids(request, prefix)
        if token_ids is None:
            token_ids = self.tokenize(prompt_text(request, prefix))
        template_length = self.pipeline.prompt_template_encode_start_idx
        if len(token_ids) <= template_length:
            raise ValueError(
                f"{prefix}prompt_token_ids must include the model's template of {template_length} tokens before the "
                f"prompt, got {len(token_ids)} tokens"
            )
        require_in_vocabulary(token_ids, self.pipeline.text_encoder, f"{prefix}prompt_token_ids")
        return tuple(token_ids)

    def encode_tokens(self, tokens: tuple[int, ...], max_sequence_length: int) -> PromptEncoding:
        input_ids = torch.tensor([tokens], device=self.device)
        hidden_states = self.pipeline.text_encoder.model(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids)
        ).last_hidden_state[0]
        template_length = self.pipeline.prompt_template_encode_start_idx
        embeds = hidden_states[template_length:][:max_sequence_length].to(self.dtype)
        return PromptEncoding(embeds, torch.ones(len(embeds), dtype=torch.bool))

    def guidance_scale(self, request: OmniDiffusionRequest) -> float:
        has_negative = request.prompt_field(
            "negative_prompt", "negative_prompt_token_ids", "negative_prompt_ids", "negative_prompt_embeds"
        )
        scale = request.sampling_params.true_cfg_scale
        if has_negative is None:
            if scale is not None and scale > 1:
                warnings.warn(
                    f"true_cfg_scale={scale} has no effect on a prompt without a negative_prompt, which may be empty",
                    stacklevel=2,
                )
            return 1.0
        return 4.0 if scale is None else float(scale)

    # Prepare.

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return self.image_tokens(height, width), self.transformer.config.in_channels

    def draw_latents(self, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        channels = self.transformer.config.in_channels // 4
        height, width = height // self.pipeline.vae_scale_factor, width // self.pipeline.vae_scale_factor
        noise = torch.randn((1, 1, channels, height, width), generator=generator, device=generator.device)
        return self.pipeline._pack_latents(noise, 1, channels, height, width)[0]

    def default_sigmas(self, num_inference_steps: int) -> list[float] | None:
        return torch.linspace(1.0, 1 / num_inference_steps, num_inference_steps, dtype=torch.float64).tolist()

    # Denoise.

    def predict_velocity(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: ForwardRows, image_size: tuple[int, int]
    ) -> torch.Tensor:
        height, width = image_size
        grid = (1, height // self.size_multiple, width // self.size_multiple)
        return self.transformer(
            hidden_states=latents,
            timestep=timesteps / 1000,
            encoder_hidden_states=rows.prompt_embeds,
            encoder_hidden_states_mask=rows.prompt_embeds_mask,
            img_shapes=[[grid]] * len(latents),
            return_dict=False,
        )[0]

    def guide(self, positive: torch.Tensor, negative: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Guidance that keeps each token at the length of its positive prediction."""
        combined = super().guide(positive, negative, scale)
        return combined * (positive.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    # Decode.

    def decode_latents(self, latents: torch.Tensor, image_size: tuple[int, int]) -> torch.Tensor:
        vae = self.pipeline.vae
        latents = self.pipeline._unpack_latents(latents, *image_size, self.pipeline.vae_scale_factor).to(vae.dtype)
        mean, std = (
            torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return vae.decode(latents * std + mean, return_dict=False)[0][:, :, 0]
