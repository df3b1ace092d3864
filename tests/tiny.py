"""Tiny random targets, tokenizers and conversations that tests make on the spot.

Nothing is downloaded. The target is a Llama with the shapes that break careless code: grouped
query heads, head_dim not hidden / heads, final-norm weights far from 1, a vocabulary padded beyond
the tokenizer's, tied or untied head.
"""

import json
import random
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
ROLES = ("system", "user", "assistant")  # ordinary tokens: ids 259, 260, 261
VOCAB_SIZE = 272  # of the model; the tokenizer has 262


def tiny_tokenizer(chat_template: str = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: one token per byte, so that any text round-trips.

    The role names are ordinary (not special) tokens of their own, as in real vocabularies.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(role, single_word=True, special=False) for role in ROLES])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
    )
    fast.chat_template = chat_template
    return fast


def tiny_config(*, tied: bool = True, num_layers: int = 8) -> LlamaConfig:
    """Hidden 40, 4 heads / 2 kv of width 16 (not 40 / 4), rope theta 1e6."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=40,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def randomise(model: torch.nn.Module, *, seed: int = 0) -> torch.nn.Module:
    """Random weights, wide enough for varied logits; norm weights in [0.3, 3] instead of 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.3, 3.0, generator=generator)
            else:
                std = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(std=std, generator=generator)
    return model.eval()


def save_tiny_target(
    folder: str | Path,
    *,
    tied: bool = True,
    num_layers: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    chat_template: str = CHATML,
) -> Path:
    """Save a random target with its tokenizer into `folder` and return it."""
    folder = Path(folder)
    model = randomise(LlamaForCausalLM(tiny_config(tied=tied, num_layers=num_layers)), seed=seed)
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer(chat_template).save_pretrained(folder)
    return folder


def tiny_messages(seed: int, *, turns: int = 1, prompt_words: int = 30) -> list[dict]:
    """A conversation of random words: prompts of `prompt_words`, answers of 3 to 8 words."""
    rng = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(
            "".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(count)
        )

    messages = []
    for _ in range(turns):
        messages.append({"role": "user", "content": words(prompt_words)})
        messages.append({"role": "assistant", "content": words(rng.randint(3, 8))})
    return messages


def write_conversations(
    path: str | Path, count: int, *, seed: int = 0, turns: int = 1, prompt_words: int = 30
) -> Path:
    """Write `count` conversations of random words as JSON lines and return the path."""
    rows = (
        {"messages": tiny_messages(seed + i, turns=turns, prompt_words=prompt_words)}
        for i in range(count)
    )
    path = Path(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def training_place(folder: Path) -> Path:
    """Put a tiny target, training and held-out conversations and a recipe into `folder`."""
    save_tiny_target(folder / "target")
    write_conversations(folder / "train.jsonl", 8)
    write_conversations(folder / "held.jsonl", 2, seed=100)
    recipe = f"""
model: {{target: {folder}/target, draft_vocab_size: 64, target_dtype: float32}}
data:
  train_data: [{folder}/train.jsonl]
  cache_dir: {folder}/cache
  feature_dtype: float32
  tokens_per_batch: 400
  num_workers: 0
loss: {{ttt_length: 3}}
train: {{learning_rate: 1.0e-3, epochs: 2, device: cpu}}
evaluate: {{eval_data: [{folder}/held.jsonl], eval_depth: 2, eval_max_new_tokens: 6}}
"""
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def run_recipe(place: Path, name: str, *flags: str) -> list[dict]:
    """Train the recipe of `training_place` into place/name; the rows of metrics.jsonl."""
    from specforge_trim.cli.main import train_main

    out = place / name
    code = train_main(["--config", str(place / "recipe.yaml"), "--output-dir", str(out), *flags])
    assert code == 0
    return metric_rows(out)


def metric_rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def random_ids_and_mask(
    length: int, *, seed: int = 0, spans: int = 1, span_length: int = 6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids int64 [length] and a loss mask bool [length] with `spans` answers, the last at
    the end of the document."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 3 + 256, (length,), generator=generator)
    mask = torch.zeros(length, dtype=torch.bool)
    for i in range(spans):
        end = length * (i + 1) // spans
        mask[max(0, end - span_length) : end] = True
    return ids, mask
