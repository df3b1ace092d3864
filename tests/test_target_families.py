"""Every target family from features to served drafting: capture, train, export, decode.

Each tiny random target answers a prompt greedily; a draft learns that answer, is exported, read
back and drafts it. Catches, per family: hooks on the wrong module, a logit post-operation that the
teacher lacks, a config the draft cannot be sized from, an export its loader refuses, a cache that
cannot be rewound, and training that is not what decoding asks (acceptance then stays near 1).
"""

import pytest
import torch
from tiny import VOCAB_SIZE, randomise
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from specforge_trim.data.document_features import MemoryDocument
from specforge_trim.data.tokenize import Document
from specforge_trim.decode.prompts import Prompt, speculate
from specforge_trim.drafts.eagle3.batch import PlanSettings, make_batch
from specforge_trim.drafts.eagle3.for_target import draft_for_target
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.step import StepSettings, ttt_step
from specforge_trim.drafts.eagle3.vocab import build_draft_vocab
from specforge_trim.drafts.eagle3.writing import export_draft, load_draft
from specforge_trim.loss.teacher import Teacher
from specforge_trim.verifier.capture import capture_document
from specforge_trim.verifier.hf import HFTarget, load_embedding_and_head

K, DEPTH, ANSWER, STEPS = 4, 4, 32, 100
BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDE = {**BASE, "head_dim": 16}  # not 40 / 4
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": lambda: LlamaConfig(**WIDE, rope_parameters=LLAMA3),
    "gemma3-multimodal": lambda: Gemma3Config(
        text_config=Gemma3TextConfig(**WIDE, sliding_window=16), vision_config=VISION,
        image_token_index=270, boi_token_index=268, eoi_token_index=269, mm_tokens_per_image=4,
    ),
    "qwen2": lambda: Qwen2Config(**BASE),
    "qwen3": lambda: Qwen3Config(**WIDE),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "gemma2": lambda: Gemma2Config(**WIDE, final_logit_softcapping=30.0, sliding_window=16),
    "gemma3": lambda: Gemma3TextConfig(**WIDE, sliding_window=16),
    "phi3": lambda: Phi3Config(**BASE),
    "gpt-oss": lambda: GptOssConfig(
        **WIDE, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
    ),
    "cohere": lambda: CohereConfig(**BASE, logit_scale=0.25),
    "granite": lambda: GraniteConfig(**BASE, logits_scaling=0.5),
    "deepseek-v3": lambda: DeepseekV3Config(
        **{**BASE, "num_key_value_heads": 4}, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        moe_intermediate_size=32,
    ),
}  # fmt: skip


def saved_target(name, folder):
    config = FAMILIES[name]()
    build = (
        Gemma3ForConditionalGeneration if name == "gemma3-multimodal"
        else AutoModelForCausalLM.from_config
    )  # fmt: skip
    randomise(build(config)).save_pretrained(folder)
    return HFTarget.load(folder, dtype=torch.float32)


def answered(target):
    """A prompt and the target's own greedy answer to it, of some length."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(5, 250, (24,), generator=generator)
        answer = Prompt(target, prompt, max_new_tokens=ANSWER).greedy().tokens
        if len(answer) == ANSWER:
            return prompt, answer
    raise AssertionError("this random target ends every answer early")


def captured(target, document):
    made = capture_document(target, document)  # inference tensors, which autograd refuses
    return MemoryDocument(made.aux().clone(), made.last().clone(), made.last_positions)


def untrained(target, head, document):
    torch.manual_seed(0)
    config = draft_for_target(target.model.config, draft_vocab_size=200)
    draft = Eagle3Draft(config)
    draft.load_target(head)
    draft.set_vocab(
        *build_draft_vocab([document], vocab_size=config.vocab_size, draft_vocab_size=200)
    )
    draft.init_head_from_target(head)
    return draft


def train(draft, head, batch):
    """The loss before and after some steps of AdamW on one batch."""
    teacher = Teacher(head.head, draft.draft_to_target, draft.t2d, head.logit_post)
    weights = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=5e-3, weight_decay=0.0)
    denominators = torch.tensor(batch.num_loss_rows, dtype=torch.float32)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        result = ttt_step(
            draft, batch, teacher=teacher, denominators=denominators, settings=StepSettings()
        )
        losses.append(float((result.loss / denominators).mean()))
        optimizer.step()
    return losses[0], losses[-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_from_features_to_served_drafting(name, tmp_path):
    target = saved_target(name, tmp_path / "target")
    head = load_embedding_and_head(tmp_path / "target")
    prompt, answer = answered(target)
    ids = torch.cat((prompt, torch.tensor(answer)))
    mask = torch.arange(len(ids)) >= len(prompt)
    document = Document(ids, mask, "test:1", "d")
    target.check_head(head, ids)
    draft = untrained(target, head, document)
    batch = make_batch(
        [document],
        [captured(target, document)],
        PlanSettings(K, trim_loss_positions=True, trim_backbone_rows=True),
    )
    first, last = train(draft, head, batch)
    assert last < 0.9 * first, (first, last)
    out = export_draft(draft, tmp_path / "draft", target_config=target.model.config,
                       dtype=torch.float32)  # fmt: skip
    decoded = speculate(target, load_draft(out), prompt, depth=DEPTH, max_new_tokens=ANSWER)
    assert decoded.tokens == answer
    length = decoded.emitted / decoded.passes
    assert length > 1.5, length
