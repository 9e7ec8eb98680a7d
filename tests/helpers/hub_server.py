"""A model hub on this machine: the HTTP interface that `huggingface_hub` speaks, in memory.

It creates repositories, takes commits with regular and LFS files, lists and serves them. A test
changes a commit's files to make a hostile repository, and its behaviour by the attributes.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_of_the_tests"
NONE: Mapping[str, str] = MappingProxyType({})


@dataclass
class Repository:
    """A repository: its commits, oldest first, each a dictionary of files by path."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes]) -> str:
        """Add a commit with exactly these files, and return its hash."""
        content = repr((len(self.commits), sorted(files.items()))).encode()
        oid = hashlib.sha1(content).hexdigest()
        self.commits[oid] = dict(files)
        return oid

    def at(self, revision: str) -> str | None:
        """Return the hash of a revision's commit."""
        if revision == "main":
            return next(reversed(self.commits), None)
        return revision if revision in self.commits else None


class Hub:
    """The state of the hub.

    Attributes:
        repositories: repositories by name.
        blobs: LFS files by SHA-256.
        claims: sizes that listings claim instead of the real ones, by path.
        break_after: number of bytes of each file after which the connection breaks, or None.
        endless: paths whose download never ends.
        requests: methods and paths of all requests.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.claims: dict[str, int] = {}
        self.break_after: int | None = None
        self.endless: set[str] = set()
        self.requests: list[str] = []
        self.url = ""


class Handler(BaseHTTPRequestHandler):
    """Answers one request; see the paths in `ROUTES`."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, content: object = b"", headers: Mapping[str, str] = NONE) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, code: str) -> None:
        self.answer(404, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def handle_request(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.hub.requests.append(f"{self.command} {path}")
        content = self.body()
        writes = self.command in ("POST", "PUT") and "validate-yaml" not in path
        # uploads of LFS carry no token, because their address is signed
        writes = writes and not path.startswith("/lfs/")
        if writes and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid username or password."})
            return
        for (method, pattern), call in ROUTES.items():
            match = re.fullmatch(pattern, path)
            if match and method == ("GET" if self.command == "HEAD" else self.command):
                call(self, content, *match.groups(), **parse_qs(parts.query))
                return
        self.answer(404, {"error": f"no route for {self.command} {path}"})

    do_GET = do_POST = do_PUT = do_HEAD = handle_request

    def create(self, content: bytes, **_: object) -> None:
        said = json.loads(content)
        name = f"{said['organization']}/{said['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repositories:
            self.answer(409, {"error": "You already created this model repo", **url})
            return
        self.hub.repositories[name] = Repository(private=bool(said.get("private")))
        self.hub.repositories[name].commit({".gitattributes": b"*.onnx filter=lfs\n"})
        self.answer(200, url)

    def check_yaml(self, content: bytes, **_: object) -> None:
        front = re.match(r"---\n(.*?)\n---", json.loads(content)["content"], re.S)
        try:
            ok = front is not None and isinstance(yaml.safe_load(front[1]), dict)
        except yaml.YAMLError:
            ok = False
        errors = [] if ok else [{"message": "the metadata are not YAML"}]
        self.answer(200 if ok else 400, {"errors": errors, "warnings": []})

    def found(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self.headers.get("Authorization")):
            self.missing("RepoNotFound")
            return None
        oid = repository.at(revision)
        if oid is None:
            self.missing("RevisionNotFound")
            return None
        return oid, repository.commits[oid]

    def info(self, content: bytes, name: str, revision: str = "main", **_: object) -> None:
        if (state := self.found(name, revision)) is None:
            return
        oid, files = state
        siblings = [
            {"rfilename": path, "size": self.hub.claims.get(path, len(blob)), "blobId": "0" * 40}
            for path, blob in files.items()
        ]
        said = {"_id": "1", "id": name, "modelId": name, "sha": oid, "siblings": siblings}
        self.answer(200, {**said, "private": False, "tags": [], "downloads": 0, "likes": 0})

    def preupload(self, content: bytes, name: str, revision: str, **_: object) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".onnx") else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(content)["files"]
        ]
        self.answer(200, {"files": files})

    def batch(self, content: bytes, name: str, **_: object) -> None:
        objects = []
        for entry in json.loads(content)["objects"]:
            actions = {
                "upload": {"href": f"{self.hub.url}/lfs/{entry['oid']}"},
                "verify": {"href": f"{self.hub.url}/verify"},
            }
            objects.append({**entry, "actions": actions})
        self.answer(200, {"transfer": "basic", "objects": objects})

    def upload(self, content: bytes, oid: str, **_: object) -> None:
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.blobs[oid] = content
        self.answer(200)

    def verify(self, content: bytes, **_: object) -> None:
        said = json.loads(content)
        known = len(self.hub.blobs.get(said["oid"], b"")) == said["size"]
        self.answer(200 if known else 404, {})

    def commit(self, content: bytes, name: str, revision: str, **_: object) -> None:
        if (state := self.found(name, revision)) is None:
            return
        files = dict(state[1])
        for line in map(json.loads, content.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
        oid = self.hub.repositories[name].commit(files)
        self.answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid})

    def resolve(self, content: bytes, name: str, revision: str, path: str, **_: object) -> None:
        if (state := self.found(name, revision)) is None:
            return
        oid, files = state
        if path not in files:
            self.missing("EntryNotFound")
            return
        blob = files[path]
        headers = {"X-Repo-Commit": oid, "ETag": f'"{hashlib.sha256(blob).hexdigest()}"'}
        if self.command == "GET" and path in self.hub.endless:
            self.send_response(200)
            for header, value in {**headers, "Transfer-Encoding": "chunked"}.items():
                self.send_header(header, value)
            self.end_headers()
            piece = b"x" * (1 << 20)
            while True:
                self.wfile.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
        if self.command == "GET" and self.hub.break_after is not None:
            self.send_response(200)
            for header, value in {**headers, "Content-Length": str(len(blob))}.items():
                self.send_header(header, value)
            self.end_headers()
            self.wfile.write(blob[: self.hub.break_after])
            self.close_connection = True
            return
        self.answer(200, blob, headers)


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = {
    ("POST", "/api/repos/create"): Handler.create,
    ("POST", "/api/validate-yaml"): Handler.check_yaml,
    ("GET", f"/api/models/{NAME}"): Handler.info,
    ("GET", f"/api/models/{NAME}/revision/(.+)"): Handler.info,
    ("POST", f"/api/models/{NAME}/preupload/(.+)"): Handler.preupload,
    ("POST", f"/{NAME}.git/info/lfs/objects/batch"): Handler.batch,
    ("PUT", "/lfs/([0-9a-f]{64})"): Handler.upload,
    ("POST", "/verify"): Handler.verify,
    ("POST", f"/api/models/{NAME}/commit/(.+)"): Handler.commit,
    ("GET", f"/{NAME}/resolve/([^/]+)/(.+)"): Handler.resolve,
}


class Server(ThreadingHTTPServer):
    """A server that does not report clients which leave."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def running_hub():
    """Run a hub on a free port of this machine."""
    hub = Hub()
    server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
