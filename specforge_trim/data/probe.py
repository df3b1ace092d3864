"""Ask a chat template how it writes the assistant's turns, with small conversations.

One job: facts about a template, found once. No row is looked at here.

    generation_prompt   what add_generation_prompt adds: the model writes after it
    after_tool          the same where a tool result came last; some templates add nothing there,
                        and the model goes on after the tag that closes the result
    turn_ends           special tokens that end a turn of the assistant
    closes_user         add_generation_prompt adds nothing: the user's turn ends with the prompt
    tags                how reasoning and tool calls are set apart (supervision.py)
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from specforge_trim.data.markers import markers
from specforge_trim.data.messages import REASONING_KEYS
from specforge_trim.data.records import RowError
from specforge_trim.data.supervision import PartTags

_MARKUP = re.compile(r"(\s*<[^<>]*>)+\s*")
_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_INLINE_REASONING = ("<think>", "</think>")  # what models write into their content by themselves


@dataclass(frozen=True)
class TemplateFacts:
    """See the module's first lines."""

    generation_prompt: str
    after_tool: str | None
    turn_ends: frozenset[str]
    closes_user: bool
    tags: PartTags

    @property
    def header(self) -> str:
        return self.tags.header


def probe(
    render: Callable[..., str], *, specials: frozenset[str], eos: str | None
) -> TemplateFacts:
    """The facts of a template.

    render(messages, *, generation_prompt=False) gives text or raises RowError.
    Raises RowError when there is no place from which the assistant's text could be told.
    """
    asker = _Asker(render, specials)
    prompt, closes_user = asker.generation_prompt()
    header = _without_markup(prompt, asker.pattern)
    ends = asker.turn_ends() | ({eos} if eos in specials else set())
    reasoning = asker.reasoning_tags(header) or _INLINE_REASONING
    after_tool, calls, call_end = asker.tool_flow(prompt, header, frozenset(ends))
    ends |= {call_end} if call_end else set()
    return TemplateFacts(
        generation_prompt=prompt,
        after_tool=after_tool,
        turn_ends=frozenset(ends),
        closes_user=closes_user,
        tags=PartTags(header, reasoning, calls, specials),
    )


def special_pattern(specials: frozenset[str]) -> re.Pattern:
    """Matches any special token, the longest first; nothing when there are none."""
    texts = sorted(specials, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def end_of_turn(
    text: str, start: int, stop: int, *, specials: re.Pattern, ends: frozenset[str]
) -> re.Match | None:
    """The token that ends the turn whose text ends at start, looked for before stop.

    It is the first special token, unless closing tags stand before a known end: of special tokens
    in a row (space between them at most) the first known one counts.
    """
    first = last = None
    for found in specials.finditer(text, start, stop):
        if last is not None and text[last.end() : found.start()].strip():
            break
        if found.group() in ends:
            return found
        first, last = first or found, found
    return first


class _Asker:
    """Renders small conversations; what a template refuses to render is not known of it."""

    def __init__(self, render: Callable[..., str], specials: frozenset[str]):
        self.render = render
        self.specials = specials
        self.pattern = special_pattern(specials)
        self.question, self.answer, *self.extra = markers("", 6)
        self.ask = {"role": "user", "content": self.question}
        self.tell = {"role": "assistant", "content": self.answer}

    def tried(self, messages: list[dict], *, generation_prompt: bool = False) -> str:
        """The render, or "" where the template refuses."""
        try:
            return self.render(messages, generation_prompt=generation_prompt)
        except RowError:
            return ""

    def generation_prompt(self) -> tuple[str, bool]:
        """The prompt, and whether it closes the user's turn.

        A template that adds nothing (Mistral's) has the text after the question in its place.
        """
        bare = self.render([self.ask])
        prompted = self.render([self.ask], generation_prompt=True)
        whole = self.render([self.ask, self.tell])
        if whole.count(self.answer) != 1:
            raise RowError("the assistant's content is not rendered exactly once")
        if not self.pattern.search(whole[whole.index(self.answer) :]):
            raise RowError("no special token ends the assistant's turn")
        if not prompted.startswith(bare):
            raise RowError("add_generation_prompt changes more than the end of the render")
        prompt = prompted[len(bare) :] or bare[bare.rindex(self.question) + len(self.question) :]
        if not prompt.strip():
            raise RowError("nothing marks where the assistant starts to write")
        return prompt, prompted == bare

    def turn_ends(self) -> set[str]:
        """Of a turn in the middle and of the last one, which may differ."""
        again = {"role": "assistant", "content": self.extra[0]}
        ends = set()
        for messages in ([self.ask, self.tell], [self.ask, self.tell, self.ask, again]):
            text = self.tried(messages)
            for content in (self.answer, self.extra[0]):
                found = self.pattern.search(text, text.find(content)) if content in text else None
                ends |= {found.group()} if found else set()
        return ends

    def reasoning_tags(self, header: str) -> tuple[str, str] | None:
        fields = dict(zip(REASONING_KEYS, self.extra, strict=False))
        text = self.tried([self.ask, self.tell | fields])
        shown = [marker for marker in fields.values() if marker in text]
        if len(shown) != 1 or text.count(shown[0]) != 1:
            return None
        before, _, after = text.partition(shown[0])
        if header not in before or self.answer not in after:
            return None
        opening = before[before.rindex(header) + len(header) :].strip()
        between = after[: after.index(self.answer)]
        closing = self.first_tag(between)
        return (opening, closing) if opening and closing else None

    def tool_flow(
        self, prompt: str, header: str, ends: frozenset[str]
    ) -> tuple[str | None, str | None, str | None]:
        """after_tool, the opening text of tool calls, the token that ends a turn with calls."""
        name, value, result = self.extra[:3]
        function = {"name": name, "arguments": {"value": value}}
        call = {"type": "function", "id": "call00001", "function": function}
        told = self.tell | {"tool_calls": [call]}
        answered = {"role": "tool", "content": result, "tool_call_id": "call00001", "name": name}
        text = self.tried([self.ask, told, answered], generation_prompt=True)
        if text.count(result) != 1:
            return prompt, None, None
        tail = text[text.index(result) + len(result) :]
        after_tool = prompt if prompt in tail else self.last_tag(tail)
        start = text.find(value) + len(value)
        found = end_of_turn(text, start, len(text), specials=self.pattern, ends=ends)
        call_end = found.group() if found and value in text else None
        return after_tool, self.calls_opening(text, name, header), call_end

    def calls_opening(self, text: str, name: str, header: str) -> str | None:
        if self.answer not in text or name not in text:
            return None
        between = text[text.index(self.answer) + len(self.answer) : text.index(name)]
        if header in between:  # calls are a message of their own
            return between[between.index(header) :]
        return self.first_tag(between)

    def first_tag(self, text: str) -> str | None:
        found = [m for m in (self.pattern.search(text), _TAG.search(text)) if m]
        return min(found, key=lambda match: match.start()).group() if found else None

    def last_tag(self, text: str) -> str | None:
        """The last tag and what follows it; None when text has no tag."""
        places = [m.start() for p in (self.pattern, _TAG) for m in p.finditer(text)]
        return text[max(places) :] if places else None


def _without_markup(prompt: str, specials: re.Pattern) -> str:
    """The generation prompt without a think block that it opens."""
    for cut, char in enumerate(prompt):
        left_out = prompt[cut:]
        if char == "<" and prompt[:cut].strip() and _MARKUP.fullmatch(left_out):
            if not specials.search(left_out):
                return prompt[:cut]
    return prompt
