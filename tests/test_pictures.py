"""What a notebook shows of an output."""

import io

import numpy as np
import torch
from PIL import Image

from omnibatch import DiffusionOutput
from omnibatch.pictures import COLUMNS, MARGIN, THUMBNAIL, picture_grid


def test_an_output_shows_its_pictures_in_order():
    shades = torch.arange(10, dtype=torch.uint8) * 20
    output = DiffusionOutput("ten", output=shades.view(-1, 1, 1, 1).expand(-1, 3, THUMBNAIL, THUMBNAIL))
    shown = np.asarray(Image.open(io.BytesIO(output._repr_png_())))
    assert np.array_equal(shown, np.asarray(picture_grid(list(output.output))))
    centres = [THUMBNAIL // 2 + place * (THUMBNAIL + MARGIN) for place in range(COLUMNS)]
    assert shown[centres[0], centres, 0].tolist() == shades[:COLUMNS].tolist()
    assert shown[centres[1], centres, 0].tolist() == [*shades[COLUMNS:].tolist(), *[255] * (2 * COLUMNS - 10)]


def test_a_failed_output_and_latents_show_no_picture():
    assert DiffusionOutput("failed", error=ValueError("no"))._repr_png_() is None
    assert DiffusionOutput("latents", output=torch.zeros(1, 4, 8, 8))._repr_png_() is None
