"""Google Cloud Storage's XML API in front of a server that has the JSON API only.

`python gcs_xml.py PORT BACKEND_PORT` translates, on 127.0.0.1, what obstore asks of
`/bucket/object`: GET, PUT (with `x-goog-if-generation-match`, which the XML API calls its
condition) and DELETE, and of `/bucket`: a listing. Requests of the JSON API pass as they
are.
"""

import json
import sys
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit
from xml.sax.saxutils import escape

JSON_API = ("/storage/", "/upload/", "/download/", "/batch/", "/_internal/", "/b/")
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}
BOUNDARY = "----kvstore"


class Translator(BaseHTTPRequestHandler):
    """One client's connection, and one of its own to the server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    backend: HTTPConnection | None = None
    backend_port = 0

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {n: v for n, v in self.headers.items() if n.lower() not in HOP_BY_HOP}
        method, path = self.command, self.path
        translated = not path.startswith(JSON_API)
        if translated:
            method, path, headers, body = to_json_api(method, path, headers, body)
        if self.backend is None:
            self.backend = HTTPConnection("127.0.0.1", self.backend_port, timeout=60)
        self.backend.request(method, path, body or None, headers)
        answer = self.backend.getresponse()
        data = answer.read()
        if "list-type=2" in self.path and answer.status == 200:
            data = to_xml(json.loads(data))
        self.answer(answer, data, written=translated and self.command == "PUT")

    def answer(self, answer: HTTPResponse, data: bytes, *, written: bool) -> None:
        """Pass an answer on. To a PUT, the XML API answers with headers."""
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        if written and answer.status == 200:
            told = json.loads(data)
            self.send_header("ETag", f'"{told["etag"]}"')
            self.send_header("x-goog-generation", told["generation"])
            data = b""
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = forward

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    """Room for more clients at once than the usual 5, whose next one the kernel drops."""

    request_queue_size = 128
    daemon_threads = True


def to_json_api(
    method: str, path: str, headers: dict[str, str], body: bytes
) -> tuple[str, str, dict[str, str], bytes]:
    """The request of the JSON API that does what this one of the XML API does."""
    bucket, _, name = path.partition("?")[0].lstrip("/").partition("/")
    bucket, name = unquote(bucket), quote(unquote(name), safe="")
    if not name:
        return method, to_listing(bucket, path), headers, body
    if method == "DELETE":
        return method, f"/storage/v1/b/{bucket}/o/{name}", headers, body
    if method != "PUT":
        return method, f"/download/storage/v1/b/{bucket}/o/{name}?alt=media", headers, body
    upload = f"/upload/storage/v1/b/{bucket}/o?name={name}&uploadType="
    generation = headers.pop("x-goog-if-generation-match", None)
    if generation is None:
        return "POST", f"{upload}media", headers, body
    # Only an upload of several parts takes a condition there.
    parts = (b"application/json", b"{}"), (b"application/octet-stream", body)
    line = BOUNDARY.encode()
    body = b"".join(
        b"--%b\r\nContent-Type: %b\r\n\r\n%b\r\n" % (line, kind, part)
        for kind, part in parts
    )
    headers = {n: v for n, v in headers.items() if n.lower() != "content-type"}
    headers["Content-Type"] = f'multipart/related; boundary="{BOUNDARY}"'
    path = f"{upload}multipart&ifGenerationMatch={generation}"
    return "POST", path, headers, body + b"--%b--\r\n" % line


def to_listing(bucket: str, path: str) -> str:
    """The listing of the JSON API that this one of the XML API is."""
    asked = {name: value for name, [value] in parse_qs(urlsplit(path).query).items()}
    names = {
        "prefix": "prefix",
        "delimiter": "delimiter",
        "start-after": "startOffset",  # which is listed too, unless made a bit longer
        "continuation-token": "pageToken",
        "max-keys": "maxResults",
    }
    if "start-after" in asked:
        asked["start-after"] += "\0"
    query = {names[name]: value for name, value in asked.items() if name in names}
    return f"/storage/v1/b/{bucket}/o?{urlencode(query)}"


def to_xml(told: dict[str, Any]) -> bytes:
    """A listing's answer."""
    parts = [
        f"<Contents><Key>{escape(item['name'])}</Key><Size>{item['size']}</Size>"
        f"<LastModified>{item['updated']}</LastModified>"
        f"<ETag>&quot;{escape(item['etag'])}&quot;</ETag></Contents>"
        for item in told.get("items", ())
    ]
    parts += [
        f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        for name in told.get("prefixes", ())
    ]
    if token := told.get("nextPageToken"):
        parts.append(f"<NextContinuationToken>{escape(token)}</NextContinuationToken>")
    return f"<ListBucketResult>{''.join(parts)}</ListBucketResult>".encode()


if __name__ == "__main__":
    port, Translator.backend_port = map(int, sys.argv[1:])
    with Server(("127.0.0.1", port), Translator) as server:
        server.serve_forever()
