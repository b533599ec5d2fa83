"""The picture world of the embedded models: signs on a post, and the prompts that ask for them."""

from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont

RGB: TypeAlias = tuple[int, int, int]

ALPHABET = "0123456789"
MAX_CHARACTERS = 3
PICTURE_SIZE = 64
COLORS: dict[str, RGB] = {
    "red": (192, 40, 44),
    "orange": (212, 104, 20),
    "green": (24, 124, 62),
    "blue": (28, 84, 184),
    "purple": (118, 52, 160),
    "black": (44, 44, 52),
}

# Pillow's shapes are not antialiased, so a picture is drawn this many times larger and reduced.
_OVERSAMPLING = 4
_FONT_SIZE = 26
# Every sign has the same ink: dark ink on some colours would double the shapes a small transformer has to learn.
_INK: RGB = (255, 255, 255)
_SKIES: tuple[tuple[RGB, RGB], ...] = (
    ((120, 182, 232), (222, 238, 248)),
    ((150, 168, 224), (250, 220, 214)),
    ((168, 208, 214), (244, 240, 222)),
)
_GROUNDS: tuple[RGB, ...] = ((112, 164, 84), (196, 172, 120), (150, 154, 162))
_POST: RGB = (96, 88, 84)


def sign_prompt(text: str, color: str | None = None) -> str:
    """Return the prompt for a sign, such as ``a red sign that says "42"``, or without the colour if it is None."""
    subject = "a sign" if color is None else f"a {color} sign"
    return f'{subject} that says "{text}"'


def sample_texts(count: int, seed: int) -> list[str]:
    """Draw ``count`` texts of one to three characters; a seed always gives the same texts.

    Longer texts are drawn more often, because there are more of them.
    """
    random = np.random.default_rng(seed)
    lengths = random.choice(np.arange(1, MAX_CHARACTERS + 1), size=count, p=(0.15, 0.35, 0.5))
    return ["".join(random.choice(list(ALPHABET), size=length)) for length in lengths]


def sample_colors(count: int, seed: int, named_share: float = 0.6) -> list[str | None]:
    """Draw ``count`` colour names, of which about ``1 - named_share`` are None: a colour left to the model."""
    random = np.random.default_rng(seed)
    names = random.choice(list(COLORS), size=count)
    named = random.random(count) < named_share
    return [str(name) if keep else None for name, keep in zip(names, named, strict=True)]


def draw_sign(text: str, color: str | None = None, seed: int = 0) -> np.ndarray:
    """Draw one sign; the same arguments always give the same pixels.

    Args:
        text: up to three characters of ``ALPHABET``; empty text draws a blank sign.
        color: a name from ``COLORS``, or None to let the seed choose one.
        seed: sets what the prompt leaves open: sky, ground, shade and the size of the panel.

    Returns:
        uint8 array of shape (3, 64, 64), channels red, green and blue.

    Raises:
        ValueError: if the text or the colour cannot be drawn.
    """
    if len(text) > MAX_CHARACTERS or not set(text) <= set(ALPHABET):
        raise ValueError(f"text must be up to {MAX_CHARACTERS} digits, got {text!r}")
    if color is not None and color not in COLORS:
        raise ValueError(f"color must be None or one of {', '.join(COLORS)}, got {color!r}")
    random = np.random.default_rng(seed)
    drawn_color = str(random.choice(list(COLORS))) if color is None else color
    canvas = _draw_scenery(random)
    _draw_panel(ImageDraw.Draw(canvas), text, drawn_color, random)
    small = canvas.resize((PICTURE_SIZE, PICTURE_SIZE), Image.Resampling.BOX)
    return np.ascontiguousarray(np.asarray(small).transpose(2, 0, 1))


def _draw_scenery(random: np.random.Generator) -> Image.Image:
    size = PICTURE_SIZE * _OVERSAMPLING
    top, bottom = (np.asarray(tone, dtype=np.float64) for tone in _SKIES[random.integers(len(_SKIES))])
    column = top + (bottom - top) * np.linspace(0, 1, size)[:, None, None]
    canvas = Image.fromarray(column.round().astype(np.uint8)).resize((size, size), Image.Resampling.NEAREST)
    ground = _GROUNDS[random.integers(len(_GROUNDS))]
    horizon = 56 + int(random.integers(-1, 2))
    ImageDraw.Draw(canvas).rectangle(_scaled(0, horizon, PICTURE_SIZE, PICTURE_SIZE), fill=ground)
    return canvas


def _draw_panel(draw: ImageDraw.ImageDraw, text: str, color: str, random: np.random.Generator) -> None:
    # The letters keep their place: a transformer this small learns them many times faster than letters that move.
    center_x, center_y = PICTURE_SIZE / 2, 27
    half_width, half_height = 28 + int(random.integers(0, 3)), 18 + int(random.integers(0, 3))
    shade = random.uniform(0.92, 1.08)
    red, green, blue = (min(255, round(channel * shade)) for channel in COLORS[color])
    draw.rectangle(_scaled(center_x - 2.5, center_y, center_x + 2.5, 60), fill=_POST)
    draw.rounded_rectangle(
        _scaled(center_x - half_width, center_y - half_height, center_x + half_width, center_y + half_height),
        radius=6 * _OVERSAMPLING,
        fill=(red, green, blue),
        outline=_INK,
        width=2 * _OVERSAMPLING,
    )
    position = (center_x * _OVERSAMPLING, (center_y + 9.5) * _OVERSAMPLING)
    draw.text(position, text, font=_font(), fill=_INK, anchor="ms")


def _scaled(left: float, top: float, right: float, bottom: float) -> list[float]:
    return [left * _OVERSAMPLING, top * _OVERSAMPLING, right * _OVERSAMPLING, bottom * _OVERSAMPLING]


@cache
def _font() -> ImageFont.FreeTypeFont:
    # Matplotlib carries this font, so pictures do not depend on what the system has installed.
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono-Bold.ttf"
    return ImageFont.truetype(str(path), _FONT_SIZE * _OVERSAMPLING)
