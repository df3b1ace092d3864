"""A small byte-level BPE tokenizer with merges, and chat templates in the spirit of real ones.

Unlike a one-token-per-byte vocabulary this one merges newlines, spaces and multi-byte characters,
so that token boundaries and character boundaries really differ.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<|head|>", "<|/head|>")
_TEXT = [
    "system\nuser\nassistant\n\n\nanswer the question   please\n    return x\n",
    "assistant\n\n\n   yes\n\nassistant\n\n  no\n\n\n\n" * 4,
    "the quick brown fox …… jumps \U0001f468‍\U0001f469 over é ü ？…… the lazy dog" * 4,
]

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The whole turn, header and closing newline included, stands inside the tags.
TAGGED_WIDE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ '<|im_start|>assistant\n' + m['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Only the content stands inside the tags; the end-of-turn token follows.
TAGGED_NARROW = TAGGED_WIDE.replace(
    "{% generation %}{{ '<|im_start|>assistant\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endgeneration %}",
    "{{ '<|im_start|>assistant\n' }}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{{ '<|im_end|>\n' }}",
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\n\n' "
    "+ m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
# No generation prompt of its own; refuses anything but user, assistant, user, ...
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
# Reasoning of the last turn only, an empty think block when there is none; tool calls.
THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% set text = m['content'] %}{% set thought = m['reasoning_content'] or '' %}"
    "{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ text }}"
    "{% for call in m['tool_calls'] or [] %}"
    "{{ '\n<tool_call>\n' + call['function'] | tojson + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The prompt opens the think block; past turns are rendered without it.
THINKING_PROMPT = THINKING.replace(
    "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
)
# Channels; the last turn ends with another token than earlier ones.
CHANNELS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% if m['thinking'] %}"
    "{{ '<|im_start|>assistant<|head|>analysis<|/head|>' + m['thinking'] + '<|im_end|>' }}"
    "{% endif %}{{ '<|im_start|>assistant<|head|>final<|/head|>' + m['content'] }}"
    "{{ '<|eot|>' if loop.last else '<|im_end|>' }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '<|/head|>' + m['content'] + '<|im_end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
UPPER_USER = CHATML.replace(
    "m['content']", "(m['content'] | upper if m['role'] == 'user' else m['content'])"
)
UPPER_ALL = CHATML.replace("m['content']", "(m['content'] | upper)")


@dataclass(frozen=True)
class Family:
    """Special tokens of a model family; tags are tokens of their own but not special."""

    specials: tuple[str, ...]
    tags: tuple[str, ...] = ()
    bos: str = "<s>"
    eos: str = "</s>"


_CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_DEEPSEEK_TOOLS = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "outputs▁begin",
                   "outputs▁end", "output▁begin", "output▁end", "sep")  # fmt: skip
FAMILIES = {
    "chatml": Family(_CHATML_SPECIALS, eos="<|im_end|>"),
    "llama3": Family(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "qwen3_thinking": Family(
        _CHATML_SPECIALS,
        tags=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        eos="<|im_end|>",
    ),
    "mistral": Family(
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
    ),
    "gemma": Family(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), bos="<bos>", eos="<eos>"
    ),
    "harmony": Family(
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>",
         "<|return|>"),
        bos="<|start|>",
        eos="<|return|>",
    ),
    "deepseek": Family(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        tags=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>",
              *(f"<｜tool▁{part}｜>" for part in _DEEPSEEK_TOOLS)),
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
    ),
}  # fmt: skip


def family_tokenizer(name: str):
    """A small byte-level tokenizer with a family's special tokens and tests/templates/NAME."""
    family = FAMILIES[name]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(None, family.specials, family.tags)),
        bos_token=family.bos,
        eos_token=family.eos,
    )
    fast.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return fast


@cache
def _trained(
    normalizer: str | None, specials: tuple[str, ...] = SPECIALS, tags: tuple[str, ...] = ()
) -> str:
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = getattr(normalizers, normalizer)()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in specials],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in tags])
    return tokenizer.to_str()


def chat_tokenizer(template: str | None = CHATML, *, normalizer: str | None = None):
    """A fresh tokenizer of about 400 tokens with the given chat template."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(normalizer)),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    )
    fast.chat_template = template
    return fast


@cache
def sentencepiece_tokenizer(template: str = CHATML):
    """A Gemma-like vocabulary: one piece per character, a space is U+2581, bytes are <0xNN>."""
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(code) for code in range(0x21, 0x7F)] + ["\n"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **rest) -> dict:
    return {"role": "assistant", "content": text, **rest}
