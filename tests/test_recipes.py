"""The recipes, value by value."""

import pytest

import omnibatch as ob
from omnibatch import tiny
from omnibatch.prompt_files import make_requests
from omnibatch.recipes import QWEN_IMAGE_FLOW_GRPO, RECIPES, SD35_FLOW_GRPO, find_recipe


def test_qwen_image_is_the_documents():
    recipe = QWEN_IMAGE_FLOW_GRPO
    assert (recipe.num_prompts, recipe.images_per_prompt, recipe.size, recipe.num_inference_steps) == (32, 16, 512, 10)
    assert (recipe.guidance_scale, recipe.max_sequence_length) == (4.0, 256)
    assert recipe.negative_prompt is not None
    assert recipe.extra_args == {
        "noise_level": 1.2,
        "sde_type": "sde",
        "sde_window_size": 2,
        "sde_window_range": (0, 5),
    }
    assert (recipe.lora.rank, recipe.lora.alpha, len(recipe.lora.target_modules)) == (64, 128, 12)
    assert recipe.config == ob.RolloutConfig(step_execution=True, max_num_seqs=256, rows_per_forward=32)


def test_sd35_is_the_documents():
    recipe = SD35_FLOW_GRPO
    assert (recipe.num_prompts, recipe.images_per_prompt, recipe.size, recipe.num_inference_steps) == (8, 8, 384, 10)
    assert (recipe.guidance_scale, recipe.negative_prompt, recipe.max_sequence_length) == (1.0, None, 256)
    assert recipe.extra_args == {
        "noise_level": 0.8,
        "sde_type": "cps",
        "sde_window_size": 3,
        "sde_window_range": (0, 5),
    }
    assert (recipe.lora.rank, recipe.lora.alpha, len(recipe.lora.target_modules)) == (32, 64, 8)
    assert recipe.config.mode is ob.ExecutionMode.REQUEST
    assert (recipe.config.max_num_seqs, recipe.config.request_batch_max_wait_ms) == (256, 10)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_loras_modules_exist(recipe, adapters):
    small = recipe.scaled()
    modules = [name for name, _ in adapters[small.model].transformer.named_modules()]
    for target in recipe.lora.target_modules:
        assert any(name.endswith(f".{target}") for name in modules), target


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_scaled_recipes_run_on_the_embedded_models(recipe, adapters):
    small = recipe.scaled()
    assert small.model in tiny.MODEL_NAMES
    assert small.extra_args == recipe.extra_args
    requests = make_requests(
        tiny.EXAMPLE_PROMPTS[:2], small.sampling_params, images_per_prompt=2, negative_prompt=small.negative_prompt
    )
    outputs = ob.RolloutEngine(adapters[small.model], small.config).generate(requests)
    assert [output.rows_per_forward for output in outputs] == [8] * 4
    assert all(output.trajectory_log_probs.shape == (1, recipe.sde_window_size) for output in outputs)
    assert all((output.negative_prompt_embeds is None) == (recipe.guidance_scale <= 1) for output in outputs)


def test_an_unknown_recipe_is_named():
    with pytest.raises(ValueError, match="recipe must be one of qwen_image_flow_grpo, sd35_flow_grpo, got 'flux'"):
        find_recipe("flux")
