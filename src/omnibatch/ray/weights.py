"""New weights for replicas: sent once, written all or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from omnibatch.ray.transfer import TensorBytes, to_tensor

# What makes an adapter another one, beside its weights.
FIXED_IN_AN_ADAPTER = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")


class WeightsUpdate(NamedTuple):
    """One update of the transformer's weights.

    Attributes:
        version: that outputs carry from then on.
        weights: bytes by name, within a list of one object reference, so that Ray passes the reference on.
        names: which weights it writes.
        lora_config: the PEFT configuration of the adapter that ``weights`` belongs to, or ``None`` for weights by the
            transformer's own names.
        adapter_name: of that adapter.
    """

    version: int
    weights: list[Any]
    names: frozenset[str]
    lora_config: Any
    adapter_name: str

    def put_into(self, updates: Sequence[WeightsUpdate]) -> list[WeightsUpdate]:
        """The updates that a new replica needs, this one included: in the place of the first that it makes needless.

        The place matters, since an adapter that is added changes the names of the weights beneath it.
        """
        needless = [earlier for earlier in updates if self.covers(earlier)]
        kept = [self if needless and earlier is needless[0] else earlier for earlier in updates]
        return [update for update in kept if update not in needless] + ([] if needless else [self])

    def covers(self, other: WeightsUpdate) -> bool:
        """Whether nothing of the other update would be left after this one."""
        same_kind = (self.lora_config is None) == (other.lora_config is None)
        return same_kind and self.adapter_name == other.adapter_name and self.names >= other.names


def require_weights(state_dict: Any, lora_config: Any) -> None:
    """Raise a ``ValueError`` that names the argument unless these can be weights, and the LoRA's configuration."""
    if not isinstance(state_dict, Mapping) or not state_dict:
        raise ValueError(f"state_dict must hold tensors by name, as state_dict() gives them, got {state_dict!r:.80}")
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"state_dict[{name!r}] must be a tensor, got {type(tensor).__name__}")
    if lora_config is not None and not hasattr(lora_config, "peft_type"):
        raise ValueError(f"lora_config must be a peft.LoraConfig, got {type(lora_config).__name__}")


def write_weights(
    transformer: Any, sent: Mapping[str, TensorBytes], lora_config: Any = None, adapter_name: str = "default"
) -> None:
    """Write weights into a transformer.

    Args:
        transformer: of diffusers.
        sent: weights by name: the transformer's own names or, with ``lora_config``, those that
            ``peft.get_peft_model_state_dict`` gives.
        lora_config: of the adapter, which is added if the transformer has none of that name.
        adapter_name: of the adapter.

    Raises:
        ValueError: naming a weight that the model lacks or has in another shape, or what differs from the configuration
            of the adapter; then nothing was written.
    """
    weights = {name: to_tensor(value) for name, value in sent.items()}
    if lora_config is None:
        own = transformer.state_dict()
        _require_fitting(weights, own, complete=False)
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        return
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    known = getattr(transformer, "peft_config", {}).get(adapter_name)
    if known is None:
        transformer.add_adapter(lora_config, adapter_name)
    else:
        for field in FIXED_IN_AN_ADAPTER:
            own, given = getattr(known, field, None), getattr(lora_config, field, None)
            if own != given:
                raise ValueError(
                    f"lora_config.{field} must be {own!r}, as {adapter_name!r} was made with, got {given!r}"
                )
    try:
        _require_fitting(weights, get_peft_model_state_dict(transformer, adapter_name=adapter_name), complete=True)
    except ValueError:
        if known is None:
            transformer.delete_adapters(adapter_name)
        raise
    set_peft_model_state_dict(transformer, weights, adapter_name)


def _require_fitting(weights: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], complete: bool) -> None:
    for name, tensor in weights.items():
        if name not in own:
            hint = "; a LoRA's weights need its lora_config beside them" if "lora_" in name and not complete else ""
            raise ValueError(f"state_dict holds {name!r}, which the transformer lacks{hint}")
        if own[name].shape != tensor.shape:
            raise ValueError(
                f"state_dict[{name!r}] must have the shape {tuple(own[name].shape)}, got {tuple(tensor.shape)}"
            )
    missing = own.keys() - weights.keys()
    if complete and missing:
        raise ValueError(f"state_dict lacks {min(missing)!r} of the adapter")
