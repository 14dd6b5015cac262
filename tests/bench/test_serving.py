"""The bench of a server."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from radixrt.schedule.activity import Activity
from radixrt.text.builder import Detokenizer
from radixrt.text.tokenizer import load_tokenizer

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'radixrt[server]'")

from scripts import bench_serving, serving_clients

MODEL = ["--config", "tiny", "--device", "cpu"]


@pytest.mark.parametrize("runs_on", [MODEL, ["--pass-ms", "2"]], ids=["a model", "a device of time alone"])
def test_all_requests_are_answered(runs_on: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bench_serving.main([*runs_on, "--small", "--clients", "2", "--workload", "system_prompt", "--load", "0.5"])
    shown = capsys.readouterr().out
    generated, served = re.findall(r"system_prompt │ +(\S+) │ +([0-9.,]+) │ +([0-9.,]+) │", shown)
    assert (generated[0], served[0]) == ("generate", "0.50")
    assert 0 < float(served[1]) < float(generated[1])


@pytest.mark.parametrize("name", bench_serving.LISTS)
@pytest.mark.parametrize("count", [None, 30])
def test_lists_have_as_many_requests_as_are_asked_for(name: str, count: int | None) -> None:
    assert len(bench_serving.prompts_of(name, count, small=True)) == (count or bench_serving.FEW_REQUESTS)


def test_few_requests_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_serving.main(["--requests", "9"])
    assert "--requests is 10 at least" in capsys.readouterr().err


def test_each_id_spells_something_at_once(tmp_path: Path) -> None:
    bench_serving.write_words(tmp_path, 300)
    detokenizer = Detokenizer(tokenizer := load_tokenizer(tmp_path))
    assert tokenizer.vocab_size == 300
    assert all(detokenizer.push(i).strip() for i in range(300))


@pytest.mark.parametrize("load", ["0", "1.5"])
def test_loads_have_bounds(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_serving.main(["--load", load])
    assert "--load is above 0, and 1 at most" in capsys.readouterr().err


def test_figures_are_those_of_the_steady_state() -> None:
    early = [bench_serving.Told(60, 0.0, [9.0], [3]), bench_serving.Told(60, 0.5, [1.0, 2.0, 5.0], [1, 1, 1])]
    late = [bench_serving.Told(20, 2.0, [2.5, 3.0], [1, 1]), bench_serving.Told(20, 3.0, [3.5], [1])]
    activity = Activity(passes=4, prefill_seconds=0.01, decode_seconds=0.03, scheduling_seconds=0.002)
    run = bench_serving.Run([*late, *early], activity, 16e-4, 8e-4)
    assert run.steady == (0.5, 3.0)
    # Two requests for 20 tokens arrive in 2.5 s, and there come two events of 20 tokens, and two of 10.
    steady = ["0.8", "24", "1.500", "yes", "500.0", "500.0", "750.0", "995.0"]
    assert bench_serving.row(run) == [*steady, "10.0", "0.5", "17.78", "10.0", "5.0"]


def test_a_server_that_does_not_keep_up_is_told() -> None:
    told = [bench_serving.Told(10, float(i), [0.9 + i * 1.1, 1.0 + i * 1.1], [1, 1]) for i in range(100)]
    came, met = bench_serving.row(bench_serving.Run(told, Activity(), 0.0, 0.0))[2:4]
    assert (0.89 < float(came) < 0.93, met) == (True, "no")


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
        assert (sum(stream.counts), len(stream.counts)) in ((4, 1), (4, 2))
        assert len(stream.times) == len(stream.counts)


@pytest.mark.parametrize(("status", "event"), [(b"500 No", b"[DONE]"), (b"200 OK", b"1")])
def test_a_stream_without_an_end_is_no_answer(status: bytes, event: bytes) -> None:
    with pytest.raises(RuntimeError, match="has no end"):
        told_by(b"HTTP/1.1 %b\r\n\r\ndata: %b\n\n" % (status, event))
