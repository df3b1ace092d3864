"""The target in this process as the writer of answers: greedy, in batches of padded prompts."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specforge_trim.data.conversation import Conversation
from specforge_trim.verifier.answers.source import (
    LOOP_TOKENS,
    Answer,
    Pending,
    degenerate_reason,
    finished_row,
)

BLOCK = 4096  # conversations whose prompts are held and sorted at once
SOLO_LENGTH = 2048  # longer prompts go alone: padding would cost them the fused causal kernel


@dataclass(frozen=True)
class LocalAnswers:
    """Answers of a model in this process, which is loaded when the first is asked for.

    target_path: model folder or hub id, as `resolve_target` gives it.
    max_new_tokens: an answer that is not finished by then is dropped ("unfinished").
    batch_size, batch_tokens: at most that many requests, and padded tokens, at once.
    max_length: prompts longer than this less max_new_tokens are dropped ("too long"); None =
        the target's own limit.
    """

    target_path: str | Path
    max_new_tokens: int = 512
    batch_size: int = 16
    batch_tokens: int = 16384
    max_length: int | None = None
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"

    def __post_init__(self) -> None:
        for key in ("max_new_tokens", "batch_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}, expected at least 1")

    @property
    def settings(self) -> str:
        return f"{self.target_path}|{self.max_new_tokens}|{self.max_length}|{self.dtype}"

    def answer_all(
        self, todo: Iterable[tuple[str, Conversation]], *, total: int, progress: bool
    ) -> Iterator[dict]:
        """One row per conversation, as it is finished or dropped.

        They are taken BLOCK at a time, and of each block the longest prompts go first.
        """
        writer = _Writer.load(
            self.target_path, self.max_new_tokens, dtype=self.dtype, device=self.device
        )
        writer.max_prompt = (self.max_length or writer.context_length) - self.max_new_tokens
        left = (Pending(i, c.tools, [], list(c.messages)) for i, c in todo)
        with tqdm(total=total, desc="regenerate", unit="row", disable=not progress) as bar:
            while block := list(itertools.islice(left, BLOCK)):
                for row in _answer_block(writer, block, self.batch_size, self.batch_tokens):
                    bar.update()
                    yield row


@dataclass
class _Writer:
    """The target as a writer of answers."""

    model: Any
    tokenizer: Any
    context_length: int
    end_ids: tuple[int, ...]
    max_new_tokens: int
    max_prompt: int = 0

    @classmethod
    def load(
        cls, target_path: str | Path, max_new_tokens: int, *, dtype: torch.dtype, device: str
    ) -> "_Writer":
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(target_path)
        model: Any = AutoModelForCausalLM.from_pretrained(target_path, dtype=dtype)
        model.to(device).eval()
        text_config = model.config.get_text_config()
        ends = model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        if ends is None:
            raise ValueError(f"target {target_path} has no eos_token_id: its answers never end")
        ends = tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)
        return cls(model, tokenizer, text_config.max_position_embeddings, ends, max_new_tokens)

    def prompt_ids(self, messages: list[dict], tools: object) -> list[int]:
        """The request as the chat template renders it, up to where the answer starts."""
        return self.tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=False
        )

    @torch.inference_mode()
    def answer(self, prompts: list[list[int]]) -> list[Answer]:
        """Greedy answers to a batch of prompts, padded on the left."""
        from transformers import GenerationConfig, StoppingCriteriaList

        width = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        pad = self.end_ids[0] if pad is None else pad
        device = self.model.device
        ids = torch.full((len(prompts), width), pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)  # all ones for a prompt alone: no mask reaches the kernel
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        generated = self.model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            generation_config=GenerationConfig(
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                eos_token_id=list(self.end_ids),
                pad_token_id=pad,
            ),
            stopping_criteria=StoppingCriteriaList([_StopRepeats(width)]),
        )[:, width:].tolist()
        return [self._cut(row) for row in generated]

    def _cut(self, row: list[int]) -> Answer:
        end = next((i for i, token in enumerate(row) if token in self.end_ids), None)
        ids = tuple(row[:end])
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Answer(ids, text, finished=end is not None)


class _StopRepeats:
    """Ends a row of the batch once its last 16 tokens occurred before: it is dropped anyway."""

    def __init__(self, prompt_width: int):
        self.prompt_width = prompt_width
        self.seen: dict[int, set] = {}

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        stop = []
        for row, ids in enumerate(input_ids[:, self.prompt_width :].tolist()):
            seen = self.seen.setdefault(row, set())
            gram = tuple(ids[-LOOP_TOKENS:])
            stop.append(len(gram) == LOOP_TOKENS and gram in seen)
            seen.add(gram)
        return torch.tensor(stop, device=input_ids.device)


def _answer_block(
    writer: _Writer, waiting: list[Pending], batch_size: int, batch_tokens: int
) -> Iterator[dict]:
    """Yield one row per conversation as it is finished or dropped, longest prompts first."""
    rows = [row for item in waiting if (row := _next_request(writer, item))]
    while True:
        yield from rows
        waiting = sorted((i for i in waiting if not i.done), key=lambda i: -len(i.prompt))
        if not waiting:
            return
        batch = waiting[: _batch_rows(waiting[0], batch_size, batch_tokens, writer)]
        answers = writer.answer([item.prompt for item in batch])
        rows = []
        for item, answer in zip(batch, answers, strict=True):
            item.written.append({"role": "assistant", "content": answer.text})
            request = writer.tokenizer.decode(item.prompt)
            reason = degenerate_reason(answer, item.prompt, request)
            row = finished_row(item, dropped=reason) if reason else _next_request(writer, item)
            if row:
                rows.append(row)


def _next_request(writer: _Writer, item: Pending) -> dict | None:
    """Set the item's next prompt; or return its row when it is complete or cannot go on."""
    if not item.advance():
        return finished_row(item)
    try:
        item.prompt = writer.prompt_ids(item.written, item.tools)
    except Exception as error:  # a chat template raises whatever its author chose
        return finished_row(item, dropped=f"template: {error}")
    if len(item.prompt) > writer.max_prompt:
        return finished_row(item, dropped="too long")
    return None


def _batch_rows(longest: Pending, batch_size: int, batch_tokens: int, writer: _Writer) -> int:
    """How many requests, this one the longest, go into a batch; one always does."""
    if len(longest.prompt) > SOLO_LENGTH:
        return 1
    return max(1, min(batch_size, batch_tokens // (len(longest.prompt) + writer.max_new_tokens)))
