"""What clients do with their files."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, TypeVar

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from radixrt.checks import short
from radixrt.errors import ParameterError
from radixrt.server.files.record import BATCH, FileRecord
from radixrt.server.files.store import FileStore
from radixrt.server.files.upload import Form, receive
from radixrt.server.limits import Limits
from radixrt.server.listing import listed
from radixrt.server.refusal import Refusal
from radixrt.server.responses import JsonResponse

Endpoint = Callable[[Request, str | None], Awaitable[Response]]
Route = tuple[str, str, Endpoint]  # method, path

FILES = "/v1/files"

T = TypeVar("T")

_LISTED = 10_000
_THREADS = 2  # that write and sync: not those that read and answer bodies
_FIELDS = ("purpose",)

_log = logging.getLogger(__name__)


class FileEndpoints:
    """Of all tenants, each with a store of its own."""

    def __init__(
        self,
        stores: Mapping[str | None, FileStore],
        limits: Limits,
        is_used: Callable[[str | None, str], str | None],
    ) -> None:
        """`is_used` tells which batch of a tenant needs a file, if one does."""
        self._stores, self._limits, self._is_used = stores, limits, is_used
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="radixrt-files")

    def routes(self) -> list[Route]:
        """What is served where."""
        return [
            ("POST", FILES, self._create),
            ("GET", FILES, self._list),
            ("GET", f"{FILES}/{{file_id}}", self._get),
            ("DELETE", f"{FILES}/{{file_id}}", self._delete),
            ("GET", f"{FILES}/{{file_id}}/content", self._content),
        ]

    async def _create(self, request: Request, tenant: str | None) -> Response:
        limits = self._limits
        told = request.headers.get("content-length", "")
        if told.isascii() and told.isdigit() and int(told[:18]) > limits.file_bytes + limits.body_bytes:
            raise Refusal(413, f"the file has more than {limits.file_bytes:,} bytes", "file_too_large")
        try:
            with self._stores[tenant].draft() as draft:
                form = Form(request.headers.get("content-type", ""), draft.write)
                await receive(request.stream(), form, limits, self._in_thread)
                _check(form)
                assert form.filename is not None
                record = await self._in_thread(draft.keep, form.filename, form.fields["purpose"])
        except OSError as error:
            raise disk_refuses(error) from error
        return JsonResponse(record.body())

    async def _list(self, request: Request, tenant: str | None) -> Response:
        given = request.query_params
        wanted = given.get("purpose")
        files = [record for record in self._stores[tenant] if wanted in (None, record.purpose)]
        known = ("after", "limit", "order", "purpose")
        return JsonResponse(listed(files, given, known, limit=_LISTED, most=_LISTED))

    async def _get(self, request: Request, tenant: str | None) -> Response:
        return JsonResponse(self._asked(request, tenant).body())

    async def _content(self, request: Request, tenant: str | None) -> Response:
        try:
            content = await self._in_thread(self._stores[tenant].opened, self._asked(request, tenant))
        except OSError as error:
            raise disk_refuses(error) from error
        return _Content(content)

    async def _delete(self, request: Request, tenant: str | None) -> Response:
        record = self._asked(request, tenant)
        if (batch_id := self._is_used(tenant, record.id)) is not None:
            told = f"the file is the input of {batch_id}, which has not ended; cancel that first"
            raise Refusal(409, told, "file_in_use")
        try:
            await self._in_thread(self._stores[tenant].delete, record)
        except OSError as error:
            raise disk_refuses(error) from error
        return JsonResponse({"id": record.id, "object": "file", "deleted": True})

    def _asked(self, request: Request, tenant: str | None) -> FileRecord:
        return self._stores[tenant].get(request.path_params["file_id"])

    async def _in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)


class _Content(FileResponse):
    """The content of a file, which may be deleted meanwhile."""

    def __init__(self, file: BinaryIO) -> None:
        headers = {"Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff"}
        status = os.fstat(file.fileno())
        media_type = "application/octet-stream"
        super().__init__(f"/dev/fd/{file.fileno()}", headers=headers, media_type=media_type, stat_result=status)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


def _check(form: Form) -> None:
    """Raise ParameterError unless a whole form asks for what can be done."""
    purpose = form.fields.get("purpose", "")
    if unknown := sorted(form.fields.keys() - {*_FIELDS}):
        raise ParameterError(f"unknown parameter {short(unknown[0])}; known are file, {', '.join(_FIELDS)}")
    if purpose != BATCH:
        raise ParameterError(f"purpose is {short(purpose) or 'missing'}; it must be {BATCH}")
    if form.filename is None:
        raise ParameterError("the form has no file")


def disk_refuses(error: OSError) -> Refusal:
    """What a client is told then; the log has the rest."""
    _log.error("something cannot be kept or removed: %s", error, exc_info=error)
    return Refusal(507, "the server's disk refuses; its log has more", "disk_refuses")
