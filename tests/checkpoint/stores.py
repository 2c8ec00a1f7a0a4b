"""An S3 server of its own process on the loopback (moto's), and a proxy in front of it that fails as it is told."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

BUCKET = "bucket"
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
FAILS = b"<Error><Code>ServiceUnavailable</Code><Message>no</Message></Error>"


@contextlib.contextmanager
def server() -> Iterator[str]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                put = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                put.request("PUT", f"/{BUCKET}")
                assert put.getresponse().status == 200
                break
            assert job.poll() is None, "moto's server ended"
            assert time.monotonic() < deadline, "moto's server does not answer"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        job.kill()
        job.wait()


def use(endpoint: str) -> None:
    from accel.checkpoint import remote

    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(keys, AWS_ENDPOINT_URL=endpoint)
    remote._opened.cache_clear()


@dataclass
class Fault:
    """What befalls requests whose first line is found, ``times`` of them, after the first ``skip``."""

    where: str
    how: Any  # "cut", "flip", "lose the answer", or a status and a body
    times: int = 10**9
    skip: int = 0


@dataclass
class Proxy:
    """Passes requests on, counts them, and lets some fail."""

    port: int
    faults: list[Fault] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def fault(self, line: str) -> Any:
        self.seen.append(line)
        for one in self.faults:
            if re.search(one.where, line):
                one.skip -= 1
                if one.skip < 0 and one.times > 0:
                    one.times -= 1
                    return one.how
        return None


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Proxy

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()

    def pass_on(self) -> None:
        how = self.state.fault(self.requestline)
        size = int(self.headers.get("Content-Length") or 0)
        if how == "cut":
            self.rfile.read(size // 2)
            self.hang_up()
            return
        body = self.rfile.read(size)
        if isinstance(how, tuple):
            self.reply(how[0], {"Content-Type": "application/xml"}, how[1])
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.state.port, timeout=60)
        sent = _flipped(body) if how == "flip" and self.command == "PUT" else body
        upstream.request(self.command, self.path, sent, dict(self.headers))
        answer = upstream.getresponse()
        content = answer.read()
        if how == "lose the answer":
            self.hang_up()
            return
        if how == "flip" and self.command == "GET":
            content = _flipped(content)
        self.reply(answer.status, dict(answer.getheaders()), content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

    def hang_up(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        whole = str(len(body))
        self.send_header("Content-Length", headers.get("Content-Length", whole) if self.command == "HEAD" else whole)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def _flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@contextlib.contextmanager
def proxy(endpoint: str) -> Iterator[tuple[str, Proxy]]:
    state = Proxy(int(endpoint.rpartition(":")[2]))
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"state": state}))
    listener.daemon_threads = True
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.server_address[1]}", state
    finally:
        listener.shutdown()
        listener.server_close()
