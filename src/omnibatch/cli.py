"""The ``omnibatch`` command."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import click
import torch

import omnibatch
from omnibatch import tiny
from omnibatch.bench.command import bench
from omnibatch.cli_options import MODEL_OPTIONS, PACKING_OPTIONS, POSITIVE, SAMPLING_OPTIONS, options
from omnibatch.config import ExecutionMode, RolloutConfig
from omnibatch.dispatch import choose_mode
from omnibatch.memory import activation_bytes_per_row, available_bytes, bytes_in_words
from omnibatch.prompt_files import Prompt, make_requests, read_prompts
from omnibatch.recipes import Recipe, find_recipe
from omnibatch.request import OmniDiffusionRequest, OmniDiffusionSamplingParams
from omnibatch.step_state import StepRequestState

# The SDE window is drawn among the first steps, where noise still changes what the picture shows.
SDE_WINDOW_RANGE = (0, 5)


@click.group(context_settings={"max_content_width": 100})
@click.version_option(omnibatch.__version__)
def app() -> None:
    """Batched diffusion rollouts: images with their trajectories and log-probs."""


app.add_command(bench)


@app.command()
@click.option(
    "--prompts",
    required=True,
    metavar="FILE|-",
    help=".txt with a prompt a line; .jsonl with a string, chat messages, or an object with prompt and negative_prompt "
    "a line; .parquet with a column prompt; - for a .txt on standard input.",
)
@click.option("--out", required=True, metavar="DIR", help="Folder to write to.")
@click.option("--images-per-prompt", type=POSITIVE, help="One request each.  [default: 16]")
@click.option(
    "--mode",
    type=click.Choice(["auto", *(mode.value for mode in ExecutionMode)]),
    default="auto",
    show_default=True,
    help="How to pack.",
)
@click.option("--max-num-seqs", type=POSITIVE, help="Requests in flight, or in a wave.  [default: 32]")
@click.option("--replicas", type=POSITIVE, help="Run in so many Ray actors, a device each.  [default: in this process]")
@options(MODEL_OPTIONS, SAMPLING_OPTIONS, PACKING_OPTIONS)
def rollout(
    prompts: str,
    out: str,
    images_per_prompt: int | None,
    mode: str,
    max_num_seqs: int | None,
    replicas: int | None,
    rows_per_forward: int | None,
    quiet: bool,
    algorithm: str,
    device: str | None,
    dtype: str | None,
    seed: int,
    **workload: Any,
) -> None:
    """Make images with their trajectories and log-probs, and write them to a folder."""
    from omnibatch.rollout_files import writable_folder, write_rollouts

    model, sampling_params, negative_prompt, recipe = _workload(**workload)
    requests = make_requests(
        read_prompts(prompts),
        sampling_params,
        images_per_prompt=images_per_prompt or (recipe.images_per_prompt if recipe else 16),
        seed=seed,
        negative_prompt=negative_prompt,
    )
    folder = writable_folder(out)
    wish = None if mode == "auto" else ExecutionMode(mode)
    if replicas is None:
        adapter = _load(model, algorithm, device, dtype)
        _prepare_first(adapter, requests)
    if mode == "auto" and recipe is not None:
        execution_mode, reason = recipe.config.mode, f"as in {recipe.name}"
    elif replicas is None:
        execution_mode, reason = choose_mode(adapter, wish=wish)
    else:
        execution_mode, reason = wish or ExecutionMode.STEP, f"{replicas} replicas"
    config = RolloutConfig.for_mode(
        execution_mode,
        max_num_seqs or (recipe.config.max_num_seqs if recipe else 32),
        rows_per_forward=rows_per_forward or (recipe.config.rows_per_forward if recipe else None),
    )
    click.echo(f"{len(requests)} images in mode {execution_mode.value} ({reason})")
    if replicas is None:
        outputs = omnibatch.RolloutEngine(adapter, config).generate(requests, return_errors=True, progress=not quiet)
    else:
        with _pool(partial(_load, model, algorithm, device, dtype), config, replicas) as pool:
            outputs = pool.generate(requests, return_errors=True, progress=not quiet)
    write_rollouts(folder, requests, outputs, algorithm)
    failed = [output for output in outputs if output.error is not None]
    click.echo(f"{len(outputs) - len(failed)} of {len(outputs)} requests finished, written to {folder}")
    if failed:
        click.echo(f"first failure, {failed[0].request_id}: {failed[0].error}", err=True)
        raise click.exceptions.Exit(1)


@app.command()
@click.option("--prompts", metavar="FILE|-", help="As for rollout.  [default: an embedded model's examples]")
@click.option("--out", metavar="DIR", help="Also write the rollouts to this folder.")
@click.option("--images-per-prompt", type=POSITIVE, default=8, show_default=True, help="One request each.")
@click.option("--max-num-seqs", type=POSITIVE, default=32, show_default=True, help="Requests in flight, or in a wave.")
@click.option("--repeats", type=POSITIVE, default=3, show_default=True, help="Rounds, after one that does not count.")
@options(MODEL_OPTIONS, SAMPLING_OPTIONS, PACKING_OPTIONS)
def compare(
    prompts: str | None,
    out: str | None,
    images_per_prompt: int,
    max_num_seqs: int,
    repeats: int,
    rows_per_forward: int | None,
    quiet: bool,
    algorithm: str,
    device: str | None,
    dtype: str | None,
    seed: int,
    **workload: Any,
) -> None:
    """Run the same requests in every supported mode and print how they compare."""
    from omnibatch.bench.compare import compare as compare_modes
    from omnibatch.rollout_files import writable_folder, write_rollouts

    model, sampling_params, negative_prompt, _ = _workload(**workload)
    prompt_list = _prompts(prompts, model)

    def requests() -> list[OmniDiffusionRequest]:
        return make_requests(
            prompt_list,
            sampling_params,
            images_per_prompt=images_per_prompt,
            seed=seed,
            negative_prompt=negative_prompt,
        )

    folder = None if out is None else writable_folder(out)
    adapter = _load(model, algorithm, device, dtype)
    _prepare_first(adapter, requests())
    result = compare_modes(
        adapter,
        requests,
        max_num_seqs=max_num_seqs,
        rows_per_forward=rows_per_forward,
        repeats=repeats,
        progress=not quiet,
    )
    click.echo(
        f"{model}: {len(prompt_list)} prompts x {images_per_prompt} images, {sampling_params.num_inference_steps} "
        f"steps, max_num_seqs {max_num_seqs}, on {adapter.device} in {str(adapter.dtype).removeprefix('torch.')}; "
        f"medians of {repeats} rounds after a warm-up, speed-up of each round's own ratios"
    )
    click.echo(result.table().to_string(index=False, formatters={"difference": "{:.1e}".format}))
    if folder is not None:
        write_rollouts(folder, requests(), result.outputs[ExecutionMode.STEP], algorithm)
        click.echo(f"pictures: {folder / 'contact_sheet.png'}")


@app.command()
@click.option("--prompts", metavar="FILE|-", help="A sample of yours.  [default: an embedded model's examples]")
@click.option("--images-per-prompt", type=POSITIVE, default=4, show_default=True, help="One request each.")
@click.option("--repeats", type=POSITIVE, default=3, show_default=True, help="Rounds, after one that does not count.")
@click.option("--cache", metavar="FILE", type=click.Path(dir_okay=False), help="JSON file to look in and to add to.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
@options(MODEL_OPTIONS, SAMPLING_OPTIONS)
def tune(
    prompts: str | None,
    images_per_prompt: int,
    repeats: int,
    cache: str | None,
    quiet: bool,
    algorithm: str,
    device: str | None,
    dtype: str | None,
    seed: int,
    **workload: Any,
) -> None:
    """Measure modes and capacities on a sample of requests and print which to take."""
    from omnibatch.measure import measure

    model, sampling_params, negative_prompt, _ = _workload(**workload)
    requests = make_requests(
        _prompts(prompts, model),
        sampling_params,
        images_per_prompt=images_per_prompt,
        seed=seed,
        negative_prompt=negative_prompt,
    )
    adapter = _load(model, algorithm, device, dtype)
    state = _prepare_first(adapter, requests)
    result = measure(adapter, requests, repeats=repeats, cache=cache, progress=not quiet)
    if result.cached:
        click.echo(f"measured earlier for this model, device, data type and size; from {cache}")
    click.echo(result.table().to_string(index=False))
    text_length = len(state.prompt_encoding.prompt_embeds)
    per_row = activation_bytes_per_row(adapter, *state.image_size, text_length)
    available = available_bytes(adapter.device)
    click.echo(f"activations: about {bytes_in_words(per_row)} a row; {bytes_in_words(available)} available")
    config = result.config
    click.echo(f"take {config.mode.value}: {result.reason}")
    click.echo(
        f"step_execution={str(config.step_execution).lower()} max_num_seqs={config.max_num_seqs} "
        f"rows_per_forward={'null' if config.rows_per_forward is None else config.rows_per_forward}"
    )


def _prompts(prompts: str | None, model: str) -> Sequence[Prompt]:
    if prompts is not None:
        return read_prompts(prompts)
    if model not in tiny.MODEL_NAMES:
        raise ValueError(f"prompts: model {model!r} brings none of its own, give a file")
    return list(tiny.EXAMPLE_PROMPTS)


def _workload(
    model: str | None, recipe: str | None, negative_prompt: str | None, steps: int | None, **given: Any
) -> tuple[str, OmniDiffusionSamplingParams, str | None, Recipe | None]:
    """Model, sampling and negative prompt: what was given, else the recipe's, else the defaults."""
    found = None if recipe is None else find_recipe(recipe)
    if found is not None and model in tiny.MODEL_NAMES:
        found = found.scaled()
    if model is None:
        if found is None:
            raise ValueError("model: give --model, or a --recipe that names one")
        model = found.model
    low, high = SDE_WINDOW_RANGE
    steps = steps or (found.num_inference_steps if found else 10)
    extra_args = {"sde_window_size": min(2, steps), "sde_window_range": (low, min(high, steps))}
    extra_args |= found.extra_args if found else {}
    for name in ("noise_level", "sde_type", "sde_window_size", "sde_window_scope"):
        value = given.pop(name)
        if value is not None:
            extra_args[name] = value
    guidance_scale = given.pop("guidance_scale")
    if guidance_scale is not None:
        given |= {"guidance_scale": guidance_scale, "true_cfg_scale": guidance_scale}
    defaults = (
        OmniDiffusionSamplingParams(guidance_scale=1.0, true_cfg_scale=1.0) if found is None else found.sampling_params
    )
    sampling_params = replace(
        defaults,
        num_inference_steps=steps,
        extra_args=extra_args,
        **{name: value for name, value in given.items() if value is not None},
    )
    sampling_params.validate()
    return model, sampling_params, negative_prompt or (found.negative_prompt if found else None), found


