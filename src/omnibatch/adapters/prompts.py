"""Prompts as users hand them over: text, token ids or embeddings; and the encodings kept of them."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from omnibatch.request import OmniDiffusionRequest
from omnibatch.step_state import PromptEncoding


class EncodingCache:
    """Encodings of the prompts in flight, and of the last few that were asked for.

    An encoding stays while some request holds it. The last few stay beyond that, so that a group of requests that run
    one after the other is encoded once, too.
    """

    def __init__(self, num_recent: int = 8):
        self._in_flight: WeakValueDictionary[Hashable, PromptEncoding] = WeakValueDictionary()
        self._recent: deque[PromptEncoding] = deque(maxlen=num_recent)
        self._parameter_dicts: dict[torch.nn.Module, list[Mapping[str, torch.nn.Parameter | None]]] = {}
        self._versions: dict[torch.nn.Module, tuple[list[int], int]] = {}

    def get(
        self,
        prompt: Hashable,
        text_encoders: Sequence[torch.nn.Module | None],
        encode: Callable[[], PromptEncoding],
    ) -> PromptEncoding:
        """The encoding of a prompt, made if it is not there or if an encoder was replaced or written to since.

        Args:
            prompt: whatever it depends on besides the encoders.
            text_encoders: the modules that ``encode`` runs.
            encode: makes the encoding.
        """
        key = (prompt, *(self._version(encoder) for encoder in text_encoders if encoder is not None))
        encoding = self._in_flight.get(key)
        if encoding is None:
            encoding = self._in_flight[key] = encode()
        self._recent.append(encoding)
        return encoding

    def _version(self, encoder: torch.nn.Module) -> Hashable:
        """A number that changes with the encoder's weights, whether they were written to or replaced."""
        if encoder not in self._parameter_dicts:
            # Walking the modules of a large encoder takes longer than preparing a request. What each holds its
            # parameters in stays the same when they are replaced.
            self._parameter_dicts[encoder] = [module._parameters for module in encoder.modules() if module._parameters]
        weights = [weight for held in self._parameter_dicts[encoder] for weight in held.values() if weight is not None]
        state = [number for weight in weights for number in (id(weight), weight._version)]
        known, version = self._versions.get(encoder, ([], 0))
        if state != known:
            version += 1
            self._versions[encoder] = state, version
        return id(encoder), version


def prompt_text(request: OmniDiffusionRequest, prefix: str = "", default: str | None = None) -> str:
    """The prompt (``prefix`` ``""``) or negative prompt (``"negative_"``) as text.

    Raises:
        ValueError: when there is none and no default, or when it is not a string.
    """
    name = f"{prefix}prompt"
    text = request.prompt_field(name)
    if text is None:
        text = default
    if text is None:
        raise ValueError(f"{name} is missing: give it as text, token ids or embeddings")
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a string, got {type(text).__name__}")
    return text


