"""One answer, whether it may be trained on, and a conversation while its answers are written."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specforge_trim.data.conversation import Conversation

LOOP_TOKENS = 16
ECHO_SHARE = 0.9


class AnswerSource(Protocol):
    """Who writes the answers."""

    @property
    def settings(self) -> str:
        """All that decides an answer besides the request, for its content hash."""

    def answer_all(
        self, todo: Iterable[tuple[str, Conversation]], *, total: int, progress: bool
    ) -> Iterator[dict]:
        """One row per conversation, finished or dropped, in any order.

        todo: ids and conversations, `total` of them, taken as they are needed.
        """


@dataclass(frozen=True)
class Answer:
    """What the target wrote; `finished` = it did end by itself.

    ids: its tokens without the end token, or its words where only the text is known.
    """

    ids: tuple[int, ...] | tuple[str, ...]
    text: str
    finished: bool


def degenerate_reason(
    answer: Answer, request_ids: Iterable[int] | Iterable[str], request_text: str = ""
) -> str | None:
    """Why an answer must not be trained on, or None.

    request_ids: of the request, as `answer.ids` are of the answer.
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


def is_answer(message: dict) -> bool:
    """True for a turn of the assistant's that is to be written anew: text, not a tool call."""
    return message["role"] == "assistant" and not message.get("tool_calls")


@dataclass
class Pending:
    """A conversation under way: what is written so far and the messages still to come."""

    id: str
    tools: object
    written: list[dict]
    rest: list[dict]
    prompt: list[int] = field(default_factory=list)
    done: bool = False

    def advance(self) -> bool:
        """Take over everything up to the next answer; False when there is none left."""
        while self.rest and not is_answer(self.rest[0]):
            self.written.append(self.rest.pop(0))
        if self.rest:
            self.rest.pop(0)
            return True
        return bool(self.written) and self.written[-1]["role"] in ("user", "tool")


def finished_row(item: Pending, dropped: str | None = None) -> dict:
    """The item's output row; it is done."""
    item.done = True
    row: dict[str, Any] = {"id": item.id, "messages": item.written}
    if item.tools:
        row["tools"] = item.tools
    return row if dropped is None else {**row, "dropped": dropped}
