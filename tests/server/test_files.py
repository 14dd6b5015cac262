"""`/v1/files`: what is kept, what is listed, who sees it, and what is refused."""

from __future__ import annotations

import shutil
import socket
import stat
import subprocess
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.responses import FileResponse

from radixrt.errors import BatchFileError, ParameterError
from radixrt.runtime import Runtime
from radixrt.server.app import Server
from radixrt.server.batches.service import Batches
from radixrt.server.files.folder import files_folder
from radixrt.server.files.record import FileRecord
from radixrt.server.files.store import FileStore
from radixrt.server.files.upload import Form
from radixrt.server.limits import Limits
from radixrt.server.refusal import Refusal
from radixrt.server.tenants import Tenants
from tests.support.serving import Serving, client_of, until

KEYS = ("key-of-one-tenant-1", "key-of-another-one-2")
Keeping = Callable[..., str]


@pytest.fixture
def keeping(runtime: Runtime, serving: Serving, tmp_path: Path) -> Iterator[Keeping]:
    """Serves with files in a folder, which are this server's until the test ends."""
    with ExitStack() as opened:

        def keep(limits: Limits | None = None, keys: tuple[str, ...] = ()) -> str:
            tenants, folder = Tenants(keys), opened.enter_context(files_folder(tmp_path / "kept"))
            batches = opened.enter_context(Batches(runtime, folder, tenants.names, limits=limits))
            return serving(Server(runtime, "built-in", limits=limits, tenants=tenants, batches=batches))

        yield keep


def kept(folder: Path) -> list[str]:
    """Names of all that is in the folder of files, of all tenants."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def upload(url: str, content: bytes = b"{}\n", name: str = "in.jsonl", purpose: str = "batch") -> httpx.Response:
    return httpx.post(f"{url}/v1/files", files={"file": (name, content)}, data={"purpose": purpose}, timeout=30)


def test_a_file_by_the_client_of_openai(keeping: Keeping, tmp_path: Path) -> None:
    client = client_of(keeping())
    content = b'{"custom_id": "a"}\n' * 100_000  # in several pieces
    made = client.files.create(file=("my lines.jsonl", content), purpose="batch")
    assert (made.filename, made.bytes, made.purpose, made.status) == (
        "my lines.jsonl", len(content), "batch", "processed"
    )  # fmt: skip
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    assert [one.id for one in client.files.list()] == [made.id]
    assert kept(tmp_path / "kept") == [made.id, f"{made.id}.json"]
    for path in (tmp_path / "kept", tmp_path / "kept" / "no-key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert client.files.delete(made.id).deleted
    assert kept(tmp_path / "kept") == []
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no such file"):
            ask(made.id)


def test_a_file_that_is_deleted_while_it_is_downloaded(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there until it was asked for, or it is not found; there is no half of it."""
    client = client_of(keeping())
    get, begin = FileStore.get, FileResponse.__call__
    made = [client.files.create(file=("in.jsonl", b"content"), purpose="batch") for _ in range(2)]

    def unlink() -> None:
        for path in (tmp_path / "kept").rglob("file-*"):
            if path.suffix != ".json":
                path.unlink()

    def got(store: FileStore, file_id: str) -> FileRecord:
        record = get(store, file_id)
        unlink()
        return record

    async def begun(*arguments: Any) -> None:
        unlink()
        await begin(*arguments)

    monkeypatch.setattr(FileResponse, "__call__", begun)
    assert client.files.content(made[0].id).read() == b"content"
    monkeypatch.setattr(FileStore, "get", got)
    with pytest.raises(openai.NotFoundError, match="there is no such file"):
        client.files.content(made[1].id)


def test_lists_go_page_by_page(keeping: Keeping) -> None:
    url = keeping()
    client = client_of(url)
    ids = [client.files.create(file=(f"{n}.jsonl", b"{}"), purpose="batch").id for n in range(5)]
    assert [one.id for one in client.files.list(limit=2)] == ids[::-1]  # the client asks for page after page
    assert [one.id for one in client.files.list(limit=2, order="asc")] == ids
    page = client.files.list(limit=2, order="asc", after=ids[1])
    assert ([one.id for one in page.data], page.has_more) == (ids[2:4], True)
    assert client.files.list(after=ids[0]).data == []
    assert [one.id for one in client.files.list(purpose="batch")] == ids[::-1]
    assert client.files.list(purpose="batch_output").data == []
    for query, message in (
        ("limit=0", "limit is 0; it must be 1 to 10000"),
        ("limit=a", "limit is a"),
        ("limit=%C2%B2", "it must be 1 to 10000"),
        (f"limit=000000001{'9' * 5000}", "it must be 1 to 10000"),  # more digits than Python reads
        ("order=up", "order is up; it must be asc or desc"),
        ("after=file-0", "after is file-0, which is not in the list"),
        ("page=2", "unknown parameter page"),
    ):
        response = httpx.get(f"{url}/v1/files?{query}")
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


