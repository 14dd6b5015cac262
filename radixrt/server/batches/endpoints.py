"""What clients do with batches."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from radixrt.checks import check_kind, kind, short
from radixrt.errors import ParameterError
from radixrt.frontend.openai import CHAT, COMPLETIONS, as_json
from radixrt.server.batches.queue import BatchQueue
from radixrt.server.batches.record import BatchRecord
from radixrt.server.files.endpoints import Route, disk_refuses
from radixrt.server.files.record import BATCH
from radixrt.server.files.store import FileStore
from radixrt.server.listing import listed
from radixrt.server.responses import JsonResponse

BATCHES = "/v1/batches"

T = TypeVar("T")

_KNOWN = ("input_file_id", "endpoint", "completion_window", "metadata")
_LISTED, _MOST_LISTED = 20, 100
_HOURS = re.compile(r"([1-9]\d{0,2})h")
_MOST_HOURS = 720
_PAIRS, _KEY_LENGTH, _VALUE_LENGTH = 16, 64, 512  # of metadata: OpenAI's bounds


class BatchEndpoints:
    """Of all tenants, each with a queue of its own."""

    def __init__(
        self,
        queues: Mapping[str | None, BatchQueue],
        stores: Mapping[str | None, FileStore],
        model: str,
        read: Callable[[Request], Awaitable[dict[str, Any]]],
    ) -> None:
        """`model`: its name; `read` gives the object of a body."""
        self._queues, self._stores, self._model, self._read = queues, stores, model, read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="radixrt-batch-records")  # that writes to disk

    def routes(self) -> list[Route]:
        """What is served where."""
        return [
            ("POST", BATCHES, self._create),
            ("GET", BATCHES, self._list),
            ("GET", f"{BATCHES}/{{batch_id}}", self._get),
            ("POST", f"{BATCHES}/{{batch_id}}/cancel", self._cancel),
        ]

    async def _create(self, request: Request, tenant: str | None) -> Response:
        asked = _read(await self._read(request))
        file = self._stores[tenant].get(asked.pop("input_file_id"))
        if file.purpose != BATCH:
            raise ParameterError(f"input_file_id is a file for {file.purpose}; it must be one for {BATCH}")

        def create() -> BatchRecord:
            return self._queues[tenant].create(file, model=self._model, **asked)

        return JsonResponse((await self._written(create)).body())

    async def _list(self, request: Request, tenant: str | None) -> Response:
        known, batches = ("after", "limit"), self._queues[tenant]
        return JsonResponse(listed(batches, request.query_params, known, limit=_LISTED, most=_MOST_LISTED))

    async def _get(self, request: Request, tenant: str | None) -> Response:
        return JsonResponse(self._queues[tenant].get(request.path_params["batch_id"]).body())

    async def _cancel(self, request: Request, tenant: str | None) -> Response:
        queue, batch_id = self._queues[tenant], request.path_params["batch_id"]
        return JsonResponse((await self._written(lambda: queue.cancel(batch_id))).body())

    async def _written(self, change: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, change)
        except OSError as error:
            raise disk_refuses(error) from error


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """What a body without what is null asks for. Raises ParameterError or PromptError, by name."""
    if unknown := sorted(given.keys() - {*_KNOWN}):
        raise ParameterError(f"unknown parameter {short(unknown[0])}; known are {', '.join(_KNOWN)}")
    endpoint, window = given.get("endpoint"), given.get("completion_window")
    if endpoint not in (CHAT, COMPLETIONS):
        raise ParameterError(f"endpoint is {as_json(endpoint)}; it must be {CHAT} or {COMPLETIONS}")
    hours = _HOURS.fullmatch(window) if isinstance(window, str) else None
    if hours is None or int(hours[1]) > _MOST_HOURS:
        most = f"{_MOST_HOURS}h"
        raise ParameterError(f'completion_window is {as_json(window)}; it must be "24h", or "1h" to "{most}"')
    return {
        "input_file_id": check_kind("input_file_id", given.get("input_file_id"), str, "the id of a file"),
        "endpoint": endpoint,
        "completion_window": window,
        "expires_at": int(hours[1]) * 3600,
        "metadata": _metadata(given.get("metadata")),
    }


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > _PAIRS:
        told = f"has {len(given)} keys" if isinstance(given, dict) else f"is {kind(given)}"
        raise ParameterError(f"metadata {told}; it must be an object of at most {_PAIRS} strings")
    for key, value in given.items():
        if len(key) > _KEY_LENGTH:
            raise ParameterError(f"a key of metadata has {len(key)} characters; {_KEY_LENGTH} are the most")
        if not isinstance(value, str) or len(value) > _VALUE_LENGTH:
            told = f"has {len(value)} characters" if isinstance(value, str) else f"is {kind(value)}"
            raise ParameterError(
                f"metadata.{key} {told}; it must be a string of at most {_VALUE_LENGTH} characters"
            )
    return given
