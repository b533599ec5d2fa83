"""Adapters without a model, for tests of the engine and the schedulers."""

import torch

from omnibatch import DiffusionOutput, DiffusionRequestBatch, RolloutAdapter
from omnibatch.sde import schedule_coefficients
from omnibatch.step_state import PromptEncoding


class FakeAdapter:
    """The four lifecycle methods over latents of four numbers a row, whose velocity depends on the row alone."""

    supports_request_batch = True
    step_scheduler = RolloutAdapter.step_scheduler
    forward = RolloutAdapter.forward

    def shape_key(self, request):
        return request.sampling_params.height

    def prepare_encode(self, state):
        state.request.validate()
        if state.request.prompt == "bad":
            raise ValueError("prompt must not be 'bad'")
        steps = state.sampling.num_inference_steps
        state.generators = state.sampling.draw_generators()
        state.seeds = [generator.initial_seed() for generator in state.generators]
        state.image_size = (state.sampling.height or 1, 1)
        state.latents = torch.stack([torch.randn(2, 2, generator=generator) for generator in state.generators])
        state.sigmas = torch.linspace(1, 0, steps + 1)
        state.timesteps = state.sigmas[:-1] * 1000
        state.sde_window, state.noisy, state.logprobs = (0, steps - 1), True, True
        table = schedule_coefficients(tuple(state.sigmas.tolist()), state.sde_window, noise_level=0.5, sde_type="sde")
        state.schedule = torch.cat([state.timesteps[:, None], table], dim=1)
        state.prompt_encoding = PromptEncoding(torch.zeros(1, 1))

    def denoise_step(self, input_batch):
        return torch.sin(input_batch.latents) + input_batch.timesteps.view(-1, 1, 1) / 1000

    def post_decode(self, states, decode_rows=1):
        for state in states:
            state.images = torch.zeros(state.num_outputs, 3, 1, 1, dtype=torch.uint8)


class PackedForward:
    """Only a ``forward()`` over batches, which returns one packed output."""

    supports_request_batch = True

    def __init__(self):
        self.batch_sizes = []

    def forward(self, req):
        requests = req.requests if isinstance(req, DiffusionRequestBatch) else [req]
        self.batch_sizes.append(len(requests))
        seeds = [request.sampling_params.seed for request in requests]
        if 13 in seeds:
            raise RuntimeError("unlucky")
        return DiffusionOutput(
            "packed",
            output=torch.tensor(seeds).view(-1, 1, 1, 1).expand(-1, 3, 2, 2).to(torch.uint8),
            timesteps=torch.arange(len(seeds)),
            custom_output={"all_log_probs": torch.tensor(seeds).view(-1, 1)},
        )


class SingleForward(PackedForward):
    """Only a ``forward()`` for one request."""

    supports_request_batch = False

    def forward(self, req):
        assert not isinstance(req, DiffusionRequestBatch)
        return super().forward(req)
