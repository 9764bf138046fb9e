"""A small server that speaks the hub's protocol: listings, metadata, redirects, ranges, and faults.

What it answers follows the public behaviour of huggingface.co: `/api/{kind}s/{repo}/revision|tree`,
`/{datasets/}{repo}/resolve/{revision}/{path}` with the digest and size in headers and a redirect to
another host for LFS files, and ranges there.
"""

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub import constants

COMMIT = "c0ffee" + "0" * 34
PAGE = 1000


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose method and path match."""

    pattern: str
    status: int = 0
    cut_after: int | None = None
    corrupt: bool = False
    headers: dict = field(default_factory=dict)
    times: int = 1


class Hub:
    """A hub of one repository: `files` by path, `lfs` says which are stored by LFS."""

    def __init__(self, files, kind="dataset", name="owner/corpus", revisions=("main",)):
        self.files = dict(files)
        self.kind = kind
        self.name = name
        self.revisions = dict.fromkeys(revisions, COMMIT)
        self.lfs = lambda path: path.endswith((".parquet", "tokenizer.json"))
        self.page = PAGE
        self.faults = []
        self.requests = []
        self.ignore_ranges = False
        self.xet = False
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{port}"
        self.cdn = f"http://localhost:{port}/cdn"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def fail(self, pattern, **fault):
        """Makes requests fail whose "METHOD path" contains a match of `pattern`."""
        self.faults.append(Fault(pattern, **fault))

    def fault(self, request):
        for fault in self.faults:
            if fault.times and re.search(fault.pattern, request):
                fault.times -= 1
                return fault
        return None

    def ranges(self):
        """The first bytes from which content was asked for, in order."""
        return [start for _, start in (r for r in self.requests if r[0].startswith("GET /cdn"))]


def point_at(url, monkeypatch):
    """Does what HF_ENDPOINT and HF_HUB_DISABLE_XET do when huggingface_hub is imported.

    Chunks are small, so that a cut shows, and nothing waits.
    """
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def git_id(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        url = urlsplit(self.path)
        path = unquote(url.path)
        asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        request = f"{self.command} {path}"
        self.hub.requests.append((request, start))
        self.current = self.hub.fault(request)
        if self.current and self.current.status:
            self.send(self.current.status, b"{}", self.current.headers)
        elif path.startswith("/api/"):
            self.api(path, parse_qs(url.query))
        elif path.startswith("/cdn/"):
            self.content(path.removeprefix("/cdn/"), start)
        else:
            self.resolve(path)

    def api(self, path, query):
        hub = self.hub
        prefix = f"/api/{hub.kind}s/{hub.name}/"
        match = re.fullmatch(rf"{prefix}(revision|tree)/(refs/pr/\d+|[^/]+)/?(.*)", path)
        if not match:
            self.error("RepoNotFound")
        elif (commit := self.commit(match[2])) is None:
            self.error("RevisionNotFound")
        elif match[1] == "revision":
            self.send_json({"id": hub.name, "sha": commit, "siblings": [], "tags": []})
        else:
            self.tree(match[3], int(query.get("cursor", ["0"])[0]))

    def commit(self, revision):
        known = self.hub.revisions
        return revision if revision in known.values() else known.get(revision)

    def tree(self, folder, start):
        prefix = f"{folder}/" if folder else ""
        paths = sorted(path for path in self.hub.files if path.startswith(prefix))
        if not paths:
            self.error("EntryNotFound")
            return
        entries = {}
        for path in paths:
            name, _, below = path.removeprefix(prefix).partition("/")
            entries[name] = (
                {"type": "directory", "path": prefix + name, "oid": git_id(name.encode())}
                if below
                else self.entry(path)
            )
        page = list(entries.values())[start : start + self.hub.page]
        headers = {}
        if start + self.hub.page < len(entries):
            url = f"{self.hub.url}{self.path.split('?')[0]}?cursor={start + self.hub.page}"
            headers["Link"] = f'<{url}>; rel="next"'
        self.send_json(page, headers)

    def entry(self, path):
        content = self.hub.files[path]
        entry = {"type": "file", "path": path, "size": len(content), "oid": git_id(content)}
        if self.hub.lfs(path):
            entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 130}
        return entry

    def resolve(self, path):
        hub = self.hub
        prefix = f"/datasets/{hub.name}" if hub.kind == "dataset" else f"/{hub.name}"
        match = re.fullmatch(rf"{prefix}/resolve/(refs/pr/\d+|[^/]+)/(.+)", path)
        if not match:
            self.error("RepoNotFound")
        elif (commit := self.commit(match[1])) is None:
            self.error("RevisionNotFound")
        elif match[2] not in hub.files:
            self.error("EntryNotFound", {"X-Repo-Commit": commit})
        else:
            self.file(match[2], commit)

    def file(self, path, commit):
        content = self.hub.files[path]
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not self.hub.lfs(path):
            headers["ETag"] = f'"{git_id(content)}"'
            self.send(200, self.corrupted(content), headers)
            return
        headers |= {
            "Location": f"{self.hub.cdn}/{path}",
            "X-Linked-Etag": f'"{sha256(content)}"',
            "X-Linked-Size": str(len(content)),
        }
        if self.hub.xet:
            headers["X-Xet-Hash"] = sha256(content)
            headers["Link"] = f'<{self.hub.url}/api/xet-token>; rel="xet-auth"'
        self.send(302, b"", headers)

    def content(self, path, start):
        content = self.corrupted(self.hub.files[path])
        if start and not self.hub.ignore_ranges:
            spread = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send(206, content[start:], {"Content-Range": spread})
        else:
            self.send(200, content)

    def corrupted(self, content):
        if self.current and self.current.corrupt:
            return content[:-1] + bytes([content[-1] ^ 1])
        return content

    def error(self, code, headers=None):
        self.send(404, b"{}", {"X-Error-Code": code, "X-Error-Message": code} | (headers or {}))

    def send_json(self, value, headers=None):
        content_type = {"Content-Type": "application/json"}
        self.send(200, json.dumps(value).encode(), content_type | (headers or {}))

    def send(self, status, body, headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.current and self.current.cut_after is not None:
            self.wfile.write(body[: self.current.cut_after])
            self.close_connection = True
        else:
            self.wfile.write(body)
