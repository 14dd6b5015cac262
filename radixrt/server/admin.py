"""What the one who runs a server may do, over a socket of this machine alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from radixrt.checks import check_kind
from radixrt.errors import BatchFileError, CacheFileError, ParameterError, RadixrtError
from radixrt.files.path_roles import PathRole, check_apart, written_role
from radixrt.frontend.openai import as_json
from radixrt.kept_cache.cache_file import check_cache_target
from radixrt.runtime import Runtime
from radixrt.server.body import object_in, read_body
from radixrt.server.limits import Limits
from radixrt.server.openai_request import check_known
from radixrt.server.refusal import Refusal, refusal_of
from radixrt.server.responses import JsonResponse, failed, refused
from radixrt.server.route import route_of

Action = Callable[[dict[str, Any]], dict[str, object]]


class Admin:
    """Flushes and saves the cache of a Runtime, one after the other, in a thread of its own."""

    def __init__(self, runtime: Runtime, places: Iterable[PathRole] = ()) -> None:
        """`places` are the server's own, which nothing is saved over."""
        self._runtime, self._places = runtime, [*places]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="radixrt-admin")

    def app(self) -> Starlette:
        """As an ASGI server runs it."""
        routes = [
            route_of("POST", path, self._guarded(action))
            for path, action in (("/flush", self._flush), ("/save", self._save))
        ]
        return Starlette(routes=routes, exception_handlers={404: _unknown, 405: _unknown, Exception: failed})

    def _guarded(self, action: Action) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            try:
                limits = Limits()
                body = await read_body(request, limits)
                given = object_in(body, limits) if body else {}
                done = await asyncio.get_running_loop().run_in_executor(self._thread, action, given)
                return JsonResponse(done)
            except (BatchFileError, CacheFileError) as error:
                return refused(Refusal(400, str(error), "invalid_value"))
            except (Refusal, RadixrtError) as error:
                return refused(refusal_of(error))

        return answered

    def _flush(self, given: dict[str, Any]) -> dict[str, object]:
        if given:
            raise ParameterError("/flush takes no parameters")
        return {"forgotten_tokens": self._runtime.flush_cache()}

    def _save(self, given: dict[str, Any]) -> dict[str, object]:
        check_known(given, "path")
        name = check_kind("path", given.get("path"), str, "the name of a file")
        if "\0" in name or not name.isprintable():
            raise ParameterError(f"path is {as_json(name)}, which names no file")
        path = Path(name).absolute()
        check_apart([*self._places, *written_role("the cache file", path)])
        check_cache_target(path)  # before what runs is waited for
        return {"saved_tokens": self._runtime.save_cache(path), "path": str(path)}


async def _unknown(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path[:200]} is not known; these are: POST /flush, POST /save"
    return refused(Refusal(error.status_code, message, "unknown_url"))