def test_files_are_there_after_a_restart(runtime: Runtime, tmp_path: Path) -> None:
    """What a killed server has left of an upload goes."""
    (tmp_path / "kept").mkdir()
    limits = Limits()
    store = FileStore(tmp_path / "kept", limits)
    with store.draft() as draft:
        draft.write(b"all of it")
        record = draft.keep("in.jsonl", "batch")
    (tmp_path / "kept" / "file-without-a-record").write_text("half of it")
    (tmp_path / "kept" / "file-without-a-record.partial").write_text("half of it")
    (tmp_path / "kept" / "notes.txt").write_text("not the server's")
    again = FileStore(tmp_path / "kept", limits)
    assert list(again) == [record]
    assert again.content(record).read_bytes() == b"all of it"
    assert kept(tmp_path / "kept") == sorted([record.id, f"{record.id}.json", "notes.txt"])
    with again.draft() as draft:
        assert draft.keep("later", "batch").number > record.number


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"id": "file-1"}'])
def test_a_record_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / f"file-{'0' * 32}.json"
    path.write_text(text)
    with pytest.raises(BatchFileError, match=f"{path} is no record of this server"):
        FileStore(tmp_path, Limits())


def test_tenants_see_their_own(keeping: Keeping, tmp_path: Path) -> None:
    url = keeping(keys=KEYS)
    one, other = (client_of(url, key) for key in KEYS)
    made = one.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    assert other.files.list().data == []
    for ask in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=made.id, endpoint="/v1/completions", completion_window="24h")
    assert one.files.content(made.id).read() == b"{}"
    assert httpx.get(f"{url}/v1/files").status_code == 401
    assert httpx.post(f"{url}/v1/files", content=b"x").status_code == 401
    folders = {path.name for path in (tmp_path / "kept").iterdir() if path.is_dir()}
    assert folders == {*Tenants(KEYS).names} == {*Tenants(KEYS[::-1]).names}  # whatever the order in the file


@pytest.mark.parametrize(
    "name",
    [
        "../../../etc/passwd",
        "/etc/passwd",
        "..\\..\\a",
        "a\0b",
        "..",
        "",
        "lock",
        "file-" + "0" * 32 + ".json",
        "nämé 🙂.jsonl",
    ],
)
def test_names_of_clients_lead_nowhere(name: str, keeping: Keeping, tmp_path: Path) -> None:
    """They are told again, and are no part of a path."""
    client = client_of(keeping())
    before = {path for path in tmp_path.rglob("*") if "kept" not in str(path.relative_to(tmp_path))}
    escaped = name.replace("\0", "%00")
    body = (
        f'--b\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\nlines\r\n'
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    )
    response = httpx.post(
        f"{client.base_url}files",
        content=body.encode(),
        headers={"Content-Type": "multipart/form-data; boundary=b"},
    )
    if "\0" in name:
        assert response.status_code in (200, 400)
    else:
        assert response.status_code == 200
    if response.status_code == 200:
        made = response.json()
        assert kept(tmp_path / "kept") == [made["id"], f"{made['id']}.json"]
    assert {path for path in tmp_path.rglob("*") if "kept" not in str(path.relative_to(tmp_path))} == before
    for path in (f"files/{escaped}", f"files/{escaped}/content"):
        response = httpx.get(f"{client.base_url}{path}")
        assert response.status_code in (200, 307, 404)  # the empty one asks for the list
        assert "root:" not in response.text


@pytest.mark.parametrize(
    "wanted",
    [
        "..%2f..%2fsecret",
        "%2e%2e/%2e%2e/secret",
        "..%5c..%5csecret",
        "%2fetc%2fpasswd",
        "file-..%2fsecret",
        "a%00b",
    ],
)
def test_ids_lead_nowhere(wanted: str, keeping: Keeping, tmp_path: Path) -> None:
    url = keeping()
    (tmp_path / "secret").write_text("root:")
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    for method in ("GET", "DELETE"):
        for path in (f"/v1/files/{wanted}", f"/v1/files/{wanted}/content", f"/v1/batches/{wanted}"):
            with socket.create_connection(address, timeout=10) as raw:  # a client would make the path shorter
                head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
                raw.sendall(head.encode())
                told = b"".join(iter(lambda: raw.recv(65536), b""))
            assert told.split()[1] in (b"404", b"405")
            assert b"root:" not in told
    assert (tmp_path / "secret").exists()


