"""What can be done at the local socket, and who can come there."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixrt.errors import ParameterError
from radixrt.files.path_roles import read_role
from radixrt.runtime import Runtime
from radixrt.server.admin import Admin
from radixrt.server.local_socket import local_socket
from tests.support.serving import GREEDY, LONG, QUESTIONS, Serving, client_of, held, until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "admin"


@pytest.fixture
def bound(path: Path) -> Iterator[socket.socket]:
    with local_socket(path) as listening:
        yield listening


@pytest.fixture
def admin(
    bound: socket.socket, serving: Serving, runtime: Runtime, path: Path, tmp_path: Path
) -> Iterator[httpx.Client]:
    """A client of the actions; the header X-Url says where the server is."""
    (tmp_path / "model").mkdir()
    url = serving(admin=(Admin(runtime, read_role("the model's folder", tmp_path / "model")), bound))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
        client.headers["x-url"] = url
        yield client


def url_of(admin: httpx.Client) -> str:
    return admin.headers["x-url"]


def test_flush(admin: httpx.Client, runtime: Runtime) -> None:
    """What no request uses is forgotten."""
    client_of(url_of(admin)).completions.create(prompt=QUESTIONS, **GREEDY)
    until(lambda: not runtime.has_work)
    tokens = runtime.cache_stats().evictable
    assert tokens > 0
    response = admin.post("/flush")
    assert (response.status_code, response.json()) == (200, {"forgotten_tokens": tokens})
    assert runtime.cache_stats().evictable == 0


def test_save(admin: httpx.Client, runtime: Runtime, tmp_path: Path) -> None:
    """What runs ends first, and new requests wait; health is told meanwhile."""
    url = url_of(admin)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(httpx.post, f"{url}/v1/completions", json={**LONG, "max_tokens": 200}, timeout=60)
        until(lambda: runtime.num_running == 1)
        saving = threads.submit(admin.post, "/save", json={"path": str(tmp_path / "kept")}, timeout=60)
        assert httpx.get(f"{url}/health").status_code == 200
        saved = saving.result()
        assert asked.result().json()["usage"]["completion_tokens"] == 200
    assert saved.status_code == 200
    assert saved.json() == {
        "saved_tokens": runtime.cache_stats().evictable,
        "path": str(tmp_path / "kept"),
    }
    runtime.flush_cache()
    assert runtime.load_cache(tmp_path / "kept") == saved.json()["saved_tokens"]
    again = admin.post("/save", json={"path": str(tmp_path / "kept")})  # a kept cache may be replaced
    assert again.status_code == 200


@pytest.mark.parametrize(
    ("url", "body", "status", "message"),
    [
        ("/save", {}, 400, "path is"),
        ("/save", {"path": 1}, 400, "path is a number; it must be the name of a file"),
        ("/save", {"path": "a\0b"}, 400, "which names no file"),
        ("/save", {"path": "HOME/other"}, 400, "exists and is no kept cache of radixrt"),
        ("/save", {"path": "HOME/nothing/there"}, 400, "nothing"),
        ("/save", {"path": "HOME"}, 400, "HOME"),
        ("/save", {"path": "HOME/model/cache"}, 400, "is in the model's folder"),
        ("/save", {"path": "HOME/kept", "more": 1}, 400, "unknown parameter more; known are path"),
        ("/save", b"{", 400, "the body is not JSON"),
        ("/flush", {"path": "HOME/kept"}, 400, "/flush takes no parameters"),
        ("/state", {}, 404, "POST /state is not known; these are: POST /flush, POST /save"),
    ],
)
def test_what_cannot_be_done(
    url: str, body: Any, status: int, message: str, admin: httpx.Client, tmp_path: Path
) -> None:
    (tmp_path / "other").write_text("something else")
    if isinstance(body, dict):
        body = {
            name: str(v).replace("HOME", str(tmp_path)) if isinstance(v, str) else v for name, v in body.items()
        }
    response = admin.post(url, content=body) if isinstance(body, bytes) else admin.post(url, json=body)
    assert response.status_code == status
    assert message.replace("HOME", str(tmp_path)) in response.json()["error"]["message"]
    assert (tmp_path / "other").read_text() == "something else"
    assert admin.get("/flush").status_code == 405


def test_a_runtime_without_a_cache(bound: socket.socket, serving: Serving, path: Path, tmp_path: Path) -> None:
    with (
        Runtime(device="cpu", enable_prefix_cache=False) as runtime,
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client,
    ):
        serving(admin=(Admin(runtime), bound))
        response = client.post("/save", json={"path": str(tmp_path / "kept")})
        assert response.status_code == 400
        assert "save_cache needs a prefix cache, but enable_prefix_cache is False" in response.text


def test_the_public_address_does_none_of_it(admin: httpx.Client) -> None:
    for action in ("flush", "save"):
        assert httpx.post(f"{url_of(admin)}/{action}", json={}).status_code == 404


def test_an_action_does_not_hold_the_loop(admin: httpx.Client, runtime: Runtime) -> None:
    with ThreadPoolExecutor() as threads, held(runtime):
        flushing = threads.submit(admin.post, "/flush", timeout=30)
        assert httpx.get(f"{url_of(admin)}/health").status_code == 200
        assert not flushing.done()
    assert flushing.result().status_code == 200


def test_curl(admin: httpx.Client, path: Path, tmp_path: Path) -> None:
    """As the documents say."""
    if (curl := shutil.which("curl")) is None:
        pytest.skip("there is no curl")
    command = [curl, "-sS", "--unix-socket", str(path)]
    flushed = subprocess.run([*command, "-X", "POST", "http://localhost/flush"], capture_output=True, text=True)
    assert "forgotten_tokens" in flushed.stdout
    body = f'{{"path": "{tmp_path / "kept"}"}}'
    saved = subprocess.run([*command, "http://localhost/save", "-d", body], capture_output=True, text=True)
    assert "saved_tokens" in saved.stdout


# -- the socket --------------------------------------------------------------------------------------------


def test_only_this_user_may_come(path: Path) -> None:
    before = os.umask(0)
    try:
        with local_socket(path):
            found = path.lstat()
            assert stat.S_ISSOCK(found.st_mode)
            assert stat.S_IMODE(found.st_mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert not path.exists()


def test_what_a_server_has_left_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    with local_socket(path) as bound, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        bound.accept()[0].close()


def test_what_is_in_use_is_not(path: Path) -> None:
    with local_socket(path):
        with pytest.raises(ParameterError, match=f"a server listens at {path} already"), local_socket(path):
            pass
        assert path.exists()
    path.write_text("a file")
    with pytest.raises(ParameterError, match="is there and is no socket"), local_socket(path):
        pass
    assert path.read_text() == "a file"
    path.unlink()
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(ParameterError, match="is there and is no socket"), local_socket(path):
        pass


def test_another_server_may_have_come_meanwhile(path: Path) -> None:
    with local_socket(path):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
    assert path.exists()
