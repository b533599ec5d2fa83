"""Adapters for replicas, without a model, that misbehave as they are told to."""

import os
import signal
import threading
import time
from pathlib import Path

import torch
from fake_adapter import FakeAdapter

from omnibatch import DiffusionOutput


class PidAdapter(FakeAdapter):
    """Writes the number of its process into its pictures, as three bytes, at a device's pace, the same in each."""

    def denoise_step(self, input_batch):
        time.sleep(0.02)
        return super().denoise_step(input_batch)

    def post_decode(self, states, decode_rows=1):
        pid = torch.tensor(list(os.getpid().to_bytes(3, "little")), dtype=torch.uint8)
        for state in states:
            state.images = pid.view(1, 3, 1, 1).expand(state.num_outputs, 3, 1, 1)


class FaultyAdapter(FakeAdapter):
    """Does what a prompt says in the first step, each time or, with a file to leave a mark in, once."""

    def __init__(self, marks: str):
        self.marks = Path(marks)

    def denoise_step(self, input_batch):
        for state in input_batch.states:
            what, _, once = str(state.request.prompt).partition(" ")
            mark = self.marks / f"{what}-{once}"
            if what in dir(self) and not (once and mark.exists()):
                mark.touch()
                getattr(self, what)()
        return super().denoise_step(input_batch)

    def crash(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self):
        time.sleep(1000)

    def break_device(self):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def leave(self):
        raise SystemExit("an adapter that leaves")

    def stop(self):
        raise StopIteration("no more steps")

    def fail(self):
        raise UnsendableError("an error with a lock", threading.Lock())

    @classmethod
    def anywhere(cls):
        """One that leaves no marks."""
        return cls(os.devnull)


class FaultyModel(FakeAdapter):
    """Can be made a few times, over all processes."""

    def __init__(self, marks: str, most: int):
        Path(marks, f"{os.getpid()}-{time.monotonic_ns()}").touch()
        if len(list(Path(marks).iterdir())) > most:
            raise ValueError("no more models")


class LoadingAdapter(FakeAdapter):
    """Has weights, and takes a while to be made."""

    def __init__(self, seconds: float):
        time.sleep(seconds)
        self.transformer = torch.nn.Linear(2, 2)


class OnlyHereAdapter:
    """Gives requests whose prompt says so something that no other process can read."""

    def forward(self, req):
        custom_output = {"field": OnlyHere()} if req.prompt == "only here" else {}
        return DiffusionOutput(req.request_id, torch.zeros(1, 3, 1, 1, dtype=torch.uint8), custom_output=custom_output)


class OnlyHere:
    """Raises when it is read in another process than it was made in."""

    def __reduce__(self):
        return _read_only_here, (os.getpid(),)


def _read_only_here(pid):
    if pid != os.getpid():
        raise ImportError("this class is not known here")
    return OnlyHere()


class UnsendableError(Exception):
    """Holds what cannot be pickled."""
