"""Find what the assistant writes inside one full render of a chat template.

One job: text of the whole conversation plus the character spans [start, end) that the model itself
would have generated: from the end of the generation prompt through the end-of-turn token. Tokens
are not known here.

The conversation is rendered whole, never message by message: templates look at neighbours (an
empty think block on the last turn only, strict alternation). With {% generation %} tags the
template says where the spans are. Without them a second whole render, in which every string the
assistant wrote is replaced by a marker, shows the text around the assistant's turns:

    real      SYS user Q1 </s> assistant Hello. </s> user Q2 </s> assistant Bye. </s>
    marked    SYS user Q1 </s> assistant 7305.. </s> user Q2 </s> assistant 7306.. </s>
              |----- frame 0 -----------|      |----- frame 1 -----------|      | rest

The frames must occur in the real render in this order and in one way only; what lies between them
is the assistant's. It does not matter how the template changes the assistant's text (trimmed,
upper-cased, reasoning moved or dropped). Anything that leaves a doubt raises RowError.
"""

import unicodedata
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specforge_trim.data.markers import mark_assistant, strings
from specforge_trim.data.probe import end_of_turn, probe, special_pattern
from specforge_trim.data.records import Conversation, RowError, TextRow
from specforge_trim.data.render import Renderer
from specforge_trim.data.supervision import MaskOptions, select_spans

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Rendered:
    """text of the conversation; spans: ascending character ranges that carry loss."""

    text: str
    spans: Spans


