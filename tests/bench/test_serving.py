"""The bench of a server."""

from __future__ import annotations

import asyncio
import re

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'radixrt[server]'")

from scripts import bench_serving, serving_clients

MODEL = ["--config", "tiny", "--device", "cpu"]


@pytest.mark.parametrize("runs_on", [MODEL, ["--pass-ms", "2"]], ids=["a model", "a device of time alone"])
def test_all_requests_are_answered(runs_on: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bench_serving.main([*runs_on, "--small", "--clients", "2", "--workload", "system_prompt", "--load", "0.5"])
    shown = capsys.readouterr().out
    generated, served = re.findall(r"system_prompt │ +(\S+) │ +([0-9.,]+) │ +([0-9.,]+) │", shown)
    assert (generated[0], served[0]) == ("generate", "0.50")
    assert 0 < float(served[1]) < float(generated[1])


@pytest.mark.parametrize("load", ["0", "1.5"])
def test_loads_have_bounds(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_serving.main(["--load", load])
    assert "--load is above 0, and 1 at most" in capsys.readouterr().err


def test_figures() -> None:
    told = [bench_serving.Told(0.0, [0.1, 0.3], 3), bench_serving.Told(1.0, [1.5], 2)]
    figures = bench_serving.row(bench_serving.Run(told, 6e-4, 3e-4), 30, 1.0)
    assert figures == ["2.0", "20", "1.500", "300.0", "496.0", "200.0", "200.0", "6.00", "20.0", "10.0"]


def told_by(*pieces: bytes) -> serving_clients.Stream:
    async def read() -> serving_clients.Stream:
        stream = serving_clients.Stream(b"", asyncio.get_running_loop().create_future())
        for piece in pieces:
            stream.data_received(piece)
        stream.connection_lost(None)
        await stream.ended
        return stream

    return asyncio.run(read())


def test_events_are_counted_wherever_they_are_cut() -> None:
    whole = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(b"%x\r\ndata: %d\n\n\r\n" % (9, i) for i in range(3))
    whole += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    for place in range(len(whole)):
        stream = told_by(whole[:place], whole[place:])
        assert (stream.num_events, len(stream.times)) in ((4, 1), (4, 2))


@pytest.mark.parametrize(("status", "event"), [(b"500 No", b"[DONE]"), (b"200 OK", b"1")])
def test_a_stream_without_an_end_is_no_answer(status: bytes, event: bytes) -> None:
    with pytest.raises(RuntimeError, match="has no end"):
        told_by(b"HTTP/1.1 %b\r\n\r\ndata: %b\n\n" % (status, event))
