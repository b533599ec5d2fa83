"""How much of a run the transformer takes."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch


class TransformerClock:
    """Counts the seconds between entering and leaving a transformer's forward, within a ``with`` block.

    On a CUDA device events are recorded and read at the end, so that the clock itself waits for nothing.
    """

    def __init__(self, transformer: torch.nn.Module):
        self._transformer = transformer
        self._on_cuda = next(transformer.parameters()).device.type == "cuda"
        self._marks: list[Any] = []
        self.seconds = 0.0

    def __enter__(self) -> TransformerClock:
        self._handles = [
            self._transformer.register_forward_pre_hook(self._mark),
            self._transformer.register_forward_hook(self._mark),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        pairs = list(zip(self._marks[::2], self._marks[1::2]))
        if self._on_cuda:
            torch.cuda.synchronize()
            self.seconds = sum(start.elapsed_time(end) for start, end in pairs) / 1000
        else:
            self.seconds = sum(end - start for start, end in pairs)

    def _mark(self, *_: Any) -> None:
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