class ChatTemplate:
    """A tokenizer's chat template, probed once.

    Raises ValueError when the tokenizer has no template, or its template has no place from which
    the assistant's text could be told.
    """

    def __init__(self, tokenizer, *, masks: MaskOptions | None = None):
        if not tokenizer.chat_template:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat_template; use the target's own "
                "instruction-tuned tokenizer or set the template"
            )
        self._tokenizer = tokenizer
        self._rendered = Renderer(tokenizer)
        self._masks = masks or MaskOptions()
        self._normal_form: Any = _unicode_form(tokenizer)
        specials = frozenset(_special_texts(tokenizer))
        self._specials = special_pattern(specials)
        try:
            self.facts = probe(self._ask, specials=specials, eos=tokenizer.eos_token)
        except RowError as error:
            raise ValueError(f"chat template of {tokenizer.name_or_path!r}: {error}") from None

    def render(self, conversation: Conversation) -> Rendered:
        """Render the whole conversation once and find the assistant's spans; raises RowError."""
        (found,) = self.render_all([conversation])
        if isinstance(found, RowError):
            raise found
        return found

    def render_all(self, conversations: Sequence[Conversation]) -> list[Rendered | RowError]:
        """The same for many rows, in waves: all first renders, then all marked ones.

        What a program does many times in a row it does faster than in turn with other things.
        """
        found: dict[int, Rendered | RowError] = {}
        steps = [self._render(conversation) for conversation in conversations]
        answers: dict[int, Any] = dict.fromkeys(range(len(steps)))  # None starts a generator
        while answers:
            asked = {}
            for k, text in answers.items():
                try:
                    asked[k] = steps[k].send(text)
                except StopIteration as done:
                    found[k] = done.value
                except RowError as error:
                    found[k] = error
                except RecursionError:
                    found[k] = RowError("row is nested too deeply")
            answers = {}
            for k, messages in asked.items():
                try:
                    answers[k] = self._apply(messages, conversations[k].tools)
                except RowError as error:
                    found[k] = error
                except RecursionError:
                    found[k] = RowError("row is nested too deeply")
        return [found[k] for k in range(len(steps))]

    def locate(self, row: TextRow) -> Rendered:
        """The spans of a conversation that is rendered already; raises RowError."""
        if not self._masks.whole_turns:
            raise RowError("parts of turns cannot be told in a row without messages")
        text = self._normalise(row.text)
        if row.spans is None:
            spans = self._find_turns(text)
        else:
            spans = self._normal_spans(row.text, row.spans)
        return Rendered(text, spans[-1:] if self._masks.turns == "last" else spans)

    def _render(self, conversation: Conversation) -> Generator[Sequence[dict], str, Rendered]:
        """Yields messages to be rendered and is sent their text; returns what is found."""
        turns = [m for m in conversation.messages if m["role"] == "assistant"]
        if not turns:
            raise RowError("no assistant message", f"{len(conversation.messages)} messages")
        text = yield conversation.messages
        if self._rendered.has_generation_tags(conversation.tools):
            spans = self._tagged_spans(conversation, text)
        else:
            spans = yield from self._framed_spans(conversation, turns, text)
        for start, end in spans:
            if self._is_blank(text, start, end):
                raise RowError("assistant turn renders empty", _around(text, start))
        kept = select_spans(text, spans, turns, options=self._masks, tags=self.facts.tags)
        return Rendered(text, kept)

    def _is_blank(self, text: str, start: int, end: int) -> bool:
        """Whether [start, end) holds nothing but special tokens and white space."""
        while start < end:
            special = self._specials.match(text, start, end)
            if special and special.end() > start:
                start = special.end()
            elif text[start].isspace():
                start += 1
            else:
                return False
        return True

    # -- rendering ------------------------------------------------------------------------------

    def _ask(self, messages, *, generation_prompt: bool = False) -> str:
        return self._apply(messages, None, generation_prompt=generation_prompt)

    def _apply(self, messages, tools, *, generation_prompt: bool = False) -> str:
        try:
            text = self._rendered(messages, tools, generation_prompt=generation_prompt)
        except Exception as error:  # a template is a foreign program: it may raise anything
            detail = f"{type(error).__name__}: {error}".splitlines()[0]
            raise RowError("chat template refuses the conversation", detail) from None
        return self._normalise(text)

    def _normalise(self, text: str) -> str:
        """The text as the tokenizer sees it, so that its tokens spell it byte for byte."""
        return unicodedata.normalize(self._normal_form, text) if self._normal_form else text

    def _normal_spans(self, raw: str, spans: Iterable[Sequence[int]]) -> Spans:
        """Character ranges of raw as ranges of its normal form."""
        return tuple((self._normal_index(raw, a), self._normal_index(raw, b)) for a, b in spans)

    def _normal_index(self, raw: str, index: int) -> int:
        if self._normal_form is None:
            return index
        head = self._normalise(raw[:index])
        if head + self._normalise(raw[index:]) != self._normalise(raw):
            raise RowError("unicode normalisation joins the assistant's text with its frame")
        return len(head)

    # -- spans from generation tags -------------------------------------------------------------

    def _tagged_spans(self, conversation: Conversation, text: str) -> Spans:
        from transformers.utils.chat_template_utils import render_jinja_template

        made: Any = render_jinja_template(
            conversations=[list(conversation.messages)],
            tools=_tools(conversation.tools),
            chat_template=self._rendered.source(conversation.tools),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        rendered, indices = made
        if self._normalise(rendered[0]) != text:
            raise RowError("chat template renders differently each time")
        spans: list[tuple[int, int]] = []
        for start, end in self._normal_spans(rendered[0], indices[0]):
            if spans and start < spans[-1][1]:
                raise RowError("generation tags of the chat template overlap")
            if spans and start == spans[-1][1]:
                start = spans.pop()[0]
            if start < end:
                spans.append((start, end))
        if not spans:
            raise RowError("generation tags of the chat template cover nothing")
        settled = tuple(self._settle(text, start, end) for start, end in spans)
        turns = [m for m in conversation.messages if m["role"] == "assistant"]
        written = [text for turn in turns for text in strings(turn)]
        for start, end in settled:
            closing = [m.group() for m in self._specials.finditer(text, start, end)][-1:]
            _refuse_inner_end({*closing, *self.facts.turn_ends}, written)
        return settled

    def _settle(self, text: str, start: int, end: int) -> tuple[int, int]:
        """A tagged span without the generation prompt in it, ending at its end-of-turn token."""
        for before in (self.facts.generation_prompt, self.facts.header):
            if text.startswith(before, start):
                start += len(before)
                break
        inside = list(self._specials.finditer(text, start, end))
        if inside and not text[inside[-1].end() : end].strip():
            return start, inside[-1].end()
        following = self._specials.match(text, end)
        if following and following.group() not in self.facts.generation_prompt:
            end = following.end()
        return start, end

    # -- spans from frames ----------------------------------------------------------------------

    def _framed_spans(
        self, conversation: Conversation, turns: list[dict], text: str
    ) -> Generator[Sequence[dict], str, Spans]:
        frames, ends = yield from self._frames(conversation, turns)
        delimiters = [end + frame for end, frame in zip(ends, frames[1:], strict=True)]
        if not text.startswith(frames[0]) or not text.endswith(delimiters[-1]):
            raise RowError("chat template changes other text with the assistant's")
        first, stop = len(frames[0]), len(text) - len(delimiters[-1])
        left: list[int] = []
        right: list[int] = []
        place = first
        for delimiter in delimiters[:-1]:
            place = text.find(delimiter, place, stop)
            if place < 0:
                raise RowError("chat template changes other text with the assistant's")
            left.append(place)
            place += len(delimiter)
        place = stop
        for delimiter in reversed(delimiters[:-1]):
            place = text.rfind(delimiter, first, place)
            right.insert(0, place)
        if left != right or stop < (left[-1] + len(delimiters[-2]) if left else first):
            raise RowError("the assistant's text repeats the text around it")
        starts = [first] + [at + len(d) for at, d in zip(left, delimiters[:-1], strict=True)]
        return tuple(
            (start, at + len(end))
            for start, at, end in zip(starts, [*left, stop], ends, strict=True)
        )

    def _frames(
        self, conversation: Conversation, turns: list[dict]
    ) -> Generator[Sequence[dict], str, tuple[list, list]]:
        """Frames before, between and after the n turns (n + 1), and the n end-of-turn tokens."""
        after_tool = _follow_tool_results(conversation)
        self._refuse_prompt_in_other_text(conversation, after_tool=any(after_tool))
        marked, turn_markers = mark_assistant(conversation)
        text = yield marked
        extents = _extents(text, turn_markers)
        frames, ends, place = [], [], 0
        for number, (first, last) in enumerate(extents):
            frames.append(self._frame(text[place:first], number, after_tool[number]))
            stop = extents[number + 1][0] if number + 1 < len(extents) else len(text)
            end = end_of_turn(text, last, stop, specials=self._specials, ends=self.facts.turn_ends)
            if end is None or end.group() in self.facts.generation_prompt:
                raise RowError("no special token ends the assistant's turn", f"turn {number}")
            _refuse_inner_end({end.group(), *self.facts.turn_ends}, strings(turns[number]))
            ends.append(end.group())
            place = end.end()
        frames.append(text[place:])
        # A template without a generation prompt closes the user's turn with it.
        asked = sum(m["role"] == "user" for m in _after_last_turn(conversation))
        if frames[-1].count(self.facts.header) > (asked if self.facts.closes_user else 0):
            raise RowError("an assistant turn goes on after its end-of-turn token")
        used = sum(turn_markers, [])
        start = used[0][:9] if used else ""  # all begin alike: most frames need one look
        if any(start in frame and any(m in frame for m in used) for frame in frames):
            raise RowError("the assistant's text is rendered outside its turn")
        return frames, ends

    def _frame(self, text: str, number: int, after_tool: bool) -> str:
        """text, which ends at the assistant's first string, cut where the model starts writing."""
        prompt, header, closing = (
            self.facts.generation_prompt, self.facts.header, self.facts.after_tool
        )  # fmt: skip
        if after_tool and closing != prompt:
            if closing is None or closing not in text:
                raise RowError("nothing marks where the turn after a tool result starts")
            return text[: text.rindex(closing) + len(closing)]
        if text.count(header) > 1:
            raise RowError("other text contains the generation prompt", f"before turn {number}")
        if prompt in text:
            return text[: text.index(prompt) + len(prompt)]
        if header not in text:
            raise RowError("no generation prompt before the assistant's turn", f"turn {number}")
        # A reasoning template may open a think block in the prompt and leave it out of past turns:
        # the turn then starts right after the rest of the prompt.
        place = text.index(header) + len(header)
        if text[place:].lstrip().startswith(prompt[len(header) :].strip()):
            raise RowError("the think block is not the generation prompt's", f"turn {number}")
        return text[:place]

    def _refuse_prompt_in_other_text(
        self, conversation: Conversation, *, after_tool: bool
    ) -> None:
        prompts = {self.facts.header}
        if after_tool and self.facts.after_tool:
            prompts.add(self.facts.after_tool)
        for message in conversation.messages:
            if message["role"] != "assistant":
                if any(prompt in text for prompt in prompts for text in strings(message)):
                    raise RowError("other text contains the generation prompt", message["role"])

    # -- spans of text that is rendered already ---------------------------------------------------

    def _find_turns(self, text: str) -> Spans:
        """Turns start after the generation prompt and end with the first end-of-turn token."""
        facts = self.facts
        closing = facts.after_tool
        if closing and closing != facts.generation_prompt and closing in text:
            raise RowError("turns after tool results need spans in rendered text", closing)
        ends = special_pattern(facts.turn_ends)
        spans: list[tuple[int, int]] = []
        start = text.find(facts.header)
        while start >= 0:
            start += len(facts.header)
            opened = facts.generation_prompt[len(facts.header) :]
            start += len(opened) if text.startswith(opened, start) else 0
            following = text.find(facts.header, start)
            end = ends.search(text, start, len(text) if following < 0 else following)
            if end is None:
                raise RowError("no token ends the assistant's turn", _around(text, start))
            spans.append((start, end.end()))
            start = following
        if not spans:
            raise RowError("text has no assistant header", f"expected {facts.header!r}")
        return tuple(spans)


def _tools(tools: tuple[dict, ...] | None) -> Any:
    return list(tools) if tools else None


def _special_texts(tokenizer) -> set[str]:
    special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    return special | {text for text in tokenizer.all_special_tokens if text}


def _unicode_form(tokenizer) -> str | None:
    """The canonical normal form the tokenizer applies; None for any other normaliser."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    kind = type(normalizer).__name__
    return kind if kind in ("NFC", "NFD") else None


def _extents(text: str, turn_markers: list[list[str]]) -> list[tuple[int, int]]:
    """From the first through the last marker of each turn, in the marked render."""
    extents, place = [], 0
    for number, markers in enumerate(turn_markers):
        found = [(text.find(marker, place), len(marker)) for marker in markers]
        found = [(at, size) for at, size in found if at >= 0]
        if not markers:
            raise RowError("an assistant turn has no text", f"turn {number}")
        if not found:
            raise RowError("an assistant turn is not rendered", f"turn {number}")
        place = sum(max(found))
        extents.append((min(found)[0], place))
    return extents


def _after_last_turn(conversation: Conversation) -> list[dict]:
    roles = [message["role"] for message in conversation.messages]
    return list(conversation.messages[len(roles) - roles[::-1].index("assistant") :])


def _follow_tool_results(conversation: Conversation) -> list[bool]:
    """For each assistant turn, whether a tool result stands directly before it."""
    before = [None, *conversation.messages[:-1]]
    return [
        previous is not None and previous["role"] == "tool"
        for previous, message in zip(before, conversation.messages, strict=True)
        if message["role"] == "assistant"
    ]


def _refuse_inner_end(closing: Iterable[str], written: list[str]) -> None:
    """The model stops at its first end-of-turn token: text with one inside was never written."""
    for end in closing:
        if any(end in string for string in written):
            raise RowError("the assistant's text contains the end-of-turn token", end)


def _around(text: str, place: int) -> str:
    return f"after {text[max(0, place - 40) : place]!r}"
