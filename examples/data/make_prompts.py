"""Build the prompts of the example data, and choose among the answers the target wrote to them.

    python make_prompts.py prompts WORK --human-eval HumanEval.jsonl.gz [--per-section 2]
    specforge-trim regenerate ...          (README.md has all commands and the number of rounds)
    python make_prompts.py select WORK --tokenizer TARGET --out .

Long prompts are pages of `pydoc_data.topics`, cut at their section headings, each with a question
about it. No paragraph of a page held out for evaluation occurs in a training prompt: pages that
share one count as one page.
"""

import argparse
import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

HELD_OUT_PAGES = (
    "binary",
    "calls",
    "comparisons",
    "dict",
    "identifiers",
    "import",
    "integers",
    "objects",
    "operator-summary",
    "raise",
    "strings",
    "subscriptions",
)
LONG_PAGES = ("debugger", "formatstrings", "string-methods", "typesseq")
LONG_CHARS = 17_200  # first part of a long page: a prompt above 4,000 tokens
HELD_OUT_TASKS = tuple(range(4, 100, 8))
HEADING = re.compile(r'\n(?=[^\n]+\n(?:\*{3,}|={3,}|-{3,}|~{3,}|\^{3,}|"{3,})\n)')
CODE = re.compile(r'"([A-Za-z_][\w.]*(?:\(\))?)"')
LONG_TOKENS = 95_000  # of all long-prompt conversations together
MIN_CHARS, MAX_CHARS = 1500, 3200  # of a section: about 350 to 800 tokens

# The question comes last, marked as one first: otherwise this target tends to answer in loops.
FRAMES = (
    "Here is a part of the Python documentation.\n\n{text}\n\nQuestion: {question}",
    "{text}\n\n{question}",
)
QUESTIONS = (
    "Which rule does the text give? Answer in one or two sentences.",
    "Summarise the text in two short sentences.",
    "What should a programmer remember from this? Answer in two sentences.",
    "Tell a beginner the most important point in one or two sentences.",
    "What problem does this feature solve? Answer in two sentences.",
    "In two sentences, what does this part of the documentation describe?",
    "What is the main idea of the text? Answer in one sentence.",
)
NAME_QUESTIONS = (
    'What does the text say about "{name}"? Answer in two sentences.',
    'When would a programmer need "{name}"? Answer in two sentences.',
)
TASKS = (
    "Complete this Python function.\n\n```python\n{prompt}```",
    "Write this Python function. Reply with the code only.\n\n```python\n{prompt}```",
    "```python\n{prompt}```\n\nWrite this function, then explain in one sentence what it does.",
    "```python\n{prompt}```\n\nExplain in two or three sentences how to write this function.",
)


def paragraphs(text: str) -> set[str]:
    """Its paragraphs of some length, white space normalised."""
    found = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return {part for part in found if len(part) >= 100}


def page_groups() -> dict[str, str]:
    """Page -> name of its group; pages that share a paragraph are in one group."""
    parent = {page: page for page in topics}

    def root(page: str) -> str:
        while parent[page] != page:
            page = parent[page]
        return page

    owner: dict[str, str] = {}
    for page, text in topics.items():
        for part in paragraphs(text):
            parent[root(page)] = root(owner.setdefault(part, page))
    return {page: root(page) for page in topics}


def sections(text: str, first_chars: int = MAX_CHARS) -> list[str]:
    """Cut a page at its headings and long parts at blank lines; join neighbours that are short.

    With a larger `first_chars` the first section has at least that many characters.
    """
    pieces: list[str] = []
    for part in HEADING.split("\n" + text):
        blocks = re.split(r"\n\n(?=\S)", part.strip("\n"))
        pieces += [""] + blocks  # "" = a section starts here
    joined = [""]
    fresh = False
    for piece in pieces:
        long = len(joined) == 1 and first_chars > MAX_CHARS
        size = len(joined[-1])
        if not piece:
            fresh = size >= (first_chars if long else MIN_CHARS)
        elif fresh or (size >= first_chars if long else size + len(piece) > MAX_CHARS):
            joined.append(piece)
            fresh = False
        else:
            joined[-1] = f"{joined[-1]}\n\n{piece}".strip("\n")
    return [part for part in joined if part]


def ask(text: str, key: str) -> list[str]:
    """User messages about a text, in the order in which to try them; `key` varies the order."""
    seed = int(hashlib.sha256(key.encode()).hexdigest(), 16)
    names = Counter(CODE.findall(text)).most_common(3)
    name = names[seed % len(names)][0] if names else "this"
    turn = seed % len(QUESTIONS)
    questions = QUESTIONS[turn:] + QUESTIONS[:turn] + NAME_QUESTIONS
    return [
        frame.format(text=text, question=question.format(name=name))
        for frame in FRAMES
        for question in questions
    ]