def prompt_digest(request: OmniDiffusionRequest) -> int:
    """A number from 0 to 2**62 - 1 that equal prompts share, in every process."""
    value = request.prompt_field("prompt", "prompt_token_ids", "prompt_ids", "extra_prompt_ids", "prompt_embeds")
    digest = hashlib.sha256()
    for part in value.values() if isinstance(value, dict) else [value]:
        if isinstance(part, torch.Tensor):
            part = part.detach().flatten().tolist()
        digest.update(repr(part).encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 2


def given_token_ids(request: OmniDiffusionRequest, prefix: str = "") -> list[int] | None:
    """The token ids that the request brings, without the positions its mask hides, or ``None``.

    Raises:
        ValueError: when the ids are not one row of integers or the mask has another length.
    """
    name = f"{prefix}prompt_token_ids"
    value = request.prompt_field(name, f"{prefix}prompt_ids")
    if value is None:
        return None
    token_ids = _one_row(value, name)
    mask = request.prompt_field(f"{prefix}prompt_mask")
    if mask is None:
        return token_ids
    kept = _one_row(mask, f"{prefix}prompt_mask")
    if len(kept) != len(token_ids):
        raise ValueError(f"{prefix}prompt_mask must be as long as {name} ({len(token_ids)}), got {len(kept)}")
    return [token for token, keep in zip(token_ids, kept) if keep]


def given_extra_token_ids(
    request: OmniDiffusionRequest, prefix: str, tokenizers: Sequence[str]
) -> dict[str, list[int]] | None:
    """The token ids per tokenizer that the request brings, or ``None``.

    Raises:
        ValueError: naming the tokenizer whose ids are missing.
    """
    name = f"{prefix}extra_prompt_ids"
    value = request.prompt_field(name)
    if value is None:
        if request.prompt_field(f"{prefix}prompt_token_ids", f"{prefix}prompt_ids") is not None:
            raise ValueError(f"{name} is missing: this model needs token ids for each of {', '.join(tokenizers)}")
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict of ids per tokenizer, got {type(value).__name__}")
    for tokenizer in tokenizers:
        if value.get(tokenizer) is None:
            raise ValueError(f"{name} lacks the ids of {tokenizer!r}, it has {', '.join(map(repr, value)) or 'none'}")
    return {tokenizer: _one_row(value[tokenizer], f"{name}[{tokenizer!r}]") for tokenizer in tokenizers}


def given_embeddings(
    request: OmniDiffusionRequest,
    prefix: str,
    like: torch.Tensor,
    width: int,
    *,
    has_mask: bool,
    pooled_width: int | None = None,
) -> PromptEncoding | None:
    """The embeddings that the request brings, or ``None``.

    Args:
        request: whose prompt it is.
        prefix: ``""`` for the prompt, ``"negative_"`` for the negative prompt.
        like: the embeddings get this tensor's device and data type.
        width: the last axis that the model needs.
        has_mask: whether the model takes a mask over its text; without one a mask may hide nothing.
        pooled_width: width of the pooled embeddings, for models that have them.

    Raises:
        ValueError: naming the field whose shape is wrong, which is missing, or which the model would not heed.
    """
    name = f"{prefix}prompt_embeds"
    embeds = request.prompt_field(name)
    if embeds is None:
        return None
    embeds = _finite_tensor(embeds, name)
    if not embeds.is_floating_point():
        raise ValueError(f"{name} must be of a floating-point dtype, got {embeds.dtype}")
    embeds = embeds[0] if embeds.dim() == 3 and len(embeds) == 1 else embeds
    embeds = embeds.detach().to(like)
    if embeds.dim() != 2 or embeds.shape[1] != width or not len(embeds):
        raise ValueError(f"{name} must have the shape (L, {width}), got {tuple(embeds.shape)}")
    pooled = None
    if pooled_width is not None:
        pooled_name = f"{prefix}pooled_prompt_embeds"
        value = request.prompt_field(pooled_name)
        if value is None:
            raise ValueError(f"{pooled_name} is missing: {name} needs it beside it")
        value = _finite_tensor(value, pooled_name)
        if value.numel() != pooled_width:
            raise ValueError(f"{pooled_name} must have the shape ({pooled_width},), got {tuple(value.shape)}")
        pooled = value.detach().to(like).reshape(-1)
    mask = request.prompt_field(f"{prefix}prompt_embeds_mask")
    mask = torch.ones(len(embeds)) if mask is None else torch.as_tensor(mask).reshape(-1)
    mask = mask.bool().cpu()
    if len(mask) != len(embeds) or not mask.any():
        raise ValueError(
            f"{prefix}prompt_embeds_mask must be as long as {name} ({len(embeds)}) and true somewhere, "
            f"got {int(mask.sum())} of {len(mask)} true"
        )
    if not has_mask:
        if not mask.all():
            raise ValueError(f"{prefix}prompt_embeds_mask must be all true: this model attends to all of its text")
        return PromptEncoding(embeds, pooled_prompt_embeds=pooled)
    # Padding behind the last token says nothing, and would make the row's length depend on how it was padded.
    length = int(mask.nonzero().max()) + 1
    return PromptEncoding(embeds[:length], mask[:length], pooled)


def require_in_vocabulary(token_ids: Sequence[int], encoder: Any, name: str) -> None:
    """Raise a ``ValueError`` for an id that the encoder has no embedding for, which on a GPU would end the process."""
    size = encoder.get_input_embeddings().num_embeddings
    strange = [token for token in token_ids if not 0 <= token < size]
    if strange:
        raise ValueError(f"{name} must be from 0 to {size - 1}, got {strange[0]}")


def _finite_tensor(value: Any, name: str) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}") from None
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{name} must be finite")
    return tensor


def _one_row(value: torch.Tensor | Sequence[int], name: str) -> list[int]:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be one row of integers, got {type(value).__name__}") from None
    tensor = tensor[0] if tensor.dim() == 2 and len(tensor) == 1 else tensor
    if tensor.dim() != 1 or tensor.is_floating_point() or not len(tensor):
        raise ValueError(f"{name} must be one row of integers, got shape {tuple(tensor.shape)} of {tensor.dtype}")
    return tensor.tolist()
