"""Trains the embedded models from nothing: ``python -m omnibatch.tiny.train --out FOLDER``."""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline, QwenImagePipeline
from PIL import Image
from safetensors.torch import load_file

from omnibatch.tiny import MODEL_NAMES
from omnibatch.tiny.build import BUILDERS, save_pipeline
from omnibatch.tiny.reward import ALPHABET, BLANK, SignReader, text_classes
from omnibatch.tiny.signs import draw_sign, sample_colors, sample_texts, sign_prompt
from omnibatch.tiny.train_flow import FlowData, train_flow
from omnibatch.tiny.train_reward import save_reader, train_reader
from omnibatch.tiny.train_vae import encode, normalize, reconstruct, to_float, train_vae

PICTURES = 16_000
VAE_STEPS = {"tiny-qwen-image": 1000, "tiny-sd35": 1000}
FLOW_STEPS = {"tiny-qwen-image": 2000, "tiny-sd35": 1600}
READER_STEPS = 600
RECONSTRUCTED = 4000
TEST_PICTURES = 64
TEST_SEED = 10_000_019


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the models named on the command line, save them, and print how often their signs read as prompted."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    with _timed("draw pictures"):
        texts = sample_texts(PICTURES, options.seed)
        colors = [str(color) for color in sample_colors(PICTURES, options.seed + 1, named_share=1.0)]
        pictures = draw_signs(texts, colors, options.seed)
    pipelines = {name: BUILDERS[name]() for name in MODEL_NAMES if options.only in (None, name)}
    for name, pipeline in pipelines.items():
        vae_folder = options.out / name / "vae"
        if options.reuse and vae_folder.exists():
            pipeline.register_modules(vae=type(pipeline.vae).from_pretrained(vae_folder))
            continue
        with _timed(f"{name} autoencoder"):
            train_vae(pipeline.vae, pictures, VAE_STEPS[name], options.seed)
        save_pipeline(pipeline, options.out / name)
    reader_path = options.out / "reward.safetensors"
    if not (options.reuse and reader_path.exists()):
        with _timed("reward"):
            _train_reward(list(pipelines.values()), pictures, texts, options.seed, reader_path)
    for name, pipeline in pipelines.items():
        with _timed(f"{name} transformer"):
            data = flow_data(pipeline, pictures, texts, colors)
            train_flow(pipeline, data, FLOW_STEPS[name], options.seed)
        save_pipeline(pipeline, options.out / name)
        report(name, options.out)


def draw_signs(texts: Sequence[str], colors: Sequence[str | None], seed: int) -> torch.Tensor:
    """Draw one sign for each text and colour, as uint8 (n, 3, 64, 64)."""
    pairs = zip(texts, colors, strict=True)
    drawn = [draw_sign(text, color, seed + index) for index, (text, color) in enumerate(pairs)]
    return torch.from_numpy(np.stack(drawn))


def _train_reward(
    pipelines: Sequence[DiffusionPipeline], pictures: torch.Tensor, texts: list[str], seed: int, path: Path
) -> None:
    damaged = [reconstruct(pipeline.vae, pictures[:RECONSTRUCTED], 0.6, seed) for pipeline in pipelines]
    blank = draw_signs([""] * 800, [None] * 800, seed)
    shown = torch.cat([pictures, *damaged, blank])
    written = [*texts, *(texts[:RECONSTRUCTED] * len(damaged)), *([""] * len(blank))]
    save_reader(train_reader(shown, written, READER_STEPS, seed), path)


def flow_data(
    pipeline: DiffusionPipeline, pictures: torch.Tensor, texts: Sequence[str], colors: Sequence[str]
) -> FlowData:
    """Encode pictures once, so that the autoencoder has no part in the training of the transformer."""
    latents = normalize(pipeline.vae, encode(pipeline.vae, pictures))
    if isinstance(pipeline, QwenImagePipeline):
        latents = pipeline._pack_latents(latents, *latents.shape)
    prompts = [sign_prompt(text, color) for text, color in zip(texts, colors, strict=True)]
    classes = torch.tensor([text_classes(text) for text in texts])
    return FlowData(latents, classes, prompts, [sign_prompt(text) for text in texts])


def report(name: str, folder: Path) -> None:
    """Print the share of pictures that read exactly as prompted, and write a contact sheet beside the model."""
    pipeline = DiffusionPipeline.from_pretrained(folder / name)
    reader = SignReader()
    reader.load_state_dict({key: weight.float() for key, weight in load_file(folder / "reward.safetensors").items()})
    reader.eval()
    texts = sample_texts(TEST_PICTURES, TEST_SEED)
    colors = sample_colors(TEST_PICTURES, TEST_SEED, named_share=0.5)
    prompts = [sign_prompt(text, color) for text, color in zip(texts, colors, strict=True)]
    for label, guided in (("guidance off", False), ("guidance 4.0", True)):
        pictures = sample(pipeline, prompts, guided)
        share = np.mean([read == text for read, text in zip(_read(reader, pictures), texts, strict=True)])
        print(f"{name}, {label}: {share:.1%} of {TEST_PICTURES} pictures read exactly", flush=True)
        if not guided:
            contact_sheet(pictures).save(folder / f"{name}.png")


def sample(
    pipeline: DiffusionPipeline, prompts: Sequence[str], guided: bool, steps: int = 10, **settings: int
) -> torch.Tensor:
    """Draw one picture a prompt with the pipeline's own sampler; returns uint8 (n, 3, 64, 64)."""
    pipeline.set_progress_bar_config(disable=True)
    scale = 4.0 if guided else 1.0
    guidance: dict[str, object] = {"guidance_scale": scale}
    if isinstance(pipeline, QwenImagePipeline):
        guidance = {"true_cfg_scale": scale, "negative_prompt": [" "] * len(prompts) if guided else None}
    generators = [torch.Generator().manual_seed(index) for index in range(len(prompts))]
    pictures = pipeline(
        list(prompts),
        height=64,
        width=64,
        num_inference_steps=steps,
        generator=generators,
        output_type="pt",
        **guidance,
        **settings,
    ).images
    return (pictures.float() * 255).round().to(torch.uint8)


def contact_sheet(pictures: torch.Tensor, columns: int = 8) -> Image.Image:
    """Tile uint8 pictures (n, 3, height, width) with thin gaps, row by row."""
    padded = torch.nn.functional.pad(pictures, (2, 2, 2, 2), value=255)
    rows = [torch.cat(list(row), dim=2) for row in padded.split(columns)]
    return Image.fromarray(torch.cat(rows, dim=1).permute(1, 2, 0).contiguous().numpy())


def _read(reader: SignReader, pictures: torch.Tensor) -> list[str]:
    with torch.no_grad():
        classes = reader(to_float(pictures)).argmax(dim=-1).tolist()
    return ["".join(ALPHABET[index] for index in row if index != BLANK) for row in classes]


@contextmanager
def _timed(stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"{stage}: {time.perf_counter() - start:.0f} s", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder the models and the reward are written to")
    parser.add_argument("--only", choices=MODEL_NAMES, help="train one model alone")
    parser.add_argument("--reuse", action="store_true", help="keep autoencoders and a reward already in the folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
