"""How an engine packs rollouts: the knobs, and the ways people set them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from omnibatch.config_sources import read_environment, read_overrides, read_yaml
from omnibatch.validation import is_finite, require_positive_integer


class ExecutionMode(Enum):
    """What is batched: nothing, whole requests, or the denoising steps of requests in flight."""

    SERIAL = "serial"
    REQUEST = "request"
    STEP = "step"


@dataclass(frozen=True)
class RolloutConfig:
    """The knobs of a :class:`~omnibatch.RolloutEngine`.

    Args:
        step_execution: true for step-wise continuous batching; how many requests is up to ``max_num_seqs``.
        max_num_seqs: requests in flight (step-wise) or in a wave (request-level). Without ``step_execution``, 1 is
            serial execution.
        request_batch_max_wait_ms: how long a wave may wait for more arrivals, in milliseconds; request-level only.
        rows_per_forward: rows that every transformer call takes, exactly: more are split over calls, fewer are filled
            up with rows whose results are dropped. ``None`` takes all rows in one call.
        decode_rows: rows that a VAE call takes at most. ``None`` takes 8, or 1 with ``rows_per_forward``, since a
            picture's last bits may depend on how many are decoded together.

    Raises:
        ValueError: naming the field, its value and what would be right.

    Example:
        >>> RolloutConfig(step_execution=True, max_num_seqs=8).mode
        <ExecutionMode.STEP: 'step'>
    """

    step_execution: bool = False
    max_num_seqs: int = 1
    request_batch_max_wait_ms: float = 0
    rows_per_forward: int | None = None
    decode_rows: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.step_execution, bool):
            raise ValueError(f"step_execution must be true or false, got {self.step_execution!r}")
        require_positive_integer("max_num_seqs", self.max_num_seqs)
        for name in ("rows_per_forward", "decode_rows"):
            if getattr(self, name) is not None:
                require_positive_integer(name, getattr(self, name))
        wait = self.request_batch_max_wait_ms
        if not is_finite(wait) or wait < 0:
            raise ValueError(f"request_batch_max_wait_ms must be a finite number of at least 0, got {wait!r}")
        if self.step_execution and wait > 0:
            raise ValueError(
                f"step_execution=True excludes request_batch_max_wait_ms={wait!r}: the modes are mutually exclusive; "
                "drop request_batch_max_wait_ms for step-wise or step_execution for request-level batching"
            )

    @staticmethod
    def of(config: RolloutConfig | None) -> RolloutConfig:
        """The configuration given, or the default one.

        Raises:
            ValueError: when it is something else.
        """
        if config is not None and not isinstance(config, RolloutConfig):
            raise ValueError(f"config must be a RolloutConfig, got {type(config).__name__}")
        return config or RolloutConfig()

    @property
    def mode(self) -> ExecutionMode:
        if self.step_execution:
            return ExecutionMode.STEP
        return ExecutionMode.REQUEST if self.max_num_seqs > 1 else ExecutionMode.SERIAL

    @classmethod
    def for_mode(cls, mode: ExecutionMode, max_num_seqs: int, *, rows_per_forward: int | None = None) -> RolloutConfig:
        """The configuration that runs a mode at a capacity; serial execution takes one request whatever is given."""
        return cls(
            step_execution=mode is ExecutionMode.STEP,
            max_num_seqs=1 if mode is ExecutionMode.SERIAL else max_num_seqs,
            rows_per_forward=rows_per_forward,
        )

    @classmethod
    def from_overrides(cls, overrides: Sequence[str]) -> RolloutConfig:
        """Read Hydra overrides, as they are typed for verl-omni.

        A knob goes by ``actor_rollout_ref.rollout.<knob>``, by
        ``actor_rollout_ref.rollout.engine_kwargs.vllm_omni.<knob>``, or by its name alone, each with ``+`` or ``++`` in
        front if that is how it is typed.

        Raises:
            ValueError: naming the key that is unknown, has a value of a wrong type, or contradicts another spelling of
                the same knob. Of one spelling given twice the last wins, as in Hydra.

        Example:
            >>> RolloutConfig.from_overrides([
            ...     "actor_rollout_ref.rollout.step_execution=true",
            ...     "++actor_rollout_ref.rollout.engine_kwargs.vllm_omni.max_num_seqs=256",
            ... ])
            RolloutConfig(step_execution=True, max_num_seqs=256, request_batch_max_wait_ms=0, \
rows_per_forward=None, decode_rows=None)
        """
        return cls(**read_overrides(overrides))

    @classmethod
    def from_yaml(cls, path: str | Path) -> RolloutConfig:
        """Read a YAML file that holds the knobs by name, or nested as in verl-omni's configuration.

        Raises:
            ValueError: naming the file, or the key that is unknown or has a value of a wrong type.
        """
        return cls(**read_yaml(path))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RolloutConfig:
        """Read ``MAX_NUM_SEQS`` and ``REQUEST_BATCH_MAX_WAIT_MS``, such as from ``os.environ``.

        Raises:
            ValueError: naming the variable whose value is no number.
        """
        return cls(**read_environment(environ))

    @classmethod
    def load(
        cls,
        *,
        yaml: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
        overrides: Sequence[str] = (),
    ) -> RolloutConfig:
        """Put the sources together: overrides win over the environment, which wins over YAML, which wins over defaults.

        Raises:
            ValueError: as each source does, or when the values together contradict each other.
        """
        knobs = {} if yaml is None else read_yaml(yaml)
        knobs |= {} if environ is None else read_environment(environ)
        return cls(**(knobs | read_overrides(overrides)))
