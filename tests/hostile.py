"""A server that means harm: it speaks just enough of S3 and of Google's JSON API to be
believed, and then answers as a test tells it to."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_OF_AN_OBJECT = {"ETag": '"e"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}


@dataclass(frozen=True)
class Answer:
    """What is sent. The body's parts are sent one by one, until the client leaves."""

    status: int = 200
    body: Iterable[bytes] = ()
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None

    @classmethod
    def of(cls, body: bytes, status: int = 200, **headers: str) -> "Answer":
        """An answer of its real length."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return cls(status, [body], named, len(body))

    @classmethod
    def part(cls, body: Iterable[bytes], length: int, **headers: str) -> "Answer":
        """The first `length` bytes of an object, as is claimed."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named = {"Content-Range": f"bytes 0-{length - 1}/{length}", **named}
        return cls(206, body, named, length)


@dataclass(frozen=True)
class Request:
    """What a client has asked."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Hostile:
    """A server, and what it was asked."""

    endpoint: str = ""
    answer: Callable[[Request], Answer] = lambda request: Answer.of(b"")
    seen: list[Request] = field(default_factory=list)


@contextmanager
def hostile() -> Iterator[Hostile]:
    """A server on this machine."""
    server = Hostile()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = Request(self.command, self.path, dict(self.headers), body)
            server.seen.append(request)
            answer = server.answer(request)
            self.send_response_only(answer.status)
            for name, value in (_OF_AN_OBJECT | answer.headers).items():
                self.send_header(name, value)
            if answer.length is None:
                self.send_header("Connection", "close")
            else:
                self.send_header("Content-Length", str(answer.length))
            self.end_headers()
            self.close_connection = answer.length is None
            for part in answer.body:
                self.wfile.write(part)
                self.wfile.flush()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: `seen` is the log."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client may leave whenever it likes."""

    with Server(("127.0.0.1", 0), Handler) as listener:
        server.endpoint = f"http://127.0.0.1:{listener.server_address[1]}"
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()
