"""Any OpenAI-compatible server (vLLM, SGLang, ...) as the writer of answers.

Many conversations are under way at once, each asking for its turns one after the other. A request
that fails for a reason that may pass is sent again after a growing pause. Connections go straight
to the server, without a proxy.
"""

import contextlib
import http.client
import json
import random
import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tqdm import tqdm

from specforge_trim.data.conversation import Conversation
from specforge_trim.verifier.answers.source import Answer, Pending, degenerate_reason, finished_row

PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
HOPELESS = {401, 403, 404}  # the key or the address is wrong: every request fails alike
LONGEST_PAUSE = 60.0  # seconds
GIVE_UP = 8  # conversations without an answer in a row: the server is gone


class NoAnswer(ConnectionError):
    """A request got no answer, or was refused in a way that every other would be too."""


class RequestRefused(ValueError):
    """The server will never answer this request."""


@dataclass(frozen=True)
class ServerAnswers:
    """Answers of a model behind `url` (http[s]://host:port, with or without /v1).

    model: its name there. max_new_tokens: an answer that is not finished by then is dropped.
    temperature: 0 = greedy. concurrency: requests under way at once. retries: how often a request
    is sent again; pause: seconds before the first time, doubled each time. timeout: seconds a
    request may take. api_key: sent as a bearer token.
    """

    url: str
    model: str
    max_new_tokens: int = 512
    temperature: float = 0.0
    concurrency: int = 32
    retries: int = 5
    pause: float = 0.5
    timeout: float = 600.0
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for key in ("max_new_tokens", "concurrency"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}, expected at least 1")
        if self.retries < 0:
            raise ValueError(f"retries is {self.retries}, expected 0 or more")
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}, expected seconds above 0")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"server {self.url!r}: expected http://host:port or https://host")

    @property
    def settings(self) -> str:
        return f"server|{self.model}|{self.max_new_tokens}|{self.temperature}"

    def answer_all(
        self, todo: Iterable[tuple[str, Conversation]], *, total: int, progress: bool
    ) -> Iterator[dict]:
        """One row per conversation, as it is finished or dropped.

        Raises NoAnswer when the server is gone, or at the end when some conversations got none.
        """
        waiting = (Pending(i, c.tools, [], list(c.messages)) for i, c in todo)
        running: set[Future[dict]] = set()
        failed, in_a_row, last = 0, 0, ""
        bar = tqdm(total=total, desc="regenerate", unit="row", disable=not progress)
        pool, client = ThreadPoolExecutor(self.concurrency), _Client(self)
        try:
            while True:
                while len(running) < self.concurrency and (item := next(waiting, None)):
                    running.add(pool.submit(self._converse, client, item))
                if not running:
                    break
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    bar.update()
                    try:
                        row, in_a_row = future.result(), 0
                    except NoAnswer as error:
                        failed, in_a_row, last = failed + 1, in_a_row + 1, str(error)
                        if in_a_row >= GIVE_UP:
                            raise NoAnswer(f"{last}; what was answered is kept") from error
                        continue
                    yield row
        finally:
            client.stop()
            pool.shutdown(cancel_futures=True)
            client.close()
            bar.close()
        if failed:
            raise NoAnswer(
                f"{failed} of {total} conversations got no answer (the last: {last}). The "
                "others are kept: the same command asks for these only"
            )

    def _converse(self, client: "_Client", item: Pending) -> dict:
        """All turns of one conversation."""
        while item.advance():
            try:
                message, finished = self._ask(client, item)
            except RequestRefused as error:
                return finished_row(item, dropped=f"server: {error}")
            if message.get("tool_calls"):
                return finished_row(item, dropped="calls a tool")
            text = message.get("content") or ""
            kept = {"role": "assistant", "content": text}
            if message.get("reasoning_content"):
                kept["reasoning_content"] = message["reasoning_content"]
            asked = " ".join(str(m.get("content") or "") for m in item.written)
            item.written.append(kept)
            answer = Answer(tuple(text.split()), text, finished)
            reason = degenerate_reason(answer, asked.split(), asked)
            if reason:
                return finished_row(item, dropped=reason)
        return finished_row(item)

    def _ask(self, client: "_Client", item: Pending) -> tuple[dict, bool]:
        """The assistant's next message, and whether it ended by itself."""
        body: dict = {
            "model": self.model,
            "messages": item.written,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
        }
        if item.tools:
            body["tools"] = item.tools
        reply = client.request("POST", "/chat/completions", body)
        try:
            choice = reply["choices"][0]
            return dict(choice["message"]), choice.get("finish_reason") != "length"
        except (KeyError, IndexError, TypeError):
            raise RequestRefused(f"a reply without a message: {json.dumps(reply)[:200]}") from None


