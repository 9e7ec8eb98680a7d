"""nginx with the configuration of `deploy/`, and slow clients that occupy its connections."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import wire

DEPLOY = Path(__file__).parents[2] / "deploy"
_DRIP_SECONDS = 1.0
_OPENED_A_SECOND = 200
_HEAD = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n"


class Proxy:
    """nginx before a server on this machine, on a free port with a new certificate.

    Args:
        folder: folder to create for nginx's files.
        port: port of the server.
        changes: replacements of texts in the configuration.

    Attributes:
        port: port that nginx listens on, for TLS.
        certificate: file of the certificate, for clients.
    """

    def __init__(self, folder: Path, port: int, changes: dict[str, str] | None = None) -> None:
        folder.mkdir()
        self.certificate = folder / "fullchain.pem"
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        request = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -days 2"
        files = ["-keyout", folder / "privkey.pem", "-out", self.certificate]
        subprocess.run(
            [*request.split(), "-addext", names, *files], check=True, capture_output=True
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
        places = {
            "/tmp/": f"{folder}/",
            "retrieval:8000": f"127.0.0.1:{port}",
            "listen 8443 ssl": f"listen 127.0.0.1:{self.port} ssl",
            "/certificates": str(folder),
        }
        for shipped, replacement in {**places, **(changes or {})}.items():
            assert shipped in text, shipped
            text = text.replace(shipped, replacement)
        (folder / "nginx.conf").write_text(text)
        nginx = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]
        check = subprocess.run([*nginx, "-t"], capture_output=True, text=True)
        assert check.returncode == 0, check.stderr
        user = "user root;" if os.geteuid() == 0 else ""  # its workers must reach the folder
        self._process = subprocess.Popen(
            [*nginx, "-g", f"daemon off;{user}"], stderr=subprocess.DEVNULL
        )
        self.context = ssl.create_default_context(cafile=str(self.certificate))
        wire.until(self._answers)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), self.open() as connection:
            connection.sendall(wire.get("/livez"))
            return wire.read_answer(connection).status == 200
        return False

    def open(self) -> ssl.SSLSocket:
        """Return a connection with TLS."""
        connection = socket.create_connection(("127.0.0.1", self.port), 30.0)
        return self.context.wrap_socket(connection, server_hostname="localhost")

    def stop(self) -> None:
        """End nginx."""
        self._process.terminate()
        self._process.wait(20)


class SlowClients:
    """Slow connections, which are opened again when the proxy closes them.

    Args:
        port: port of the proxy.
        context: TLS context.
        idle: number of connections that send nothing.
        dripping: number of connections that send a byte a second, half of them in a header and half
            in a body.

    Attributes:
        closed: number of connections that the proxy closed, by kind.
        most: largest number of connections that were open at once.
    """

    def __init__(self, port: int, context: ssl.SSLContext, idle: int, dripping: int) -> None:
        self._port, self._context = port, context
        kinds = ("header", "body")
        self._missing = ["idle"] * idle + [kinds[number % 2] for number in range(dripping)]
        self._open: dict[socket.socket, str] = {}
        self.closed, self.most = Counter[str](), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        count = 0
        while not self._stop.is_set():
            turn = time.monotonic() + _DRIP_SECONDS
            for kind in self._missing[:_OPENED_A_SECOND]:
                with contextlib.suppress(OSError):
                    count += 1
                    connection = socket.create_connection(
                        ("127.0.0.1", self._port), 5.0, (f"127.0.1.{1 + count % 250}", 0)
                    )
                    if kind != "idle":
                        connection = self._context.wrap_socket(
                            connection, server_hostname="localhost"
                        )
                        connection.sendall(_HEAD + (b"\r\n" if kind == "body" else b"X: "))
                    connection.setblocking(False)
                    self._open[connection] = kind
                    self._missing.remove(kind)
            self.most = max(self.most, len(self._open))
            for connection, kind in list(self._open.items()):
                if not self._is_open(connection, kind):
                    connection.close()
                    del self._open[connection]
                    self._missing.append(kind)
                    self.closed[kind] += 1
            self._stop.wait(max(0.0, turn - time.monotonic()))

    @staticmethod
    def _is_open(connection: socket.socket, kind: str) -> bool:
        """Send a byte unless the client is idle; return whether the connection is still open."""
        try:
            if kind != "idle":
                connection.sendall(b"x")
            connection.recv(1)  # an answer or the end of the connection
            return False
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False

    def stop(self) -> None:
        """Close all connections."""
        self._stop.set()
        self._thread.join(30)
        for connection in self._open:
            connection.close()
