"""Stable Diffusion 3 and 3.5: three text encoders, pooled embeddings, a fixed number of text tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from omnibatch.adapters.base import RolloutAdapter
from omnibatch.adapters.prompts import given_embeddings, given_extra_token_ids, prompt_text, require_in_vocabulary
from omnibatch.request import OmniDiffusionRequest
from omnibatch.step_batch import ForwardRows
from omnibatch.step_state import PromptEncoding


class StableDiffusion3Adapter(RolloutAdapter):
    """Rollouts through a :class:`diffusers.StableDiffusion3Pipeline`."""

    has_text_mask = False
    default_max_sequence_length = 256
    largest_max_sequence_length = 512

    # Encode.

    def tokenize(self, prompt: str) -> dict[str, list[int]]:
        """Token ids of a prompt per tokenizer, as ``extra_prompt_ids`` takes them."""
        tokenizers = {"clip": self.pipeline.tokenizer, "t5": self.pipeline.tokenizer_3}
        given = {name: tokenizer for name, tokenizer in tokenizers.items() if tokenizer is not None}
        if prompt:
            return {name: tokenizer(prompt).input_ids for name, tokenizer in given.items()}
        # What a missing negative prompt stands for; so whoever brings ids needs no tokenizer for it.
        ends = {name: (tokenizer.bos_token_id, tokenizer.eos_token_id) for name, tokenizer in given.items()}
        return {name: [token for token in tokens if token is not None] for name, tokens in ends.items()}

    def given_embeddings(self, request: OmniDiffusionRequest, prefix: str) -> PromptEncoding | None:
        config = self.transformer.config
        return given_embeddings(
            request,
            prefix,
            self._weight,
            config.joint_attention_dim,
            has_mask=self.has_text_mask,
            pooled_width=config.pooled_projection_dim,
        )

    def prompt_tokens(self, request: OmniDiffusionRequest, prefix: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        has_t5 = self.pipeline.text_encoder_3 is not None
        token_ids = given_extra_token_ids(request, prefix, ("clip", "t5") if has_t5 else ("clip",))
        if token_ids is None:
            token_ids = self.tokenize(prompt_text(request, prefix, default="" if prefix else None))
        name = f"{prefix}extra_prompt_ids"
        for encoder in (self.pipeline.text_encoder, self.pipeline.text_encoder_2):
            require_in_vocabulary(token_ids["clip"], encoder, f"{name}['clip']")
        if has_t5:
            require_in_vocabulary(token_ids["t5"], self.pipeline.text_encoder_3, f"{name}['t5']")
        return tuple(token_ids["clip"]), tuple(token_ids["t5"] if has_t5 else ())

    def encode_tokens(
        self, tokens: tuple[tuple[int, ...], tuple[int, ...]], max_sequence_length: int
    ) -> PromptEncoding:
        clip_ids, t5_ids = (list(ids) for ids in tokens)
        encoders = (self.pipeline.text_encoder, self.pipeline.text_encoder_2)
        tokenizers = (self.pipeline.tokenizer, self.pipeline.tokenizer_2)
        clip = [self._encode_clip(*modules, clip_ids) for modules in zip(encoders, tokenizers)]
        t5_embeds = self._encode_t5(t5_ids, max_sequence_length)
        clip_embeds = torch.cat([embeds for embeds, _ in clip], dim=-1)
        clip_embeds = F.pad(clip_embeds, (0, t5_embeds.shape[-1] - clip_embeds.shape[-1]))
        embeds = torch.cat([clip_embeds.to(self.dtype), t5_embeds.to(self.dtype)])
        pooled = torch.cat([pooled for _, pooled in clip], dim=-1).to(self.dtype)
        return PromptEncoding(embeds, pooled_prompt_embeds=pooled)

    def _encode_clip(self, encoder: torch.nn.Module, tokenizer, token_ids: list[int]):
        """Hidden states ``(77, D)`` and the pooled embedding ``(P,)`` of one CLIP encoder."""
        length = self.pipeline.tokenizer_max_length
        # Ids may come padded for the other tokenizer: cut behind the first end token, then pad for this one.
        end = tokenizer.eos_token_id
        token_ids = token_ids[: token_ids.index(end) + 1] if end in token_ids else token_ids
        if len(token_ids) > length:
            token_ids = token_ids[: length - 1] + [end]
        padded = token_ids + [tokenizer.pad_token_id] * (length - len(token_ids))
        result = encoder(torch.tensor([padded], device=self.device), output_hidden_states=True)
        return result.hidden_states[-2][0], result[0][0]

    def _encode_t5(self, token_ids: list[int], length: int) -> torch.Tensor:
        """Hidden states ``(length, D)``; padding is attended to, as the pipeline does."""
        if self.pipeline.text_encoder_3 is None:
            return torch.zeros(length, self.transformer.config.joint_attention_dim, device=self.device)
        tokenizer = self.pipeline.tokenizer_3
        if len(token_ids) > length:
            token_ids = token_ids[: length - 1] + [tokenizer.eos_token_id]
        padded = token_ids + [tokenizer.pad_token_id] * (length - len(token_ids))
        return self.pipeline.text_encoder_3(torch.tensor([padded], device=self.device))[0][0]

    def guidance_scale(self, request: OmniDiffusionRequest) -> float:
        scale = request.sampling_params.guidance_scale
        return 7.0 if scale is None else float(scale)

    # Prepare.

    @property
    def size_multiple(self) -> int:
        return self.pipeline.vae_scale_factor * self.pipeline.patch_size

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        reduction = self.pipeline.vae_scale_factor
        largest = self.transformer.config.pos_embed_max_size * self.size_multiple
        for name, value in (("height", height), ("width", width)):
            if value > largest:
                raise ValueError(f"{name} must be at most {largest}, where the model's positions end, got {value}")
        return self.transformer.config.in_channels, height // reduction, width // reduction

    # Denoise.

    def predict_velocity(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: ForwardRows, image_size: tuple[int, int]
    ) -> torch.Tensor:
        return self.transformer(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=rows.prompt_embeds,
            pooled_projections=rows.pooled_prompt_embeds,
            return_dict=False,
        )[0]

    # Decode.

    def decode_latents(self, latents: torch.Tensor, image_size: tuple[int, int]) -> torch.Tensor:
        vae = self.pipeline.vae
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(latents.to(vae.dtype), return_dict=False)[0]
