"""Catches: answers that depend on the batch's padding; a resume that asks again or loses rows; ids
that change with the order of rows; answers of earlier inputs or settings that are lost; memory
that grows with the data; degenerate answers kept; an end-of-turn invented for an answer that was
cut off."""

import contextlib
import json
import shutil
import tracemalloc

import pytest
import torch
from tiny import CHATML, save_tiny_target, tiny_messages, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from specforge_trim.verifier.answers import written as answer_files
from specforge_trim.verifier.answers.local import LocalAnswers
from specforge_trim.verifier.answers.regenerate import regenerate
from specforge_trim.verifier.answers.source import Answer, degenerate_reason

END_IDS = [2, *range(100, 130)]  # a random model meets one of so many soon
STRICT = "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no') }}{% endif %}" + CHATML


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = save_tiny_target(tmp_path_factory.mktemp("t"), tied=False, chat_template=STRICT)
    GenerationConfig(eos_token_id=END_IDS, pad_token_id=0).save_pretrained(folder)
    return folder


def write(path, conversations):
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in conversations))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(paths, out, target, **options):
    options = {"max_new_tokens": 12, "batch_size": 3, "dtype": torch.float32, **options}
    return regenerate(paths, out, LocalAnswers(target, **options), progress=False)


def greedy(model, ids, limit):
    """One token at a time, without cache, batch or padding."""
    answer = []
    while len(answer) < limit:
        logits = model(torch.tensor([ids + answer]), use_cache=False).logits[0, -1]
        token = int(logits.argmax())
        if token in END_IDS:
            return answer, True
        answer.append(token)
    return answer, False


@pytest.fixture
def prompts(tmp_path):
    rows = [tiny_messages(i, prompt_words=3 + 2 * i)[:1] for i in range(10)]
    return write(tmp_path / "prompts.jsonl", rows)


def test_answers_are_the_targets_own_greedy_ones(tmp_path, target, prompts):
    report = run([prompts], tmp_path / "out.jsonl", target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = tiny_tokenizer(STRICT)
    expected, dropped = [], 0
    for row in read(prompts):
        ids = tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_dict=False
        )
        with torch.inference_mode():
            answer, finished = greedy(model, ids, 12)
        text = tokenizer.decode(answer)
        found = Answer(tuple(answer), text, finished)
        if degenerate_reason(found, ids, tokenizer.decode(ids)):
            dropped += 1
        else:
            expected.append([*row["messages"], {"role": "assistant", "content": text}])
    assert len(expected) >= 3
    assert [row["messages"] for row in read(tmp_path / "out.jsonl")] == expected
    assert report.written == len(expected) and report.dropped.total() == dropped
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_every_text_turn_is_answered_in_its_new_context(tmp_path, target):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    user = [{"role": "user", "content": text} for text in ("abc", "fed cba", "dd")]
    rows = [
        [user[0], {"role": "assistant", "content": "OLD"}, user[1], call, user[2]],
        [user[1], {"role": "assistant", "content": "OLD"}, user[0]],
    ]
    run([write(tmp_path / "p.jsonl", rows)], tmp_path / "out.jsonl", target, max_new_tokens=40)
    both = read(tmp_path / "out.jsonl") + read(tmp_path / "out.jsonl.dropped")
    assert len(both) == 2 and "OLD" not in json.dumps(both)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = tiny_tokenizer(STRICT)
    turns = 0
    for row in both:
        for i, message in enumerate(row["messages"]):
            if message["role"] != "assistant" or "tool_calls" in message:
                continue
            ids = tokenizer.apply_chat_template(
                row["messages"][:i], add_generation_prompt=True, return_dict=False
            )
            with torch.inference_mode():
                answer, finished = greedy(model, ids, 40)
            assert finished and message["content"] == tokenizer.decode(answer)
            turns += 1
    assert turns >= 3
    kept = [[m["role"][0] for m in row["messages"]] for row in read(tmp_path / "out.jsonl")]
    assert all("".join(roles) in ("uauaua", "uaua") for roles in kept)


class Interrupt(Exception):
    pass


def count_requests(monkeypatch, *, stop_after=None):
    """Record every prompt the target is asked; raise after so many batches."""
    from specforge_trim.verifier.answers import local as module

    asked, batches, whole = [], [], module._Writer.answer

    def answer(self, prompts):
        if stop_after is not None and len(batches) == stop_after:
            raise Interrupt
        batches.append(1)
        asked.extend(map(tuple, prompts))
        return whole(self, prompts)

    monkeypatch.setattr(module._Writer, "answer", answer)
    return asked


def test_an_interrupted_run_goes_on(tmp_path, target, prompts, monkeypatch):
    run([prompts], tmp_path / "straight.jsonl", target)
    with monkeypatch.context() as patch:
        first = count_requests(patch, stop_after=2)
        with pytest.raises(Interrupt):
            run([prompts], tmp_path / "out.jsonl", target)
    assert len(first) == 6 and not (tmp_path / "out.jsonl").exists()
    with (tmp_path / "out.jsonl.partial").open("a") as file:
        file.write('{"id": "cut off in the mid')
    with monkeypatch.context() as patch:
        second = count_requests(patch)
        report = run([prompts], tmp_path / "out.jsonl", target)
    assert len(second) == 4 and not set(first) & set(second) and report.resumed == 6
    for name in ("", ".dropped"):
        straight = (tmp_path / f"straight.jsonl{name}").read_bytes()
        assert (tmp_path / f"out.jsonl{name}").read_bytes() == straight


