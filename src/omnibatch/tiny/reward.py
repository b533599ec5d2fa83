"""A reward that reads the text on a sign, as the character-recognition reward of Flow-GRPO does on large models."""

import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from omnibatch.tiny.signs import ALPHABET, MAX_CHARACTERS, PICTURE_SIZE

REWARD_FILE = Path(__file__).parent / "models" / "reward.safetensors"
BLANK = len(ALPHABET)


class SignReader(nn.Module):
    """A small convolutional network that reads up to three characters off a sign."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 24, 48, 64, 64)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.SiLU()]
        self.features = nn.Sequential(*layers)
        self.classes = nn.Linear(64 * 4 * 4, MAX_CHARACTERS * (len(ALPHABET) + 1))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Map float pictures (n, 3, 64, 64) in [-1, 1] to logits (n, 3 positions, 37 classes, the last one blank)."""
        logits = self.classes(self.features(pictures).flatten(1))
        return logits.view(len(pictures), MAX_CHARACTERS, len(ALPHABET) + 1)


def read_text(images: torch.Tensor | np.ndarray) -> list[str]:
    """Read the text on each picture.

    Args:
        images: (n, 3, height, width), uint8, or floating point in [0, 1].

    Returns:
        one string of zero to three characters a picture.

    Raises:
        ValueError: if the pictures have another shape or type.
    """
    classes = _logits(images).argmax(dim=-1).tolist()
    return ["".join(ALPHABET[index] for index in row if index != BLANK) for row in classes]


def prompted_text(prompt: str) -> str:
    """Return the text between the first pair of double quotes in a prompt.

    Raises:
        ValueError: if the prompt has no text in double quotes.
    """
    match = re.search(r'"([^"]+)"', prompt)
    if match is None:
        raise ValueError(f"the prompt has no text in double quotes: {prompt!r}")
    return match.group(1)


def text_reward(images: torch.Tensor | np.ndarray, prompts: Sequence[str]) -> torch.Tensor:
    """Score how closely each picture spells the text its prompt asks for.

    Args:
        images: (n, 3, height, width), uint8, or floating point in [0, 1].
        prompts: n prompts with the wanted text in double quotes.

    Returns:
        One minus the edit distance over the length of the wanted text, float32 (n,) in [0, 1] on the CPU.

    Raises:
        ValueError: if the pictures have a wrong shape or type, a prompt has no quoted text, or the numbers differ.
    """
    _check_counts(images, prompts)
    wanted = [prompted_text(prompt) for prompt in prompts]
    scores = [
        max(0.0, 1.0 - _edit_distance(read, target) / len(target))
        for read, target in zip(read_text(images), wanted, strict=True)
    ]
    return torch.tensor(scores, dtype=torch.float32)


def text_log_likelihood(images: torch.Tensor | np.ndarray, prompts: Sequence[str]) -> torch.Tensor:
    """Score each picture by the mean log-probability the reader gives to the wanted characters: a smoother reward.

    Args:
        images: (n, 3, height, width), uint8, or floating point in [0, 1].
        prompts: n prompts whose quoted text is one to three characters of the alphabet of the signs.

    Returns:
        Float32 (n,), at most zero, on the CPU.

    Raises:
        ValueError: as ``text_reward``, or if a wanted text cannot be on a sign.
    """
    _check_counts(images, prompts)
    targets = torch.tensor([text_classes(prompted_text(prompt)) for prompt in prompts])
    log_probabilities = _logits(images).log_softmax(dim=-1)
    return log_probabilities.gather(-1, targets[..., None]).squeeze(-1).mean(dim=-1)


def text_classes(text: str) -> list[int]:
    """Return the class of each of the three positions for a text, with blanks after its end.

    Raises:
        ValueError: if the text is too long or holds a character no sign has.
    """
    if len(text) > MAX_CHARACTERS or not set(text) <= set(ALPHABET):
        raise ValueError(f"text must be up to {MAX_CHARACTERS} digits, got {text!r}")
    return [ALPHABET.index(character) for character in text] + [BLANK] * (MAX_CHARACTERS - len(text))


@torch.no_grad()
def _logits(images: torch.Tensor | np.ndarray) -> torch.Tensor:
    pictures = torch.as_tensor(images).cpu()
    if pictures.ndim != 4 or pictures.shape[1] != 3:
        raise ValueError(f"images must have the shape (n, 3, height, width), got {tuple(pictures.shape)}")
    if pictures.dtype == torch.uint8:
        pictures = pictures.float() / 255
    elif not pictures.is_floating_point():
        raise ValueError(f"images must be uint8, or floating point in [0, 1], got {pictures.dtype}")
    pictures = pictures.float()
    if pictures.shape[-2:] != (PICTURE_SIZE, PICTURE_SIZE):
        size = (PICTURE_SIZE, PICTURE_SIZE)
        pictures = nn.functional.interpolate(pictures, size, mode="bilinear", antialias=True, align_corners=False)
    return _reader()(pictures * 2 - 1)


@cache
def _reader() -> SignReader:
    reader = SignReader()
    reader.load_state_dict({name: weight.float() for name, weight in load_file(REWARD_FILE).items()})
    return reader.eval().requires_grad_(False)


def _check_counts(images: torch.Tensor | np.ndarray, prompts: Sequence[str]) -> None:
    if len(images) != len(prompts):
        raise ValueError(
            f"there must be one prompt for each picture, got {len(images)} pictures, {len(prompts)} prompts"
        )


def _edit_distance(first: str, second: str) -> int:
    previous = list(range(len(second) + 1))
    for row, character in enumerate(first, start=1):
        current = [row]
        for column, other in enumerate(second, start=1):
            substituted = previous[column - 1] + (character != other)
            current.append(min(substituted, previous[column] + 1, current[-1] + 1))
        previous = current
    return previous[-1]
