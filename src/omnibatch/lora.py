"""LoRA per row: every row of a transformer call with its own adapters and scales.

Each LoRA's update is computed for all rows of the call and multiplied by a scale per row, 0 where the row does not use
it. So rows with different adapters, with different scales and with none share a forward, and a row's bits do not depend
on what its neighbours use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from omnibatch.request import OmniDiffusionSamplingParams
from omnibatch.step_batch import to_device


class _Found(NamedTuple):
    """A transformer's LoRA layers, and the adapters it had when they were looked for."""

    adapters: dict[str, Any]
    layers: list[Any]


# Walking the modules of a large transformer takes longer than a step's bookkeeping.
_found: WeakKeyDictionary[torch.nn.Module, _Found] = WeakKeyDictionary()


def requested_lora(transformer: Any, sampling: OmniDiffusionSamplingParams) -> dict[str, float] | None:
    """The scale of each LoRA that a request asks for.

    Args:
        transformer: a diffusers transformer, with or without PEFT adapters.
        sampling: ``lora_request`` names an adapter of the transformer; ``lora_scale`` (1) multiplies the adapter's own
            scaling, and alone it applies to whatever adapters are active.

    Returns:
        ``None`` when the request asks for nothing: it then runs with the transformer as it stands.

    Raises:
        ValueError: naming the adapter that the transformer lacks, or none of whose layers it has.
    """
    if sampling.lora_request is None and sampling.lora_scale is None:
        return None
    scale = 1.0 if sampling.lora_scale is None else float(sampling.lora_scale)
    known = list(getattr(transformer, "peft_config", {}))
    if sampling.lora_request is None:
        active = active_lora(transformer)
        _require_plain(transformer, active)
        return dict.fromkeys(active, scale)
    if sampling.lora_request not in known:
        raise ValueError(
            f"lora_request {sampling.lora_request!r} is not an adapter of the transformer, "
            f"which has {', '.join(map(repr, known)) or 'none'}"
        )
    if not any(sampling.lora_request in layer.lora_A for layer in _lora_layers(transformer)):
        raise ValueError(f"lora_request {sampling.lora_request!r} matches no layer of the transformer")
    _require_plain(transformer, [sampling.lora_request, *active_lora(transformer)])
    return {sampling.lora_request: scale}


def active_lora(transformer: Any) -> list[str]:
    """Names of the adapters that the transformer applies as it stands."""
    if not getattr(transformer, "peft_config", None):
        return []
    layers = _lora_layers(transformer)
    return [] if not layers or layers[0].disable_adapters else list(layers[0].active_adapters)


def lora_scales(
    rows: Sequence[Mapping[str, float] | None], active: Sequence[str], device: torch.device
) -> dict[str, torch.Tensor] | None:
    """Scales ``(r,)`` of every adapter that some row uses; ``None`` when all rows take the transformer as it stands."""
    if all(row is None for row in rows):
        return None
    resolved = [dict.fromkeys(active, 1.0) if row is None else row for row in rows]
    # Sums are made in the order in which PEFT makes them, so that a row keeps its bits beside others.
    names = [*active, *sorted({name for row in resolved for name in row} - set(active))]
    return {name: to_device(torch.tensor([row.get(name, 0.0) for row in resolved]), device) for name in names}


@contextmanager
def lora_rows(transformer: Any, scales: Mapping[str, torch.Tensor] | None) -> Iterator[None]:
    """Within this context, rows of a transformer call use these adapters at these scales.

    Args:
        transformer: called with as many rows as the scales have.
        scales: from :func:`lora_scales`; ``None`` changes nothing.
    """
    if scales is None:
        yield
        return

    def keep_base(layer: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, kwargs | {"adapter_names": ["__base__"] * len(args[0])}

    def add_updates(layer: Any, args: tuple, kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        result = output
        for name, scale in scales.items():
            if name in layer.lora_A:
                update = _update(layer, name, args[0])
                per_row = scale.to(update.dtype).view(-1, *[1] * (update.dim() - 1))
                # Not a multiplication by 0: a broken adapter must not reach rows that do not use it.
                result = torch.where(per_row != 0, result + update * per_row, result)
        return result.to(output.dtype)

    handles = []
    try:
        for layer in _lora_layers(transformer):
            handles.append(layer.register_forward_pre_hook(keep_base, with_kwargs=True))
            handles.append(layer.register_forward_hook(add_updates, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _require_plain(transformer: Any, names: Sequence[str]) -> None:
    """Raise a ``ValueError`` where PEFT's layers do more than add a plain LoRA's update."""
    for layer in _lora_layers(transformer):
        if layer.merged:
            raise ValueError(
                "lora_request cannot be used while LoRA weights are merged into the transformer: unfuse them"
            )
        for name in names:
            if name in layer.lora_variant:
                raise ValueError(f"lora_request cannot be used with adapter {name!r}, which is not a plain LoRA")


def _lora_layers(transformer: torch.nn.Module) -> list[Any]:
    """The transformer's LoRA layers, looked for once as long as its adapters stay the same."""
    from peft.tuners.lora import LoraLayer

    adapters = getattr(transformer, "peft_config", {})
    found = _found.get(transformer)
    # By identity: an adapter may be replaced by another of the same name.
    if found is None or [*map(id, found.adapters.values())] != [*map(id, adapters.values())]:
        layers = [module for module in transformer.modules() if isinstance(module, LoraLayer)]
        found = _found[transformer] = _Found(dict(adapters), layers)
    return found.layers


def _update(layer: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    down, up = layer.lora_A[name], layer.lora_B[name]
    return up(down(layer.lora_dropout[name](x.to(down.weight.dtype)))) * layer.scaling[name]
