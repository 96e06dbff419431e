"""Small tokenizers of every kind the families need, trained here on a fixed text."""

from __future__ import annotations

import json
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# The system templates that the pipelines prepend. Training to exhaustion on them makes every word of
# a template one token, as in the real vocabularies, so the pipelines' fixed ``drop_idx`` (34 and 64)
# cuts at the intended place. Ordinary prompts are not in this text and split into several tokens.
TEMPLATE_TEXT = [
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:",
    "system\n \\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:",
    "system\nDescribe the key features of the input image (color, shape, size, texture, objects, background), "
    "then explain how the user's text instruction should alter or modify the image. Generate a new image that "
    "meets the user's requirements while maintaining consistency with the original input where appropriate.",
    "system\nAs an image captioning expert, generate a descriptive text prompt based on an image content, "
    "suitable for input to a text-to-image model.",
    "system\nAs an image editing expert, first analyze the content and attributes of the input image(s). Then, "
    "based on the user's editing instructions, clearly and precisely determine how to modify the given image(s), "
    "ensuring that only the specified parts are altered and all other aspects remain consistent with the "
    "original(s).",
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation.",
    "system\nYou are a helpful assistant. Describe the video by detailing the following aspects:         1. The main "
    "content and theme of the video.         2. The color, shape, size, texture, quantity, text, and spatial "
    "relationships of the objects.         3. Actions, events, behaviors temporal relationships, physical movement "
    "changes of the objects.         4. background environment, light, style and atmosphere.         5. camera "
    "angles, movements, and transitions used in the video.",
    "user\n",
    "assistant\n",
    "Picture 1: Picture 2: <Picture 1>: <Audio 1>: <Video 1>: <0.5 seconds>",
]
QWEN_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
QWEN_CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
MISTRAL_CHAT_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'system' %}{{- '[SYSTEM_PROMPT]' }}{%- elif message.role == 'user' %}{{- '[INST]' }}"
    "{%- endif %}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '[IMG]' }}{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{%- if message.role == 'system' %}{{- '[/SYSTEM_PROMPT]' }}{%- elif message.role == 'user' %}{{- '[/INST]' }}"
    "{%- endif %}{%- endfor %}"
)


def _train_bpe(pre_tokenizer: Any, text: list[str], suffix: str | None = None) -> tuple[dict[str, int], list[tuple]]:
    """Vocabulary (byte alphabet first) and merges of a byte-level BPE trained to exhaustion."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=suffix) if suffix else models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    options = {"end_of_word_suffix": suffix} if suffix else {}
    trainer = trainers.BpeTrainer(
        vocab_size=4000, min_frequency=1, show_progress=False, initial_alphabet=alphabet, **options
    )
    tokenizer.train_from_iterator(text, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = list(alphabet) + ([a + suffix for a in alphabet] if suffix else [])
    tokens += [t for t, _ in sorted(model["vocab"].items(), key=lambda item: item[1]) if t not in set(tokens)]
    return {token: i for i, token in enumerate(tokens)}, [tuple(m) for m in model["merges"]]


def clip_tokenizer(pad_token: str = "<|endoftext|>") -> transformers.CLIPTokenizer:
    """CLIP BPE: lower-cased, ``</w>`` suffix, 77 tokens, and the end token has the highest id."""
    split = transformers.CLIPTokenizer()._tokenizer.pre_tokenizer
    vocab, merges = _train_bpe(split, [t.lower() for t in TEMPLATE_TEXT], suffix="</w>")
    vocab["<|startoftext|>"] = len(vocab)
    vocab["<|endoftext|>"] = len(vocab)
    return transformers.CLIPTokenizer(vocab=vocab, merges=merges, pad_token=pad_token, model_max_length=77)


def t5_tokenizer(model_max_length: int = 512) -> transformers.T5TokenizerFast:
    """SentencePiece-like Unigram with ``<pad>``=0, ``</s>``=1, ``<unk>``=2 (used for T5 and UMT5)."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
        initial_alphabet=[chr(c) for c in range(33, 127)],
    )
    tokenizer.train_from_iterator(TEMPLATE_TEXT, trainer)
    vocab = [(token, score) for token, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    return transformers.T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=model_max_length)


def qwen_tokenizer(padding_side: str = "right") -> transformers.Qwen2TokenizerFast:
    """Qwen2 byte-level BPE with the chat and vision special tokens."""
    split = transformers.Qwen2TokenizerFast()._tokenizer.pre_tokenizer
    vocab, merges = _train_bpe(split, TEMPLATE_TEXT)
    for token in QWEN_SPECIAL:
        vocab[token] = len(vocab)
    tokenizer = transformers.Qwen2TokenizerFast(
        vocab=vocab, merges=merges, padding_side=padding_side, model_max_length=4096
    )
    tokenizer.add_special_tokens({"additional_special_tokens": QWEN_SPECIAL})
    tokenizer.chat_template = QWEN_CHAT_TEMPLATE
    return tokenizer


def mistral_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE in the manner of Mistral's; it pads on the LEFT, like the published one."""
    vocab, merges = _train_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), TEMPLATE_TEXT)
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
    special += ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "<pad>"]
    ordered = special + list(vocab)
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(ordered)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=special[3:10],
        padding_side="left",
        model_max_length=4096,
    )
    tokenizer.chat_template = MISTRAL_CHAT_TEMPLATE
    return tokenizer


def gemma_tokenizer() -> transformers.GemmaTokenizerFast:
    """Gemma BPE: spaces become U+2581, a begin token, byte fallback; ``<pad>``=0, ``<eos>``=1, ``<bos>``=2."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<boi>", "<eoi>", "<img>"]
    special += [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=["\u2581"] + [chr(c) for c in range(33, 127)],
    )
    tokenizer.train_from_iterator(TEMPLATE_TEXT, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    result = transformers.GemmaTokenizerFast(
        vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], model_max_length=1024
    )
    result._tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", model["vocab"]["<bos>"])]
    )
    return result
