"""A loopback HTTP proxy that spoils some of the answers, as networks and servers do.

    with faulty(server.endpoint) as proxy:
        proxy.spoil("GET", "reset", times=2)

Each fault is for one request of a method, in the order in which they were given. The
requests are counted, spoilt or not.

    503, 500, 429, 403, …   the server is not asked, and this status answered
    expired                 the same with 400, as S3 answers to an old token
    reset                   the connection is reset before the server is asked
    lost                    the server does it, and the connection is reset
    cut                     half the body, then the connection is reset
    end                     half the body, then the connection is closed
    short                   half the body, announced as all of it
    flip                    one bit of the body is another
    hang                    the server is not asked, and nothing is answered
"""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}
_CODES = {
    "503": "SlowDown",
    "500": "InternalError",
    "429": "TooManyRequests",
    "expired": "ExpiredToken",
}
_ERROR = "<Error><Code>{code}</Code><Message>Please try again</Message></Error>"


@dataclass
class Proxy:
    """What a test tells the proxy, and what it has seen.

    Attributes:
        endpoint: the proxy's own address.
        seen: the requests so far, `METHOD path`, with the fault behind it if there was one.
        gather: where requests wait for each other, if it is set.
        expired: an access key; all that is signed with it has the fault `expired`.
    """

    endpoint: str
    seen: list[str] = field(default_factory=list)
    gather: threading.Barrier | None = None
    expired: str | None = None
    _faults: list[tuple[str, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def spoil(self, method: str, fault: str, times: int = 1) -> None:
        """Let the next requests of a method fail."""
        with self._lock:
            self._faults += [(method, fault)] * times

    def heal(self) -> None:
        """Forget the faults that have not happened yet."""
        with self._lock:
            self._faults.clear()

    def take(self) -> list[str]:
        """The requests since the last call."""
        with self._lock:
            seen, self.seen = self.seen, []
        return seen

    def note(self, method: str, path: str) -> str:
        """A request's fault, or nothing."""
        with self._lock:
            for n, (of, fault) in enumerate(self._faults):
                if of == method:
                    del self._faults[n]
                    self.seen.append(f"{method} {path} {fault}")
                    return fault
            self.seen.append(f"{method} {path}")
            return ""


class _Server(ThreadingHTTPServer):
    request_queue_size = 256  # what is over this waits for a second
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client may leave whenever it likes."""


@contextmanager
def faulty(endpoint: str) -> Iterator[Proxy]:
    """A proxy in front of the server at `endpoint`."""
    server = urlsplit(endpoint)
    assert server.hostname
    assert server.port
    host, behind = server.hostname, server.port
    gone = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def forward(self) -> None:
            fault = proxy.note(self.command, self.path)
            if proxy.expired and proxy.expired in self.headers.get("Authorization", ""):
                fault = "expired"
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if proxy.gather:
                proxy.gather.wait(20)
            if fault == "hang":
                gone.wait(60)
                self.close_connection = True
            elif fault == "reset":
                self.reset()
            elif fault.isdigit() or fault == "expired":
                code = _CODES.get(fault, "AccessDenied")
                status = int(fault) if fault.isdigit() else 400
                self.answer(status, _ERROR.format(code=code).encode())
            else:
                self.ask(body, fault)

        def ask(self, body: bytes, fault: str) -> None:
            with closing(HTTPConnection(host, behind, timeout=30)) as connection:
                # The Host header stays: it is part of what the client has signed.
                connection.putrequest(self.command, self.path, True, True)
                for name, value in self.headers.items():
                    if name.lower() not in _HOP_BY_HOP:
                        connection.putheader(name, value)
                if body or self.command in ("PUT", "POST"):
                    connection.putheader("Content-Length", str(len(body)))
                connection.endheaders(body or None)
                answer = connection.getresponse()
                data = answer.read()
            if fault == "lost":
                self.reset()
                return
            half = data[: len(data) // 2]
            if fault == "flip":
                data = half + bytes([data[len(half)] ^ 1]) + data[len(half) + 1 :]
            sent = half if fault in ("cut", "end", "short") else data
            length = len(half) if fault == "short" else len(data)
            self.answer(answer.status, sent, answer, length)
            if fault == "cut":
                self.reset()
            elif fault == "end":
                self.close_connection = True

        def answer(
            self,
            status: int,
            data: bytes,
            answer: HTTPResponse | None = None,
            length: int | None = None,
        ) -> None:
            self.send_response_only(status)
            for name, value in answer.getheaders() if answer else ():
                if name.lower() not in _HOP_BY_HOP:
                    self.send_header(name, value)
            if status != 204:
                told = len(data) if length is None else length
                self.send_header("Content-Length", str(told))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def reset(self) -> None:
            """Close without a word: the kernel sends RST."""
            self.wfile.flush()
            now = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
            self.close_connection = True
            self.connection.close()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: `seen` is the log."""

    with _Server(("127.0.0.1", 0), Handler) as listener:
        proxy = Proxy(f"http://127.0.0.1:{listener.server_address[1]}")
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            gone.set()
            listener.shutdown()
            thread.join()
