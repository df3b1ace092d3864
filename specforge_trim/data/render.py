"""Render messages as apply_chat_template does, without what that spends on foreign objects.

One job: text of a chat template, for many rows. transformers rebuilds every message before each
render, since callers may pass it anything; rows here are decoded JSON, which that leaves as it is.
So the template that transformers has compiled (its sandbox, filters and globals) is called
directly. Nothing rests on that reading of its code: the first time a message with some set of keys
is seen, both ways are rendered, and where they differ apply_chat_template stays in use.
"""

import re
from collections.abc import Callable, Sequence

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Renderer:
    """A tokenizer's chat template as a function of messages and tools, decoded JSON both.

    The template and the special tokens are those the tokenizer has when this is made. What the
    template raises is raised.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._same: dict[tuple, bool] = {}  # keys of a message -> both ways gave the same
        self._programs: dict[str, Callable[[dict], str] | None] = {}
        self._tokens = dict(tokenizer.special_tokens_map)
        named = isinstance(tokenizer.chat_template, dict)  # one for tools, one without
        self._source = None if named else tokenizer.chat_template
        self._tagged: dict[str, bool] = {}

    def source(self, tools: Sequence[dict] | None) -> str:
        """The text of the template that rows with these tools are rendered by."""
        if self._source is not None:
            return self._source
        return self._tokenizer.get_chat_template(tools=list(tools) if tools else None)

    def has_generation_tags(self, tools: Sequence[dict] | None) -> bool:
        source = self.source(tools)
        if source not in self._tagged:
            self._tagged[source] = _GENERATION_TAG.search(source) is not None
        return self._tagged[source]

    def __call__(
        self,
        messages: Sequence[dict],
        tools: Sequence[dict] | None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        keys = [tuple(message) for message in messages]
        if all(map(self._same.get, keys)):
            return self._directly(messages, tools, generation_prompt)
        text = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
        if any(key not in self._same for key in keys):
            same = self._gives(text, messages, tools, generation_prompt)
            self._same.update((key, same) for key in keys if key not in self._same)
        return text

    def _gives(self, text: str, messages, tools, generation_prompt: bool) -> bool:
        try:
            return self._directly(messages, tools, generation_prompt) == text
        except Exception:  # any reason is enough not to go this way
            return False

    def _directly(self, messages, tools, generation_prompt: bool) -> str:
        source = self.source(tools)
        if source not in self._programs:
            self._programs[source] = _program(source)
        program = self._programs[source]
        if program is None:
            raise ValueError("this version of transformers shows no compiled template")
        return program(
            {
                "messages": list(messages),
                "tools": list(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": generation_prompt,
                **self._tokens,
            }
        )


def _program(source: str) -> Callable[[dict], str] | None:
    """The function from a template's variables to its text; None where there is none to call."""
    from transformers.utils import chat_template_utils as utils

    compiling = getattr(utils, "_compile_jinja_template", None)
    alias = getattr(utils, "_alias_reasoning_fields", list)
    if compiling is None:
        return None
    template = compiling(source)
    environment, name, blocks = template.environment, template.name, template.blocks
    shared = dict(template.globals)

    def run(variables: dict) -> str:
        variables["messages"] = alias(variables["messages"])
        context = environment.context_class(environment, shared | variables, name, blocks)
        return environment.concat(template.root_render_func(context))

    return run
