"""Trains the reader behind the reward, on signs that were damaged in the ways generated pictures are."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional
from tqdm import trange

from omnibatch.tiny.reward import BLANK, SignReader, text_classes
from omnibatch.tiny.train_vae import to_float

BATCH_SIZE = 128
EMPTY_SHARE = 0.06


def train_reader(pictures: torch.Tensor, texts: Sequence[str], steps: int, seed: int) -> SignReader:
    """Train a reader on pictures and what is written on them.

    Args:
        pictures: uint8 (n, 3, 64, 64).
        texts: n texts of up to three characters, the empty one for pictures without any.
        steps: optimiser steps.
        seed: of the batches and the damage.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    reader = SignReader().train()
    classes = torch.tensor([text_classes(text) for text in texts])
    optimizer = torch.optim.AdamW(reader.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    progress = trange(steps, desc="train SignReader", mininterval=10)
    for step in progress:
        rows = torch.randint(len(pictures), (BATCH_SIZE,), generator=generator)
        batch, wanted = _with_empty_pictures(_damage(to_float(pictures[rows]), generator), classes[rows], generator)
        logits = reader(batch)
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.4f}")
    return reader.eval()


def save_reader(reader: SignReader, path: Path) -> None:
    """Write the weights of a reader as float16 safetensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.half().contiguous() for name, weight in reader.state_dict().items()}, path)
    path.chmod(0o644)


def _damage(pictures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Shift, scale, blur, recolour and add noise to float pictures in [-1, 1], each picture by its own amounts."""
    count = len(pictures)
    scale = 1 + 0.08 * _uniform((count, 2), generator)
    shift = 0.1 * _uniform((count, 2), generator)
    transform = torch.zeros(count, 2, 3)
    transform[:, 0, 0], transform[:, 1, 1], transform[:, :, 2] = scale[:, 0], scale[:, 1], shift
    grid = functional.affine_grid(transform, list(pictures.shape), align_corners=False)
    pictures = functional.grid_sample(pictures, grid, padding_mode="border", align_corners=False)
    halved = functional.interpolate(functional.avg_pool2d(pictures, 2), scale_factor=2.0, mode="bilinear")
    blur = 0.8 * torch.rand((count, 1, 1, 1), generator=generator)
    pictures = pictures + blur * (halved - pictures)
    gain = 1 + 0.25 * _uniform((count, 3, 1, 1), generator)
    pictures = pictures * gain + 0.2 * _uniform((count, 3, 1, 1), generator)
    level = 0.3 * torch.rand((count, 1, 1, 1), generator=generator).square()
    noisy = pictures + level * torch.randn(pictures.shape, generator=generator)
    return noisy.clamp(-1, 1)


def _with_empty_pictures(
    pictures: torch.Tensor, classes: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace a share of the pictures by smooth or rough noise, in which there is nothing to read."""
    count = max(1, round(EMPTY_SHARE * len(pictures)))
    cells = int(torch.tensor([4, 8, 16, 64])[torch.randint(4, (1,), generator=generator)])
    noise = torch.randn((count, 3, cells, cells), generator=generator)
    smooth = functional.interpolate(noise, size=pictures.shape[-2:], mode="bilinear").clamp(-1, 1)
    pictures, classes = pictures.clone(), classes.clone()
    pictures[:count], classes[:count] = smooth, BLANK
    return pictures, classes


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator) * 2 - 1
