"""A Hugging Face hub on a local port: enough of its HTTP interface for a download of one model."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(
    models: Mapping[str, Mapping[str, bytes]], gate: threading.Event | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Serve models, given as id to file name to content; no safetensors come through a closed gate.

    Yields:
        The URL, for HF_ENDPOINT, and the list of files asked for, which grows.
    """
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, *, has_body: bool) -> None:
            for model, files in models.items():
                if self.path.startswith(f"/api/models/{model}/tree/"):
                    tree = [
                        {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
                        for name, content in files.items()
                    ]
                    return self._send(json.dumps(tree).encode(), has_body)
                if self.path.startswith(f"/api/models/{model}"):
                    siblings = [{"rfilename": name} for name in files]
                    answer = {"id": model, "sha": COMMIT, "siblings": siblings}
                    return self._send(json.dumps(answer).encode(), has_body)
                prefix = f"/{model}/resolve/{COMMIT}/"
                if (name := self.path.removeprefix(prefix)) in files:
                    fetched.append(name)
                    return self._send(files[name], has_body)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(self, content: bytes, has_body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{_oid(content)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if has_body:
                if gate is not None and self.path.endswith(".safetensors"):
                    gate.wait(60)
                with contextlib.suppress(OSError):  # the client may be gone by then
                    self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
