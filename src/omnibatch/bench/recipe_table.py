"""A recipe's performance table: the modes, diffusers' own pipeline, and the floor, in one run."""

from __future__ import annotations

import json
import platform
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from tqdm import tqdm

from omnibatch.adapters.base import RolloutAdapter
from omnibatch.bench.floor import matrix_rate, rollout_operations, synchronize
from omnibatch.bench.transformer_clock import TransformerClock
from omnibatch.config import RolloutConfig
from omnibatch.engine import RolloutEngine
from omnibatch.recipes import Recipe
from omnibatch.request import OmniDiffusionRequest
from omnibatch.step_batch import pad_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What the document packs into a wave; in flight step-wise it has 256 for both recipes.
WAVE = {"QwenImagePipeline": 32, "StableDiffusion3Pipeline": 256}
IN_FLIGHT = 256

VERSIONS_OF = ("omnibatch", "torch", "diffusers", "transformers", "peft")

Requests = Sequence[OmniDiffusionRequest]


@dataclass
class TableRow:
    """What one way of running took, a number a round; the first round is not among them.

    Attributes:
        name: the way.
        rows_per_call: the most rows that a transformer call was to take, or ``None`` for all there are.
        seconds: gen times.
        transformer_seconds: of these, within the transformer's forward.
        peak_bytes: peak memory on a CUDA device, weights included.
    """

    name: str
    rows_per_call: int | None
    seconds: list[float] = field(default_factory=list)
    transformer_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None


@dataclass(repr=False)
class RecipeTable:
    """A measured recipe, as it is kept in a JSON file.

    Attributes:
        recipe: its name.
        scale: ``full``, ``minutes`` or ``tiny``.
        model: what was run.
        random_weights: whether the weights, and the embeddings in place of text, were random.
        device: what it ran on.
        dtype: of the model.
        date: of the run.
        versions: of the libraries.
        images: a round's.
        operations: floating-point operations of a round's transformer forwards.
        matrix_rate: operations a second that the device reached on a large matrix product.
        variant: how the transformer differed from what diffusers makes, such as another attention backend.
        rows: a way of running each.
    """

    recipe: str
    scale: str
    model: str
    random_weights: bool
    device: str
    dtype: str
    date: str
    versions: dict[str, str]
    images: int
    operations: float
    matrix_rate: float
    variant: str = ""
    rows: list[TableRow] = field(default_factory=list)

    @property
    def floor_seconds(self) -> float:
        """The least time that the transformer forwards of a round can take on the device."""
        return self.operations / self.matrix_rate

    def table(self) -> pd.DataFrame:
        """A row a way of running, medians over the rounds; ratios are taken round by round."""
        serial = next((row.seconds for row in self.rows if row.name == "serial"), [])
        lines = []
        for row in self.rows:
            if not row.seconds:
                continue
            median = statistics.median(row.seconds)
            ratios = [reference / own for reference, own in zip(serial, row.seconds)]
            share = statistics.median(own / all_ for own, all_ in zip(row.transformer_seconds, row.seconds))
            line: dict[str, Any] = {
                "run": row.name,
                "rows a call": row.rows_per_call or "all",
                "gen time (s)": round(median, 3),
                "spread (s)": round(max(row.seconds) - min(row.seconds), 3) if len(row.seconds) > 1 else "one round",
                "images/s": round(self.images / median, 2),
                "speed-up": round(statistics.median(ratios), 2) if ratios else None,
                "in transformer": f"{share:.0%}",
                "of the limit": f"{self.floor_seconds / median:.0%}",
            }
            if row.peak_bytes is not None:
                line["peak memory (GiB)"] = round(row.peak_bytes / 2**30, 1)
            lines.append(line)
        return pd.DataFrame(lines)

    def heading(self) -> str:
        """What was measured, on what and when, in a line; it goes wherever the numbers go."""
        weights = ", random weights and embeddings" if self.random_weights else ""
        variant = f", {self.variant}" if self.variant else ""
        return (
            f"{self.recipe}, scale {self.scale}: {self.images} images, {self.model}{weights}{variant}, {self.dtype}, "
            f"{self.device}, {self.date}, torch {self.versions['torch']}, diffusers {self.versions['diffusers']}"
        )

    def markdown(self) -> str:
        """Heading and table for a page."""
        table = self.table()
        lines = [table.columns.tolist(), ["---"] * len(table.columns), *table.astype(str).values.tolist()]
        return f"{self.heading()}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def plot(self) -> Figure:
        """A bar a way of running, its gen time; the dashed line is the floor."""
        # pyplot, so that a notebook knows how to show what is returned.
        import matplotlib.pyplot as plt

        table = self.table()
        figure, axes = plt.subplots(figsize=(7.5, 1.4 + 0.42 * len(table)), layout="constrained")
        bars = axes.barh(table["run"], table["gen time (s)"], color="tab:blue", height=0.7)
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.axvline(self.floor_seconds, color="tab:red", linestyle="--", label="floor")
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel("gen time (s)")
        figure.suptitle(textwrap.fill(self.heading(), 100), fontsize=8, x=0.01, ha="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right")
        plt.close(figure)
        return figure

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> RecipeTable:
        """Read what :meth:`save` wrote."""
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**content | {"rows": [TableRow(**row) for row in content["rows"]]})

    def __repr__(self) -> str:
        return f"{self.heading()}\n\n{self.table().to_string(index=False)}"

    def _repr_html_(self) -> str:
        """Show heading and table in a notebook."""
        return f"<p>{self.heading()}</p>{self.table().to_html(index=False)}"


