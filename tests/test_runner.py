"""The lifecycle run for many requests: memory that runs out, numbers that are none, faults in decoding."""

import pytest
import torch
from fake_adapter import FakeAdapter

import omnibatch as ob
from omnibatch.step_state import PromptEncoding
from omnibatch.timeline import Timeline

STEP = {"step_execution": True, "max_num_seqs": 8}


def requests(count=4, **sampling):
    arguments = {"num_inference_steps": 3} | sampling
    return [
        ob.OmniDiffusionRequest("a", ob.OmniDiffusionSamplingParams(seed=10 * index, **arguments), str(index))
        for index in range(count)
    ]


class SmallMemory(FakeAdapter):
    """Has memory for so many rows in a transformer call and in a VAE call."""

    def __init__(self, rows, decode_rows=8):
        self.rows, self.most_decoded = rows, decode_rows

    def denoise_step(self, input_batch):
        if input_batch.largest_forward > self.rows:
            raise torch.OutOfMemoryError("no memory")
        return super().denoise_step(input_batch)

    def post_decode(self, states, decode_rows=1):
        if decode_rows > self.most_decoded:
            raise torch.OutOfMemoryError("no memory")
        super().post_decode(states, decode_rows)


def test_out_of_memory_halves_the_rows_and_loses_nothing():
    expected = ob.RolloutEngine(FakeAdapter()).generate(requests(8))
    engine = ob.RolloutEngine(SmallMemory(rows=3), ob.RolloutConfig(**STEP))
    with pytest.warns(UserWarning, match="ran out of memory: going on with rows_per_forward = 4") as caught:
        outputs = engine.generate(requests(8))
    assert len(caught) == 1
    assert [output.rows_per_forward for output in outputs] == [2] * 8
    for output, other in zip(outputs, expected):
        assert torch.equal(output.trajectory_latents, other.trajectory_latents)
        assert torch.equal(output.trajectory_log_probs, other.trajectory_log_probs)


def test_out_of_memory_with_one_row_is_an_error_once():
    engine = ob.RolloutEngine(SmallMemory(rows=0), ob.RolloutConfig(**STEP))
    with pytest.warns(UserWarning, match="ran out of memory"):
        outputs = engine.generate(requests(2), return_errors=True)
    assert [type(output.error) for output in outputs] == [torch.OutOfMemoryError] * 2


def test_out_of_memory_in_decoding_halves_its_rows():
    engine = ob.RolloutEngine(SmallMemory(rows=8, decode_rows=2), ob.RolloutConfig(**STEP))
    with pytest.warns(UserWarning, match="going on with decode_rows = 4"):
        outputs = engine.generate(requests(4))
    assert all(output.output is not None for output in outputs)


class Poisoned(FakeAdapter):
    """Makes the latents of request 1 nan in its second step."""

    def denoise_step(self, input_batch):
        velocity = super().denoise_step(input_batch)
        for state, rows in zip(input_batch.states, velocity.split(input_batch.row_counts)):
            if state.request_id == "1" and state.step_index == 1:
                rows[-1, 0, 0] = float("nan")
        return velocity


@pytest.mark.parametrize("step_execution", [False, True])
def test_latents_that_are_not_finite_fail_their_request(step_execution):
    expected = ob.RolloutEngine(FakeAdapter()).generate(requests(num_outputs_per_prompt=2))
    engine = ob.RolloutEngine(Poisoned(), ob.RolloutConfig(step_execution=step_execution, max_num_seqs=8))
    outputs = engine.generate(requests(num_outputs_per_prompt=2), return_errors=True)
    assert isinstance(outputs[1].error, FloatingPointError)
    assert "seed 11 are not finite" in str(outputs[1].error)
    for index in (0, 2, 3):
        assert torch.equal(outputs[index].latents, expected[index].latents)


class Unstackable(FakeAdapter):
    """Prepares request 1 with an encoding that does not fit beside the others."""

    def prepare_encode(self, state):
        super().prepare_encode(state)
        if state.request_id == "1":
            state.prompt_encoding = PromptEncoding(torch.zeros(1, 2))


def test_a_batch_that_cannot_be_built_ends_its_members_and_the_engine_goes_on():
    engine = ob.RolloutEngine(Unstackable(), ob.RolloutConfig(**STEP))
    outputs = engine.generate(requests(2) + requests(3, height=8)[2:], return_errors=True)
    assert [output.error is None for output in outputs] == [False, False, True]
    assert engine.generate(requests(1))[0].error is None


class CannotDecode(FakeAdapter):
    def post_decode(self, states, decode_rows=1):
        if any(state.request_id == "2" for state in states):
            raise RuntimeError("cannot decode 2")
        super().post_decode(states, decode_rows)


def test_a_fault_in_decoding_stays_with_its_request():
    outputs = ob.RolloutEngine(CannotDecode(), ob.RolloutConfig(**STEP)).generate(requests(), return_errors=True)
    assert [str(output.error) for output in outputs] == ["None", "None", "cannot decode 2", "None"]


def test_a_batch_is_kept_while_its_members_stay(monkeypatch):
    made, original = [], ob.step_batch.StepBatch.__init__

    def counting(self, *arguments):
        made.append(1)
        original(self, *arguments)

    monkeypatch.setattr(ob.step_batch.StepBatch, "__init__", counting)
    ob.RolloutEngine(FakeAdapter(), ob.RolloutConfig(**STEP)).generate(requests(4, num_inference_steps=6))
    assert len(made) == 1


def test_requests_that_end_together_are_decoded_together(monkeypatch):
    decoded = []
    monkeypatch.setattr(FakeAdapter, "post_decode", lambda self, states, rows: decoded.append(len(states)))
    ob.RolloutEngine(FakeAdapter(), ob.RolloutConfig(**STEP)).generate(requests(4), return_errors=True)
    assert decoded == [4]


def test_the_timeline_tells_who_stepped_when():
    timeline = Timeline()
    engine = ob.RolloutEngine(FakeAdapter(), ob.RolloutConfig(step_execution=True, max_num_seqs=2), timeline=timeline)
    engine.generate([*requests(2, num_inference_steps=3), *requests(3, num_inference_steps=1)[2:]])
    assert [(step.tick, step.request_id, step.step_index, step.rows_together) for step in timeline.steps] == [
        (0, "0", 0, 2),
        (0, "1", 0, 2),
        (1, "0", 1, 2),
        (1, "1", 1, 2),
        (2, "0", 2, 2),
        (2, "1", 2, 2),
        (3, "2", 0, 1),
    ]
