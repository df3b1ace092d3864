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

import re
import unicodedata
from dataclasses import dataclass

from specforge_trim.data.conversation import Conversation, RowError

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MARKUP = re.compile(r"(\s*<[^<>]*>)+\s*")
_KEPT_KEYS = frozenset({"role", "type", "id", "tool_call_id", "name"})


@dataclass(frozen=True)
class Rendered:
    """text of the conversation; spans: ascending character ranges that the assistant wrote."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A tokenizer's chat template, probed once.

    Raises ValueError when the tokenizer has no template, or its template has no place from which
    the assistant's text could be told.
    """

    def __init__(self, tokenizer):
        if not tokenizer.chat_template:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat_template; use the target's own "
                "instruction-tuned tokenizer or set the template"
            )
        self._tokenizer = tokenizer
        self._normal_form = _unicode_form(tokenizer)
        self._specials = _special_texts(tokenizer)
        self._special_pattern = re.compile(
            "|".join(re.escape(text) for text in sorted(self._specials, key=len, reverse=True))
            or r"(?!)"
        )
        try:
            self.generation_prompt = self._probe()
        except RowError as error:
            raise ValueError(f"chat template of {tokenizer.name_or_path!r}: {error}") from None

    def render(self, conversation: Conversation) -> Rendered:
        """Render the whole conversation once and find the assistant's spans; raises RowError."""
        if not any(message["role"] == "assistant" for message in conversation.messages):
            raise RowError("no assistant message", f"{len(conversation.messages)} messages")
        text = self._apply(conversation.messages, conversation.tools)
        template = self._tokenizer.get_chat_template(tools=_tools(conversation.tools))
        if _GENERATION_TAG.search(template):
            spans = self._tagged_spans(conversation, template, text)
        else:
            spans = self._framed_spans(conversation, text)
        for start, end in spans:
            if not self._special_pattern.sub("", text[start:end]).strip():
                raise RowError("assistant turn renders empty", _around(text, start))
        return Rendered(text, spans)

    # -- rendering ------------------------------------------------------------------------------

    def _apply(self, messages, tools, *, generation_prompt: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=_tools(tools),
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except Exception as error:  # a template is a foreign program: it may raise anything
            detail = f"{type(error).__name__}: {error}".splitlines()[0]
            raise RowError("chat template refuses the conversation", detail) from None
        return self._normalise(text)

    def _normalise(self, text: str) -> str:
        """The text as the tokenizer sees it, so that its tokens spell it byte for byte."""
        return unicodedata.normalize(self._normal_form, text) if self._normal_form else text

    def _probe(self) -> str:
        """The text after which the model starts to write, from a one-question conversation.

        It is what add_generation_prompt adds. A template that adds nothing (Mistral's) closes the
        user's turn with it instead, so the text after the question serves.
        """
        question, answer = _markers("", 2)
        ask = {"role": "user", "content": question}
        bare = self._apply([ask], None)
        prompted = self._apply([ask], None, generation_prompt=True)
        whole = self._apply([ask, {"role": "assistant", "content": answer}], None)
        if whole.count(answer) != 1:
            raise RowError("the assistant's content is not rendered exactly once")
        if not self._special_pattern.search(whole[whole.index(answer) :]):
            raise RowError("no special token ends the assistant's turn")
        if not prompted.startswith(bare):
            raise RowError("add_generation_prompt changes more than the end of the render")
        prompt = prompted[len(bare) :] or bare[bare.rindex(question) + len(question) :]
        if not prompt.strip():
            raise RowError("nothing marks where the assistant starts to write")
        return prompt

    # -- spans from generation tags -------------------------------------------------------------

    def _tagged_spans(self, conversation, template: str, text: str) -> tuple[tuple[int, int], ...]:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, indices = render_jinja_template(
            conversations=[list(conversation.messages)],
            tools=_tools(conversation.tools),
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        if self._normalise(rendered[0]) != text:
            raise RowError("chat template renders differently each time")
        spans: list[tuple[int, int]] = []
        for start, end in indices[0]:
            start, end = (self._normal_index(rendered[0], place) for place in (start, end))
            if spans and start < spans[-1][1]:
                raise RowError("generation tags of the chat template overlap")
            if spans and start == spans[-1][1]:
                start = spans.pop()[0]
            if start < end:
                spans.append((start, end))
        if not spans:
            raise RowError("generation tags of the chat template cover nothing")
        settled = tuple(self._settle(text, start, end) for start, end in spans)
        turns = sum(message["role"] == "assistant" for message in conversation.messages)
        strings = [s for turn in range(turns) for s in _strings(conversation, turn)]
        for start, end in settled:
            closing = [m.group() for m in self._special_pattern.finditer(text, start, end)][-1:]
            _refuse_inner_end(closing, strings)
        return settled

    def _normal_index(self, raw: str, index: int) -> int:
        head = self._normalise(raw[:index])
        if head + self._normalise(raw[index:]) != self._normalise(raw):
            raise RowError("unicode normalisation joins the assistant's text with its frame")
        return len(head)

    def _settle(self, text: str, start: int, end: int) -> tuple[int, int]:
        """A tagged span without the generation prompt in it, ending at its end-of-turn token."""
        if text.startswith(self.generation_prompt, start):
            start += len(self.generation_prompt)
        inside = list(self._special_pattern.finditer(text, start, end))
        if inside and not text[inside[-1].end() : end].strip():
            return start, inside[-1].end()
        following = self._special_pattern.match(text, end)
        if following and following.group() not in self.generation_prompt:
            end = following.end()
        return start, end

    # -- spans from frames ----------------------------------------------------------------------

    def _framed_spans(self, conversation, text: str) -> tuple[tuple[int, int], ...]:
        frames, ends = self._frames(conversation)
        delimiters = [end + frame for end, frame in zip(ends, frames[1:], strict=True)]
        if not text.startswith(frames[0]) or not text.endswith(delimiters[-1]):
            raise RowError("chat template changes other text with the assistant's")
        first, stop = len(frames[0]), len(text) - len(delimiters[-1])
        left, right = [], []
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

    def _frames(self, conversation) -> tuple[list[str], list[str]]:
        """Frames before, between and after the n turns (n + 1), and the n end-of-turn tokens."""
        marked, turns = _mark_assistant(conversation)
        text = self._apply(marked, conversation.tools)
        extents, place = [], 0
        for number, markers in enumerate(turns):
            found = [(text.find(marker, place), len(marker)) for marker in markers]
            found = [(at, size) for at, size in found if at >= 0]
            if not found:
                raise RowError("an assistant turn is not rendered", f"turn {number}")
            place = sum(max(found))
            extents.append((min(found)[0], place))
        frames, ends, place = [], [], 0
        for number, (first, last) in enumerate(extents):
            frames.append(self._frame(text[place:first], number))
            stop = extents[number + 1][0] if number + 1 < len(extents) else len(text)
            end = self._special_pattern.search(text, last, stop)
            if end is None or end.group() in self.generation_prompt:
                raise RowError("no special token ends the assistant's turn", f"turn {number}")
            _refuse_inner_end([end.group()], _strings(conversation, number))
            ends.append(end.group())
            place = end.end()
        frames.append(text[place:])
        if any(marker in frame for frame in frames for marker in sum(turns, [])):
            raise RowError("the assistant's text is rendered outside its turn")
        return frames, ends

    def _frame(self, text: str, number: int) -> str:
        """text, which ends at the assistant's first string, cut where the model starts writing."""
        prompt = self.generation_prompt
        if text.count(prompt) == 1:
            return text[: text.index(prompt) + len(prompt)]
        if text.count(prompt) > 1:
            raise RowError("other text contains the generation prompt", f"before turn {number}")
        # A reasoning template may open a think block in the prompt and leave it out of past turns:
        # the turn then starts at the assistant's text, right after the rest of the prompt.
        for cut in range(len(prompt) - 1, 0, -1):
            left_out = prompt[cut:]
            if text.endswith(prompt[:cut]) and text.count(prompt[:cut]) == 1:
                if _MARKUP.fullmatch(left_out) and not self._special_pattern.search(left_out):
                    return text
        raise RowError("no generation prompt before the assistant's turn", f"turn {number}")


def _tools(tools: tuple[dict, ...] | None) -> list[dict] | None:
    return list(tools) if tools else None


def _special_texts(tokenizer) -> set[str]:
    special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    return special | {text for text in tokenizer.all_special_tokens if text}


def _unicode_form(tokenizer) -> str | None:
    """The canonical normal form the tokenizer applies; None for any other normaliser."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    kind = type(normalizer).__name__
    return kind if kind in ("NFC", "NFD") else None


def _markers(avoid: str, count: int) -> list[str]:
    """Distinct digit strings that survive trimming, case changes and escaping, absent in avoid."""
    salt = 7305
    while f"{salt}90251" in avoid:
        salt += 1
    return [f"{salt}90251{index:05d}{salt}" for index in range(count)]


def _mark_assistant(conversation: Conversation) -> tuple[list[dict], list[list[str]]]:
    """The conversation with each string the assistant wrote replaced, and the markers per turn."""
    total = sum(_count(m) for m in conversation.messages if m["role"] == "assistant")
    supply = iter(_markers(repr(conversation.messages) + repr(conversation.tools), total))
    marked, turns = [], []
    for message in conversation.messages:
        if message["role"] == "assistant":
            used: list[str] = []
            message = _replace(message, supply, used)
            turns.append(used)
        marked.append(message)
    return marked, turns


def _replace(value, supply, used: list[str]):
    if isinstance(value, str):
        used.append(next(supply))
        return used[-1]
    if isinstance(value, list):
        return [_replace(item, supply, used) for item in value]
    if isinstance(value, dict):
        return {
            key: item if key in _KEPT_KEYS else _replace(item, supply, used)
            for key, item in value.items()
        }
    return value


def _count(value) -> int:
    if isinstance(value, dict):
        return sum(_count(item) for key, item in value.items() if key not in _KEPT_KEYS)
    if isinstance(value, list):
        return sum(_count(item) for item in value)
    return int(isinstance(value, str))


def _strings(conversation: Conversation, turn: int) -> list[str]:
    """Every string of an assistant turn, names included."""
    message = [m for m in conversation.messages if m["role"] == "assistant"][turn]
    found, stack = [], [message]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, (list, dict)):
            stack.extend(value.values() if isinstance(value, dict) else value)
    return found


def _refuse_inner_end(closing: list[str], strings: list[str]) -> None:
    """The model stops at its first end-of-turn token: text with one inside was never written."""
    for end in closing:
        if any(end in string for string in strings):
            raise RowError("the assistant's text contains the end-of-turn token", end)


def _around(text: str, place: int) -> str:
    return f"after {text[max(0, place - 40) : place]!r}"
