"""Two complete, trained diffusers pipelines small enough to ship inside the package, and a reward that reads them."""

from pathlib import Path

PIPELINE_CLASSES = {"tiny-qwen-image": "QwenImagePipeline", "tiny-sd35": "StableDiffusion3Pipeline"}
MODEL_NAMES: tuple[str, ...] = tuple(PIPELINE_CLASSES)

# Height and width, in pixels, of the pictures that the embedded models were trained on.
IMAGE_SIZE = 64

# Prompts to try the embedded models with.
EXAMPLE_PROMPTS: tuple[str, ...] = (
    'a sign that says "42"',
    'a red sign that says "7"',
    'a blue sign that says "128"',
    'a sign that says "365"',
)


def model_path(name: str) -> Path:
    """Return the folder of an embedded model, ready for ``DiffusionPipeline.from_pretrained``.

    Args:
        name: one of ``MODEL_NAMES``.

    Raises:
        ValueError: if no embedded model has that name.
    """
    if name not in MODEL_NAMES:
        raise ValueError(f"no embedded model is named {name!r}; the embedded models are {', '.join(MODEL_NAMES)}")
    return Path(__file__).parent / "models" / name
