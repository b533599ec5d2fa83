"""The embedded models load without a network, keep the full-size settings, and write what they are asked to."""

import json

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, QwenImagePipeline, StableDiffusion3Pipeline

from omnibatch.tiny import MODEL_NAMES, model_path
from omnibatch.tiny.reward import prompted_text, read_text, text_log_likelihood, text_reward
from omnibatch.tiny.signs import COLORS, draw_sign, sample_colors, sample_texts, sign_prompt
from omnibatch.tiny.train import draw_signs, sample
from omnibatch.tiny.vocabulary import TEMPLATE_PREFIX

MEGABYTE = 1_000_000
CLASSES = {"tiny-qwen-image": QwenImagePipeline, "tiny-sd35": StableDiffusion3Pipeline}


@pytest.fixture(scope="module", params=MODEL_NAMES)
def pipeline(request: pytest.FixtureRequest) -> DiffusionPipeline:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        loaded = DiffusionPipeline.from_pretrained(model_path(request.param))
    assert isinstance(loaded, CLASSES[request.param])
    return loaded


def test_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'huge'.*tiny-qwen-image, tiny-sd35"):
        model_path("huge")


def test_weights_load_as_float32(pipeline: DiffusionPipeline) -> None:
    modules = [module for module in pipeline.components.values() if isinstance(module, torch.nn.Module)]
    assert {module.dtype for module in modules} == {torch.float32}
    assert all(bool(parameter.isfinite().all()) for module in modules for parameter in module.parameters())


def test_models_and_reward_fit_in_ten_megabytes() -> None:
    folder = model_path(MODEL_NAMES[0]).parent
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 10 * MEGABYTE


def test_configs_name_no_folder_of_the_machine_that_trained_them() -> None:
    for path in model_path(MODEL_NAMES[0]).parent.rglob("*.json"):
        assert "_name_or_path" not in path.read_text()


def test_schedulers_have_the_full_size_settings() -> None:
    qwen = json.loads((model_path("tiny-qwen-image") / "scheduler" / "scheduler_config.json").read_text())
    expected = {
        "use_dynamic_shifting": True,
        "time_shift_type": "exponential",
        "base_shift": 0.5,
        "max_shift": 0.9,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "shift": 1.0,
        "shift_terminal": 0.02,
        "num_train_timesteps": 1000,
    }
    assert {key: qwen[key] for key in expected} == expected
    sd3 = json.loads((model_path("tiny-sd35") / "scheduler" / "scheduler_config.json").read_text())
    assert (sd3["shift"], sd3["use_dynamic_shifting"], sd3["num_train_timesteps"]) == (3.0, False, 1000)


def test_architectures_have_the_parts_of_the_full_size_ones() -> None:
    sd3 = json.loads((model_path("tiny-sd35") / "transformer" / "config.json").read_text())
    assert (sd3["dual_attention_layers"], sd3["qk_norm"]) == ([0], "rms_norm")
    vae = json.loads((model_path("tiny-sd35") / "vae" / "config.json").read_text())
    assert (vae["latent_channels"], vae["use_quant_conv"], vae["use_post_quant_conv"]) == (16, False, False)
    qwen = json.loads((model_path("tiny-qwen-image") / "transformer" / "config.json").read_text())
    assert (qwen["patch_size"], qwen["in_channels"], qwen["out_channels"]) == (2, 64, 16)


def test_template_prefix_is_the_34_tokens_that_diffusers_drops() -> None:
    loaded = QwenImagePipeline.from_pretrained(model_path("tiny-qwen-image"))
    start = loaded.prompt_template_encode_start_idx
    assert loaded.prompt_template_encode.startswith(TEMPLATE_PREFIX)
    assert len(loaded.tokenizer(TEMPLATE_PREFIX).input_ids) == start == 34
    prompt = loaded.tokenizer.tokenize('a red sign that says "4B"')
    assert prompt == ["a", "Ġred", "Ġsign", "Ġthat", "Ġsays", 'Ġ"', "4", "B", '"']


def test_clip_tokenizers_pad_to_77() -> None:
    loaded = StableDiffusion3Pipeline.from_pretrained(model_path("tiny-sd35"))
    assert (loaded.tokenizer.model_max_length, loaded.tokenizer_2.model_max_length) == (77, 77)


def test_drawing_depends_on_its_arguments_alone() -> None:
    first = draw_sign("47", "red", seed=3)
    assert first.shape == (3, 64, 64)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(first, draw_sign("47", "red", seed=3))
    assert not np.array_equal(first, draw_sign("47", "red", seed=4))


@pytest.mark.parametrize(("text", "color"), [("1234", None), ("a", None), ("7", "pink")])
def test_signs_that_cannot_be_drawn_are_refused(text: str, color: str | None) -> None:
    with pytest.raises(ValueError, match="got"):
        draw_sign(text, color)


def test_sampled_texts_and_colors_follow_the_seed() -> None:
    assert sample_texts(20, seed=1) == sample_texts(20, seed=1) != sample_texts(20, seed=2)
    assert {len(text) for text in sample_texts(200, seed=1)} == {1, 2, 3}
    assert set(sample_colors(200, seed=1)) == {None, *COLORS}


def test_prompted_text_is_what_the_quotes_hold() -> None:
    assert prompted_text(sign_prompt("42", "red")) == "42"
    with pytest.raises(ValueError, match="a plain sign"):
        prompted_text("a plain sign")


def test_reader_reads_clean_signs() -> None:
    texts = sample_texts(1000, seed=77)
    pictures = draw_signs(texts, sample_colors(1000, seed=78), seed=10**6)
    exact = [read == text for read, text in zip(read_text(pictures), texts, strict=True)]
    assert np.mean(exact) >= 0.99


def test_reader_sees_no_text_where_there_is_none() -> None:
    blank = draw_signs([""] * 20, [None] * 20, seed=5)
    assert read_text(blank) == [""] * 20


def test_reward_counts_the_characters_that_differ() -> None:
    pictures = draw_signs(["142", "142", "7"], ["red", "blue", "green"], seed=0)
    prompts = [sign_prompt("142"), sign_prompt("143"), sign_prompt("608")]
    reward = text_reward(pictures, prompts)
    assert reward.dtype == torch.float32
    torch.testing.assert_close(reward, torch.tensor([1.0, 2 / 3, 0.0]))
    likelihood = text_log_likelihood(pictures, prompts)
    assert likelihood[0] > likelihood[1] > likelihood[2]


def test_reward_takes_floats_and_other_sizes() -> None:
    picture = draw_signs(["89"], ["purple"], seed=0)
    large = torch.nn.functional.interpolate(picture.float() / 255, size=(128, 128), mode="bilinear")
    assert read_text(large) == read_text(picture) == read_text(picture.numpy()) == ["89"]
    with pytest.raises(ValueError, match="shape"):
        read_text(picture[0])
    with pytest.raises(ValueError, match="int64"):
        read_text(picture.long())
    with pytest.raises(ValueError, match="1 pictures, 2 prompts"):
        text_reward(picture, ['"A"', '"B"'])


def test_pictures_read_as_prompted(pipeline: DiffusionPipeline) -> None:
    texts = sample_texts(64, seed=4321)
    colors = sample_colors(64, seed=4321, named_share=0.5)
    prompts = [sign_prompt(text, color) for text, color in zip(texts, colors, strict=True)]
    pictures = sample(pipeline, prompts, guided=False)
    exact = [read == text for read, text in zip(read_text(pictures), texts, strict=True)]
    assert np.mean(exact) >= 0.8
