"""The two training recipes behind the document's tables, as complete workloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from omnibatch import tiny
from omnibatch.config import RolloutConfig
from omnibatch.request import OmniDiffusionSamplingParams

ATTENTION_PROJECTIONS = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
)
QWEN_IMAGE_MLP = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")


@dataclass(frozen=True)
class Lora:
    """The LoRA that a recipe trains: rank, alpha and the modules it is put on."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """A workload: what is generated, how it is sampled, how it is packed.

    Attributes:
        name: what it is called.
        pipeline_class: the diffusers pipeline it is for.
        model: hub id of the full-size model.
        num_prompts: prompts in a training step.
        images_per_prompt: images for each, one request each.
        size: height and width in pixels.
        num_inference_steps: denoising steps.
        guidance_scale: 1 skips the negative branch.
        negative_prompt: what guidance leads away from.
        max_sequence_length: text tokens (for SD3 those of T5, behind CLIP's 77).
        noise_level: of the SDE steps.
        sde_type: their sampler.
        sde_window_size: SDE steps.
        sde_window_range: where they are drawn from.
        lora: what is trained.
        config: how the document packs it. ``max_num_seqs`` is the document's: requests in flight or in a wave.
            ``rows_per_forward`` is the recipe's log-prob micro-batch, because bf16 kernels round differently for
            different numbers of rows: rollouts packed 256 at a time and log-probs recomputed 32 at a time disagree, and
            that mismatch was found to hurt Flow-GRPO's convergence. It also holds 256 requests in flight at the memory
            of 32.
    """

    name: str
    pipeline_class: str
    model: str
    num_prompts: int
    images_per_prompt: int
    size: int
    num_inference_steps: int
    guidance_scale: float
    negative_prompt: str | None
    max_sequence_length: int
    noise_level: float
    sde_type: str
    sde_window_size: int
    sde_window_range: tuple[int, int]
    lora: Lora
    config: RolloutConfig

    @property
    def extra_args(self) -> dict[str, Any]:
        """The sampler's arguments."""
        names = ("noise_level", "sde_type", "sde_window_size", "sde_window_range")
        return {name: getattr(self, name) for name in names}

    @property
    def sampling_params(self) -> OmniDiffusionSamplingParams:
        """How each request is sampled."""
        return OmniDiffusionSamplingParams(
            height=self.size,
            width=self.size,
            num_inference_steps=self.num_inference_steps,
            guidance_scale=self.guidance_scale,
            true_cfg_scale=self.guidance_scale,
            max_sequence_length=self.max_sequence_length,
            extra_args=self.extra_args,
        )

    def scaled(self) -> Recipe:
        """The same workload for the embedded model of its family: small images, short text, a group of 8 for 4 prompts.

        Sampler, guidance, steps and packing stay; ``rows_per_forward`` becomes 8, so that there are several calls.
        """
        return replace(
            self,
            model=next(model for model, pipeline in tiny.PIPELINE_CLASSES.items() if pipeline == self.pipeline_class),
            num_prompts=len(tiny.EXAMPLE_PROMPTS),
            images_per_prompt=8,
            size=tiny.IMAGE_SIZE,
            max_sequence_length=48,
            config=replace(self.config, rows_per_forward=8),
        )


QWEN_IMAGE_FLOW_GRPO = Recipe(
    name="qwen_image_flow_grpo",
    pipeline_class="QwenImagePipeline",
    model="Qwen/Qwen-Image",
    num_prompts=32,
    images_per_prompt=16,
    size=512,
    num_inference_steps=10,
    guidance_scale=4.0,
    negative_prompt=" ",
    max_sequence_length=256,
    noise_level=1.2,
    sde_type="sde",
    sde_window_size=2,
    sde_window_range=(0, 5),
    lora=Lora(64, 128, ATTENTION_PROJECTIONS + QWEN_IMAGE_MLP),
    config=RolloutConfig(step_execution=True, max_num_seqs=256, rows_per_forward=32),
)

SD35_FLOW_GRPO = Recipe(
    name="sd35_flow_grpo",
    pipeline_class="StableDiffusion3Pipeline",
    model="stabilityai/stable-diffusion-3.5-medium",
    num_prompts=8,
    images_per_prompt=8,
    size=384,
    num_inference_steps=10,
    guidance_scale=1.0,
    negative_prompt=None,
    max_sequence_length=256,
    noise_level=0.8,
    sde_type="cps",
    sde_window_size=3,
    sde_window_range=(0, 5),
    lora=Lora(32, 64, ATTENTION_PROJECTIONS),
    config=RolloutConfig(max_num_seqs=256, request_batch_max_wait_ms=10, rows_per_forward=32),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {recipe.name: recipe for recipe in (QWEN_IMAGE_FLOW_GRPO, SD35_FLOW_GRPO)}
)


def find_recipe(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        ValueError: naming the value and the recipes there are.

    Example:
        >>> find_recipe("sd35_flow_grpo").config.rows_per_forward
        32
    """
    if name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {name!r}")
    return RECIPES[name]