def test_forms_of_others(keeping: Keeping) -> None:
    url = keeping()
    if (curl := shutil.which("curl")) is None:
        pytest.skip("there is no curl")
    command = [curl, "-sS", f"{url}/v1/files", "-F", "purpose=batch", "-F", "file=@-;filename=a.jsonl"]
    told = subprocess.run(command, input=b"some\r\n--lines\r\n", capture_output=True, check=True)
    (made,) = client_of(url).files.list()
    assert made.id.encode() in told.stdout
    assert client_of(url).files.content(made.id).read() == b"some\r\n--lines\r\n"


BOUND = {"Content-Type": "multipart/form-data; boundary=b"}
PURPOSE = '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = '--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nlines\r\n'
MORE = '--b\r\nContent-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n3600\r\n'
LONG = f'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{"a" * 2000}\r\n'


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        ("{}", {"Content-Type": "application/json"}, "the content type is application/json; it must be multipart"),
        ("{}", {}, "the content type is none"),
        ("{}", {"Content-Type": "multipart/form-data"}, "it must be multipart/form-data"),
        ("{}", BOUND, "the body is no multipart form"),
        ("", BOUND, "the form breaks off before its end"),
        (PURPOSE + FILE, BOUND, "the form breaks off before its end"),
        (FILE[:-7], BOUND, "the form breaks off before its end"),
        (PURPOSE + "--b--\r\n", BOUND, "the form has no file"),
        (FILE + "--b--\r\n", BOUND, "purpose is missing; it must be batch"),
        (PURPOSE.replace("batch", "vision") + FILE + "--b--\r\n", BOUND, "purpose is vision; it must be batch"),
        (PURPOSE + FILE + FILE + "--b--\r\n", BOUND, "the form has two files"),
        (PURPOSE + PURPOSE + FILE + "--b--\r\n", BOUND, "the form has purpose twice"),
        (PURPOSE + MORE + FILE + "--b--\r\n", BOUND, "unknown parameter expires_after[seconds]"),
        (LONG + FILE + "--b--\r\n", BOUND, "purpose in the form has more than 1,024 bytes"),
        ("--b\r\nX-Other: 1\r\n\r\na\r\n" * 20, BOUND, ""),
        (PURPOSE, {"Content-Type": f"multipart/form-data; boundary={'b' * 1000}"}, ""),
        ("--b\r\n" + "X" * 20_000, BOUND, "the body is no multipart form"),
    ],
)
def test_forms_that_cannot_be(
    body: str, headers: dict[str, str], message: str, keeping: Keeping, tmp_path: Path
) -> None:
    response = httpx.post(f"{keeping()}/v1/files", content=body.encode(), headers=headers)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
    assert kept(tmp_path / "kept") == []


def test_a_form_byte_by_byte() -> None:
    content = b"--b\r\n\r\n--b-\r\n" + bytes(range(256))
    body = PURPOSE.encode() + FILE.encode().replace(b"lines", content) + b"--b--\r\n"
    body = body.replace(content, content.replace(b"\r\n--b", b"\r\n--c"))
    got = bytearray()
    form = Form("multipart/form-data; boundary=b", got.extend)
    for byte in body:
        form.feed(bytes([byte]))
    assert form.is_whole
    assert (form.fields, form.filename) == ({"purpose": "batch"}, "a")
    assert bytes(got) == content.replace(b"\r\n--b", b"\r\n--c")


# -- limits ----------------------------------------------------------------------------------------------------


def test_a_file_that_is_too_large(keeping: Keeping, tmp_path: Path) -> None:
    """With a length that says so, and without one; nothing of it stays."""
    url = keeping(Limits(file_bytes=3_000_000, body_bytes=1000))
    for content in (b"x" * 4_000_000, b"x" * 3_000_001):
        response = upload(url, content)
        assert response.status_code == 413
        assert "the file has more than 3,000,000 bytes" in response.text

    def pieces() -> Iterator[bytes]:
        yield (PURPOSE + FILE[:-7]).encode()
        for _ in range(100):
            yield b"x" * 100_000

    response = httpx.post(f"{url}/v1/files", content=pieces(), headers=BOUND, timeout=30)
    assert response.status_code == 413
    until(lambda: kept(tmp_path / "kept") == [])
    assert upload(url, b"x" * 3_000_000).status_code == 200


def test_all_files_of_a_tenant_have_a_bound(keeping: Keeping) -> None:
    url = keeping(Limits(all_file_bytes=2500, files=3))
    first = upload(url, b"x" * 1000).json()["id"]
    assert upload(url, b"x" * 1000).status_code == 200
    response = upload(url, b"x" * 1000)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "storage_full")
    assert "all files have more than 2,500 bytes; delete some first" in response.text
    assert upload(url, b"x" * 500).status_code == 200
    assert "3 files are the most; delete some first" in upload(url, b"").text
    httpx.delete(f"{url}/v1/files/{first}")
    assert upload(url, b"x" * 1000).status_code == 200


