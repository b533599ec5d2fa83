"""From a model's name to its adapter. The key is ``(model_index.json's _class_name, algorithm)``."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from omnibatch import tiny
from omnibatch.adapters.base import RolloutAdapter
from omnibatch.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

AdapterClass = TypeVar("AdapterClass", bound=type[RolloutAdapter])

# Where the package's own adapters live; imported when asked for, since they import diffusers.
BUILT_IN = {
    "QwenImagePipeline": ("omnibatch.adapters.qwen_image", "QwenImageAdapter"),
    "StableDiffusion3Pipeline": ("omnibatch.adapters.sd3", "StableDiffusion3Adapter"),
}

_registered: dict[tuple[str, str], type[RolloutAdapter]] = {}


def register_adapter(
    pipeline_class: str, algorithms: Iterable[str] = ALGORITHMS
) -> Callable[[AdapterClass], AdapterClass]:
    """Class decorator: serve pipelines of this class name with the adapter, for these algorithms."""

    def register(adapter_class: AdapterClass) -> AdapterClass:
        for algorithm in algorithms:
            _registered[pipeline_class, algorithm] = adapter_class
        return adapter_class

    return register


def adapter_class(pipeline_class: str, algorithm: str) -> type[RolloutAdapter]:
    """The adapter registered for a pipeline class and an algorithm.

    Raises:
        ValueError: naming what is unknown and what is known.
    """
    if (pipeline_class, algorithm) in _registered:
        return _registered[pipeline_class, algorithm]
    known = sorted(set(BUILT_IN) | {name for name, _ in _registered})
    if pipeline_class not in known:
        raise ValueError(f"no adapter for the pipeline class {pipeline_class!r}; there is one for {', '.join(known)}")
    if pipeline_class not in BUILT_IN or algorithm not in ALGORITHMS:
        raise ValueError(
            f"no adapter for {pipeline_class} and the algorithm {algorithm!r}; known are {', '.join(ALGORITHMS)}"
        )
    module, name = BUILT_IN[pipeline_class]
    return getattr(importlib.import_module(module), name)


def load(
    model: str | Path | DiffusionPipeline,
    algorithm: str = "flow_grpo",
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> RolloutAdapter:
    """Load a model and wrap it in its adapter.

    Args:
        model: the name of an embedded model (``tiny-qwen-image``, ``tiny-sd35``), a diffusers folder, a hub id, or a
            pipeline object, whose modules are then shared with the caller.
        algorithm: the training algorithm that reads the rollouts.
        device: where it runs; ``None`` takes CUDA when there is one. A pipeline object stays where it is unless
            a device is given.
        dtype: ``None`` takes bfloat16 on CUDA and float32 elsewhere. A pipeline object keeps its own unless given.

    Raises:
        ValueError: when the model is unknown, cannot be read, or has no adapter for the algorithm.

    Example:
        >>> adapter = load("tiny-qwen-image", device="cpu", dtype=torch.float32)
        >>> type(adapter).__name__
        'QwenImageAdapter'
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype such as torch.bfloat16, got {dtype!r}")
    if device is not None:
        require_device(device)
    if not isinstance(model, (str, Path)):
        if device is not None or dtype is not None:
            model.to(*[argument for argument in (device, dtype) if argument is not None])
        return adapter_class(type(model).__name__, algorithm)(model, algorithm)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype is None:
        dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    embedded = str(model) in tiny.MODEL_NAMES
    folder = tiny.model_path(str(model)) if embedded else Path(model)
    with _quiet() if embedded else nullcontext():
        pipeline = _read_pipeline(folder, algorithm, dtype).to(device)
        if embedded:
            pipeline.default_sample_size = tiny.IMAGE_SIZE // pipeline.vae_scale_factor
        return adapter_class(type(pipeline).__name__, algorithm)(pipeline, algorithm)


def require_device(device: str | torch.device) -> None:
    """Raise a ``ValueError`` that names the device unless tensors can be made on it."""
    try:
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from error


def _read_pipeline(model: Path, algorithm: str, dtype: torch.dtype) -> DiffusionPipeline:
    from diffusers import DiffusionPipeline

    if model.exists():
        # Before the weights are read: a model without an adapter should say so at once.
        adapter_class(_pipeline_class(model), algorithm)
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)):
        raise ValueError(
            f"model {str(model)!r} is neither an embedded model ({', '.join(tiny.MODEL_NAMES)}) nor a folder nor a hub "
            "id of the form owner/name"
        )
    try:
        return DiffusionPipeline.from_pretrained(str(model), dtype=dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {str(model)!r} could not be read: {str(error).splitlines()[0]}") from error


def _pipeline_class(folder: Path) -> str:
    index = folder / "model_index.json"
    if not index.is_file():
        raise ValueError(f"model {str(folder)!r} is not a diffusers folder: it has no model_index.json")
    return json.loads(index.read_text())["_class_name"]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' loading bars and notes, which for a model of a few megabytes are litter."""
    with warnings.catch_warnings():
        # Where a notebook lacks ipywidgets; no bar is shown here.
        warnings.filterwarnings("ignore", message="IProgress not found")
        import diffusers.utils.logging
        import transformers.utils.logging

    libraries = (diffusers.utils.logging, transformers.utils.logging)
    levels = [library.get_verbosity() for library in libraries]
    bars = [library.is_progress_bar_enabled() for library in libraries]
    try:
        for library in libraries:
            library.set_verbosity_error()
            library.disable_progress_bar()
        yield
    finally:
        for library, level, bar in zip(libraries, levels, bars):
            library.set_verbosity(level)
            if bar:
                library.enable_progress_bar()
