"""The full-size architectures of the recipes, with random weights: a forward takes as long as one with the real ones.

Nothing is downloaded. Text encoders are left out; requests bring embeddings of realistic lengths. Pictures show noise,
so only times and memory mean anything, and whoever prints a number says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from omnibatch.adapters import load
from omnibatch.adapters.base import RolloutAdapter
from omnibatch.recipes import Lora, Recipe
from omnibatch.request import OmniDiffusionRequest

# Of the published models' configuration files, where they differ from the class's defaults.
QWEN_IMAGE_SCHEDULER = {
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
}
SD35_MEDIUM_TRANSFORMER = {
    "sample_size": 128,
    "num_layers": 24,
    "num_attention_heads": 24,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}
SD3_VAE = {
    "latent_channels": 16,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "sample_size": 1024,
}

# Tokens of a prompt that asks for a text in a scene, as those of the recipes do, and of a blank negative prompt.
QWEN_IMAGE_PROMPT_LENGTHS = (24, 40, 56, 72)
QWEN_IMAGE_NEGATIVE_LENGTH = 6
CLIP_LENGTH = 77


def build_transformer(pipeline_class: str, device: torch.device | str, dtype: torch.dtype) -> Any:
    """The transformer of Qwen-Image or of Stable Diffusion 3.5 Medium with random weights, made on the device.

    Args:
        pipeline_class: a recipe's.
        device: ``"meta"`` gives shapes without memory.
        dtype: of the weights.
    """
    from diffusers import QwenImageTransformer2DModel, SD3Transformer2DModel

    with _made_in(device, dtype):
        if pipeline_class == "QwenImagePipeline":
            return QwenImageTransformer2DModel().eval()
        return SD3Transformer2DModel(**SD35_MEDIUM_TRANSFORMER).eval()


def build_pipeline(recipe: Recipe, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A diffusers pipeline of the recipe's full size, its LoRA on the transformer, without text encoders.

    Args:
        recipe: one of :data:`omnibatch.recipes.RECIPES`.
        device: where the weights are made.
        dtype: of the weights.
    """
    from diffusers import (
        AutoencoderKL,
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        StableDiffusion3Pipeline,
    )

    transformer = build_transformer(recipe.pipeline_class, device, dtype)
    add_lora(transformer, recipe.lora)
    if recipe.pipeline_class == "QwenImagePipeline":
        with _made_in(device, dtype):
            vae = AutoencoderKLQwenImage().eval()
        scheduler = FlowMatchEulerDiscreteScheduler(**QWEN_IMAGE_SCHEDULER)
        return QwenImagePipeline(scheduler, vae, None, None, transformer)
    with _made_in(device, dtype):
        vae = AutoencoderKL(**SD3_VAE).eval()
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return StableDiffusion3Pipeline(transformer, scheduler, vae, None, None, None, None, None, None)


def hundred_million() -> RolloutAdapter:
    """The embedded SD3.5 model with a transformer of about 100 million random weights in its place, on the CPU."""
    from diffusers import SD3Transformer2DModel

    adapter = load("tiny-sd35", device="cpu", dtype=torch.float32)
    larger = {"num_layers": 5, "num_attention_heads": 12, "attention_head_dim": 64, "caption_projection_dim": 768}
    torch.manual_seed(0)
    adapter.pipeline.transformer = SD3Transformer2DModel.from_config({**adapter.transformer.config, **larger}).eval()
    return adapter


def add_lora(transformer: Any, lora: Lora) -> None:
    """Put a recipe's LoRA on a transformer, active, with random weights in both its matrices."""
    from peft import LoraConfig

    transformer.requires_grad_(False)
    transformer.add_adapter(
        LoraConfig(r=lora.rank, lora_alpha=lora.alpha, init_lora_weights=False, target_modules=[*lora.target_modules])
    )


def embedding_requests(recipe: Recipe, transformer: Any, num_prompts: int, seed: int) -> list[OmniDiffusionRequest]:
    """A training step's requests with random embeddings in place of text, a request an image.

    Args:
        recipe: how many images a prompt has and how they are sampled.
        transformer: its configuration says how wide embeddings are; they get its device and data type.
        num_prompts: prompts.
        seed: of the first image.
    """
    config, weight = transformer.config, next(transformer.parameters())
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    requests = []
    for place in range(num_prompts):
        prompt: dict[str, Any] = {}
        if recipe.pipeline_class == "QwenImagePipeline":
            length = QWEN_IMAGE_PROMPT_LENGTHS[place % len(QWEN_IMAGE_PROMPT_LENGTHS)]
            prompt["prompt_embeds"] = random(length, config.joint_attention_dim)
            if recipe.guidance_scale > 1:
                prompt["negative_prompt_embeds"] = random(QWEN_IMAGE_NEGATIVE_LENGTH, config.joint_attention_dim)
        else:
            prompt["prompt_embeds"] = random(CLIP_LENGTH + recipe.max_sequence_length, config.joint_attention_dim)
            prompt["pooled_prompt_embeds"] = random(config.pooled_projection_dim)
        for image in range(recipe.images_per_prompt):
            sampling = recipe.sampling_params
            sampling.seed = seed + place * recipe.images_per_prompt + image
            requests.append(OmniDiffusionRequest(prompt, sampling, f"{place}-{image}"))
    return requests


@contextmanager
def _made_in(device: torch.device | str, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
