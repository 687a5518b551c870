"""A loopback HTTP proxy that notes every request, so that requests can be counted
without trusting any client's own hooks."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding"}


@dataclass
class Requests:
    """What went through: `METHOD path`, in order.

    Attributes:
        endpoint: the proxy's own address.
        seen: the requests so far.
    """

    endpoint: str
    seen: list[str] = field(default_factory=list)

    def take(self) -> list[str]:
        """The requests since the last call."""
        seen, self.seen = self.seen, []
        return seen


@contextmanager
def counted(endpoint: str, *, port: int = 0) -> Iterator[Requests]:
    """A proxy in front of the server at `endpoint`, at a free port or the given one."""
    server = urlsplit(endpoint)
    assert server.hostname
    assert server.port
    host, behind = server.hostname, server.port

    gone = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            if gone.is_set():  # connections outlive the listener: leave without a word
                self.close_connection = True
                return
            requests.seen.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with closing(HTTPConnection(host, behind, timeout=30)) as connection:
                # The Host header stays: it is part of what the client has signed.
                connection.putrequest(self.command, self.path, True, True)
                for name, value in self.headers.items():
                    if name.lower() not in _HOP_BY_HOP:
                        connection.putheader(name, value)
                connection.endheaders(body or None)
                answer = connection.getresponse()
                data = answer.read()
                self.send_response_only(answer.status, answer.reason)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOP_BY_HOP | {"content-length"}:
                        self.send_header(name, value)
                length = len(data)
                if self.command == "HEAD":
                    length = int(answer.getheader("Content-Length") or 0)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: `seen` is the log."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as proxy:
        proxy.daemon_threads = True
        requests = Requests(f"http://127.0.0.1:{proxy.server_address[1]}")
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield requests
        finally:
            gone.set()
            proxy.shutdown()
            thread.join()
