"""Whatever is done to an engine, in whatever order, every id ends exactly once.

``HYPOTHESIS_PROFILE=nightly`` runs 10,000 actions and more, ``make test`` fewer.
"""

import os

import torch
from fake_adapter import FakeAdapter
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import omnibatch as ob
from omnibatch.request import RequestAborted

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


class Faulty(FakeAdapter):
    """Raises in the next transformer call when told to."""

    fail_next = False

    def denoise_step(self, input_batch):
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("told to")
        return super().denoise_step(input_batch)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.adapter = Faulty()
        self.engine = None
        self.submitted, self.ended = {}, {}

    def take(self, outputs):
        for output in outputs:
            assert output.request_id not in self.ended, "an id ended twice"
            self.ended[output.request_id] = output

    @precondition(lambda self: self.engine is None)
    @rule(step_execution=st.booleans(), capacity=st.integers(1, 4), rows=st.sampled_from([None, 2]))
    def start(self, step_execution, capacity, rows):
        config = ob.RolloutConfig(step_execution=step_execution, max_num_seqs=capacity, rows_per_forward=rows)
        self.engine = ob.RolloutEngine(self.adapter, config)

    @precondition(lambda self: self.engine is not None)
    @rule(
        steps=st.integers(1, 4),
        outputs=st.integers(1, 2),
        height=st.sampled_from([8, 16]),
        prompt=st.sampled_from(["a", "a", "a", "bad"]),
    )
    def submit(self, steps, outputs, height, prompt):
        name = str(len(self.submitted))
        sampling = ob.OmniDiffusionSamplingParams(
            num_inference_steps=steps, num_outputs_per_prompt=outputs, height=height, seed=len(self.submitted)
        )
        request = ob.OmniDiffusionRequest(prompt, sampling, name)
        self.engine.submit(request)
        self.submitted[name] = request

    @precondition(lambda self: self.engine is not None)
    @rule()
    def step(self):
        self.take(self.engine.step())

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.submitted)))
        in_flight = name in self.engine._waiting or name in self.engine._running
        assert self.engine.abort(name) == in_flight

    @precondition(lambda self: self.engine is not None)
    @rule()
    def let_the_transformer_fail(self):
        self.adapter.fail_next = True

    @precondition(lambda self: self.engine is not None)
    @rule()
    def close(self):
        self.take(self.engine.close())
        assert self.ended.keys() == self.submitted.keys()
        self.check_results()
        self.__init__()

    @invariant()
    def books_agree(self):
        if self.engine is not None:
            self.engine.scheduler.check_integrity()
            in_flight = set(self.engine._waiting) | set(self.engine._running)
            assert in_flight == set(self.engine.scheduler._key_of)
            assert in_flight | set(self.engine._ended) | set(self.ended) == set(self.submitted)

    def check_results(self):
        """What finished equals its serial result; what failed did so for a reason that was given."""
        for name, output in self.ended.items():
            if output.error is None:
                (expected,) = ob.RolloutEngine(FakeAdapter()).generate([self.submitted[name]])
                assert torch.equal(output.trajectory_latents, expected.trajectory_latents)
            else:
                assert isinstance(output.error, (RequestAborted, RuntimeError, ValueError))
                assert isinstance(output.error, ValueError) <= (self.submitted[name].prompt == "bad")

    def teardown(self):
        if self.engine is not None:
            while self.engine.has_unfinished:
                self.take(self.engine.step())
            assert self.ended.keys() == self.submitted.keys()
            self.check_results()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=1000 if NIGHTLY else 30, stateful_step_count=50 if NIGHTLY else 25, deadline=None
)
