"""Trains the autoencoders of the embedded models, and turns pictures into the latents the pipelines expect."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers import AutoencoderKL, AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import nn
from torch.nn import functional
from tqdm import trange

KL_WEIGHT = 2e-4
BATCH_SIZE = 32


@contextmanager
def single_frame_convolutions() -> Iterator[None]:
    """Run the causal 3D convolutions of Qwen-Image's autoencoder as 2D ones while the context lasts.

    Every frame before the first is zero, so on one frame only the last slice of a kernel counts; the result is exact.
    """
    original = QwenImageCausalConv3d.forward

    def forward(self: QwenImageCausalConv3d, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        if cache_x is not None or x.shape[2] != 1:
            return original(self, x, cache_x)
        left, _, top, _, _, _ = self._padding
        kernel = self.weight[:, :, -1]
        flat = functional.conv2d(x[:, :, 0], kernel, self.bias, self.stride[1:], (top, left))
        return flat.unsqueeze(2)

    QwenImageCausalConv3d.forward = forward
    try:
        yield
    finally:
        QwenImageCausalConv3d.forward = original


def train_vae(vae: nn.Module, pictures: torch.Tensor, steps: int, seed: int) -> None:
    """Train an autoencoder in place and write the statistics of its latents to its config.

    Args:
        vae: an ``AutoencoderKL`` or ``AutoencoderKLQwenImage`` in float32.
        pictures: uint8 (n, 3, 64, 64).
        steps: optimiser steps.
        seed: of the batches and the sampled latents.
    """
    generator = torch.Generator().manual_seed(seed)
    vae.train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.05)
    progress = trange(steps, desc=f"train {type(vae).__name__}", mininterval=10)
    for step in progress:
        rows = torch.randint(len(pictures), (BATCH_SIZE,), generator=generator)
        batch = to_float(pictures[rows])
        with single_frame_convolutions(), torch.autocast("cpu", torch.bfloat16):
            mean, log_variance = _posterior(vae, batch)
            noise = torch.randn(mean.shape, generator=generator)
            reconstruction = decode(vae, mean + (0.5 * log_variance).exp() * noise)
        error = reconstruction.float() - batch
        pixel_loss = error.square().mean() + 0.5 * error.abs().mean()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        optimizer.zero_grad()
        (pixel_loss + KL_WEIGHT * kl).backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            progress.set_postfix(pixels=f"{error.square().mean().item():.5f}", kl=f"{kl.item():.3f}")
    vae.eval()
    _record_statistics(vae, encode(vae, pictures[:4096]))


@torch.no_grad()
def encode(vae: nn.Module, pictures: torch.Tensor) -> torch.Tensor:
    """Return the posterior means of uint8 pictures (n, 3, 64, 64) as float32 latents (n, 16, 8, 8), not normalised."""
    with single_frame_convolutions(), torch.autocast("cpu", torch.bfloat16):
        return torch.cat([_posterior(vae, to_float(part))[0] for part in pictures.split(256)])


def decode(vae: nn.Module, latents: torch.Tensor) -> torch.Tensor:
    """Return pictures (n, 3, 64, 64) around [-1, 1] for latents (n, 16, 8, 8) that are not normalised."""
    if isinstance(vae, AutoencoderKLQwenImage):
        # The public decode cuts values off at -1 and 1, which would leave white and black without a gradient.
        vae.clear_cache()
        hidden = vae.post_quant_conv(latents.unsqueeze(2))
        pictures = vae.decoder(hidden, feat_cache=vae._feat_map, feat_idx=[0])
        vae.clear_cache()
        return pictures.squeeze(2)
    assert isinstance(vae, AutoencoderKL)
    return vae.decode(latents).sample


@torch.no_grad()
def reconstruct(vae: nn.Module, pictures: torch.Tensor, noise: float, seed: int) -> torch.Tensor:
    """Return uint8 pictures after the autoencoder, with noise of up to that many standard deviations in the latents."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for part in pictures.split(256):
        latents = normalize(vae, encode(vae, part))
        level = noise * torch.rand((len(part), 1, 1, 1), generator=generator)
        latents = latents + level * torch.randn(latents.shape, generator=generator)
        with single_frame_convolutions(), torch.autocast("cpu", torch.bfloat16):
            decoded = decode(vae, denormalize(vae, latents))
        parts.append(((decoded.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8))
    return torch.cat(parts)


def normalize(vae: nn.Module, latents: torch.Tensor) -> torch.Tensor:
    """Return latents (n, 16, 8, 8) as the transformer of the vae's pipeline takes them."""
    shift, scale = _shift_and_scale(vae)
    return (latents - shift) / scale


def denormalize(vae: nn.Module, latents: torch.Tensor) -> torch.Tensor:
    """Undo ``normalize``."""
    shift, scale = _shift_and_scale(vae)
    return latents * scale + shift


def to_float(pictures: torch.Tensor) -> torch.Tensor:
    """Return uint8 pictures as float32 in [-1, 1]."""
    return pictures.float() / 127.5 - 1


def _posterior(vae: nn.Module, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(vae, AutoencoderKLQwenImage):
        posterior = vae.encode(pictures.unsqueeze(2)).latent_dist
        return posterior.mean.squeeze(2).float(), posterior.logvar.squeeze(2).float()
    assert isinstance(vae, AutoencoderKL)
    posterior = vae.encode(pictures).latent_dist
    return posterior.mean.float(), posterior.logvar.float()


def _record_statistics(vae: nn.Module, latents: torch.Tensor) -> None:
    if isinstance(vae, AutoencoderKLQwenImage):
        mean = [round(value, 4) for value in latents.mean(dim=(0, 2, 3)).tolist()]
        deviation = [round(value, 4) for value in latents.std(dim=(0, 2, 3)).tolist()]
        vae.register_to_config(latents_mean=mean, latents_std=deviation)
    else:
        assert isinstance(vae, AutoencoderKL)
        vae.register_to_config(
            shift_factor=round(latents.mean().item(), 4), scaling_factor=round(1 / latents.std().item(), 4)
        )


def _shift_and_scale(vae: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(vae, AutoencoderKLQwenImage):
        shift = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1)
        return shift, torch.tensor(vae.config.latents_std).view(1, -1, 1, 1)
    assert isinstance(vae, AutoencoderKL)
    return torch.tensor(vae.config.shift_factor), torch.tensor(1 / vae.config.scaling_factor)
