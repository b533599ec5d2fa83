"""The small tokenizers of the embedded models, of the same classes as the full-size ones."""

import re
import string

from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer, Qwen2Tokenizer, T5TokenizerFast

from omnibatch.tiny.signs import COLORS

# diffusers cuts the first 34 tokens off every prompt, so these words must be whole tokens, as in the full-size model.
TEMPLATE_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
TEMPLATE_PREFIX_LENGTH = 34
_PROMPT_WORDS = ("a", "sign", "that", "says", *COLORS)
_QWEN_SPECIAL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def build_qwen_tokenizer() -> Qwen2Tokenizer:
    """Return a byte-level Qwen2 tokenizer that knows the words of the template and of the prompts.

    Raises:
        RuntimeError: if the template does not fall into the 34 tokens that diffusers drops.
    """
    merges: list[tuple[str, str]] = []
    template_words = re.findall(" ?[A-Za-z]+", re.sub(r"<\|.*?\|>", "", TEMPLATE_PREFIX))
    for word in (*template_words, "assistant", *(f" {word}" for word in _PROMPT_WORDS)):
        # Byte-level tokenizers write the space before a word as this letter.
        spelled = word.replace(" ", "Ġ")
        merges += [(spelled[:end], spelled[end]) for end in range(1, len(spelled))]
    merges.append(("Ġ", '"'))
    merges = list(dict.fromkeys(merges))
    pieces = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    for token in ("<|endoftext|>", *_QWEN_SPECIAL_TOKENS):
        vocabulary[token] = len(vocabulary)
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        eos_token="<|im_end|>",
        additional_special_tokens=list(_QWEN_SPECIAL_TOKENS),
        model_max_length=131072,
    )
    length = len(tokenizer(TEMPLATE_PREFIX).input_ids)
    if length != TEMPLATE_PREFIX_LENGTH:
        raise RuntimeError(f"the template prefix must be {TEMPLATE_PREFIX_LENGTH} tokens, got {length}")
    return tokenizer


def build_clip_tokenizer(pad_token: str) -> CLIPTokenizer:
    """Return a CLIP tokenizer that knows the words of the prompts and otherwise spells byte by byte.

    Args:
        pad_token: ``"<|endoftext|>"`` as in the first tokenizer of Stable Diffusion 3.5, ``"!"`` as in the second.
    """
    merges: list[tuple[str, str]] = []
    for word in _PROMPT_WORDS:
        ending = f"{word[-1]}</w>"
        for letter in reversed(word[:-1]):
            merges.append((letter, ending))
            ending = letter + ending
    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *("".join(pair) for pair in merges)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, pad_token=pad_token, model_max_length=77)


def build_t5_tokenizer() -> T5TokenizerFast:
    """Return a T5 tokenizer that knows printable ASCII and the words of the prompts."""
    # Words score above the letters they are made of, so a known word is always one token.
    pieces: list[tuple[str, float]] = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ('▁"', -1.0)]
    pieces += [(f"▁{word}", -1.0) for word in _PROMPT_WORDS]
    pieces += [(letter, -3.0) for letter in string.printable.strip()]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, additional_special_tokens=[], model_max_length=512)
