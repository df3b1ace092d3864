"""Answers from an OpenAI-compatible server that sometimes fails.

Catches: a request given up although the next try would have worked, or repeated although it never
will; rows lost or asked again after an interruption; more requests at once than allowed; an answer
that was cut off taken as finished; a run without answers that ends well.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specforge_trim.cli.main import main
from specforge_trim.data.conversation import read_conversations
from specforge_trim.verifier.answers.regenerate import regenerate
from specforge_trim.verifier.answers.server import NoAnswer, ServerAnswers, served_model

WORDS = [f"{a}{b}" for a in "bcdfghklmn" for b in "aeiou"]


class Server:
    """A scripted server. `behave(n, body)` gives (status, reply) for the n-th request (from 0)."""

    def __init__(self):
        self.bodies, self.keys, self.at_once, self.most = [], [], 0, 0
        self.behave = lambda n, body: (200, answer(body))
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.reply(200, {"data": [{"id": name} for name in server.models]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    n = len(server.bodies)
                    server.bodies.append(body)
                    server.keys.append(self.headers.get("Authorization"))
                    server.at_once += 1
                    server.most = max(server.most, server.at_once)
                try:
                    assert self.path == "/v1/chat/completions", self.path
                    status, reply = server.behave(n, body)
                finally:
                    with server.lock:
                        server.at_once -= 1
                self.reply(status, reply)

            def reply(self, status, reply):
                text = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                length = len(text) + (100 if status == 0 else 0)  # 0: cut off
                self.send_response(status or 200)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(text)
                self.close_connection = status == 0

            def log_message(self, *_):
                pass

        self.models = ["tiny"]
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.thread.start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def answer(body, **changes):
    """A reply that tells what it answers: the words for the last message's number."""
    number = int(body["messages"][-1]["content"].split()[-1])
    text = f"{WORDS[number % 50]} {WORDS[(number + 7) % 50]} reply"
    message = {"role": "assistant", "content": text, **changes.pop("message", {})}
    return {"choices": [{"message": message, "finish_reason": "stop", **changes}]}


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def question(number):
    return {"role": "user", "content": f"question {number}"}


def write(path, conversations):
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in conversations))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path):
    return write(tmp_path / "prompts.jsonl", [[question(i)] for i in range(10)])


def run(prompts, out, server, **options):
    options = {"pause": 0.001, "concurrency": 4, "timeout": 20.0, **options}
    return regenerate([prompts], out, ServerAnswers(server.url, "tiny", **options), progress=False)


def test_rows_come_in_the_order_of_the_input_with_every_turn_answered(server, tmp_path):
    old = {"role": "assistant", "content": "OLD"}
    rows = [[question(i), old, question(i + 20)] for i in range(6)]
    system = {"role": "system", "content": "be short 9"}
    out = tmp_path / "sub" / "out.jsonl"
    report = run(write(tmp_path / "p.jsonl", [[system, *rows[0]], *rows[1:]]), out, server)
    assert report.written == 6 and not report.dropped
    for i, row in enumerate(read(out)):
        turns = [m for m in row["messages"] if m["role"] != "system"]
        texts = [answer({"messages": [question(n)]})["choices"][0]["message"]["content"]
                 for n in (i, i + 20)]  # fmt: skip
        assert [m["content"] for m in turns[1::2]] == texts
        assert [m["content"] for m in turns[::2]] == [f"question {i}", f"question {i + 20}"]
    later = [b["messages"] for b in server.bodies if b["messages"][-1]["content"].endswith(" 23")]
    assert later[0][1]["content"].endswith("reply")  # the new answer, not the old one
    body = server.bodies[0]
    assert body["temperature"] == 0.0 and body["max_tokens"] == 512 and body["model"] == "tiny"
    assert server.most <= 4


def test_failures_that_pass_are_tried_again(server, prompts, tmp_path):
    kinds = {0: (500, {}), 1: (429, {}), 2: (503, b"busy"), 3: (0, b'{"cho'), 4: (200, b"<html>")}
    server.behave = lambda n, body: kinds.get(n) or (200, answer(body))
    report = run(prompts, tmp_path / "out.jsonl", server)
    assert report.written == 10 and len(server.bodies) == 15