def test_files_that_come_at_once_count_while_they_come(tmp_path: Path) -> None:
    store = FileStore(tmp_path, Limits(all_file_bytes=1500, files=2))
    with store.draft() as one, store.draft() as other:
        one.write(b"x" * 1000)
        with pytest.raises(Refusal, match="all files have more than 1,500 bytes"):
            other.write(b"x" * 1000)
        other.write(b"x" * 500)
        with pytest.raises(Refusal, match="2 files are the most"):
            store.draft()
    with store.draft() as again:
        again.write(b"x" * 1500)


def test_a_file_that_does_not_come(keeping: Keeping, tmp_path: Path) -> None:
    url = keeping(Limits(body_seconds=0.3))
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    with socket.create_connection(address, timeout=10) as slow:
        head = "POST /v1/files HTTP/1.1\r\nHost: a\r\nContent-Length: 9999\r\n"
        slow.sendall(f"{head}Content-Type: {BOUND['Content-Type']}\r\n\r\n{FILE[:-7]}".encode())
        assert b"408" in slow.recv(4096)
    assert kept(tmp_path / "kept") == []


def test_a_client_that_goes_leaves_nothing(keeping: Keeping, tmp_path: Path) -> None:
    url = keeping()
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    with socket.create_connection(address, timeout=10) as left:
        head = "POST /v1/files HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999\r\n"
        left.sendall(f"{head}Content-Type: {BOUND['Content-Type']}\r\n\r\n{FILE[:-7]}".encode())
        until(lambda: kept(tmp_path / "kept") != [])
    until(lambda: kept(tmp_path / "kept") == [])


def test_a_large_file_is_not_in_memory(tmp_path: Path) -> None:
    """Neither taken apart nor written."""
    piece = b"x" * 2**20
    tracemalloc.start()
    try:
        store = FileStore(tmp_path, Limits())
        with store.draft() as draft:
            form = Form(BOUND["Content-Type"], draft.write)
            form.feed((PURPOSE + FILE[:-7]).encode())
            for _ in range(64):
                form.feed(piece)
            form.feed(b"\r\n--b--\r\n")
            record = draft.keep("large", "batch")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert record.bytes == 64 * 2**20
    assert most < 8 * 2**20


def test_a_disk_that_refuses(keeping: Keeping, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = keeping()

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("radixrt.server.files.store.AtomicFile.write", refuse)
        response = upload(url)
    assert (response.status_code, response.json()["error"]["code"]) == (507, "disk_refuses")
    assert kept(tmp_path / "kept") == []
    assert upload(url).status_code == 200


# -- the folder ------------------------------------------------------------------------------------------------


def test_without_a_folder_nothing_is_kept(serving: Serving) -> None:
    url = serving()
    for method, path in (
        ("POST", "/v1/files"),
        ("GET", "/v1/files"),
        ("GET", "/v1/files/file-1"),
        ("GET", "/v1/files/file-1/content"),
        ("DELETE", "/v1/files/file-1"),
        ("POST", "/v1/batches"),
        ("POST", "/v1/batches/batch_1/cancel"),
    ):
        response = httpx.request(method, f"{url}{path}")
        assert response.status_code == 404
        assert response.json()["error"]["message"] == (
            "this server keeps no files: start it with --files-dir FOLDER"
        )


@contextmanager
def opened(path: Path) -> Iterator[None]:
    with files_folder(path) as folder:
        folder.of(None)
        yield


def test_a_folder_is_of_one_server(tmp_path: Path) -> None:
    refused = pytest.raises(BatchFileError, match="another process writes to")
    with opened(tmp_path / "kept"), refused, opened(tmp_path / "kept"):
        pass
    with opened(tmp_path / "kept"):
        pass
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "nothing" / "there"):
        with pytest.raises(ParameterError, match=f"files cannot be kept in {path}"), opened(path):
            pass


def test_uploads_do_not_hold_the_loop(keeping: Keeping, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk takes its time, others are answered."""
    url, goes_on, begun = keeping(), threading.Event(), threading.Event()

    def slowly(*_: Any) -> None:
        begun.set()
        goes_on.wait(20)

    monkeypatch.setattr("radixrt.server.files.store.AtomicFile.write", slowly)
    thread = threading.Thread(target=upload, args=(url,))
    thread.start()
    try:
        assert begun.wait(20)
        assert httpx.get(f"{url}/health", timeout=5).status_code == 200
    finally:
        goes_on.set()
        thread.join()
