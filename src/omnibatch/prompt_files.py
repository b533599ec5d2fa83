"""Prompts from files, and the requests that a group of rollouts per prompt makes of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from omnibatch.request import OmniDiffusionRequest, OmniDiffusionSamplingParams, requested_outputs

Prompt = str | dict[str, Any]

PROMPT_FIELDS = ("prompt", "negative_prompt")


def read_prompts(source: str) -> list[Prompt]:
    """Read prompts from a file, or from standard input for ``"-"``.

    Args:
        source: ``.txt`` (one prompt a line; so is standard input), ``.jsonl`` (a string, or an object with ``prompt``
            and, if wanted, ``negative_prompt``), or ``.parquet`` with a ``prompt`` column. In the last two a prompt may
            also be a list of chat messages, of which the user's last is taken. Empty lines are skipped.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    path = Path(source)
    if source != "-" and not path.is_file():
        raise ValueError(f"prompts: there is no file {source!r}")
    if path.suffix not in (".txt", ".jsonl", ".parquet") and source != "-":
        raise ValueError(f"prompts: {source!r} must end in .txt, .jsonl or .parquet")
    if path.suffix == ".parquet":
        prompts = _read_parquet(path)
    else:
        try:
            text = sys.stdin.read() if source == "-" else path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"prompts: {source!r} cannot be read as text: {error}") from error
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        is_json = path.suffix == ".jsonl"
        prompts = [_parse_json(line, f"{source}:{number}") if is_json else line for number, line in lines]
    if not prompts:
        raise ValueError(f"prompts: {source!r} holds no prompt")
    return prompts


def make_requests(
    prompts: Sequence[Prompt],
    sampling_params: OmniDiffusionSamplingParams,
    *,
    images_per_prompt: int = 1,
    seed: int = 0,
    negative_prompt: str | None = None,
) -> list[OmniDiffusionRequest]:
    """One request per picture: a group of ``images_per_prompt`` for each prompt.

    Seeds count up from ``seed`` over all outputs, so no two share their noise, and the same picture gets the same
    seed whether the prompts come in one call or, with ``seed`` moved on by as many outputs, in several.

    Args:
        prompts: texts, or prompt dicts.
        sampling_params: what all requests have in common; its seed is not used.
        negative_prompt: for prompts that bring none.

    Returns:
        Requests with ids ``<prompt>-<picture>``, groups together, in the order of the prompts.

    Example:
        >>> requests = make_requests(["a", "b"], OmniDiffusionSamplingParams(), images_per_prompt=2, seed=5)
        >>> [(request.request_id, request.sampling_params.seed) for request in requests]
        [('0000-00', 5), ('0000-01', 6), ('0001-00', 7), ('0001-01', 8)]
    """
    outputs = requested_outputs(sampling_params)
    requests = []
    for prompt_index, prompt in enumerate(prompts):
        if negative_prompt is not None:
            prompt = {"negative_prompt": negative_prompt} | ({"prompt": prompt} if isinstance(prompt, str) else prompt)
        for image_index in range(images_per_prompt):
            offset = (prompt_index * images_per_prompt + image_index) * outputs
            requests.append(
                OmniDiffusionRequest(
                    prompt=prompt,
                    sampling_params=replace(sampling_params, seed=seed + offset),
                    request_id=f"{prompt_index:04d}-{image_index:02d}",
                )
            )
    return requests


def _read_parquet(path: Path) -> list[Prompt]:
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"prompts: {str(path)!r} cannot be read as parquet: {error}") from error
    if "prompt" not in table.columns:
        raise ValueError(f"prompts: {str(path)!r} has no column 'prompt', it has {', '.join(map(repr, table.columns))}")
    values = table["prompt"].dropna()
    return [_as_prompt(value, f"{path}, row {index}") for index, value in zip(values.index, values)]


def _parse_json(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"prompts: {where} is not JSON: {error}") from error
    return _as_prompt(value, where)


def _as_prompt(value: Any, where: str) -> Prompt:
    """A text, the user's last message of a chat, or a prompt dict of known fields."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("prompt"), str):
        unknown = sorted(set(value) - set(PROMPT_FIELDS))
        if unknown:
            known = ", ".join(PROMPT_FIELDS)
            raise ValueError(f"prompts: {where} has an unknown field {unknown[0]!r}; known are {known}")
        return dict(value)
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        messages = [message for message in value if isinstance(message, Mapping) and message.get("role") == "user"]
        if messages and isinstance(messages[-1].get("content"), str):
            return messages[-1]["content"]
    raise ValueError(
        f"prompts: {where} must be a string, an object with a 'prompt' or a list of chat messages, got {value!r}"
    )
