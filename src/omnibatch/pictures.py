"""Pictures side by side."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

import matplotlib
import torch
from PIL import Image, ImageDraw, ImageFont

from omnibatch.request import DiffusionOutput, OmniDiffusionRequest

THUMBNAIL = 128
MARGIN = 6
CAPTION_WIDTH = 190
COLUMNS = 8


def picture_grid(pictures: Sequence[torch.Tensor], columns: int = COLUMNS) -> Image.Image:
    """Pictures uint8 ``(3, H, W)`` each, in rows of ``columns``."""
    columns, cell = min(columns, len(pictures)), THUMBNAIL + MARGIN
    rows = -(-len(pictures) // columns)
    grid = Image.new("RGB", (columns * cell - MARGIN, rows * cell - MARGIN), "white")
    for index, picture in enumerate(pictures):
        grid.paste(_thumbnail(picture), (index % columns * cell, index // columns * cell))
    return grid


def contact_sheet(requests: Sequence[OmniDiffusionRequest], outputs: Sequence[DiffusionOutput]) -> Image.Image:
    """All pictures on one sheet: a row a prompt, its text at the left; failed requests leave grey squares."""
    groups: dict[str, list[torch.Tensor | None]] = {}
    for request, output in zip(requests, outputs):
        caption = request.prompt_field("prompt") or "(given as ids or embeddings)"
        pictures = list(output.output) if is_picture(output.output) else [None]
        groups.setdefault(caption, []).extend(pictures)
    columns = max(len(pictures) for pictures in groups.values())
    cell = THUMBNAIL + MARGIN
    sheet = Image.new("RGB", (CAPTION_WIDTH + columns * cell + MARGIN, len(groups) * cell + MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), 13)
    for row, (caption, pictures) in enumerate(groups.items()):
        top = MARGIN + row * cell
        text = "\n".join(textwrap.wrap(caption, width=25, max_lines=6, placeholder=" …"))
        draw.multiline_text((MARGIN * 2, top + THUMBNAIL / 2), text, fill="black", font=font, anchor="lm", spacing=5)
        for column, picture in enumerate(pictures):
            sheet.paste(_thumbnail(picture), (CAPTION_WIDTH + column * cell, top))
    return sheet


def png_bytes(image: Image.Image) -> bytes:
    """The image as a PNG file's content."""
    buffer = io.BytesIO()
    image.save(buffer, format="png")
    return buffer.getvalue()


def _thumbnail(picture: torch.Tensor | None) -> Image.Image:
    if picture is None:
        return Image.new("RGB", (THUMBNAIL, THUMBNAIL), "lightgrey")
    image = to_image(picture)
    scale = THUMBNAIL / max(image.size)
    size = (round(image.width * scale), round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BICUBIC)


def to_image(picture: torch.Tensor) -> Image.Image:
    """A picture uint8 ``(3, H, W)`` as Pillow has it."""
    return Image.fromarray(picture.permute(1, 2, 0).numpy())


def is_picture(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether an output's tensor holds pictures, and not latents or nothing."""
    return tensor is not None and tensor.dtype == torch.uint8
