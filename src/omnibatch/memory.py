"""How many rows fit: an estimate from the architecture, and what the device has left."""

from __future__ import annotations

import os
from typing import Any

import torch

# Tensors of (tokens, width) that a transformer block holds at its widest, in inference: the residual stream, its
# normalised copy, the MLP's hidden layer before and after its activation (four times the width each), and its output.
WIDEST_POINT = 2 + 4 + 4 + 1


def activation_bytes_per_row(adapter: Any, height: int, width: int, text_length: int) -> int:
    """Estimate the activations that one row adds to a transformer call, in bytes.

    It counts the widest point of one block, since a forward without gradients lets go of the others. Attention that
    builds its score matrix needs more; the usual kernels do not.

    Args:
        adapter: its ``transformer.config`` names the heads; ``image_tokens`` turns pixels into tokens.
        height: in pixels.
        width: in pixels.
        text_length: text tokens of a row.

    Example:
        >>> from omnibatch import load
        >>> adapter = load("tiny-sd35", device="cpu", dtype=torch.float32)
        >>> activation_bytes_per_row(adapter, 64, 64, text_length=109) == 11 * (16 + 109) * 128 * 4
        True
    """
    config = adapter.transformer.config
    inner_width = config.num_attention_heads * config.attention_head_dim
    return WIDEST_POINT * (adapter.image_tokens(height, width) + text_length) * inner_width * adapter.dtype.itemsize


def available_bytes(device: torch.device) -> int:
    """Memory that the device can still give, in bytes: of a GPU what is free and what torch keeps unused."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def bytes_in_words(number: int) -> str:
    """A number of bytes as people read it.

    Example:
        >>> bytes_in_words(3 * 2**29), bytes_in_words(700 * 2**10)
        ('1.5 GiB', '0.7 MiB')
    """
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def largest_that_fits(peak_bytes: dict[int, int], limit: int) -> int:
    """The most rows that fit, from the peaks of fewer rows.

    Args:
        peak_bytes: measured peak memory by rows, for two numbers of rows or more.
        limit: bytes that may be used.

    Returns:
        Rows by a straight line through the smallest and the largest measurement.

    Example:
        >>> largest_that_fits({4: 1400, 8: 1800}, limit=3000)
        20
    """
    fewest, most = min(peak_bytes), max(peak_bytes)
    per_row = max((peak_bytes[most] - peak_bytes[fewest]) / (most - fewest), 1.0)
    return int((limit - peak_bytes[fewest]) // per_row) + fewest
