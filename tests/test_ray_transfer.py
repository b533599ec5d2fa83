"""Tensors and weights on their way to replicas and back."""

import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict

import omnibatch as ob
from omnibatch.ray.transfer import pack_output, to_bytes, to_tensor, unpack_output
from omnibatch.ray.weights import WeightsUpdate, write_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_every_tensor_comes_back_as_it_was(dtype, shape):
    tensor = (torch.randn(shape) * 100).to(dtype)
    back = to_tensor(to_bytes(tensor))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_a_view_is_sent_alone_and_what_is_contiguous_is_not_copied():
    whole = torch.arange(1000.0)
    assert to_bytes(whole[::100]).array.nbytes == 40
    assert to_bytes(whole).array.ctypes.data == whole.data_ptr()


def test_bytes_travel_beside_the_pickle():
    buffers = []
    pickled = pickle.dumps(to_bytes(torch.zeros(100_000)), protocol=5, buffer_callback=buffers.append)
    assert len(pickled) < 1000
    assert sum(len(buffer.raw()) for buffer in buffers) == 400_000


def test_an_output_comes_back_as_it_was(adapter, make_request):
    (output,) = ob.RolloutEngine(adapter).generate([make_request(num_outputs_per_prompt=2)])
    back = unpack_output(pickle.loads(pickle.dumps(pack_output(output), protocol=5)))
    assert back.sampling_params is None
    for name, value in vars(output).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(back, name), value), name
        elif name != "sampling_params":
            assert getattr(back, name) == value, name


def sent(weights):
    return {name: to_bytes(tensor) for name, tensor in weights.items()}


@pytest.fixture
def transformer():
    return ob.load("tiny-sd35", device="cpu", dtype=torch.float32).transformer


def test_weights_are_written_by_name(transformer):
    before = {name: tensor.clone() for name, tensor in transformer.state_dict().items()}
    name = "proj_out.bias"
    write_weights(transformer, sent({name: before[name] + 1}))
    for other, tensor in transformer.state_dict().items():
        assert torch.equal(tensor, before[other] + (1 if other == name else 0)), other


def test_what_does_not_fit_writes_nothing(transformer):
    before = transformer.proj_out.bias.clone()
    good = {"proj_out.bias": before + 1}
    with pytest.raises(ValueError, match=r"^state_dict holds 'nonsense', which the transformer lacks"):
        write_weights(transformer, sent(good | {"nonsense": before}))
    with pytest.raises(ValueError, match=r"^state_dict\['proj_out.bias'\] must have the shape \(64,\), got \(3,\)"):
        write_weights(transformer, sent({"proj_out.bias": torch.zeros(3)}))
    assert torch.equal(transformer.proj_out.bias, before)


def test_a_lora_is_added_and_then_updated(transformer, adapter, make_request):
    config = LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=["to_q", "to_v"])
    trainer = ob.load("tiny-sd35", device="cpu", dtype=torch.float32)
    trainer.transformer.add_adapter(config)
    for factor in (1.0, 2.0):
        weights = get_peft_model_state_dict(trainer.transformer)
        for tensor in weights.values():
            tensor.mul_(factor)
        write_weights(transformer, sent(weights), config)
        replica = ob.load("tiny-sd35", device="cpu", dtype=torch.float32)
        replica.pipeline.transformer = transformer
        (ours,) = ob.RolloutEngine(replica).generate([make_request()])
        (theirs,) = ob.RolloutEngine(trainer).generate([make_request()])
        assert torch.equal(ours.latents, theirs.latents)


def test_a_lora_that_does_not_fit_is_not_added(transformer):
    config = LoraConfig(r=2, target_modules=["to_q"])
    with pytest.raises(ValueError, match="which the transformer lacks"):
        write_weights(transformer, sent({"nonsense": torch.zeros(1)}), config)
    assert "default" not in getattr(transformer, "peft_config", {})
    transformer.add_adapter(config)
    weights = get_peft_model_state_dict(transformer)
    weights.pop(min(weights))
    with pytest.raises(ValueError, match="of the adapter"):
        write_weights(transformer, sent(weights), config)


def test_an_update_makes_those_before_it_needless_only_if_it_writes_all_they_did():
    def update(names, lora=None, adapter_name="default"):
        return WeightsUpdate(1, [None], frozenset(names), lora, adapter_name)

    assert update("ab").covers(update("a"))
    assert not update("a").covers(update("ab"))
    assert not update("ab", lora="config").covers(update("a"))
    assert not update("ab", "config", "other").covers(update("ab", "config"))
