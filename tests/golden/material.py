"""What golden runs are made of: a tiny random target, conversations, a draft config.

It leans on nothing of the package nor of the other tests, since both may change where golden runs
must not. A change here needs new golden files.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
VOCAB_SIZE = 272  # of the model; the tokenizer has fewer
SIZES: dict[str, int] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,  # not 40 / 4
    intermediate_size=64,
    max_position_embeddings=4096,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
ROPE = {"rope_type": "default", "rope_theta": 1e6}
# An EAGLE-3.1 draft of another shape than the target's.
DRAFT: dict[str, Any] = SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "norm_before_residual": True,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "draft_vocab_size": 64,
    "target_hidden_size": 40,
    "fc_norm": True,
    "norm_output": True,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "rope_parameters": ROPE,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
    "eagle_config": {"use_aux_hidden_state": True},
}
TWO_LAYERS = DRAFT | {
    "num_hidden_layers": 2,
    "fc_norm": False,
    "norm_output": False,
    "norm_before_residual": False,
}


def save_target(folder: Path, *, layers: int = 8, **sizes: int) -> Path:
    """A random Llama with a tied head and a byte-level tokenizer; norm weights far from 1."""
    shape = SIZES | sizes
    config = LlamaConfig(
        **shape, num_hidden_layers=layers, rope_parameters=ROPE, tie_word_embeddings=True
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.3, 3.0, generator=generator)
            else:
                std = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
                weight.normal_(std=std, generator=generator)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
    )
    fast.chat_template = CHATML
    return fast


def write_conversations(path: Path, count: int, *, seed: int, words: tuple[int, int]) -> Path:
    """Conversations of random words, one to three turns; words: fewest and most of a prompt."""
    rng = random.Random(seed)

    def text(low: int, high: int) -> str:
        lengths = (rng.randint(2, 6) for _ in range(rng.randint(low, high)))
        return " ".join("".join(rng.choices("abcdefghij", k=n)) for n in lengths)

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = []
            for _ in range(rng.randint(1, 3)):
                messages.append({"role": "user", "content": text(*words)})
                messages.append({"role": "assistant", "content": text(3, 8)})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def make(folder: Path) -> None:
    """All that runs read, which they do not change."""
    folder.mkdir(parents=True, exist_ok=True)
    save_target(folder / "target")
    write_conversations(folder / "train.jsonl", 10, seed=1, words=(4, 20))
    write_conversations(folder / "more.jsonl", 4, seed=2, words=(2, 8))
    write_conversations(folder / "held.jsonl", 3, seed=3, words=(4, 12))
    for name, values in (("draft31.json", DRAFT), ("draft2.json", TWO_LAYERS)):
        (folder / name).write_text(json.dumps(values))