class _Client:
    """Connections to one server, one per thread, kept open between requests."""

    def __init__(self, server: ServerAnswers):
        self._server, self._url = server, urlsplit(server.url)
        path = self._url.path.rstrip("/").removesuffix("/chat/completions")
        self._base = path if path.endswith("/v1") else path + "/v1"
        self._stopped = threading.Event()
        self._local = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def request(self, method: str, path: str, body: dict | None = None) -> dict:
        """One request, sent again while it fails for a reason that may pass."""
        server = self._server
        for attempt in range(server.retries + 1):
            pause = min(LONGEST_PAUSE, server.pause * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                status, wish, text = self._send(method, path, body)
                if status < 300:
                    return json.loads(text)
                problem = f"status {status}: {' '.join(text.split())[:200]}"
                if status in HOPELESS:
                    raise NoAnswer(f"{server.url} refuses: {problem}")
                if status not in PASSING:
                    raise RequestRefused(problem)
                pause = min(LONGEST_PAUSE, float(wish)) if wish.isdigit() else pause
            except NoAnswer:
                raise
            except (http.client.HTTPException, json.JSONDecodeError, UnicodeDecodeError) as error:
                self._connection().close()  # the reply was cut off or is no JSON
                problem = f"{type(error).__name__}: {error}"
            except OSError as error:
                self._connection().close()
                problem = str(error) or type(error).__name__
            if attempt == server.retries or self._stopped.wait(pause):
                break
        tries = "one try" if attempt == 0 else f"{attempt + 1} tries"
        raise NoAnswer(f"{server.url} gave no answer after {tries}: {problem}")

    def _send(self, method: str, path: str, body: dict | None) -> tuple[int, str, str]:
        """(status, Retry-After, text) of one try."""
        connection = self._connection()
        headers = {"Content-Type": "application/json"}
        if self._server.api_key:
            headers["Authorization"] = f"Bearer {self._server.api_key}"
        # ASCII: a lone surrogate has no UTF-8 form, its JSON escape has.
        data = None if body is None else json.dumps(body).encode("ascii")
        if connection.sock is None:
            connection.connect()
        if self._stopped.is_set():  # looked at with the socket open: stop() ends it from now on
            raise NoAnswer("stopped")
        connection.request(method, self._base + path, body=data, headers=headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8")
        return response.status, response.getheader("Retry-After", ""), text

    def _connection(self) -> http.client.HTTPConnection:
        """This thread's connection; a closed one opens again by itself."""
        found = getattr(self._local, "connection", None)
        if found is None:
            secure = self._url.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            found = kind(self._url.hostname or "", self._url.port, timeout=self._server.timeout)
            self._local.connection = found
            self._connections.append(found)
        return found

    def stop(self) -> None:
        """End requests under way: an interrupted run does not wait for answers no one reads."""
        self._stopped.set()
        for connection in list(self._connections):
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)  # closing would not wake a reader

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def served_model(
    url: str, *, api_key: str | None = None, timeout: float = 30.0, retries: int = 2
) -> str:
    """The name of the one model a server has.

    Raises ValueError naming them when there are several, NoAnswer when the server is not there.
    """
    client = _Client(ServerAnswers(url, "", timeout=timeout, retries=retries, api_key=api_key))
    try:
        names = [entry["id"] for entry in client.request("GET", "/models").get("data", [])]
    finally:
        client.close()
    if len(names) != 1:
        raise ValueError(f"server {url} has the models {names}: choose one with --server-model")
    return names[0]