def measure_recipe(
    adapter: RolloutAdapter,
    recipe: Recipe,
    make_requests: Callable[[int], Requests],
    *,
    scale: str,
    random_weights: bool,
    operations: float | None = None,
    variant: str = "",
    repeats: int = 3,
    progress: bool = False,
    on_round: Callable[[RecipeTable], None] | None = None,
) -> RecipeTable:
    """Run a recipe in every mode and through diffusers' own pipeline, in turn, after a round that does not count.

    diffusers samples the ODE, the modes the recipe's SDE: the transformer's work is the same.

    Args:
        adapter: over the recipe's model.
        recipe: what is run.
        make_requests: gives the requests of a round; all rounds must be alike.
        scale: noted in the result.
        random_weights: noted in the result.
        operations: of a round's transformer forwards; counted if not given.
        variant: noted in the result.
        repeats: counted rounds.
        progress: show a bar.
        on_round: called with what there is after every run, so that it can be kept as it comes.
    """
    runs = _ways_of_running(adapter, recipe)
    requests = make_requests(0)
    result = RecipeTable(
        recipe=recipe.name,
        scale=scale,
        model=recipe.model,
        random_weights=random_weights,
        device=device_name(adapter.device),
        dtype=str(adapter.dtype).removeprefix("torch."),
        date=date.today().isoformat(),
        versions={name: version(name) for name in VERSIONS_OF},
        images=sum(request.sampling_params.num_outputs_per_prompt for request in requests),
        operations=rollout_operations(adapter, requests) if operations is None else operations,
        matrix_rate=matrix_rate(adapter.device, adapter.dtype),
        variant=variant,
        rows=[row for row, _ in runs],
    )
    with tqdm(total=len(runs) * (repeats + 1), desc=recipe.name, unit="run", disable=not progress, leave=False) as bar:
        for round_index in range(repeats + 1):
            for row, run in runs:
                bar.set_postfix_str(row.name)
                _time(adapter, row, run, make_requests(round_index), counts=round_index > 0)
                bar.update()
                if on_round is not None:
                    on_round(result)
    return result


