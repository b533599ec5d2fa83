"""What each training algorithm asks of a rollout and reads from it.

``flow_grpo`` (Flow-GRPO, arXiv 2505.05470), ``mix_grpo`` (MixGRPO, arXiv 2507.21802) and ``dance_grpo`` (DanceGRPO,
arXiv 2505.07818) sample an SDE inside a window of steps and the ODE outside it, and read the window's latents,
timesteps and log-probs; they differ in where the window lies and in the sampler. ``diffusion_nft`` (arXiv 2509.16117)
and ``dpo`` sample the ODE and read the clean latents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from omnibatch.request import DiffusionOutput
from omnibatch.request_batch import sample_per_sample_sde_windows
from omnibatch.sde import NOISE_LEVELS, SDE_TYPES, is_noise_level
from omnibatch.validation import is_finite, is_integer

# The sampler that each algorithm takes unless told otherwise; None is the ODE, and nothing else.
DEFAULT_SDE_TYPES: dict[str, str | None] = {
    "flow_grpo": "sde",
    "mix_grpo": "sde",
    "dance_grpo": "dance_sde",
    "diffusion_nft": None,
    "dpo": None,
}
ALGORITHMS = tuple(DEFAULT_SDE_TYPES)

EXTRA_ARGS = (
    "noise_level",
    "sde_type",
    "sde_window_size",
    "sde_window_range",
    "sde_window_scope",
    "sde_window_seed",
    "logprobs",
    "shared_noise",
)

MIX_GRPO_ARGS = ("sde_window_strategy", "global_steps", "iters_per_group")

WINDOW_SCOPES = ("request", "group", "all")
WINDOW_STRATEGIES = ("random", "progressive")


@dataclass(frozen=True)
class SdeArguments:
    """The algorithm's arguments of one request, checked.

    Attributes:
        noise_level: a in the papers, 0 for the ODE.
        sde_type: one of ``SDE_TYPES``.
        window: SDE steps ``(start, end)``, ``end`` exclusive.
        logprobs: whether log-probs are returned.
        shared_noise: whether the request's outputs start from the same latents.
    """

    noise_level: float
    sde_type: str
    window: tuple[int, int]
    logprobs: bool
    shared_noise: bool


def validate_algorithm(algorithm: str) -> str:
    """Return the name, or raise a ``ValueError`` that names it and the known ones."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    return algorithm


def sde_arguments(
    extra_args: Mapping[str, Any],
    num_timesteps: int,
    *,
    algorithm: str = "flow_grpo",
    seed: int = 0,
    group_seed: int = 0,
) -> SdeArguments:
    """Read ``extra_args`` for a schedule of ``num_timesteps`` steps.

    The window's start is drawn from a generator of its own, so that drawing it does not disturb the noise and any one
    output can be made again alone, in the window that the output names. ``sde_window_scope`` says who shares it: nobody
    (``"request"``, the generator is seeded with the request's seed), the requests of one prompt (``"group"``, the
    prompt and ``sde_window_seed``), or everybody (``"all"``, ``sde_window_seed`` alone). Different windows within a
    group add a variance to its rewards that no policy can learn from.

    ``mix_grpo`` has one window for all, which moves with the training step ``global_steps``: with
    ``sde_window_strategy`` ``"random"`` it is drawn from ``sde_window_seed + global_steps``, so that all ranks agree;
    with ``"progressive"`` it moves one step on every ``iters_per_group`` training steps and starts over behind the end
    of its range.

    Args:
        extra_args: ``noise_level`` (default 0.7), ``sde_type`` (the algorithm's), ``sde_window_size`` (``None``: the
            whole range), ``sde_window_range`` (``(0, num_timesteps - 1)``; a list, or such as ``"[0,5]"``),
            ``sde_window_scope`` (``"request"``), ``sde_window_seed`` (0), ``logprobs`` (``True``), ``shared_noise``
            (``False``: whether all outputs start from the latents of the first seed, so that the steps before the
            window, the same for all, are computed once); for ``mix_grpo`` also ``sde_window_strategy``
            (``"random"``), ``global_steps`` (0), ``iters_per_group`` (1).
        num_timesteps: steps of the schedule.
        algorithm: one of ``ALGORITHMS``. Those that sample the ODE take no noise and give no log-probs.
        seed: the request's seed.
        group_seed: a number that stands for the prompt.

    Raises:
        ValueError: naming the field, its value and what would be right.
    """
    known = EXTRA_ARGS + (MIX_GRPO_ARGS if algorithm == "mix_grpo" else ())
    unknown = sorted(set(extra_args) - set(known), key=str)
    if unknown:
        raise ValueError(f"extra_args has no field {unknown[0]!r} for {algorithm}; known are {', '.join(known)}")
    default_sde_type = DEFAULT_SDE_TYPES[algorithm]
    noise_level = extra_args.get("noise_level", 0.0 if default_sde_type is None else 0.7)
    if not is_finite(noise_level) or not is_noise_level(float(noise_level)):
        raise ValueError(f"noise_level must be {NOISE_LEVELS}, got {noise_level!r}")
    if default_sde_type is None and noise_level > 0:
        raise ValueError(f"noise_level must be 0 for {algorithm}, which samples the ODE, got {noise_level!r}")
    sde_type = extra_args.get("sde_type", default_sde_type or "sde")
    if sde_type not in SDE_TYPES:
        raise ValueError(f"sde_type must be one of {', '.join(SDE_TYPES)}, got {sde_type!r}")
    logprobs, shared_noise = extra_args.get("logprobs", True), extra_args.get("shared_noise", False)
    for name, value in (("logprobs", logprobs), ("shared_noise", shared_noise)):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
    size = extra_args.get("sde_window_size")
    low, high = _window_range(extra_args.get("sde_window_range"), num_timesteps)
    if size is not None and not (is_integer(size) and 1 <= size <= high - low):
        raise ValueError(
            f"sde_window_size must be an integer from 1 to the length of sde_window_range [{low}, {high}], got {size!r}"
        )
    if algorithm == "mix_grpo":
        window_seed, shift = _mix_grpo_schedule(extra_args)
    else:
        window_seed, shift = _window_seed(extra_args, seed, group_seed), None
    if size is None:
        window = low, high
    elif shift is not None:
        start = low + shift % (high - low - size + 1)
        window = (start, start + int(size))
    else:
        window = sample_per_sample_sde_windows(
            sde_window_size=int(size),
            sde_window_range=(low, high),
            num_timesteps=num_timesteps,
            batch_size=1,
            generator=torch.Generator().manual_seed(window_seed),
            device=torch.device("cpu"),
        )[0]
    return SdeArguments(float(noise_level), sde_type, window, logprobs, shared_noise)