def long_prompts() -> list[dict]:
    """All candidates: {split, section, prompt}."""
    groups = page_groups()
    held_out = {groups[page] for page in HELD_OUT_PAGES}
    rows, seen = [], set()
    # Short pages first: a long page often repeats them.
    for page in sorted(topics, key=lambda page: (page not in LONG_PAGES, len(topics[page]))):
        split = "heldout" if groups[page] in held_out else "train"
        if split == "heldout" and page not in HELD_OUT_PAGES:
            continue
        if split == "heldout" and len(topics[page]) < 10_000:
            texts = [topics[page].strip()]
        else:
            texts = sections(topics[page], LONG_CHARS if page in LONG_PAGES else MAX_CHARS)
        for number, text in enumerate(texts):
            parts = paragraphs(text)
            if len(text) < MIN_CHARS or parts & seen:
                continue
            seen |= parts
            section = f"{page}/{number}"
            for prompt in ask(text, section):
                rows.append({"split": split, "section": section, "prompt": prompt})
    return rows


def task_prompts(human_eval: Path) -> list[dict]:
    """HumanEval tasks 0 to 99: {split, section, prompt}."""
    rows = []
    with gzip.open(human_eval, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file):
            if number < 100:
                task = json.loads(line)
                split = "heldout" if number in HELD_OUT_TASKS else "train"
                for frame in TASKS:
                    prompt = frame.format(prompt=task["prompt"])
                    rows.append({"split": split, "section": task["task_id"], "prompt": prompt})
    return rows


def read_lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


def candidates(work: Path, kind: str, human_eval: Path) -> list[dict]:
    """All prompts of a kind, those with a good answer as messages."""
    rows = long_prompts() if kind == "long_prompt" else task_prompts(human_eval)
    answered = {
        row["messages"][0]["content"]: row["messages"]
        for row in read_lines(work / f"{kind}.answers.jsonl")
    }
    return [{**row, "messages": answered.get(row["prompt"])} for row in rows]


def ask_more(work: Path, kind: str, rows: list[dict], per_section: int) -> int:
    """Add one more question for every section with too few good answers; say how many."""
    path = work / f"{kind}.prompts.jsonl"
    asked = read_lines(path)
    known = {row["messages"][0]["content"] for row in asked}
    sections: dict[str, list[dict]] = {}
    for row in rows:
        sections.setdefault(row["section"], []).append(row)
    new = []
    for group in sections.values():
        fresh = [row["prompt"] for row in group if row["prompt"] not in known]
        if fresh and sum(row["messages"] is not None for row in group) < per_section:
            new.append({"messages": [{"role": "user", "content": fresh[0]}]})
    write_lines(path, asked + new)
    return len(new)


def select(rows: list[dict], count_tokens: Callable[[list[dict]], int], limit: int) -> list[dict]:
    """The longest answer of each section, then second ones in training while `limit` tokens hold.

    Long answers, because a draft learns from the answers' tokens only.
    """
    sections: dict[str, list[dict]] = {}
    for row in rows:
        group = sections.setdefault(row["section"], [])
        if row["messages"] is not None:
            group.append(row)
    for group in sections.values():
        group.sort(key=lambda row: -len(row["messages"][1]["content"]))
    chosen = [group[0] for group in sections.values() if group]
    total = sum(count_tokens(row["messages"]) for row in chosen)
    second = [g[1] for g in sections.values() if len(g) > 1 and g[1]["split"] == "train"]
    second.sort(key=lambda row: -len(row["messages"][1]["content"]) / len(row["prompt"]))
    for row in second:
        total += count_tokens(row["messages"])
        if total > limit:
            break
        chosen.append(row)
    order = list(sections)
    return sorted(chosen, key=lambda row: order.index(row["section"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("prompts", "select"))
    parser.add_argument("work", type=Path, help="folder of prompts and answers")
    parser.add_argument("--human-eval", type=Path, required=True, help="HumanEval.jsonl.gz")
    parser.add_argument("--per-section", type=int, default=1, help="good answers wanted")
    parser.add_argument("--tokenizer", help="target folder, to count tokens (select)")
    parser.add_argument("--out", type=Path, help="folder of the data files (select)")
    args = parser.parse_args()
    for kind in ("long_prompt", "humaneval"):
        rows = candidates(args.work, kind, args.human_eval)
        if args.command == "prompts":
            new = ask_more(args.work, kind, rows, args.per_section)
            print(f"{kind}: {new} more prompts")
            continue
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)

        def count_tokens(messages: list[dict], tokenizer=tokenizer) -> int:
            return len(tokenizer.apply_chat_template(messages, return_dict=False))

        chosen = select(rows, count_tokens, LONG_TOKENS)
        for split in ("train", "heldout"):
            kept = [row for row in chosen if row["split"] == split]
            write_lines(
                args.out / f"{kind}.{split}.jsonl",
                [{"section": row["section"], "messages": row["messages"]} for row in kept],
            )
            tokens = sum(count_tokens(row["messages"]) for row in kept)
            print(f"{kind}.{split}: {len(kept)} conversations, {tokens} tokens")


if __name__ == "__main__":
    main()
