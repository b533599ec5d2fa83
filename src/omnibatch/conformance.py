"""What an adapter must hold to, run over anybody's adapter: the modes agree, bits are a row's own, faults stay put."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch

from omnibatch.adapters.base import RolloutAdapter
from omnibatch.algorithms import DEFAULT_SDE_TYPES, training_fields
from omnibatch.config import RolloutConfig
from omnibatch.dispatch import missing_step_methods, supported_modes
from omnibatch.engine import RolloutEngine
from omnibatch.replay import compare_replay, replay_log_probs
from omnibatch.request import DiffusionOutput, OmniDiffusionRequest, OmniDiffusionSamplingParams
from omnibatch.step_batch import StepBatch
from omnibatch.step_state import StepRequestState

ROWS_PER_FORWARD = 4

# For float32 with free shapes, where kernels may round a row differently in another batch.
TOLERANCE = 1e-5

COMPARED = (
    "latents", "trajectory_latents", "trajectory_log_probs", "trajectory_timesteps", "timesteps", "sigmas",
    "prompt_embeds", "negative_prompt_embeds",
)  # fmt: skip


class Finding(NamedTuple):
    """One thing that was checked, and what was wrong with it: ``""`` when nothing was."""

    name: str
    fault: str


@dataclass(frozen=True)
class Conformance:
    """What :func:`check` found.

    Attributes:
        findings: one a check, in the order in which they were made.
    """

    findings: list[Finding]

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return not any(finding.fault for finding in self.findings)

    def table(self) -> pd.DataFrame:
        """A row a check."""
        rows = [(name, "failed: " + fault if fault else "passed") for name, fault in self.findings]
        return pd.DataFrame(rows, columns=["check", "result"])

    def __repr__(self) -> str:
        lines = [
            f"{'FAILED' if fault else 'passed'}  {name}{': ' + fault if fault else ''}" for name, fault in self.findings
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return self.table().to_html(index=False)


def check(adapter: Any, *, sampling: OmniDiffusionSamplingParams | None = None) -> Conformance:
    """Run the package's contracts over an adapter: a call for an adapter's tests.

    An adapter with the step lifecycle is checked in every mode, with free and with fixed rows, and its log-probs are
    replayed. One that has only a ``forward()`` is checked in the modes it supports. What no check can know is whether
    the model is the right one: compare noise level 0 with the diffusers pipeline for that.

    Args:
        adapter: over a model in float32 for all checks; in another data type, modes are compared with fixed rows only.
        sampling: what the requests have in common, such as ``height``, ``width`` or ``max_sequence_length``; by default
            4 steps and the adapter's own size.

    Example:
        >>> from omnibatch.adapters import check, load
        >>> check(load("tiny-sd35", device="cpu"), sampling=OmniDiffusionSamplingParams(max_sequence_length=32)).passed
        True
    """
    sampling = sampling or OmniDiffusionSamplingParams(num_inference_steps=4)
    checks = dict(_checks_of_all(adapter, sampling))
    if not missing_step_methods(adapter):
        checks |= dict(_checks_of_lifecycles(adapter, sampling))
    findings = []
    for name, function in checks.items():
        try:
            findings.append(Finding(name, function() or ""))
        except Exception as error:
            findings.append(Finding(name, f"{type(error).__name__}: {error}"))
    return Conformance(findings)


# A check returns what is wrong, or None.
Check = tuple[str, Callable[[], str | None]]


def _checks_of_all(adapter: Any, sampling: OmniDiffusionSamplingParams) -> Iterator[Check]:
    requests, serial = _mixed_requests(sampling), RolloutConfig()
    yield "every request ends with pictures", partial(_pictures, adapter, requests)
    yield "a seed gives the same bits again", partial(_agree, adapter, requests, serial, serial)
    yield "an output can be made again alone", partial(_alone, adapter, sampling)
    if getattr(adapter, "dtype", torch.float32) == torch.float32:
        for mode in supported_modes(adapter)[:-1]:
            config = RolloutConfig.for_mode(mode, len(requests))
            yield f"{mode.value} equals serial", partial(_agree, adapter, requests, config, serial, TOLERANCE)
    yield "a bad request fails alone", partial(_isolation, adapter, requests)


def _checks_of_lifecycles(adapter: Any, sampling: OmniDiffusionSamplingParams) -> Iterator[Check]:
    requests, serial = _mixed_requests(sampling), RolloutConfig(rows_per_forward=ROWS_PER_FORWARD)
    for mode in supported_modes(adapter)[:-1]:
        config = RolloutConfig.for_mode(mode, 3, rows_per_forward=ROWS_PER_FORWARD)
        name = f"{mode.value} with fixed rows equals serial to the bit"
        yield name, partial(_agree, adapter, requests, config, serial)
        yield f"{name}, in another order", partial(_agree, adapter, requests[::-1], config, serial)
    yield "denoise_step can be repeated and changes no state", partial(_purity, adapter, requests)
    if not isinstance(adapter, RolloutAdapter):
        return
    yield f"the fields that {adapter.algorithm} reads are there", partial(_contract, adapter, requests)
    if DEFAULT_SDE_TYPES[adapter.algorithm] is not None:
        yield "replayed log-probs equal the rollout's to the bit", partial(_replay, adapter, requests)
        yield "gradients reach the transformer", partial(_gradients, adapter, requests)


def _mixed_requests(sampling: OmniDiffusionSamplingParams) -> list[OmniDiffusionRequest]:
    """Requests that differ in everything that may differ within a forward."""
    steps = sampling.num_inference_steps
    guided = {"guidance_scale": 3.0, "true_cfg_scale": 3.0}
    return [
        _request("a sign", "plain", sampling, seed=1, guidance_scale=1.0),
        _request("a long prompt " * 6, "two outputs", sampling, seed=10, guidance_scale=1.0, num_outputs_per_prompt=2),
        _request({"prompt": "a cat", "negative_prompt": "ugly, blurry"}, "guided", sampling, seed=20, **guided),
        _request("a dog", "more steps", sampling, seed=30, guidance_scale=1.0, num_inference_steps=steps + 1),
        _request({"prompt": "a", "negative_prompt": ""}, "guided, short", sampling, seed=40, **guided),
    ]


def _request(prompt: Any, name: str, sampling: OmniDiffusionSamplingParams, **changes: Any) -> OmniDiffusionRequest:
    return OmniDiffusionRequest(prompt, replace(sampling, **changes), name)


def _pictures(adapter: Any, requests: Sequence[OmniDiffusionRequest]) -> str | None:
    for output, request in zip(RolloutEngine(adapter).generate(requests), requests):
        count, picture = request.sampling_params.num_outputs_per_prompt, output.output
        if picture is None or picture.dtype != torch.uint8 or picture.dim() != 4 or picture.shape[:2] != (count, 3):
            found = None if picture is None else f"{picture.dtype} {tuple(picture.shape)}"
            return f"output of {request.request_id!r} must be uint8 ({count}, 3, height, width), got {found}"
    return None


def _agree(
    adapter: Any,
    requests: Sequence[OmniDiffusionRequest],
    config: RolloutConfig,
    reference: RolloutConfig,
    tolerance: float = 0.0,
) -> str | None:
    """Compare a configuration with another, which takes the requests in the usual order."""
    ours, theirs = RolloutEngine(adapter, config).generate(requests), RolloutEngine(adapter, reference)
    expected = {output.request_id: output for output in theirs.generate(sorted(requests, key=lambda r: r.request_id))}
    return _difference(ours, [expected[output.request_id] for output in ours], tolerance)


def _difference(
    outputs: Sequence[DiffusionOutput], expected: Sequence[DiffusionOutput], tolerance: float = 0.0
) -> str | None:
    for ours, theirs in zip(outputs, expected, strict=True):
        for name in (*COMPARED, "output"):
            value, reference = getattr(ours, name), getattr(theirs, name)
            if value is None and reference is None:
                continue
            where = f"{name} of {ours.request_id!r}"
            if value is None or reference is None or value.shape != reference.shape:
                return f"{where} has another shape"
            distance = float((value.double() - reference.double()).abs().max())
            # A latent that differs in its last bits may move a pixel by one step of 255; guidance of scale g
            # multiplies what two branches lose by up to 2g - 1.
            allowed = tolerance * (2 * max(theirs.guidance, 1.0) - 1) * max(1.0, float(reference.abs().max()))
            if not distance <= (bool(tolerance) if value.dtype == torch.uint8 else allowed):
                return f"{where} differs by {distance:.2g}"
    return None


def _alone(adapter: Any, sampling: OmniDiffusionSamplingParams) -> str | None:
    config = RolloutConfig(rows_per_forward=ROWS_PER_FORWARD)
    both, second = RolloutEngine(adapter, config).generate(
        [
            _request("a sign", "both", sampling, seed=5, guidance_scale=1.0, num_outputs_per_prompt=2),
            _request("a sign", "second", sampling, seed=6, guidance_scale=1.0),
        ]
    )
    # A forward() of its own may run two rows otherwise than one, and so move a pixel by one step of 255.
    free = bool(missing_step_methods(adapter))
    for name, allowed in (("latents", TOLERANCE * free), ("output", 1 * free)):
        ours, theirs = getattr(both, name), getattr(second, name)
        if ours is not None and (ours[1].double() - theirs[0].double()).abs().max() > allowed:
            return f"{name}: the second output of seed 5 is not the one of seed 6"
    return None


def _isolation(adapter: Any, requests: Sequence[OmniDiffusionRequest]) -> str | None:
    bad = [_request("a sign", "no steps", requests[0].sampling_params, num_inference_steps=0)]
    if not missing_step_methods(adapter):
        bad.append(_request({}, "no prompt", requests[0].sampling_params))
    mode = supported_modes(adapter)[0]
    config = RolloutConfig.for_mode(mode, len(requests) + 2)
    expected = RolloutEngine(adapter, config).generate(requests)
    mixed = RolloutEngine(adapter, config).generate([bad[0], *requests, *bad[1:]], return_errors=True)
    for output in (mixed[0], *mixed[len(requests) + 1 :]):
        if not isinstance(output.error, ValueError):
            return f"{output.request_id!r} must end with a ValueError, got {output.error!r}"
    return _difference(mixed[1 : len(requests) + 1], expected)


def _purity(adapter: Any, requests: Sequence[OmniDiffusionRequest]) -> str | None:
    states = [StepRequestState(request) for request in requests]
    with torch.no_grad():
        for state in states:
            adapter.prepare_encode(state)
        before = [state.latents.clone() for state in states]
        batch = StepBatch(states, ROWS_PER_FORWARD)
        batch.gather()
        if not torch.equal(adapter.denoise_step(batch), adapter.denoise_step(batch)):
            return "a second call gives another result"
    moved = [s.request_id for s, latents in zip(states, before) if s.step_index or not torch.equal(s.latents, latents)]
    return f"the state of {moved[0]!r} changed" if moved else None


def _contract(adapter: RolloutAdapter, requests: Sequence[OmniDiffusionRequest]) -> str | None:
    for output in RolloutEngine(adapter, RolloutConfig(step_execution=True, max_num_seqs=3)).generate(requests):
        fields = training_fields(output, adapter.algorithm)
        if ("guided" in output.request_id) != (fields["negative_prompt_embeds"] is not None):
            return f"negative_prompt_embeds of {output.request_id!r} must be there when it is guided, and only then"
        for name, value in fields.items():
            if value is None and not name.startswith("negative_") and name != "prompt_embeds_mask":
                return f"{name} of {output.request_id!r} is missing"
            if value is not None and (value.device.type != "cpu" or len(value) != len(output.seeds)):
                return f"{name} of {output.request_id!r} must be on the CPU and have {len(output.seeds)} rows"
    return None


def _replay(adapter: RolloutAdapter, requests: Sequence[OmniDiffusionRequest]) -> str | None:
    config = RolloutConfig(step_execution=True, max_num_seqs=3, rows_per_forward=ROWS_PER_FORWARD)
    outputs = RolloutEngine(adapter, config).generate(requests)
    report = compare_replay(adapter, outputs, micro_batch_size=ROWS_PER_FORWARD)
    return None if report.is_exact else f"the largest |log ratio| is {report.largest_log_ratio:.2g}"


def _gradients(adapter: RolloutAdapter, requests: Sequence[OmniDiffusionRequest]) -> str | None:
    outputs = RolloutEngine(adapter).generate(requests[:1])
    (log_probs,) = replay_log_probs(adapter, outputs, requires_grad=True)
    weights = [weight for weight in adapter.transformer.parameters() if weight.requires_grad]
    if not weights:
        return "no weight of the transformer requires a gradient"
    gradients = torch.autograd.grad(log_probs.sum(), weights, allow_unused=True)
    return None if any(g is not None and g.abs().sum() > 0 for g in gradients) else "all gradients are zero"