def test_ids_follow_the_content_not_the_order(tmp_path, target, prompts, monkeypatch):
    out = tmp_path / "out.jsonl"
    run([prompts], out, target)
    rows = [row["messages"] for row in read(prompts)]
    asked = count_requests(monkeypatch)
    run([write(prompts, rows[::-1][:7])], out, target)  # another order, another filter
    assert asked == []
    run([write(prompts, [rows[9], tiny_messages(77)[:1]])], out, target)
    assert len(asked) == 1
    run([prompts], out, target, max_new_tokens=11)  # other settings, other answers
    assert len(asked) == 3


def ids_in(folder, *names):
    return {row["id"] for name in names if (folder / name).exists() for row in read(folder / name)}


def test_rows_of_earlier_inputs_and_settings_are_kept_and_found_again(
    tmp_path, target, prompts, monkeypatch, caplog
):
    out, kinds = tmp_path / "out.jsonl", ("out.jsonl", "out.jsonl.dropped")
    run([prompts], out, target)
    first = [(tmp_path / kind).read_bytes() for kind in kinds]
    all_ten = ids_in(tmp_path, *kinds)
    rows = [row["messages"] for row in read(prompts)]
    other = write(tmp_path / "other.jsonl", [rows[4], tiny_messages(77)[:1]])
    run([other], out, target)
    assert len(ids_in(tmp_path, *kinds)) == 2 and len(all_ten) == 10
    new = ids_in(tmp_path, *kinds) - all_ten
    assert ids_in(tmp_path, "out.jsonl.others") == all_ten - ids_in(tmp_path, *kinds)
    assert "9 rows of earlier runs are not of these requests" in caplog.text
    run([prompts], out, target, max_new_tokens=11)
    asked = count_requests(monkeypatch)
    report = run([prompts], out, target)
    assert asked == [] and report.resumed == 10
    assert [(tmp_path / kind).read_bytes() for kind in kinds] == first
    kept = ids_in(tmp_path, "out.jsonl.others")
    assert new < kept and len(kept) == 11 and not kept & all_ten


def test_a_stop_between_two_files_loses_no_row(tmp_path, target, prompts, monkeypatch):
    """Stopped before each file that takes its place, one run after the other."""
    out, kinds = tmp_path / "out.jsonl", ("out.jsonl", "out.jsonl.dropped", "out.jsonl.others")
    rows = [row["messages"] for row in read(prompts)]
    inputs = [write(tmp_path / "a.jsonl", rows[:6]), write(tmp_path / "b.jsonl", rows[4:8])]
    for path in inputs:
        run([path], out, target)
    whole, real = ids_in(tmp_path, *kinds), answer_files.replaced
    assert len(whole) == 8
    stopped = []
    for stop in range(6):
        left = [stop]

        class Stopping(real):
            def __exit__(self, kind, error, trace):
                if kind is None and not left[0]:  # noqa: B023
                    stopped.append(self.path.name)
                    super().__exit__(Interrupt, Interrupt(), None)
                    raise Interrupt
                left[0] -= kind is None  # noqa: B023
                super().__exit__(kind, error, trace)

        for path in inputs:
            left[0] = stop
            with monkeypatch.context() as patch, contextlib.suppress(Interrupt):
                patch.setattr(answer_files, "replaced", Stopping)
                run([path], out, target)
            assert ids_in(tmp_path, *kinds) == whole, (stop, stopped)
    assert set(kinds) <= set(stopped), stopped


class Echo:
    """Answers at once."""

    settings = "echo"

    def answer_all(self, todo, *, total, progress):
        for row_id, conversation in todo:
            total -= 1
            written = [*conversation.messages, {"role": "assistant", "content": "yes"}]
            yield {"id": row_id, "messages": written}
        assert total == 0


