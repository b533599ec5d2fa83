"""A folder of rollouts: pictures, one contact sheet, the trajectories and a line about each request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from omnibatch.pictures import contact_sheet, is_picture, to_image
from omnibatch.replay import stack_outputs
from omnibatch.request import DiffusionOutput, OmniDiffusionRequest


def writable_folder(out: str | Path) -> Path:
    """Make the folder if need be, and return it.

    Raises:
        ValueError: naming the folder when nothing can be written there.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".write-test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"out: cannot write to {str(out)!r}: {error.strerror}") from error
    return folder


def write_rollouts(
    folder: Path,
    requests: Sequence[OmniDiffusionRequest],
    outputs: Sequence[DiffusionOutput],
    algorithm: str = "flow_grpo",
) -> None:
    """Write everything that a rollout gave.

    ``images/<request>-<output>.png``; ``contact_sheet.png``; ``rollouts.safetensors`` with the training fields of all
    finished rows stacked, ``(rows, ...)`` (text padded to the longest), ``sigmas`` and ``sde_windows`` beside them;
    ``manifest.jsonl`` with a line a request: its prompt, seeds, files, rows in the tensors, times, or its error.

    Args:
        folder: exists and can be written.
        requests: what was asked.
        outputs: what came of it, in the same order.
        algorithm: whose training fields are written.
    """
    _remove_earlier_images(folder)
    (folder / "images").mkdir(exist_ok=True)
    finished = [output for output in outputs if output.error is None]
    lines, first_row = [], 0
    for request, output in zip(requests, outputs):
        rows = list(range(first_row, first_row + len(output.seeds)))
        first_row += len(rows)
        lines.append(json.dumps(_manifest_entry(request, output, rows, _write_images(folder, output))))
    (folder / "manifest.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if finished:
        save_file(
            stack_outputs(finished, algorithm), folder / "rollouts.safetensors", metadata={"algorithm": algorithm}
        )
        contact_sheet(requests, outputs).save(folder / "contact_sheet.png")


def _remove_earlier_images(folder: Path) -> None:
    """Remove the pictures that an earlier manifest here lists, so that none of them passes for one of this run."""
    manifest = folder / "manifest.jsonl"
    lines = manifest.read_text(encoding="utf-8").splitlines() if manifest.is_file() else []
    for line in lines:
        for name in json.loads(line)["images"]:
            (folder / name).unlink(missing_ok=True)


def _write_images(folder: Path, output: DiffusionOutput) -> list[str]:
    if output.output is None or not is_picture(output.output):
        return []
    names = [f"images/{output.request_id}-{index}.png" for index in range(len(output.output))]
    for name, picture in zip(names, output.output):
        to_image(picture).save(folder / name)
    return names


def _manifest_entry(
    request: OmniDiffusionRequest, output: DiffusionOutput, rows: list[int], images: list[str]
) -> dict[str, object]:
    return {
        "request_id": output.request_id,
        "prompt": request.prompt_field("prompt"),
        "negative_prompt": request.prompt_field("negative_prompt"),
        "seeds": output.seeds,
        "images": images,
        "rows": rows,
        "num_steps": output.num_steps,
        "guidance": output.guidance,
        "extra_args": request.sampling_params.extra_args,
        "sde_window": output.sde_window,
        "rows_per_forward": output.rows_per_forward,
        "stage_times": {stage: round(seconds, 6) for stage, seconds in output.stage_times.items()},
        "error": None if output.error is None else f"{type(output.error).__name__}: {output.error}",
    }
