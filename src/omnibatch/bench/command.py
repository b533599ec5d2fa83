"""``omnibatch bench``: a recipe's performance table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import torch

from omnibatch.adapters import RolloutAdapter, load
from omnibatch.adapters.registry import require_device
from omnibatch.bench.floor import rollout_operations
from omnibatch.bench.full_size import add_lora, build_pipeline, embedding_requests
from omnibatch.bench.recipe_table import RecipeTable, Requests, measure_recipe
from omnibatch.prompt_files import make_requests
from omnibatch.recipes import RECIPES, Recipe, find_recipe
from omnibatch.rollout_files import writable_folder

SCALES = ("full", "minutes", "tiny")

# Of the recipe's prompts, at its shapes, so that both tables take minutes on one large GPU.
PROMPTS_IN_MINUTES = {"qwen_image_flow_grpo": 2, "sd35_flow_grpo": 8}
ROUNDS = {"full": 3, "minutes": 1, "tiny": 3}


@click.command()
@click.option("--recipe", required=True, type=click.Choice(list(RECIPES)), help="What is run.")
@click.option(
    "--scale",
    type=click.Choice(SCALES),
    help="The whole workload; the same shapes with fewer prompts; or the embedded model.  "
    "[default: full on a GPU, else tiny]",
)
@click.option("--model", help="A diffusers folder or a hub id with real weights.  [default: random weights]")
@click.option("--device", help="Such as cuda:0.  [default: a GPU if there is one]")
@click.option("--attention-backend", help="As diffusers names it, such as _flash_3.  [default: torch's own]")
@click.option(
    "--compile",
    "compiled",
    is_flag=True,
    help="Compile the transformer's blocks, which takes minutes and pays where shapes are fixed.",
)
@click.option("--rounds", type=click.IntRange(min=1), help="Counted rounds.  [default: 3, for minutes 1]")
@click.option("--out", metavar="DIR", help="Folder for the table as JSON, Markdown and a plot.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def bench(
    recipe: str,
    scale: str | None,
    model: str | None,
    device: str | None,
    attention_backend: str | None,
    compiled: bool,
    rounds: int | None,
    out: str | None,
    quiet: bool,
) -> None:
    """Measure a recipe: every mode, diffusers' own pipeline, and how close each is to the device's limit."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device)
    scale = scale or ("full" if torch.device(device).type == "cuda" else "tiny")
    folder = None if out is None else writable_folder(out)
    adapter, workload, requests = workload_of(find_recipe(recipe), scale, device, model)
    operations = rollout_operations(adapter, requests(0))
    variants = []
    if attention_backend is not None:
        try:
            adapter.transformer.set_attention_backend(attention_backend)
        except (RuntimeError, ImportError) as error:
            raise ValueError(f"attention-backend: {attention_backend!r} cannot be used: {error}") from error
        variants.append(f"attention {attention_backend}")
    if compiled:
        variants.append("compiled blocks")
        for block in adapter.transformer.transformer_blocks:
            block.compile()

    def keep(table: RecipeTable) -> None:
        if folder is not None:
            table.save(folder / f"{recipe}-{scale}.json")

    table = measure_recipe(
        adapter,
        workload,
        requests,
        scale=scale,
        random_weights=model is None and scale != "tiny",
        operations=operations,
        variant=", ".join(variants),
        repeats=rounds or ROUNDS[scale],
        progress=not quiet,
        on_round=keep,
    )
    click.echo(repr(table))
    if folder is not None:
        write_table(table, folder)
        click.echo(f"\nwritten to {folder}")


def workload_of(
    recipe: Recipe, scale: str, device: str, model: str | None = None
) -> tuple[RolloutAdapter, Recipe, Callable[[int], Requests]]:
    """What a scale runs.

    Args:
        recipe: full-size.
        scale: one of :data:`SCALES`.
        device: where it runs.
        model: real weights to take; ``None`` makes random ones, and takes the embedded model for ``tiny``.

    Returns:
        The adapter with the recipe's LoRA, the recipe as it is run, and what makes a round's requests.
    """
    if scale == "tiny":
        recipe = recipe.scaled()
    elif scale == "minutes":
        recipe = replace(recipe, num_prompts=PROMPTS_IN_MINUTES[recipe.name])
    if scale != "tiny" and model is None:
        adapter = load(build_pipeline(recipe, device))
        return (
            adapter,
            recipe,
            lambda round_index: embedding_requests(
                recipe, adapter.transformer, recipe.num_prompts, seed=1000 * round_index
            ),
        )
    adapter = load(model or recipe.model, device=device)
    add_lora(adapter.transformer, recipe.lora)

    def requests(round_index: int) -> Requests:
        # New prompts each round, which no cache has encoded yet.
        numbers = range(round_index * recipe.num_prompts, (round_index + 1) * recipe.num_prompts)
        return make_requests(
            [f'a sign that says "{number % 1000}"' for number in numbers],
            recipe.sampling_params,
            images_per_prompt=recipe.images_per_prompt,
            negative_prompt=recipe.negative_prompt,
        )

    return adapter, recipe, requests


def write_table(table: RecipeTable, folder: Path) -> None:
    """Write a table as JSON, Markdown and a plot, under the recipe's and the scale's name."""
    name = f"{table.recipe}-{table.scale}"
    table.save(folder / f"{name}.json")
    (folder / f"{name}.md").write_text(table.markdown(), encoding="utf-8")
    table.plot().savefig(folder / f"{name}.png", dpi=140)
