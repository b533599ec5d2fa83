"""Tensors on their way through Ray's object store.

Ray hands arrays over without copying them: they lie in memory that processes share. Tensors are pickled with their
bytes inside, so they travel as arrays.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from ray import cloudpickle

from omnibatch.request import DiffusionOutput


class TensorBytes(NamedTuple):
    """A tensor as the bytes of a contiguous array, uint8 ``(n,)``, with what makes a tensor of them."""

    array: np.ndarray
    dtype: torch.dtype
    shape: torch.Size


def to_bytes(tensor: torch.Tensor) -> TensorBytes:
    """A tensor as bytes; they share its memory when it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return TensorBytes(flat.view(torch.uint8).numpy(), tensor.dtype, tensor.shape)


def to_tensor(sent: TensorBytes) -> torch.Tensor:
    """The tensor that these bytes are; it shares their memory.

    Example:
        >>> tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
        >>> torch.equal(to_tensor(to_bytes(tensor)), tensor)
        True
    """
    if not sent.array.size:
        return torch.empty(sent.shape, dtype=sent.dtype)
    with warnings.catch_warnings():
        # Ray marks what it hands out as read-only since others may hold it too; what a pool fetches, nobody else does.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(sent.array).view(sent.dtype).reshape(sent.shape)


def pack_output(output: DiffusionOutput) -> dict[str, Any]:
    """An output's fields, without the sampling parameters, which whoever sent the request has.

    Tensors are bytes. The rest is pickled here, so that what only the receiver cannot unpickle is not taken for a fault
    of Ray's. An error that cannot be sent becomes its words.
    """
    values = {field.name: getattr(output, field.name) for field in fields(output) if field.name != "sampling_params"}
    error = values.pop("error")
    tensors = {name: to_bytes(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
    rest = {name: value for name, value in values.items() if name not in tensors}
    packed = {"tensors": tensors, "rest": cloudpickle.dumps(rest)}
    if error is not None:
        packed["error_in_words"] = f"{type(error).__name__}: {error}"
        try:
            packed["error"] = cloudpickle.dumps(error)
        except Exception:
            packed["error"] = b""
    return packed


def unpack_output(packed: Mapping[str, Any]) -> DiffusionOutput:
    """The output that :func:`pack_output` packed.

    Raises:
        Exception: when a field's type is unknown here.
    """
    output = DiffusionOutput(**pickle.loads(packed["rest"]))
    for name, sent in packed["tensors"].items():
        setattr(output, name, to_tensor(sent))
    if "error" in packed:
        try:
            output.error = pickle.loads(packed["error"])
        except Exception:
            output.error = RuntimeError(packed["error_in_words"])
    return output
