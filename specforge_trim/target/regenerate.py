"""Let the target write the assistant's answers itself, greedily, so that a draft learns its voice.

Text turns of the assistant are replaced one after the other, each asked for with the answers
already written before it. Turns that call tools stay as they are, since the tool results after
them belong to them. Answers that would teach nonsense are dropped and counted, never kept quietly.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch
from tqdm import tqdm

from specforge_trim.data.conversation import BadRow, Conversation, read_conversations

logger = logging.getLogger(__name__)

LOOP_TOKENS = 16
ECHO_SHARE = 0.9
SOLO_LENGTH = 2048  # longer prompts go alone: padding would cost them the fused causal kernel


@dataclass(frozen=True)
class Answer:
    """What the target wrote: `ids` without its end token; `finished` = it did end by itself."""

    ids: tuple[int, ...]
    text: str
    finished: bool


@dataclass
class RegenerateReport:
    """Counts of one run: rows kept in the output (of them resumed), dropped by reason, bad."""

    written: int = 0
    resumed: int = 0
    dropped: Counter = field(default_factory=Counter)
    bad_rows: list[BadRow] = field(default_factory=list)


def regenerate(
    paths: Iterable[str | Path],
    out_path: str | Path,
    target_path: str | Path,
    *,
    max_new_tokens: int = 512,
    batch_size: int = 16,
    batch_tokens: int = 16384,
    max_length: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    progress: bool = True,
) -> RegenerateReport:
    """Write `out_path` (JSONL), the conversations of `paths` with the target's own answers.

    Finished rows go to `<out_path>.partial` as they come, under a hash of the request and the
    settings, so an interrupted run continues where it stopped, whatever the order of the input.
    At the end `out_path` holds the kept rows in the order of the input, `<out_path>.dropped` the
    others with their reason.

    Args:
        paths: JSONL files (`data/conversation.py`).
        target_path: model folder or hub id, as `resolve_target` gives it.
        max_new_tokens: an answer that is not finished by then is dropped ("unfinished").
        batch_size, batch_tokens: at most that many requests, and padded tokens, at once.
        max_length: prompts longer than this less max_new_tokens are dropped ("too long"); None =
            the target's own limit.

    Raises ValueError when no conversation is usable or a setting is out of range.
    """
    for key, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{key} is {value}, expected at least 1")
    report = RegenerateReport()
    out, paths = Path(out_path), list(paths)
    if out.resolve() in [Path(path).resolve() for path in paths]:
        raise ValueError(f"--out {out} is one of the input files; name another file to write")
    conversations = _read_all(paths, report)
    settings = f"{target_path}|{max_new_tokens}|{max_length}|{dtype}"
    ids = [request_id(conversation, settings) for conversation in conversations]
    done = _read_done(out)
    todo = {i: c for i, c in zip(ids, conversations, strict=True) if i not in done}
    report.resumed = sum(i in done for i in ids)
    if todo:
        writer = _Writer.load(target_path, max_new_tokens, dtype=dtype, device=device)
        writer.max_prompt = (max_length or writer.context_length) - max_new_tokens
        out.parent.mkdir(parents=True, exist_ok=True)
        with _open(_sibling(out, "partial"), "a") as partial:
            for row in _answer_all(writer, todo, batch_size, batch_tokens, progress):
                done[row["id"]] = row
                partial.write(_line(row))
                partial.flush()
    rows = [done[i] for i in dict.fromkeys(ids)]
    _replace(_sibling(out, "dropped"), [row for row in rows if "dropped" in row])
    _replace(out, [row for row in rows if "dropped" not in row])
    _sibling(out, "partial").unlink(missing_ok=True)
    report.dropped = Counter(row["dropped"] for row in rows if "dropped" in row)
    report.written = len(rows) - report.dropped.total()
    return report


def _read_all(paths: Sequence[str | Path], report: RegenerateReport) -> list[Conversation]:
    """The conversations of all files; bad rows go to the report."""
    conversations: list[Conversation] = []
    for path in paths:
        for item in read_conversations(path):
            if isinstance(item, BadRow):
                report.bad_rows.append(item)
            elif isinstance(item, Conversation):
                conversations.append(item)
            else:
                report.bad_rows.append(BadRow(item.source, "row has no messages to answer"))
    if not conversations:
        reasons = "; ".join(map(str, report.bad_rows[:3]))
        raise ValueError(f"nothing to answer in {[str(p) for p in paths]} ({reasons or 'empty'})")
    return conversations


def request_id(conversation: Conversation, settings: str) -> str:
    """Content hash of what is asked: stable when rows move, new when the settings change.

    The answers that stand in the row count too where they stay (tool calls); the text turns, which
    are replaced, do not.
    """
    kept = [m if not _is_answer(m) else {"role": "assistant"} for m in conversation.messages]
    if kept[-1]["role"] == "user":
        kept.append({"role": "assistant"})  # an answer still missing is asked for all the same
    content = json.dumps([kept, conversation.tools, settings], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def degenerate_reason(
    answer: Answer, request_ids: Iterable[int], request_text: str = ""
) -> str | None:
    """Why an answer must not be trained on, or None.

    "empty"; "repeats" (a run of 8 words, or of 16 tokens, occurs twice); "echo" (0.9 of its runs
    of 8 tokens, or all of its words in a row, are copied from the request); "unfinished".
    """
    if not answer.text.strip():
        return "empty"
    if _repeats(answer.text.lower().split(), 8) or _repeats(answer.ids, LOOP_TOKENS):
        return "repeats"
    size = min(8, len(answer.ids))
    asked = set(ngrams(tuple(request_ids), size))
    own = list(ngrams(answer.ids, size))
    if sum(gram in asked for gram in own) >= ECHO_SHARE * len(own):
        return "echo"
    if " ".join(answer.text.lower().split()) in " ".join(request_text.lower().split()):
        return "echo"  # the same words in other tokens
    return None if answer.finished else "unfinished"


def ngrams(items: Sequence, size: int) -> Iterator[tuple]:
    """All runs of `size` consecutive items."""
    return (tuple(items[i : i + size]) for i in range(len(items) - size + 1))


def _repeats(items: Sequence, size: int) -> bool:
    grams = list(ngrams(items, size))
    return len(set(grams)) < len(grams)


@dataclass
class _Writer:
    """The target as a writer of answers."""

    model: torch.nn.Module
    tokenizer: object
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
        model = AutoModelForCausalLM.from_pretrained(target_path, dtype=dtype).to(device).eval()
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


def _is_answer(message: dict) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


@dataclass
class _Pending:
    """A conversation under way: what is written so far and the messages still to come."""

    id: str
    tools: object
    written: list[dict]
    rest: list[dict]
    prompt: list[int] = field(default_factory=list)
    done: bool = False

    def advance(self) -> bool:
        """Take over everything up to the next answer; False when there is none left."""
        while self.rest and not _is_answer(self.rest[0]):
            self.written.append(self.rest.pop(0))
        if self.rest:
            self.rest.pop(0)
            return True
        return bool(self.written) and self.written[-1]["role"] in ("user", "tool")


def _answer_all(
    writer: _Writer,
    todo: dict[str, Conversation],
    batch_size: int,
    batch_tokens: int,
    progress: bool,
) -> Iterator[dict]:
    """Yield one row per conversation as it is finished or dropped, longest prompts first."""
    waiting = [_Pending(i, c.tools, [], list(c.messages)) for i, c in todo.items()]
    with tqdm(total=len(waiting), desc="regenerate", unit="row", disable=not progress) as bar:
        rows = [row for item in waiting if (row := _next_request(writer, item))]
        while True:
            bar.update(len(rows))
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
                row = _row(item, dropped=reason) if reason else _next_request(writer, item)
                if row:
                    rows.append(row)


def _next_request(writer: _Writer, item: _Pending) -> dict | None:
    """Set the item's next prompt; or return its row when it is complete or cannot go on."""
    if not item.advance():
        return _row(item)
    try:
        item.prompt = writer.prompt_ids(item.written, item.tools)
    except Exception as error:  # a chat template raises whatever its author chose
        return _row(item, dropped=f"template: {error}")
    if len(item.prompt) > writer.max_prompt:
        return _row(item, dropped="too long")
    return None