def test_memory_does_not_hold_the_conversations(tmp_path):
    """300 of 50 kB are 15 MB."""
    rows = [[{"role": "user", "content": f"{i} " + "ab " * 16_000}] for i in range(300)]
    path = write(tmp_path / "p.jsonl", rows)
    del rows
    tracemalloc.start()
    try:
        report = regenerate([path], tmp_path / "out.jsonl", Echo(), progress=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.written == 300 and (tmp_path / "out.jsonl").stat().st_size > 14e6
    assert peak < 3e6, f"{peak / 1e6:.1f} MB"


def test_answers_already_there_do_not_change_the_id(tmp_path, target, monkeypatch):
    out = tmp_path / "out.jsonl"
    messages = tiny_messages(3)
    run([write(tmp_path / "p.jsonl", [messages[:1]])], out, target)
    asked = count_requests(monkeypatch)
    other = [messages[0], {**messages[1], "content": "x"}]
    run([write(tmp_path / "p.jsonl", [messages])], out, target)
    run([write(tmp_path / "p.jsonl", [other])], out, target)
    assert asked == []


def test_refusals_are_counted_with_their_reason(tmp_path, target):
    bad = [{"role": "user", "content": "bad"}]
    long = [{"role": "user", "content": "a" * 300}]
    good = tiny_messages(1, prompt_words=3)[:1]
    path = write(tmp_path / "p.jsonl", [bad, long, good, [{"role": "system", "content": "x"}]])
    with path.open("a") as file:
        file.write("{not json\n")
    report = run([path], tmp_path / "out.jsonl", target, max_length=200)
    reasons = {row["dropped"].split(":")[0] for row in read(tmp_path / "out.jsonl.dropped")}
    assert {"template", "too long"} <= reasons
    assert [bad.source.rpartition(":")[2] for bad in report.bad_rows] == ["4", "5"]


def test_the_input_is_never_overwritten(tmp_path, target, prompts):
    before = prompts.read_text()
    link = tmp_path / "link.jsonl"
    link.symlink_to(prompts)
    for out in (prompts, link):
        with pytest.raises(ValueError, match="one of the input files"):
            run([prompts], out, target)
    assert prompts.read_text() == before


FOREIGN = [b'{"messages": []}\n', b"\xff\xfe\n", b"[" * 99_999, b'{"id": 3, "messages": 1}', b"\n"]


@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_of_somebody_else_is_never_overwritten(tmp_path, target, prompts, content):
    out = tmp_path / "out.jsonl"
    content = b'{"id": "a", "messages": []}\n' + content
    out.write_bytes(content)
    with pytest.raises(
        ValueError, match="out.jsonl exists, and regenerate did not write its line 2"
    ):
        run([prompts], out, target)
    assert out.read_bytes() == content


def test_a_partial_file_cut_inside_a_character_is_read(tmp_path, target, prompts):
    (tmp_path / "out.jsonl.partial").write_bytes(b'{"id": "a", "messages": ["\xc3')
    assert run([prompts], tmp_path / "out.jsonl", target).written > 0


def test_nothing_usable_is_an_error(tmp_path, target):
    path = write(tmp_path / "p.jsonl", [[{"role": "system", "content": "x"}]])
    with pytest.raises(ValueError, match="p.jsonl:1"):
        run([path], tmp_path / "out.jsonl", target)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        run([path], tmp_path / "out.jsonl", target, max_new_tokens=0)


def stripped(target, folder, *tokens, **settings):
    """The target with a tokenizer that lacks some tokens, and other model settings."""
    shutil.copytree(target, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for token in tokens:
        setattr(tokenizer, token, None)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_without_a_pad_token_the_first_of_several_end_tokens_fills_up(tmp_path, target, prompts):
    bare = stripped(target, tmp_path / "bare", "pad_token")
    assert AutoTokenizer.from_pretrained(bare).pad_token_id is None and len(END_IDS) > 1
    run([prompts], tmp_path / "one.jsonl", target)
    run([prompts], tmp_path / "two.jsonl", bare)
    one, two = read(tmp_path / "one.jsonl"), read(tmp_path / "two.jsonl")
    assert [row["messages"] for row in one] == [row["messages"] for row in two] != []


def test_a_target_without_any_end_token_is_refused(tmp_path, target, prompts):
    endless = stripped(target, tmp_path / "t", "pad_token", "eos_token", eos_token_id=None)
    (endless / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="no eos_token_id: its answers never end"):
        run([prompts], tmp_path / "out.jsonl", endless)


REQUEST = tuple(range(1000, 1100))
FRESH = tuple(range(20))


@pytest.mark.parametrize(
    ("ids", "text", "finished", "reason"),
    [
        (FRESH, "fine", True, None),
        (FRESH, "fine", False, "unfinished"),
        ((), "", True, "empty"),
        ((5, 5), " \n", True, "empty"),
        (FRESH[:16] * 2, "16tokens", True, "repeats"),
        (FRESH[:15] + (99,) + FRESH[:15], "15tokens", True, None),
        ((7,) * 17, "0" * 17, False, "repeats"),
        (FRESH, "a b c d e f g h. A b c d\n e f g h.", True, "repeats"),
        (FRESH, "a b c d e f g x. A b c d e f g y.", True, None),
        (REQUEST[10:40], "copied", True, "echo"),
        (REQUEST[3:6], "short and copied", True, "echo"),
        (REQUEST[10:40] + FRESH, "half copied", True, None),
        ((1000, 1002, 1004), "short, of its own order", True, None),
    ],
)
def test_degenerate_answers_by_hand(ids, text, finished, reason):
    assert degenerate_reason(Answer(ids, text, finished), REQUEST) == reason


def test_the_same_words_in_other_tokens_are_an_echo():
    answer = Answer(FRESH, "The  rule\nHolds.", True)
    assert degenerate_reason(answer, REQUEST, "x: the rule holds. And more") == "echo"
    assert degenerate_reason(answer, REQUEST, "x: the rule never holds.") is None