def training_fields(output: DiffusionOutput, algorithm: str = "flow_grpo") -> dict[str, torch.Tensor | None]:
    """The tensors that training reads, under the names it reads them by.

    Args:
        output: of a finished request.
        algorithm: who reads.

    Returns:
        For SDE algorithms ``all_latents`` ``(n, W + 1, ...)``, ``all_log_probs`` ``(n, W)`` and ``all_timesteps``
        ``(n, W)``; for ``diffusion_nft`` ``latents_clean`` ``(n, ...)`` and ``train_timesteps`` ``(n, T)``; for ``dpo``
        ``latents_clean``; all float32. For all, the prompt embeddings and masks and their negatives, which are
        ``None`` without guidance; models with pooled embeddings have those too.

    Raises:
        ValueError: naming the output of a failed request.
    """
    if output.error is not None:
        raise ValueError(f"output {output.request_id!r} has nothing to train on: its request failed ({output.error})")
    tensors: dict[str, torch.Tensor | None]
    if DEFAULT_SDE_TYPES[validate_algorithm(algorithm)] is not None:
        tensors = {
            "all_latents": output.trajectory_latents,
            "all_log_probs": output.trajectory_log_probs,
            "all_timesteps": output.trajectory_timesteps,
        }
    else:
        tensors = {"latents_clean": output.latents}
        if algorithm == "diffusion_nft" and output.timesteps is not None:
            tensors["train_timesteps"] = output.timesteps.expand(len(output.seeds), -1)
    names = ["prompt_embeds", "prompt_embeds_mask"]
    if output.pooled_prompt_embeds is not None:
        names.append("pooled_prompt_embeds")
    return tensors | {prefix + name: getattr(output, prefix + name) for prefix in ("", "negative_") for name in names}


def _window_seed(extra_args: Mapping[str, Any], seed: int, group_seed: int) -> int:
    scope, shared_seed = extra_args.get("sde_window_scope", "request"), extra_args.get("sde_window_seed", 0)
    if scope not in WINDOW_SCOPES:
        raise ValueError(f"sde_window_scope must be one of {', '.join(WINDOW_SCOPES)}, got {scope!r}")
    if not is_integer(shared_seed) or not 0 <= shared_seed < 2**62:
        raise ValueError(f"sde_window_seed must be an integer from 0 to 2**62 - 1, got {shared_seed!r}")
    return {"request": seed, "group": group_seed ^ shared_seed, "all": shared_seed}[scope]


def _mix_grpo_schedule(extra_args: Mapping[str, Any]) -> tuple[int, int | None]:
    """The seed of this training step's window, and how far a progressive one has moved."""
    strategy = extra_args.get("sde_window_strategy", "random")
    if strategy not in WINDOW_STRATEGIES:
        raise ValueError(f"sde_window_strategy must be one of {', '.join(WINDOW_STRATEGIES)}, got {strategy!r}")
    smallest_of = {"sde_window_seed": 0, "global_steps": 0, "iters_per_group": 1}
    values = {name: extra_args.get(name, smallest) for name, smallest in smallest_of.items()}
    for name, smallest in smallest_of.items():
        if not is_integer(values[name]) or not smallest <= values[name] < 2**61:
            raise ValueError(f"{name} must be an integer of at least {smallest}, got {values[name]!r}")
    moved = values["global_steps"] // values["iters_per_group"] if strategy == "progressive" else None
    return values["sde_window_seed"] + values["global_steps"], moved


def _window_range(value: Any, num_timesteps: int) -> tuple[int, int]:
    if value is None:
        return 0, max(num_timesteps - 1, 0)
    bounds = f"0 <= low < high <= {num_timesteps} steps"
    message = f"sde_window_range must be two integers [low, high] with {bounds}, got {value!r}"
    if isinstance(value, str):
        try:
            value = json.loads(value.replace("(", "[").replace(")", "]"))
        except json.JSONDecodeError:
            raise ValueError(message) from None
    try:
        low, high = value
    except (TypeError, ValueError):
        raise ValueError(message) from None
    if not (is_integer(low) and is_integer(high)) or not 0 <= low < high <= num_timesteps:
        raise ValueError(message)
    return int(low), int(high)
