"""The architectures of the embedded models: the full-size classes and settings, made small."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from omnibatch.tiny.vocabulary import build_clip_tokenizer, build_qwen_tokenizer, build_t5_tokenizer

LATENT_CHANNELS = 16
TEXT_DIM = 96
_CLIP_DIM = 48
_HEADS, _HEAD_DIM = 8, 16
LAYERS = 2
AXES = (4, 6, 6)

QWEN_SCHEDULER: dict[str, object] = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
SD3_SCHEDULER: dict[str, object] = {"num_train_timesteps": 1000, "shift": 3.0, "use_dynamic_shifting": False}


def build_qwen_image(seed: int = 0) -> QwenImagePipeline:
    """Return a small Qwen-Image pipeline with random float32 weights."""
    torch.manual_seed(seed)
    tokenizer = build_qwen_tokenizer()
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**QWEN_SCHEDULER),
        vae=AutoencoderKLQwenImage(base_dim=8, z_dim=LATENT_CHANNELS, dim_mult=[1, 2, 4, 4], num_res_blocks=1),
        text_encoder=_build_qwen_text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=LATENT_CHANNELS * 4,
            out_channels=LATENT_CHANNELS,
            num_layers=LAYERS,
            attention_head_dim=_HEAD_DIM,
            num_attention_heads=_HEADS,
            joint_attention_dim=TEXT_DIM,
            axes_dims_rope=AXES,
        ),
    )


def build_sd35(seed: int = 0) -> StableDiffusion3Pipeline:
    """Return a small Stable Diffusion 3.5 pipeline with random float32 weights."""
    torch.manual_seed(seed)
    tokenizer = build_clip_tokenizer(pad_token="<|endoftext|>")
    tokenizer_2 = build_clip_tokenizer(pad_token="!")
    tokenizer_3 = build_t5_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=LAYERS,
            attention_head_dim=_HEAD_DIM,
            num_attention_heads=_HEADS,
            joint_attention_dim=TEXT_DIM,
            caption_projection_dim=_HEADS * _HEAD_DIM,
            pooled_projection_dim=2 * _CLIP_DIM,
            pos_embed_max_size=16,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(**SD3_SCHEDULER),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(16, 16, 32, 48),
            layers_per_block=1,
            latent_channels=LATENT_CHANNELS,
            norm_num_groups=8,
            sample_size=64,
            scaling_factor=1.0,
            shift_factor=0.0,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=_build_clip_text_encoder(tokenizer, "quick_gelu"),
        tokenizer=tokenizer,
        text_encoder_2=_build_clip_text_encoder(tokenizer_2, "gelu"),
        tokenizer_2=tokenizer_2,
        text_encoder_3=_build_t5_text_encoder(tokenizer_3),
        tokenizer_3=tokenizer_3,
    )


BUILDERS: dict[str, Callable[[], DiffusionPipeline]] = {"tiny-qwen-image": build_qwen_image, "tiny-sd35": build_sd35}


def _build_qwen_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    special = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in _QWEN_TOKEN_NAMES}
    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_DIM,
        "intermediate_size": 2 * TEXT_DIM,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "max_window_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": special["endoftext"],
        "eos_token_id": special["im_end"],
    }
    vision_config = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": TEXT_DIM,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=special["image_pad"],
        video_token_id=special["video_pad"],
        vision_start_token_id=special["vision_start"],
        vision_end_token_id=special["vision_end"],
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


_QWEN_TOKEN_NAMES = ("endoftext", "im_end", "image_pad", "video_pad", "vision_start", "vision_end")


def _build_clip_text_encoder(tokenizer: CLIPTokenizer, activation: str) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_CLIP_DIM,
        intermediate_size=2 * _CLIP_DIM,
        projection_dim=_CLIP_DIM,
        # diffusers reads the states before the last layer, so two layers let one of them work on the sequence.
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=77,
        hidden_act=activation,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return CLIPTextModelWithProjection(config).eval()


def _build_t5_text_encoder(tokenizer: T5TokenizerFast) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_DIM,
        d_kv=16,
        d_ff=2 * TEXT_DIM,
        num_layers=2,
        num_heads=6,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        is_encoder_decoder=False,
        use_cache=False,
        tie_word_embeddings=False,
        decoder_start_token_id=tokenizer.pad_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5EncoderModel(config).eval()


def save_pipeline(pipeline: DiffusionPipeline, folder: Path) -> None:
    """Write a pipeline as a diffusers folder with float16 weights; its own weights are rounded to float16 too.

    Args:
        pipeline: a pipeline whose weights fit float16.
        folder: created if missing; files of the same names are replaced.
    """
    # Casting a pipeline to float16 on a CPU warns that it will be slow to run; it is only written here.
    logging.getLogger("diffusers.pipelines.pipeline_utils").setLevel(logging.ERROR)
    pipeline.to(torch.float16)
    pipeline.save_pretrained(folder, safe_serialization=True)
    for config_path in folder.glob("*/config.json"):
        config = json.loads(config_path.read_text())
        config.pop("_name_or_path", None)
        _set_dtypes(config, "float32")
        config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for weights_path in folder.glob("*/*.safetensors"):
        weights_path.chmod(0o644)
    pipeline.to(torch.float32)


def _set_dtypes(config: dict[str, object], dtype: str) -> None:
    # Transformers otherwise loads a text encoder in the type it was stored in, diffusers always in float32.
    for key, value in config.items():
        if isinstance(value, dict):
            _set_dtypes(value, dtype)
        elif key == "dtype":
            config[key] = dtype
