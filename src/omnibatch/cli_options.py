"""Options that several of the ``omnibatch`` commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from omnibatch.algorithms import ALGORITHMS, WINDOW_SCOPES
from omnibatch.sde import SDE_TYPES

POSITIVE = click.IntRange(min=1)

MODEL_OPTIONS = [
    click.option("--model", help="An embedded model, a diffusers folder or a hub id.  [default: the recipe's]"),
    click.option(
        "--algorithm",
        type=click.Choice(ALGORITHMS),
        default="flow_grpo",
        show_default=True,
        help="What reads the rollouts.",
    ),
    click.option("--device", help="Such as cuda:0.  [default: a GPU if there is one]"),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        help="Of the model.  [default: bfloat16 on a GPU, else float32]",
    ),
]

SAMPLING_OPTIONS = [
    click.option("--recipe", help="Take the defaults from qwen_image_flow_grpo or sd35_flow_grpo."),
    click.option("--steps", type=POSITIVE, help="Denoising steps.  [default: 10]"),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Of the first image; the next ones count up.",
    ),
    click.option("--height", type=int, help="Pixels.  [default: the model's]"),
    click.option("--width", type=int, help="Pixels.  [default: the model's]"),
    click.option("--guidance-scale", type=float, help="1 turns guidance off.  [default: 1]"),
    click.option("--negative-prompt", help="Qwen-Image is guided only with one."),
    click.option("--noise-level", type=float, help="Of the SDE steps; 0 is the ODE.  [default: the algorithm's]"),
    click.option("--sde-type", type=click.Choice(SDE_TYPES), help="Sampler.  [default: the algorithm's]"),
    click.option("--sde-window-size", type=POSITIVE, help="SDE steps, among the first five.  [default: 2]"),
    click.option(
        "--sde-window-scope",
        type=click.Choice(WINDOW_SCOPES),
        help="Who shares a window's place: nobody, the images of a prompt, or all.  [default: request]",
    ),
    click.option("--max-sequence-length", type=POSITIVE, help="Longest prompt in tokens.  [default: the model's]"),
]

PACKING_OPTIONS = [
    click.option("--rows-per-forward", type=POSITIVE, help="Rows of every transformer call.  [default: all]"),
    click.option("--quiet", is_flag=True, help="No progress bar."),
]


def options(*groups: list[Callable[..., Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command these groups of options, in order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate
