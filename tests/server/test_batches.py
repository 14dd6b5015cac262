"""`/v1/batches`: what is answered, beside whom, in which order, and what is there after each end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from radixrt.batch.formats.record import LineErrorType
from radixrt.builtin import MODEL_PATH
from radixrt.errors import DeviceLostError, JournalError
from radixrt.limits import RunLimits
from radixrt.planning.simulated import ConstantRunner, simulated_parts
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.server.app import Server
from radixrt.server.batches import queue as queue_module
from radixrt.server.batches.background import BackgroundRuntime, Places
from radixrt.server.batches.record import BatchRecord, Counts, Problem, Status
from radixrt.server.batches.service import Batches
from radixrt.server.files.folder import files_folder
from radixrt.server.limits import Limits
from radixrt.server.tenants import Tenants
from radixrt.text.tokenizer import load_tokenizer
from tests.support.serving import ANSWERS, GREEDY, QUESTIONS, Serving, client_of, held, until

KEYS = ("key-of-one-tenant-1", "key-of-another-one-2")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDED = ("failed", "completed", "cancelled", "expired")


class Clock:
    """Unix time as it is, and some seconds more."""

    more = 0.0

    def __call__(self) -> float:
        return time.time() + self.more


class Kept:
    """A server with a folder, which may be started again; what it has not ended then goes on."""

    def __init__(self, runtime: Runtime, serving: Serving, path: Path) -> None:
        self.runtime, self.path, self.clock = runtime, path, Clock()
        self._serving, self._opened = serving, ExitStack()

    def serve(self, limits: Limits | None = None, keys: tuple[str, ...] = (), drain_seconds: float = 5) -> str:
        """Its URL, once it has begun anew."""
        self.end()
        tenants = Tenants(keys)
        folder = self._opened.enter_context(files_folder(self.path))
        options: dict[str, Any] = {"limits": limits, "drain_seconds": drain_seconds, "clock": self.clock}
        self.batches = Batches(self.runtime, folder, tenants.names, **options)
        self._opened.enter_context(self.batches)
        server = Server(self.runtime, "built-in", limits=limits, tenants=tenants, batches=self.batches)
        return self._serving(server)

    def end(self) -> None:
        self._opened.close()

    @property
    def runs(self) -> list[str]:
        """What batches that have not ended have left, of all tenants."""
        return sorted(path.name for path in self.path.glob("*/runs/*"))


@pytest.fixture
def kept(runtime: Runtime, serving: Serving, tmp_path: Path) -> Iterator[Kept]:
    found = Kept(runtime, serving, tmp_path / "kept")
    yield found
    found.end()


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**GREEDY, **body}}


def lines(count: int, **body: Any) -> list[dict[str, Any]]:
    return [line(f"id-{n}", prompt=f"{QUESTIONS[n % 3][:-3]} {n}?\nA:", **body) for n in range(count)]


def create(
    client: openai.OpenAI, given: list[Any], endpoint: Any = COMPLETIONS, window: Any = "24h", **more: Any
) -> Batch:
    text = "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in given)
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **more)


def ended(client: openai.OpenAI, batch: Batch, seconds: float = 60) -> Batch:
    until(lambda: client.batches.retrieve(batch.id).status in ENDED, seconds)
    return client.batches.retrieve(batch.id)


def records(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(one) for one in client.files.content(file_id).read().splitlines()]


def counts(batch: Batch) -> tuple[int, int, int]:
    """All, those completed, those failed."""
    assert batch.request_counts is not None
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


# -- from a file to files --------------------------------------------------------------------------------------


def test_a_batch_by_the_client_of_openai(kept: Kept) -> None:
    client = client_of(kept.serve())
    given = [line(f"id-{n}", prompt=question) for n, question in enumerate(QUESTIONS)]
    made = create(client, given, metadata={"of": "a test"})
    assert (made.status, made.endpoint, made.object, made.model) == (
        "validating", COMPLETIONS, "batch", "built-in"
    )  # fmt: skip
    assert made.expires_at == made.created_at + 24 * 3600
    batch = ended(client, made)
    assert (batch.status, counts(batch), batch.metadata) == ("completed", (3, 3, 0), {"of": "a test"})
    assert batch.error_file_id is None
    for moment in (batch.in_progress_at, batch.finalizing_at, batch.completed_at):
        assert moment is not None
        assert batch.created_at <= moment <= time.time()
    assert batch.output_file_id is not None
    file = client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert [one.id for one in client.files.list(purpose="batch_output")] == [file.id]
    found = records(client, batch.output_file_id)
    assert [one["custom_id"] for one in found] == ["id-0", "id-1", "id-2"]
    bodies = [one["response"]["body"] for one in found]
    assert [body["choices"][0]["text"] for body in bodies] == ANSWERS
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(body["usage"]["prompt_tokens"] for body in bodies)
    assert batch.usage.output_tokens == sum(body["usage"]["completion_tokens"] for body in bodies)
    until(lambda: kept.runs == [])  # a moment after the batch has ended
    client.files.delete(batch.input_file_id)


def test_lines_that_name_no_model_are_told_the_served_one(kept: Kept) -> None:
    client = client_of(kept.serve())
    given = line("a", prompt="a")
    del given["body"]["model"]
    batch = ended(client, create(client, [given, line("b", prompt="b")]))
    told = [one["response"]["body"]["model"] for one in records(client, batch.output_file_id)]
    assert told == ["built-in", GREEDY["model"]]


def test_chats(kept: Kept) -> None:
    client = client_of(kept.serve())
    given = [line("a", CHAT, messages=[{"role": "user", "content": QUESTIONS[0]}])]
    batch = ended(client, create(client, given, CHAT))
    (found,) = records(client, batch.output_file_id)
    assert found["response"]["body"]["choices"][0]["message"]["content"] == ANSWERS[0]


def test_calls_and_thoughts_are_told_as_to_clients(kept: Kept) -> None:
    """A line has the message that a client gets who asks the same."""
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'radixrt[grammar]'")
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "Oslo?"}], "max_tokens": 200}
    begins = load_tokenizer(MODEL_PATH).encode("a<", add_special_tokens=False)[-1]  # a call, so that none comes
    bodies = [
        {**ask, "tools": tools, "grammar": f"start: {json.dumps(f'Well.{call}')}"},
        {**ask, "tools": tools, "grammar": f"start: {json.dumps(call + call)}", "parallel_tool_calls": False},
        {**ask, "tools": tools, "tool_choice": "required"},
        {**ask, "tools": tools, "tool_choice": "none", "choice": [call]},
        {**ask, "choice": [call]},
        {**ask, "tools": tools, "choice": [f"Well.{call}"], "logit_bias": {str(begins): -100}},
    ]
    url = kept.serve()
    client = client_of(url)
    given = [line(str(n), CHAT, **body) for n, body in enumerate(bodies)]
    given += [line("no", CHAT, **ask, tool_choice="required"), line("none", CHAT, **ask, tools=[{"type": "code"}])]
    batch = ended(client, create(client, given, CHAT))
    assert counts(batch) == (8, 6, 2)
    found = [one["response"]["body"]["choices"][0] for one in records(client, batch.output_file_id)]
    for own, one in zip(found, given, strict=False):
        told = httpx.post(f"{url}{CHAT}", json=one["body"], timeout=30).json()["choices"][0]
        for choice in (own, told):
            for made in choice["message"].get("tool_calls") or ():
                assert made.pop("id")
        assert own == told
    assert [len(one["message"].get("tool_calls") or ()) for one in found] == [1, 1, 1, 0, 0, 0]
    assert [one["finish_reason"] for one in found[:3]] == ["tool_calls"] * 3
    errors = [one["error"]["message"] for one in records(client, batch.error_file_id)]
    assert ["tool_choice" in errors[0], "tools[0]" in errors[1]] == [True, True]


def test_lines_that_cannot_run_are_in_the_file_of_errors(kept: Kept) -> None:
    client = client_of(kept.serve(Limits(answers=8)))
    given = [
        line("good", prompt=QUESTIONS[0]),
        line("hot", prompt="a", temperature=-1),
        line("other", prompt="a", images=[]),
        line("long", prompt="a " * 10_000),
        line("many", prompt="a", n=9),
    ]
    batch = ended(client, create(client, given))
    assert (batch.status, counts(batch)) == ("completed", (5, 1, 4))
    assert [one["custom_id"] for one in records(client, batch.output_file_id)] == ["good"]
    errors = records(client, batch.error_file_id)
    assert [one["custom_id"] for one in errors] == ["hot", "other", "long", "many"]
    assert [one["response"]["status_code"] for one in errors] == [400] * 4
    told = [one["error"]["message"] for one in errors]
    for message, part in zip(told, ("temperature", "images", "tokens", "8 answers are the most"), strict=True):
        assert part in message


def test_a_batch_of_errors_alone_has_no_output(kept: Kept) -> None:
    client = client_of(kept.serve())
    batch = ended(client, create(client, [line("hot", prompt="a", temperature=-1)]))
    assert (batch.status, counts(batch), batch.output_file_id) == ("completed", (1, 0, 1), None)


@pytest.mark.parametrize(
    ("given", "problems"),
    [
        ([line("a", prompt="a"), "{", line("a", prompt="b")], [(2, "invalid_line"), (3, "duplicate_custom_id")]),
        ([line("a", CHAT, messages=[])], [(1, "invalid_line")]),
        ([{"prompt": "a"}], [(1, "invalid_line")]),
        ([{"custom_id": "a"}, "", "[1]"], [(1, "invalid_line"), (3, "invalid_line")]),
        (["\ufffd", {**line("a"), "method": "GET"}], [(1, "invalid_line"), (2, "invalid_line")]),
        ([], [(None, "empty_file")]),
        (["", " "], [(None, "empty_file")]),
        ([line(str(n), prompt="a") for n in range(8)], [(None, "too_many_lines")]),
    ],
)
def test_a_file_with_lines_that_are_none_fails(
    given: list[Any], problems: list[tuple[int | None, str]], kept: Kept
) -> None:
    """As OpenAI has it: nothing runs."""
    client = client_of(kept.serve(Limits(batch_lines=7)))
    passes = kept.runtime.activity().passes
    batch = ended(client, create(client, given))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(one.line, one.code) for one in batch.errors.data] == problems
    assert all(one.message for one in batch.errors.data)
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert kept.runtime.activity().passes == passes
    until(lambda: kept.runs == [])  # a moment after the batch has ended


@pytest.mark.parametrize("head", [b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"])
def test_what_is_compressed_is_refused(head: bytes, kept: Kept) -> None:
    """A few bytes of it may be very many."""
    client = client_of(kept.serve())
    file = client.files.create(file=("in.jsonl", head + b"more"), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    batch = ended(client, made)
    assert batch.errors is not None
    assert "the file is compressed" in str(batch.errors)


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        ({"endpoint": "/v1/responses"}, 400, 'endpoint is "/v1/responses"; it must be /v1/chat/completions or'),
        ({"endpoint": "/v1/embeddings"}, 400, "it must be /v1/chat/completions or /v1/completions"),
        ({"endpoint": None}, 400, "endpoint is null"),
        ({"completion_window": "1d"}, 400, 'completion_window is "1d"; it must be "24h"'),
        ({"completion_window": "721h"}, 400, 'or "1h" to "720h"'),
        ({"completion_window": 24}, 400, "completion_window is 24"),
        ({"input_file_id": None}, 400, "input_file_id is null; it must be the id of a file"),
        ({"input_file_id": "file-1"}, 404, "there is no such file"),
        ({"input_file_id": "../in"}, 404, "there is no such file"),
        ({"output_expires_after": {}}, 400, "unknown parameter output_expires_after"),
        ({"metadata": []}, 400, "metadata is a list"),
        ({"metadata": {str(n): "" for n in range(17)}}, 400, "metadata has 17 keys"),
        ({"metadata": {"a": 1}}, 400, "metadata.a is a number"),
        ({"metadata": {"a" * 65: ""}}, 400, "a key of metadata has 65 characters"),
        ({"metadata": {"a": "a" * 513}}, 400, "metadata.a has 513 characters"),
    ],
)
def test_what_cannot_be_a_batch(more: dict[str, Any], status: int, message: str, kept: Kept) -> None:
    url = kept.serve()
    file = client_of(url).files.create(file=("in.jsonl", b"{}"), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h", **more}
    response = httpx.post(f"{url}/v1/batches", json=body)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    assert client_of(url).batches.list().data == []


def test_an_output_is_no_input(kept: Kept) -> None:
    client = client_of(kept.serve())
    output = ended(client, create(client, lines(1))).output_file_id
    assert output is not None
    with pytest.raises(openai.BadRequestError, match="is a file for batch_output; it must be one for batch"):
        client.batches.create(input_file_id=output, endpoint=COMPLETIONS, completion_window="24h")


def test_lists_of_batches(kept: Kept) -> None:
    url = kept.serve()
    client = client_of(url)
    ids = [create(client, lines(1)).id for _ in range(5)]
    assert [one.id for one in client.batches.list(limit=2)] == ids[::-1]
    page = client.batches.list(limit=2, after=ids[4])
    assert ([one.id for one in page.data], page.has_more) == ([ids[3], ids[2]], True)
    assert httpx.get(f"{url}/v1/batches?limit=101").status_code == 400
    until(lambda: all(one.status == "completed" for one in client.batches.list()))
    began = [client.batches.retrieve(one).in_progress_at or 0 for one in ids]
    assert began == sorted(began)


# -- beside clients --------------------------------------------------------------------------------------------


def test_clients_do_not_wait_for_a_batch(kept: Kept) -> None:
    """A batch takes all places; what clients ask ends while it goes on."""
    client = client_of(kept.serve(drain_seconds=0))
    batch = create(client, lines(200, max_tokens=300, ignore_eos=True))
    until(lambda: kept.runtime.num_running == kept.runtime.limits.max_running_requests)
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        passes = kept.runtime.activity().passes
        response = client.completions.create(prompt=question, **GREEDY)
        assert response.choices[0].text == answer
        assert kept.runtime.activity().passes - passes < 40
    now = client.batches.retrieve(batch.id)
    assert now.status == "in_progress"
    assert counts(now)[1] < 200
    client.batches.cancel(batch.id)
    ended(client, batch)


def test_lines_make_way_where_memory_is_short(serving: Serving, tmp_path: Path) -> None:
    """What a client asks finds room at once, and the answers of lines are what they would be."""
    with Runtime(device="cpu", max_total_tokens=3000) as runtime, ExitStack() as opened:
        kept = Kept(runtime, serving, tmp_path / "kept")
        opened.callback(kept.end)
        client = client_of(kept.serve())
        given = [
            line(str(n), prompt=f"{n + 100} " * 50 + QUESTIONS[n % 3], max_tokens=100, ignore_eos=True)
            for n in range(20)
        ]
        batch = create(client, given)
        until(
            lambda: runtime.num_running > 4 and runtime.cache_stats().free + runtime.cache_stats().evictable < 500
        )
        before, passes = runtime.parts.scheduler.num_retractions, runtime.activity().passes
        more: dict[str, Any] = {**GREEDY, "extra_body": {"ignore_eos": True}}
        answer = client.completions.create(prompt="7 8 9 " * 200 + QUESTIONS[0], **more)
        assert runtime.activity().passes - passes < 40
        assert runtime.parts.scheduler.num_retractions > before
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        batch = ended(client, batch)
        assert (batch.status, counts(batch)) == ("completed", (20, 20, 0))
        found = records(client, batch.output_file_id)
        texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in found}
        for one in given[::10]:
            alone = client.completions.create(prompt=one["body"]["prompt"], **more)
            assert texts[one["custom_id"]].startswith(alone.choices[0].text)


def test_requests_of_clients_go_first(kept: Kept) -> None:
    """Of all that wait they are admitted first, and keep their memory where that runs short."""
    url = kept.serve()
    client = client_of(url)
    seen: list[tuple[int, int]] = []
    submit_all = kept.runtime.parts.engine.submit_all

    def noted(requests: list[Any], **options: Any) -> Any:
        seen.extend((request.priority, request.prompt_len) for request in requests)
        return submit_all(requests, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept.runtime.parts.engine, "submit_all", noted)
        batch = ended(client, create(client, lines(3)))
        client.completions.create(prompt=QUESTIONS[0], **GREEDY)
    assert batch.status == "completed"
    assert [priority for priority, _ in seen] == [1, 1, 1, 0]


def test_health_is_good_when_a_batch_begins(kept: Kept) -> None:
    """After a long time without work nothing has stalled."""
    url = kept.serve(Limits(stalled_seconds=0.5))
    client = client_of(url)
    assert httpx.get(f"{url}/health").status_code == 200
    time.sleep(0.7)
    with held(kept.runtime):
        create(client, lines(1))
        until(lambda: kept.runtime.has_work)
        assert httpx.get(f"{url}/health").status_code == 200
        until(lambda: httpx.get(f"{url}/health").status_code == 503)


def test_two_tenants_run_at_once(kept: Kept) -> None:
    """Neither sees the other's, nor waits for it; a tenant's own come one after the other."""
    url = kept.serve(keys=KEYS, drain_seconds=0)
    one, other = (client_of(url, key) for key in KEYS)
    long = create(one, lines(400, max_tokens=60, ignore_eos=True))
    next_one = create(one, lines(1))
    until(lambda: kept.runtime.num_running > 0)
    short = ended(other, create(other, lines(2)))
    assert (short.status, counts(short)) == ("completed", (2, 2, 0))
    assert one.batches.retrieve(long.id).status == "in_progress"
    assert one.batches.retrieve(next_one.id).status == "validating"
    assert [batch.id for batch in other.batches.list()] == [short.id]
    for ask in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no such batch"):
            ask(long.id)
    one.batches.cancel(long.id)
    assert ended(one, next_one).status == "completed"
    tenants = {space.tenant for space in _namespaces(kept.runtime)}
    assert tenants >= {*Tenants(KEYS).names}


def _namespaces(runtime: Runtime) -> list[Any]:
    return runtime.read_tree(lambda tree: list(tree.roots))


@pytest.mark.parametrize(("sharers", "handed"), [(1, 9), (2, 4), (3, 2)])
def test_batches_have_equal_parts_of_the_places(sharers: int, handed: int) -> None:
    """Some lines more than there are places wait for the next one; one that wants more than all runs alone."""
    parts = simulated_parts(ConstantRunner(ord("x")), RunLimits(9000, 8), 400, vocab_size=256)
    places, taken = Places(8), list[Any]()
    session: Any = SimpleNamespace(submit=lambda *requests, in_order: taken.extend(requests), outputs=lambda _: [])
    with Runtime.from_parts(parts) as runtime, ExitStack() as opened:
        for _ in range(sharers):
            opened.enter_context(places.shared())
        for n, count in ((1, handed), (20, 1)):
            own = BackgroundRuntime(runtime, session, places, tenant=None, weights={})
            requests = [own.prepare([5, index], SamplingParams(n=n), index=index) for index in range(20)]
            own.submit(*requests, in_order=True)
            assert (own.num_waiting, own.num_running, own.has_begun(requests[0])) == (20, 0, False)
            own.step()
            own.step()
            assert taken == requests[:count]
            assert own.abort(requests[-1])
            assert not own.has_begun(requests[-2])
            taken.clear()


def test_batches_that_wait_have_a_bound(kept: Kept) -> None:
    """Those that have ended make room."""
    client = client_of(kept.serve(Limits(batches=2)))
    first = ended(client, create(client, lines(1)))
    long = create(client, lines(200, max_tokens=300, ignore_eos=True))
    waits = create(client, lines(1))
    assert [one.id for one in client.batches.list()] == [waits.id, long.id]
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve(first.id)
    with pytest.raises(openai.RateLimitError, match="2 batches have not ended"):
        create(client, lines(1))
    client.batches.cancel(long.id)
    assert ended(client, waits).status == "completed"


# -- ends ------------------------------------------------------------------------------------------------------


def test_cancel(kept: Kept) -> None:
    """What was answered is there, and nothing else is."""
    client = client_of(kept.serve(drain_seconds=0))
    made = create(client, lines(110, max_tokens=100, ignore_eos=True))
    until(lambda: counts(client.batches.retrieve(made.id))[1] > 0)
    waits = create(client, lines(1))
    assert client.batches.cancel(made.id).status == "cancelling"
    assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
    batch = ended(client, made)
    assert batch.status == "cancelled"
    assert batch.cancelling_at is not None
    assert batch.cancelled_at is not None
    total, completed, failed = counts(batch)
    assert (total, failed) == (110, 0)
    assert 0 < completed < 110
    found = records(client, batch.output_file_id)
    assert len(found) == completed
    assert len({one["custom_id"] for one in found}) == completed
    assert batch.error_file_id is None
    assert ended(client, waits).status == "completed"
    for one in (made, waits):
        with pytest.raises(openai.ConflictError, match=r"the batch is c\w+ already"):
            client.batches.cancel(one.id)
    until(lambda: kept.runs == [])  # a moment after the batch has ended


def test_lines_that_have_begun_get_time_to_end(kept: Kept) -> None:
    client = client_of(kept.serve(drain_seconds=60))
    made = create(client, lines(200, max_tokens=100, ignore_eos=True))
    until(lambda: kept.runtime.num_running >= 40)
    client.batches.cancel(made.id)
    batch = ended(client, made)
    assert 40 <= counts(batch)[1] < 200


def test_one_that_waits_is_cancelled_at_once(kept: Kept) -> None:
    client = client_of(kept.serve(drain_seconds=0))
    long, waits = (create(client, lines(200, max_tokens=300, ignore_eos=True)) for _ in range(2))
    assert client.batches.cancel(waits.id).status == "cancelled"
    client.batches.cancel(long.id)
    ended(client, long)


def test_a_file_in_use_stays(kept: Kept) -> None:
    client = client_of(kept.serve(drain_seconds=0))
    made = create(client, lines(200, max_tokens=300, ignore_eos=True))
    with pytest.raises(openai.ConflictError, match=f"the file is the input of {made.id}, which has not ended"):
        client.files.delete(made.input_file_id)
    client.batches.cancel(made.id)
    ended(client, made)
    assert client.files.delete(made.input_file_id).deleted


def test_time_is_up(kept: Kept) -> None:
    """Lines that were not answered have errors."""
    client = client_of(kept.serve(drain_seconds=0))
    given = [*lines(100, max_tokens=100, ignore_eos=True), line("hot", prompt="a", temperature=-1)]
    made = create(client, given, window="2h")
    waits = create(client, lines(2))
    until(lambda: counts(client.batches.retrieve(made.id))[1] > 0)
    kept.clock.more = 2 * 3600 + 1
    batch = ended(client, made)
    assert (batch.status, batch.expired_at is not None) == ("expired", True)
    found, errors = records(client, batch.output_file_id), records(client, batch.error_file_id)
    assert counts(batch) == (101, len(found), len(errors))
    assert 0 < len(found) < 100
    assert {one["custom_id"] for one in (*found, *errors)} == {one["custom_id"] for one in given}
    assert len(found) + len(errors) == 101
    expired = [one for one in errors if one["custom_id"] != "hot"]
    assert {one["error"]["code"] for one in expired} == {"batch_expired"}
    assert {one["response"] for one in expired} == {None}
    assert ended(client, waits).status == "completed"


# -- restarts --------------------------------------------------------------------------------------------------


def test_a_server_that_ends_goes_on_later(kept: Kept) -> None:
    """Each line has one answer, and those of before are not made again."""
    given = lines(120, max_tokens=60, ignore_eos=True)
    url = kept.serve(drain_seconds=0)
    client = client_of(url)
    made = create(client, given)
    until(lambda: counts(client.batches.retrieve(made.id))[1] >= 20)
    kept.batches.stop()
    until(lambda: not kept.runtime.has_work)
    before = client.batches.retrieve(made.id)
    assert before.status == "in_progress"
    assert 20 <= counts(before)[1] < 120
    kept.end()
    assert kept.runs == [f"{made.id}.jsonl.run"]
    journal = kept.path / "no-key" / "runs" / f"{made.id}.jsonl.run" / "journal"
    kept_before = {
        json.loads(one[one.index(b"{") :])["custom_id"]: one[one.index(b"{") :]
        for one in journal.read_bytes().splitlines()[1:]
        if b"{" in one
    }
    assert len(kept_before) == counts(before)[1]
    client = client_of(kept.serve())
    assert counts(client.batches.retrieve(made.id))[1] >= counts(before)[1]
    batch = ended(client, made)
    assert (batch.status, counts(batch)) == ("completed", (120, 120, 0))
    assert batch.output_file_id is not None
    content = client.files.content(batch.output_file_id).read().splitlines()
    assert [json.loads(one)["custom_id"] for one in content] == [one["custom_id"] for one in given]
    assert kept_before.items() <= {json.loads(one)["custom_id"]: one for one in content}.items()
    until(lambda: kept.runs == [])  # a moment after the batch has ended


def test_what_is_cancelled_before_it_goes_on_has_what_was_answered(kept: Kept) -> None:
    client = client_of(kept.serve(drain_seconds=0))
    made = create(client, lines(120, max_tokens=60, ignore_eos=True))
    until(lambda: counts(client.batches.retrieve(made.id))[1] >= 20)
    kept.batches.stop()
    until(lambda: not kept.runtime.has_work)
    answered = counts(client.batches.retrieve(made.id))[1]
    assert client.batches.cancel(made.id).status == "cancelling"
    client = client_of(kept.serve())
    batch = ended(client, made)
    assert (batch.status, counts(batch)) == ("cancelled", (120, answered, 0))
    assert len(records(client, batch.output_file_id)) == answered


def test_killed_while_its_files_are_made(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers are there: the files are made again, with the same ids."""
    client = client_of(kept.serve())
    written: list[Any] = []
    write_outcome = queue_module.write_outcome

    def cut(*arguments: Any) -> Any:
        written.append(write_outcome(*arguments))
        raise DeviceLostError("as if the process had ended")

    with monkeypatch.context() as patch:
        patch.setattr(queue_module, "write_outcome", cut)
        made = create(client, lines(3))
        until(lambda: bool(written))
        kept.end()
    passes = kept.runtime.activity().passes
    client = client_of(kept.serve())
    batch = ended(client, made)
    assert (batch.status, counts(batch)) == ("completed", (3, 3, 0))
    assert batch.output_file_id == written[0].output_file_id
    assert len(records(client, batch.output_file_id)) == 3
    assert len(client.files.list(purpose="batch_output").data) == 1
    assert kept.runtime.activity().passes == passes
    until(lambda: kept.runs == [])  # a moment after the batch has ended