def test_a_request_that_is_refused_is_dropped_at_once(server, prompts, tmp_path):
    def behave(n, body):
        if body["messages"][-1]["content"] == "question 3":
            return 400, {"error": "context too long"}
        return 200, answer(body)

    server.behave = behave
    report = run(prompts, tmp_path / "out.jsonl", server)
    assert report.written == 9 and len(server.bodies) == 10
    (row,) = read(tmp_path / "out.jsonl.dropped")
    assert row["dropped"].startswith("server: status 400") and "too long" in row["dropped"]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"finish_reason": "length"}, "unfinished"),
        ({"message": {"content": None}}, "empty"),
        ({"message": {"content": None, "tool_calls": [{"id": "1"}]}}, "calls a tool"),
        ({"message": {"content": "one two three four five six seven eight. " * 2}}, "repeats"),
        ({"message": {"content": "question 1"}}, "echo"),
    ],
)
def test_what_may_not_be_trained_on_is_dropped(server, tmp_path, reply, reason):
    server.behave = lambda n, body: (200, answer(body, **json.loads(json.dumps(reply))))
    report = run(write(tmp_path / "p.jsonl", [[question(1)]]), tmp_path / "out.jsonl", server)
    assert report.dropped == {reason: 1} and report.written == 0


def test_reasoning_is_kept(server, tmp_path):
    extra = {"reasoning_content": "first think"}
    server.behave = lambda n, body: (200, answer(body, message=extra))
    run(write(tmp_path / "p.jsonl", [[question(1)]]), tmp_path / "out.jsonl", server)
    (row,) = read(tmp_path / "out.jsonl")
    assert row["messages"][1]["reasoning_content"] == "first think"


def test_an_interrupted_run_asks_only_for_the_rest(server, prompts, tmp_path):
    """10 rows, 4 answered, then another order and another filter: 6 requests."""
    server.behave = lambda n, body: (200, answer(body)) if n < 4 else (500, {})
    out = tmp_path / "out.jsonl"
    with pytest.raises(NoAnswer, match="6 of 10 conversations.*asks for these only"):
        run(prompts, out, server, concurrency=1, retries=0)
    assert not out.exists() and len(read(tmp_path / "out.jsonl.partial")) == 4
    with (tmp_path / "out.jsonl.partial").open("a") as file:
        file.write('{"id": "cut off in')
    server.bodies.clear()
    server.behave = lambda n, body: (200, answer(body))
    rows = [row["messages"] for row in read(prompts)]
    report = run(write(prompts, rows[::-1]), out, server)
    assert len(server.bodies) == 6 and report.resumed == 4 and report.written == 10
    assert [row["messages"][0]["content"] for row in read(out)] == [
        f"question {i}" for i in range(9, -1, -1)
    ]
    run(write(prompts, rows[2:5]), out, server)
    assert len(server.bodies) == 6
    run(write(prompts, rows[2:5]), out, server, max_new_tokens=7)  # other settings
    assert len(server.bodies) == 9


def test_a_server_that_is_gone_ends_the_run_soon(tmp_path):
    server = Server()
    server.close()
    prompts = write(tmp_path / "p.jsonl", [[question(i)] for i in range(40)])
    with pytest.raises(NoAnswer, match="no answer after 2 tries"):
        run(prompts, tmp_path / "out.jsonl", server, retries=1)


def test_a_wrong_key_is_not_repeated(server, prompts, tmp_path):
    server.behave = lambda n, body: (401, {"error": "key"})
    with pytest.raises(NoAnswer, match="refuses: status 401"):
        run(prompts, tmp_path / "out.jsonl", server, concurrency=1, api_key="secret")
    assert len(server.bodies) == 8  # one each, until eight in a row had none
    assert server.keys[0] == "Bearer secret"
    assert "secret" not in repr(ServerAnswers(server.url, "tiny", api_key="secret"))


def test_a_request_that_takes_too_long_is_tried_again(server, tmp_path):
    def behave(n, body):
        if n == 0:
            time.sleep(0.5)
        return 200, answer(body)

    server.behave = behave
    prompts = write(tmp_path / "p.jsonl", [[question(1)]])
    report = run(prompts, tmp_path / "out.jsonl", server, timeout=0.1)
    assert report.written == 1 and len(server.bodies) == 2


