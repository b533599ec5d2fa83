"""Where LoRAs are found, and what an adapter that does nothing is told."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from omnibatch.lora import active_lora, requested_lora
from omnibatch.request import OmniDiffusionSamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


class CountedTransformer(torch.nn.Module):
    """Two linear layers and PEFT's interface, counting how often its modules are walked."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_v = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.walks = 0

    def modules(self):
        self.walks += 1
        return super().modules()

    def add_adapter(self, name, target):
        config = LoraConfig(r=2, target_modules=[target])
        inject_adapter_in_model(config, self, name)
        self.peft_config = getattr(self, "peft_config", {}) | {name: config}


@pytest.fixture
def transformer():
    transformer = CountedTransformer()
    transformer.add_adapter("first", "to_q")
    transformer.walks = 0
    return transformer


def ask(transformer, name):
    return requested_lora(transformer, OmniDiffusionSamplingParams(lora_request=name))


def test_layers_are_looked_for_once(transformer):
    for _ in range(5):
        assert ask(transformer, "first") == {"first": 1.0}
        assert active_lora(transformer) == ["first"]
    assert transformer.walks == 1


def test_an_added_or_replaced_adapter_is_seen(transformer):
    assert ask(transformer, "first")
    transformer.add_adapter("second", "to_v")
    assert ask(transformer, "second") == {"second": 1.0}
    transformer.to_v.delete_adapter("second")
    del transformer.peft_config["second"]
    with pytest.raises(
        ValueError, match="lora_request 'second' is not an adapter of the transformer, which has 'first'"
    ):
        ask(transformer, "second")


def test_an_adapter_that_matches_no_layer_is_named(transformer):
    transformer.to_q.delete_adapter("first")
    with pytest.raises(ValueError, match="lora_request 'first' matches no layer of the transformer"):
        ask(transformer, "first")