def test_records_of_another_model_are_told_and_kept(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(kept.serve(drain_seconds=0))
    made = create(client, lines(120, max_tokens=60, ignore_eos=True))
    until(lambda: counts(client.batches.retrieve(made.id))[1] >= 20)
    kept.batches.stop()
    until(lambda: not kept.runtime.has_work)
    answered = counts(client.batches.retrieve(made.id))[1]
    with monkeypatch.context() as patch:
        patch.setattr(kept.runtime, "identity", lambda: {"weights": "others"})
        client = client_of(kept.serve())
        batch = ended(client, made)
    assert (batch.status, counts(batch)) == ("failed", (120, answered, 0))
    assert "weights" in str(batch.errors)
    assert len(records(client, batch.output_file_id)) == answered
    until(lambda: kept.runs == [])  # a moment after the batch has ended


def test_a_disk_that_refuses_is_tried_again(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(kept.serve())
    monkeypatch.setattr(queue_module, "_RETRY_SECONDS", 0.05)
    refusals: list[str] = []
    write_outcome = queue_module.write_outcome

    def refuse(*arguments: Any) -> Any:
        if len(refusals) < 3:
            refusals.append("once more")
            raise (OSError(28, "No space left"), JournalError("no space left"))[len(refusals) % 2]
        return write_outcome(*arguments)

    monkeypatch.setattr(queue_module, "write_outcome", refuse)
    batch = ended(client, create(client, lines(3)))
    assert (batch.status, counts(batch), len(refusals)) == ("completed", (3, 3, 0), 3)


def test_a_defect_fails_one_batch(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and none of it is told; others go on."""
    client = client_of(kept.serve())

    def broken(*_: Any) -> None:
        raise ValueError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr("radixrt.server.batches.work.Work.scan", broken)
        batch = ended(client, create(client, lines(1)))
    assert batch.status == "failed"
    assert "the server has failed at this batch" in str(batch.errors)
    assert "secret" not in str(batch)
    assert "a secret" in caplog.text
    assert ended(client, create(client, lines(1))).status == "completed"


def test_a_lost_device_leaves_batches_as_they_are(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(kept.serve())

    def lost(*_: Any) -> None:
        raise DeviceLostError("gone")

    with monkeypatch.context() as patch:
        patch.setattr("radixrt.server.batches.work.Work.run", lost)
        made = create(client, lines(1))
        until(lambda: client.batches.retrieve(made.id).status == "in_progress")
        kept.end()
    client = client_of(kept.serve())
    assert ended(client, made).status == "completed"


def test_a_record_comes_back_as_it_was() -> None:
    record = BatchRecord("batch_1", 1, "file-1", COMPLETIONS, "24h", 1, 2, "any", {"a": "b"})
    changed = replace(
        record,
        status=Status.FAILED,
        moments={"failed": 3},
        counts=Counts(3, 2, 1),
        problems=(Problem(LineErrorType.INVALID_LINE.value, "is none", 1),),
    )
    for one in (record, changed):
        assert BatchRecord.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert Batch.model_validate(changed.body()).failed_at == 3
