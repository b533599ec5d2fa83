"""Trains the transformers and text encoders of the embedded models together, by flow matching."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from diffusers import DiffusionPipeline, QwenImagePipeline, StableDiffusion3Pipeline
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import trange

from omnibatch.tiny.signs import ALPHABET, MAX_CHARACTERS
from omnibatch.tiny.vocabulary import TEMPLATE_PREFIX_LENGTH

BATCH_SIZE = 128
PEAK_LEARNING_RATE = 2e-3
PICTURE_TOKENS = 16
SPELLING_WEIGHT = 0.2
EMPTY_SHARE = 0.1
NAMELESS_SHARE = 0.4
# Time shifts of the noise levels in training; they match the schedules of 64 x 64 pictures at inference.
QWEN_SHIFT = 1.63
SD3_SHIFT = 3.0
# No prompt of a sign has more CLIP tokens; the padding after them is slow to train with, so most steps go without it.
SHORT_CLIP_LENGTH = 16
SHORT_CLIP_SHARE = 0.8
T5_LENGTHS, T5_LENGTH_WEIGHTS = (16, 32, 64, 128, 256), (0.68, 0.2, 0.06, 0.03, 0.03)

Tokens = dict[str, torch.Tensor]
Predictor = Callable[[torch.Tensor, torch.Tensor, Tokens, torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class FlowData:
    """What a transformer learns from.

    Attributes:
        latents: float32 (n, ...), normalised and laid out as the transformer takes them.
        classes: int64 (n, 3), the character of each position, as the reader of the reward numbers them.
        prompts: n prompts that name the colour of the sign.
        nameless_prompts: the same n prompts without the colour.
    """

    latents: torch.Tensor
    classes: torch.Tensor
    prompts: Sequence[str]
    nameless_prompts: Sequence[str]


def train_flow(pipeline: DiffusionPipeline, data: FlowData, steps: int, seed: int) -> None:
    """Train the transformer and the text encoders of a pipeline in place; they end as averages over the steps.

    Args:
        pipeline: a ``QwenImagePipeline`` or ``StableDiffusion3Pipeline`` in float32.
        data: latents and prompts.
        steps: optimiser steps.
        seed: of the batches, noise levels and noise.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    is_qwen = isinstance(pipeline, QwenImagePipeline)
    predict = _qwen_predictor(pipeline) if is_qwen else _sd3_predictor(pipeline)
    empty_prompt = " " if is_qwen else ""
    tokens = _tokenize(pipeline, [*data.prompts, *data.nameless_prompts, empty_prompt])
    shift = QWEN_SHIFT if is_qwen else SD3_SHIFT
    modules = trained_modules(pipeline)
    averages = [copy.deepcopy(module) for module in modules]
    spelling = SpellingLoss(pipeline.transformer.transformer_blocks, pipeline.transformer.inner_dim)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    average_parameters = [parameter for module in averages for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(
        [*parameters, *spelling.parameters()], lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, steps, pct_start=0.05)
    progress = trange(steps, desc=f"train {type(pipeline).__name__}", mininterval=10)
    running_loss = 1.0
    for step in progress:
        rows = torch.randint(len(data.latents), (BATCH_SIZE,), generator=generator)
        prompt_rows = _prompt_rows(rows, len(data.prompts), generator)
        batch_tokens = {key: ids[prompt_rows] for key, ids in tokens.items()}
        clean = data.latents[rows]
        noise = torch.randn(clean.shape, generator=generator)
        uniform = torch.rand(BATCH_SIZE, generator=generator)
        sigmas = shift * uniform / (1 + (shift - 1) * uniform)
        level = sigmas.view(-1, *[1] * (clean.ndim - 1))
        noisy = (1 - level) * clean + level * noise
        # The fused attention has a slow backward pass on CPUs for sequences as short as these.
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            velocity = predict(noisy, sigmas, batch_tokens, generator)
        loss = (velocity.float() - (noise - clean)).square().mean()
        has_text = prompt_rows < 2 * len(data.prompts)
        spelling_weight = SPELLING_WEIGHT * min(1.0, 3 * (1 - step / steps))
        spelling_loss = spelling(data.classes[rows], has_text)
        optimizer.zero_grad()
        (loss + spelling_weight * spelling_loss).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            decay = min(0.998, (1 + step) / (10 + step))
            for average_parameter, parameter in zip(average_parameters, parameters, strict=True):
                average_parameter.lerp_(parameter, 1 - decay)
        running_loss += 0.02 * (loss.item() - running_loss)
        if step % 50 == 0:
            progress.set_postfix(loss=f"{running_loss:.4f}", spelling=f"{spelling_loss.item():.3f}")
    spelling.remove()
    for module, average in zip(modules, averages, strict=True):
        module.load_state_dict(average.state_dict())
        module.eval()


class SpellingLoss(nn.Module):
    """How badly a prompt's characters, and a token's own place, can be read off the picture tokens halfway through.

    Without it a transformer long draws signs of the right colour and length with letters that are an average of all;
    asking for the characters by name makes it look them up in the prompt at once. A token's place is asked of that
    token alone, because Qwen-Image knows places only through rotations within attention, and until a token knows
    whether it is above or below its neighbour, letters come out upside down. It is dropped after training.
    """

    def __init__(self, blocks: nn.ModuleList, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(PICTURE_TOKENS * width, MAX_CHARACTERS * (len(ALPHABET) + 1))
        self.place_head = nn.Linear(width, PICTURE_TOKENS)
        self._tokens = torch.empty(0)
        self._handle = blocks[len(blocks) // 2 - 1].register_forward_hook(self._keep_tokens)

    def forward(self, classes: torch.Tensor, has_text: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropies for classes (n, 3) over rows with a text, bool (n,), and for the places."""
        logits = self.head(self._tokens[has_text].flatten(1).float())
        spelling = nn.functional.cross_entropy(logits.view(-1, len(ALPHABET) + 1), classes[has_text].flatten())
        places = torch.arange(PICTURE_TOKENS).repeat(len(self._tokens))
        return spelling + nn.functional.cross_entropy(self.place_head(self._tokens.flatten(0, 1).float()), places)

    def remove(self) -> None:
        """Detach from the transformer."""
        self._handle.remove()

    def _keep_tokens(self, module: nn.Module, inputs: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._tokens = output[1]


def trained_modules(pipeline: DiffusionPipeline) -> list[nn.Module]:
    """Return the transformer and every text encoder of a pipeline."""
    names = ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3")
    return [pipeline.components[name] for name in names if name in pipeline.components]


def _prompt_rows(rows: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    nameless = torch.rand(len(rows), generator=generator) < NAMELESS_SHARE
    empty = torch.rand(len(rows), generator=generator) < EMPTY_SHARE
    return torch.where(empty, torch.full_like(rows, 2 * count), rows + count * nameless)


def _tokenize(pipeline: DiffusionPipeline, prompts: Sequence[str]) -> Tokens:
    if isinstance(pipeline, QwenImagePipeline):
        templated = [pipeline.prompt_template_encode.format(prompt) for prompt in prompts]
        encoded = pipeline.tokenizer(templated, padding=True, return_tensors="pt")
        return {"ids": encoded.input_ids, "mask": encoded.attention_mask}
    tokenizers = {"clip": pipeline.tokenizer, "clip_2": pipeline.tokenizer_2, "t5": pipeline.tokenizer_3}
    lengths = {"clip": 77, "clip_2": 77, "t5": 256}
    return {
        name: tokenizer(list(prompts), padding="max_length", max_length=lengths[name], return_tensors="pt").input_ids
        for name, tokenizer in tokenizers.items()
    }


def _qwen_predictor(pipeline: QwenImagePipeline) -> Predictor:
    transformer = pipeline.transformer
    # The transformer casts the time to the type of its embedded latents, and bfloat16 is too coarse for a time.
    transformer.img_in.register_forward_hook(lambda module, inputs, output: output.float())

    def predict(
        latents: torch.Tensor, sigmas: torch.Tensor, tokens: Tokens, generator: torch.Generator
    ) -> torch.Tensor:
        length = int(tokens["mask"].sum(dim=1).max())
        mask = tokens["mask"][:, :length]
        hidden = pipeline.text_encoder.model(input_ids=tokens["ids"][:, :length], attention_mask=mask).last_hidden_state
        return transformer(
            hidden_states=latents,
            timestep=sigmas,
            encoder_hidden_states=hidden[:, TEMPLATE_PREFIX_LENGTH:],
            encoder_hidden_states_mask=mask[:, TEMPLATE_PREFIX_LENGTH:].bool(),
            img_shapes=[[(1, 4, 4)]] * len(latents),
            return_dict=False,
        )[0]

    return predict


def _sd3_predictor(pipeline: StableDiffusion3Pipeline) -> Predictor:
    def predict(
        latents: torch.Tensor, sigmas: torch.Tensor, tokens: Tokens, generator: torch.Generator
    ) -> torch.Tensor:
        is_short = float(torch.rand((), generator=generator)) < SHORT_CLIP_SHARE
        clip_length = SHORT_CLIP_LENGTH if is_short else 77
        choice = torch.multinomial(torch.tensor(T5_LENGTH_WEIGHTS), 1, generator=generator)
        t5_length = T5_LENGTHS[int(choice)]
        first = pipeline.text_encoder(tokens["clip"][:, :clip_length], output_hidden_states=True)
        second = pipeline.text_encoder_2(tokens["clip_2"][:, :clip_length], output_hidden_states=True)
        third = pipeline.text_encoder_3(tokens["t5"][:, :t5_length])[0]
        clip = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        clip = nn.functional.pad(clip, (0, third.shape[-1] - clip.shape[-1]))
        return pipeline.transformer(
            hidden_states=latents,
            timestep=sigmas * 1000,
            encoder_hidden_states=torch.cat([clip, third], dim=1),
            pooled_projections=torch.cat([first.text_embeds, second.text_embeds], dim=-1),
            return_dict=False,
        )[0]

    return predict
