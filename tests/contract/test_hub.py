"""A hub name is downloaded, by the real client from a small server of the hub's protocol, and comes from the cache without network."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from pathlib import Path

import pytest
import torch

from burnish.config import Model
from burnish.models.load import ModelError, inspect, load


class Hub(http.server.BaseHTTPRequestHandler):
    """GET and HEAD of /owner/NAME/resolve/main/FILE and /api/models/owner/NAME."""

    root: Path
    asked: list[str]

    def do_GET(self):
        self.answer()

    def do_HEAD(self):
        self.answer()

    def log_message(self, *args):
        pass

    def answer(self):
        self.asked.append(self.path)
        parts = self.path.partition("?")[0].strip("/").split("/")
        name = parts[3] if parts[0] == "api" and len(parts) > 3 else parts[1] if len(parts) > 1 else ""
        folder, commit = self.root / name, {"x-repo-commit": "a" * 40}
        if not name or not folder.is_dir():
            self.send(404, b"", {"x-error-code": "RepoNotFound"})
        elif parts[0] == "api":
            files = [{"rfilename": file.name} for file in folder.iterdir()]
            body = {"id": f"owner/{name}", "sha": "a" * 40, "siblings": files, "private": False, "tags": []}
            self.send(200, json.dumps([] if "tree" in parts else body).encode(), {"content-type": "application/json"})
        elif (folder / parts[-1]).is_file():
            data = (folder / parts[-1]).read_bytes()
            self.send(200, data, {"etag": f'"{hashlib.sha256(data).hexdigest()}"', **commit})
        else:
            self.send(404, b"", {"x-error-code": "EntryNotFound", **commit})

    def send(self, status, body, headers):
        self.send_response(status)
        for key, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    handler = type("OneHub", (Hub,), {"root": tmp_path / "repos", "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    yield handler
    server.shutdown()
    server.server_close()


def test_hub_name(hub, make_tiny):
    saved = make_tiny("llama_tied", seed=4)
    for part in (saved.module, saved.tokenizer):
        part.save_pretrained(hub.root / "tiny")
    settings = Model(path="owner/tiny")
    assert inspect(settings).num_parameters == sum(p.numel() for p in saved.module.parameters())
    assert not [path for path in hub.asked if "safetensors" in path]

    loaded = load(settings, seed=0)
    assert [path for path in hub.asked if "safetensors" in path]
    state = loaded.module.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.module.state_dict().items())
    assert loaded.tokenizer.encode("1+2=") == saved.tokenizer.encode("1+2=")


def test_a_name_the_hub_does_not_know(hub):
    with pytest.raises(ModelError, match="owner/nope: neither a folder here nor a model on the hub"):
        inspect(Model(path="owner/nope"))
