"""A Runtime of the built-in model with a chat template, and servers over it."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'radixrt[server]'")

from radixrt.builtin import MODEL_PATH
from radixrt.runtime import Runtime
from radixrt.server.admin import Admin
from radixrt.server.app import Server
from radixrt.server.run import Listener, listening_socket
from tests.support.serving import Serving, until

# The built-in model continues plain text. Calls are Hermes'.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endfor %}'
)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder = tmp_path_factory.mktemp("model") / "built-in"
    shutil.copytree(MODEL_PATH, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with Runtime(folder, device="cpu", max_total_tokens=20_000) as found:
        yield found


@pytest.fixture
def serving(runtime: Runtime) -> Iterator[Serving]:
    """Serves until the test ends."""
    ends: list[Callable[[], None]] = []

    def serve(
        server: Server | None = None,
        send_buffer: int | None = None,
        admin: tuple[Admin, socket.socket] | None = None,
    ) -> str:
        bound = listening_socket("127.0.0.1", 0)
        if send_buffer is not None:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        listener = Listener(server or Server(runtime, "built-in"), drain_seconds=5, admin=admin)
        thread = threading.Thread(target=listener.run, kwargs={"sockets": [bound]})
        thread.start()

        def end() -> None:
            listener.should_exit = True
            thread.join(20)
            bound.close()
            assert not thread.is_alive()

        ends.append(end)
        until(lambda: listener.started)
        return f"http://127.0.0.1:{bound.getsockname()[1]}"

    yield serve
    for end in ends:
        end()
    assert not runtime.has_work