def device_name(device: torch.device) -> str:
    """The device as a table names it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _ways_of_running(adapter: RolloutAdapter, recipe: Recipe) -> list[tuple[TableRow, Callable[[Requests], object]]]:
    wave = WAVE[recipe.pipeline_class]
    configs = {
        "serial": RolloutConfig(),
        f"request-level, {wave} a wave": RolloutConfig(max_num_seqs=wave),
        f"step-wise, {IN_FLIGHT} in flight": RolloutConfig(step_execution=True, max_num_seqs=IN_FLIGHT),
        "the recipe's own, fixed rows": recipe.config,
    }
    runs: list[tuple[TableRow, Callable[[Requests], object]]] = [
        (TableRow(name, config.rows_per_forward), RolloutEngine(adapter, config).generate)
        for name, config in configs.items()
    ]
    for name, size in (("diffusers, one by one", 1), (f"diffusers, lists of {wave}", wave)):
        runs.append((TableRow(name, size), partial(run_diffusers, adapter, size=size)))
    return runs


def _time(
    adapter: RolloutAdapter, row: TableRow, run: Callable[[Requests], object], requests: Requests, counts: bool
) -> None:
    on_cuda = adapter.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(adapter.device)
    synchronize(adapter.device)
    with TransformerClock(adapter.transformer) as clock:
        started = time.perf_counter()
        run(requests)
        synchronize(adapter.device)
        elapsed = time.perf_counter() - started
    if counts:
        row.seconds.append(elapsed)
        row.transformer_seconds.append(clock.seconds)
    if on_cuda:
        row.peak_bytes = torch.cuda.max_memory_allocated(adapter.device)


@torch.no_grad()
def run_diffusers(adapter: RolloutAdapter, requests: Requests, size: int) -> torch.Tensor:
    """Make the requests' pictures with the diffusers pipeline itself, ``size`` prompts a call.

    Returns:
        Float ``(images, 3, H, W)`` in [0, 1].
    """
    pipeline = adapter.pipeline
    pipeline.set_progress_bar_config(disable=True)
    pictures = []
    for start in range(0, len(requests), size):
        part = requests[start : start + size]
        sampling = part[0].sampling_params
        scale = adapter.guidance_scale(part[0])
        arguments = _prompts(adapter, part, "")
        if scale > 1:
            arguments |= _prompts(adapter, part, "negative_")
        result = pipeline(
            **arguments,
            **{"true_cfg_scale" if adapter.has_text_mask else "guidance_scale": scale},
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            max_sequence_length=sampling.max_sequence_length,
            generator=[generator for request in part for generator in request.sampling_params.draw_generators()],
            output_type="pt",
        )
        pictures.append(result.images)
    return torch.cat(pictures)


def _prompts(adapter: RolloutAdapter, requests: Requests, prefix: str) -> dict[str, Any]:
    """A pipeline's arguments for prompts: their texts, or the embeddings that requests bring, padded to the longest."""
    texts = [request.prompt_field(f"{prefix}prompt") for request in requests]
    if all(text is not None for text in texts):
        return {f"{prefix}prompt": texts}
    length = requests[0].sampling_params.max_sequence_length or adapter.default_max_sequence_length
    encodings = [adapter.encode_prompt(request, length, prefix) for request in requests]
    longest = max(len(encoding.prompt_embeds) for encoding in encodings)
    arguments = {f"{prefix}prompt_embeds": torch.stack([pad_rows(e.prompt_embeds, longest) for e in encodings])}
    masks = [pad_rows(e.prompt_embeds_mask, longest) for e in encodings if e.prompt_embeds_mask is not None]
    pooled = [e.pooled_prompt_embeds for e in encodings if e.pooled_prompt_embeds is not None]
    if masks:
        arguments[f"{prefix}prompt_embeds_mask"] = torch.stack(masks).to(adapter.device)
    if pooled:
        arguments[f"{prefix}pooled_prompt_embeds"] = torch.stack(pooled)
    return arguments