def _load(model: str, algorithm: str, device: str | None, dtype: str | None) -> omnibatch.RolloutAdapter:
    return omnibatch.load(model, algorithm, device, None if dtype is None else getattr(torch, dtype))


def _pool(make_adapter: Callable[[], omnibatch.RolloutAdapter], config: RolloutConfig, replicas: int) -> Any:
    try:
        from omnibatch.ray import RolloutPool
    except ModuleNotFoundError as error:
        raise ValueError(f"replicas: {error}") from error
    import ray

    if not ray.is_initialized():
        # What goes wrong in a replica comes back as an error; Ray's logs have the rest.
        ray.init(logging_level=logging.ERROR, log_to_driver=False)
    try:
        return RolloutPool(make_adapter, config=config, num_replicas=replicas)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _prepare_first(adapter: omnibatch.RolloutAdapter, requests: Sequence[OmniDiffusionRequest]) -> StepRequestState:
    """Prepare one request, so that what is wrong with all of them is said before anything runs."""
    state = StepRequestState(requests[0])
    with torch.no_grad():
        adapter.prepare_encode(state)
    return state


def main(arguments: list[str] | None = None) -> int:
    """Run the command; bad input is one line on standard error and exit code 2."""
    try:
        return app.main(arguments, prog_name="omnibatch", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return 0
    except click.ClickException as error:
        message, code = error.format_message(), error.exit_code
    except ValueError as error:
        message, code = " ".join(str(error).split()), 2
    except (click.Abort, KeyboardInterrupt):
        message, code = "interrupted", 130
    print(f"omnibatch: error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