def _row(item: _Pending, dropped: str | None = None) -> dict:
    """The item's output row; it is done."""
    item.done = True
    row = {"id": item.id, "messages": item.written}
    if item.tools:
        row["tools"] = item.tools
    return row if dropped is None else {**row, "dropped": dropped}


def _batch_rows(longest: _Pending, batch_size: int, batch_tokens: int, writer: _Writer) -> int:
    """How many requests, this one the longest, go into a batch; one always does."""
    if len(longest.prompt) > SOLO_LENGTH:
        return 1
    return max(1, min(batch_size, batch_tokens // (len(longest.prompt) + writer.max_new_tokens)))


def _sibling(out: Path, kind: str) -> Path:
    return out.with_name(f"{out.name}.{kind}")


def _read_done(out: Path) -> dict[str, dict]:
    """Rows of earlier runs by id; a half-written last line of an interrupted run is ignored."""
    done = {}
    partial = _sibling(out, "partial")
    for path in (out, _sibling(out, "dropped"), partial):
        if not path.exists():
            continue
        rows = {}
        with path.open(encoding="utf-8") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    logger.warning("%s: a half-written line is ignored", path)
                    continue
                if isinstance(row, dict) and "id" in row and "messages" in row:
                    rows[row["id"]] = row
        if path == partial:
            _replace(path, list(rows.values()))  # or the next row would join a half-written line
        done.update(rows)
    return done


def _open(path: Path, mode: str) -> TextIO:
    # In a JSON string a lone surrogate's backslash form is its JSON escape.
    return path.open(mode, encoding="utf-8", errors="backslashreplace", newline="\n")


def _line(row: dict) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _replace(path: Path, rows: list[dict]) -> None:
    """Write JSON lines under a temporary name and rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    with _open(temporary, "w") as file:
        file.writelines(map(_line, rows))
    os.replace(temporary, path)
