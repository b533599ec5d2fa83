"""What a rollout costs over the bare loop, and beside diffusers' own: ``python -m omnibatch.bench.overhead``.

The bare loop is the least that could be written for the same result: each prompt encoded once, one transformer call a
step for all rows, the sampler's formula, one VAE call. It knows one number of steps, one window and no faults.
diffusers' pipeline samples the ODE and keeps no trajectory; it is called with all prompts in a list, and one by one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

import pandas as pd
import torch
from tqdm import tqdm

from omnibatch import OmniDiffusionSamplingParams, RolloutConfig, RolloutEngine, load, tiny
from omnibatch.adapters.base import RolloutAdapter
from omnibatch.bench.full_size import hundred_million
from omnibatch.bench.recipe_table import run_diffusers
from omnibatch.prompt_files import make_requests

ROWS, PROMPTS, STEPS, WINDOW, NOISE_LEVEL, TEXT_LENGTH = 32, 4, 10, 2, 0.7, 32


def bare_loop(adapter: RolloutAdapter, prompts: list[str], images_per_prompt: int, steps: int = STEPS) -> torch.Tensor:
    """Roll out with as little code as the model needs.

    Returns:
        Pictures uint8 ``(rows, 3, 64, 64)``.
    """
    pipeline, size = adapter.pipeline, tiny.IMAGE_SIZE
    is_qwen = type(pipeline).__name__ == "QwenImagePipeline"
    if is_qwen:
        embeds, mask = pipeline.encode_prompt(prompts, max_sequence_length=TEXT_LENGTH)
        mask = None if mask is None else mask.repeat_interleave(images_per_prompt, dim=0)
    else:
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=TEXT_LENGTH
        )
        pooled = pooled.repeat_interleave(images_per_prompt, dim=0)
    embeds = embeds.repeat_interleave(images_per_prompt, dim=0)
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(embeds))]
    latents = torch.stack([adapter.draw_latents(size, size, generator) for generator in generators])
    sigmas, timesteps = adapter._noise_schedule(OmniDiffusionSamplingParams(num_inference_steps=steps), size, size)
    trajectory, log_probs = [latents], []
    for index, (sigma, next_sigma) in enumerate(zip(sigmas.tolist(), sigmas[1:].tolist())):
        timestep = timesteps[index].expand(len(latents))
        if is_qwen:
            velocity = pipeline.transformer(
                hidden_states=latents,
                timestep=timestep / 1000,
                encoder_hidden_states=embeds,
                encoder_hidden_states_mask=mask,
                img_shapes=[[(1, size // 16, size // 16)]] * len(latents),
                return_dict=False,
            )[0]
        else:
            velocity = pipeline.transformer(
                hidden_states=latents,
                timestep=timestep,
                encoder_hidden_states=embeds,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
        dt = next_sigma - sigma
        if index >= WINDOW:
            latents = latents + dt * velocity
            continue
        variance = NOISE_LEVEL**2 * sigma / (1 - (sigma if sigma < 1 else sigmas[1].item()))
        scale, drift = math.sqrt(-dt * variance), variance / (2 * sigma) * dt
        mean = latents * (1 + drift) + velocity * (dt + (1 - sigma) * drift)
        noise = torch.stack([torch.randn(latents.shape[1:], generator=generator) for generator in generators])
        latents = mean + scale * noise
        distance = (latents - mean).square().flatten(1).mean(dim=1)
        log_probs.append(-distance / (2 * scale**2) - math.log(scale) - math.log(2 * math.pi) / 2)
        trajectory.append(latents)
    images = adapter.decode_latents(latents, (size, size))
    return ((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)


def measure_overhead(adapter: RolloutAdapter, repeats: int = 12, steps: int = STEPS) -> dict[str, float | str]:
    """Time the bare loop, both batching modes and diffusers' pipeline in turn, after one uncounted round.

    Args:
        adapter: of an embedded model, or of one with another transformer in its place.
        repeats: counted rounds.
        steps: denoising steps.

    Returns:
        Median seconds of the bare loop, each mode's median ratio to it, and diffusers' to step-wise, round by round.
    """
    window = {"noise_level": NOISE_LEVEL, "sde_window_size": WINDOW, "sde_window_range": (0, WINDOW)}
    sampling = OmniDiffusionSamplingParams(
        num_inference_steps=steps,
        height=tiny.IMAGE_SIZE,
        width=tiny.IMAGE_SIZE,
        guidance_scale=1.0,
        max_sequence_length=TEXT_LENGTH,
        extra_args=window,
    )

    def run_engine(step_execution: bool) -> Callable[[list[str]], torch.Tensor]:
        config = RolloutConfig(step_execution=step_execution, max_num_seqs=ROWS)

        def run(prompts: list[str]) -> torch.Tensor:
            requests = make_requests(prompts, sampling, images_per_prompt=ROWS // PROMPTS)
            outputs = RolloutEngine(adapter, config).generate(requests)
            return torch.cat([output.output for output in outputs if output.output is not None])

        return run

    def run_peer(size: int) -> Callable[[list[str]], torch.Tensor]:
        def run(prompts: list[str]) -> torch.Tensor:
            requests = make_requests(prompts, sampling, images_per_prompt=ROWS // PROMPTS)
            return (run_diffusers(adapter, requests, size) * 255).round().to(torch.uint8)

        return run

    contenders = {
        "bare loop": lambda prompts: bare_loop(adapter, prompts, ROWS // PROMPTS, steps),
        "request": run_engine(False),
        "step": run_engine(True),
        "diffusers list": run_peer(ROWS),
        "diffusers one by one": run_peer(1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_index in tqdm(range(repeats + 1), desc="bare loop and engine in turn", unit="round"):
        # Who comes first changes, and every run has prompts of its own, which nobody has encoded yet.
        first = round_index % len(contenders)
        names = list(contenders)[first:] + list(contenders)[:first]
        for place, name in enumerate(names):
            prompts = [
                f'a sign that says "{100 * (index + 1) + len(names) * round_index + place}"' for index in range(PROMPTS)
            ]
            started = time.perf_counter()
            with torch.no_grad():
                contenders[name](prompts)
            if round_index:
                seconds[name].append(time.perf_counter() - started)
    _check_same_pictures(contenders)

    def ratio(name: str, reference: str) -> float:
        return round(statistics.median(own / other for own, other in zip(seconds[name], seconds[reference])), 3)

    return {
        "bare loop (s)": round(statistics.median(seconds["bare loop"]), 3),
        **{f"{name} / bare loop": ratio(name, "bare loop") for name in ("request", "step")},
        **{f"{name} / step": ratio(name, "step") for name in ("diffusers list", "diffusers one by one")},
    }


def _check_same_pictures(contenders: Mapping[str, Callable[[list[str]], torch.Tensor]]) -> None:
    with torch.no_grad():
        pictures = {name: contenders[name](list(tiny.EXAMPLE_PROMPTS)) for name in ("bare loop", "request", "step")}
    for name in ("request", "step"):
        own = pictures[name]
        if (own.int() - pictures["bare loop"].int()).abs().max() > 1:
            raise RuntimeError(f"the bare loop and mode {name!r} made different pictures")


def main() -> None:
    """Print a row a model: the embedded ones, and one of about 100 M parameters."""
    rows = []
    for name in tiny.MODEL_NAMES:
        adapter = load(name, device="cpu", dtype=torch.float32)
        rows.append({"model": name, "rows": ROWS, "steps": STEPS} | measure_overhead(adapter))
    large, steps = hundred_million(), 3
    measured = measure_overhead(large, repeats=3, steps=steps)
    rows.append({"model": "random weights, 100 M", "rows": ROWS, "steps": steps} | measured)
    print(pd.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