def test_an_interrupt_does_not_wait_for_answers(server, tmp_path):
    release = threading.Event()
    slow = ("question 2", "question 3")

    def behave(n, body):
        if body["messages"][-1]["content"] in slow:
            release.wait(30)
        return 200, answer(body)

    server.behave = behave
    source = ServerAnswers(server.url, "tiny", concurrency=3)
    prompts = write(tmp_path / "p.jsonl", [[question(i)] for i in (1, 2, 3)])
    todo = {str(i): c for i, c in enumerate(read_conversations(prompts))}
    answers = source.answer_all(todo.items(), total=3, progress=False)
    assert next(answers)["id"] == "0"
    start = time.monotonic()
    answers.close()  # what an exception in the caller does
    assert time.monotonic() - start < 15
    release.set()


def test_two_runs_into_one_file_do_not_mix(server, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    begun, release = threading.Event(), threading.Event()

    def behave(n, body):
        begun.set()
        release.wait(20)
        return 200, answer(body)

    server.behave = behave
    first = threading.Thread(target=run, args=(prompts, out, server))
    first.start()
    assert begun.wait(20)
    with pytest.raises(ValueError, match="another run is writing"):
        run(prompts, out, server)
    release.set()
    first.join()
    assert len(read(out)) == 10


def test_the_command_finds_the_model_and_its_mistakes_are_named(
    server, prompts, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    out = tmp_path / "out.jsonl"
    flags = ["regenerate", str(prompts), "--out", str(out), "--server"]
    assert main([*flags, server.url + "/v1"]) == 0
    assert "10 conversations written" in capsys.readouterr().out
    assert server.bodies[0]["model"] == "tiny" and server.bodies[0]["max_tokens"] == 256
    assert server.keys[0] == "Bearer from the environment"
    server.models = ["a", "b"]
    with pytest.raises(ValueError, match=r"\['a', 'b'\].*--server-model"):
        served_model(server.url)
    assert main([*flags, "localhost:8000", "--server-model", "x"]) == 2
    assert "http://host:port" in capsys.readouterr().err
    assert main([*flags[:-1], "--temperature", "0.5"]) == 2
    assert "--server" in capsys.readouterr().err


def test_bad_rows_stand_beside_the_output_and_too_many_stop_the_run(
    server, prompts, tmp_path, capsys
):
    """Two of twelve rows hold nothing to answer."""
    with prompts.open("a") as file:
        file.write('{"messages": []}\nnot json\n')
    out = tmp_path / "out.jsonl"
    flags = ["regenerate", str(prompts), "--out", str(out), "--server", server.url]
    assert main([*flags]) == 2
    message = capsys.readouterr().err
    assert "2 of 12 rows" in message and "max_bad_fraction 0.1" in message
    assert server.bodies == [] and not out.exists()
    assert main([*flags, "--max-bad-fraction", "0.17"]) == 0
    assert len(read(out)) == 10 and "1 x no user message" in capsys.readouterr().out
    listed = read(tmp_path / "out.jsonl.bad_rows.jsonl")
    assert [(row["file"], row["line"]) for row in listed] == [
        (str(prompts), 11),
        (str(prompts), 12),
    ]
    assert [row["reason"] for row in listed] == ["no user message", "line is not valid JSON"]


def test_retries_hold_for_the_question_after_the_model_too(prompts, tmp_path, capsys):
    server = Server()
    server.close()
    argv = ["regenerate", str(prompts), "--out", str(tmp_path / "o"), "--server", server.url]
    assert main([*argv, "--retries", "0"]) == 2
    assert "gave no answer after one try:" in capsys.readouterr().err
    assert main([*argv, "--retries", "1"]) == 2
    assert "gave no answer after 2 tries:" in capsys.readouterr().err
    for flag, value in (("--retries", "-1"), ("--timeout", "0")):
        assert main([*argv, "--server-model", "tiny", flag, value]) == 2
        assert f"{flag[2:]} is {value}" in capsys.readouterr().err
