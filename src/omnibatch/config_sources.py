"""Where knobs are read from: Hydra overrides, YAML files, environment variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KNOBS = ("step_execution", "max_num_seqs", "request_batch_max_wait_ms", "rows_per_forward", "decode_rows")

# The longest prefix first: the short one is the beginning of the long one.
PREFIXES = ("actor_rollout_ref.rollout.engine_kwargs.vllm_omni.", "actor_rollout_ref.rollout.", "")

ENVIRONMENT = {"MAX_NUM_SEQS": "max_num_seqs", "REQUEST_BATCH_MAX_WAIT_MS": "request_batch_max_wait_ms"}


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Knobs from Hydra overrides.

    Raises:
        ValueError: naming the key that is unknown or given twice with different values, or what does not parse.
    """
    if isinstance(overrides, str):
        raise ValueError(f"overrides must be a list of strings, got the string {overrides!r}")
    if not overrides:
        return {}
    # Imported here: Hydra is not needed by whoever sets the knobs in Python.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise ValueError(f"override {error.override!r} is not one that Hydra reads") from error
    pairs = []
    for override in parsed:
        if override.is_delete() or override.is_sweep_override():
            raise ValueError(f"override {override.input_line!r} must give one value")
        pairs.append((override.key_or_group, override.value()))
    return _knobs(pairs)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Knobs from a YAML file, flat or nested as in verl-omni's configuration.

    Raises:
        ValueError: naming the file that cannot be read, or the key.
    """
    from omegaconf import OmegaConf

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:
        raise ValueError(f"configuration file {str(path)!r} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"configuration file {str(path)!r} must hold keys and values")
    return _knobs(_flattened(content))


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Knobs from ``MAX_NUM_SEQS`` and ``REQUEST_BATCH_MAX_WAIT_MS``; empty variables count as not set.

    Raises:
        ValueError: naming the variable whose value is no number.
    """
    knobs: dict[str, Any] = {}
    for variable, knob in ENVIRONMENT.items():
        text = environ.get(variable, "").strip()
        if not text:
            continue
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"{variable} must be a number, got {text!r}") from None
        knobs[knob] = int(number) if number.is_integer() else number
    return knobs


def _knobs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    knobs: dict[str, Any] = {}
    key_of: dict[str, str] = {}
    for key, value in pairs:
        knob = next(key.removeprefix(prefix) for prefix in PREFIXES if key.startswith(prefix))
        if knob not in KNOBS:
            raise ValueError(f"{key} is not a knob of rollouts; known are {', '.join(KNOBS)}")
        if knob in knobs and knobs[knob] != value and key_of[knob] != key:
            raise ValueError(f"{key}={value} contradicts {key_of[knob]}={knobs[knob]}")
        knobs[knob], key_of[knob] = value, key
    return knobs


def _flattened(content: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for name, value in content.items():
        nested = isinstance(value, Mapping)
        pairs += _flattened(value, f"{prefix}{name}.") if nested else [(f"{prefix}{name}", value)]
    return pairs
