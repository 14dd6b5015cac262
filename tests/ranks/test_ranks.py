"""A Runtime of several ranks on a CPU: what it answers, and how it ends."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from safetensors.torch import load_file

from layers.stages import WHOLE
from radixrt.builtin import MODEL_PATH
from radixrt.errors import DeviceLostError, ModelError, ParameterError
from radixrt.models import loader
from radixrt.output import RequestOutput
from radixrt.ranks import follower, followers, group, leading_runner, rank
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.workers.channel import Message
from tests.support.forked_processes import running
from tests.support.processes import children_that_run

LINES = [f"Mira likes Oslo.\nQ: {what}?\nA:" for what in ("Mira likes", "Who likes Oslo", "What is Oslo")]
PARAMS = [
    SamplingParams(max_new_tokens=12, temperature=0.0),
    SamplingParams(max_new_tokens=8, temperature=0.8, seed=5, n=3),
    SamplingParams(max_new_tokens=10, temperature=0.0, logprobs=2, prompt_logprobs=1),
]


def runtime(size: int, **options: object) -> Runtime:
    """Of the built-in model, in float32."""
    told = {"device": "cpu", "max_total_tokens": 800, "chunked_prefill_size": 24, "threads": 1} | options
    return Runtime(tensor_parallel_size=size, **told)  # type: ignore[arg-type]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def ranks_of_this_process() -> list[psutil.Process]:
    """Those that run."""
    found = children_that_run(followers.PROGRAM)
    for pid in running(followers.PROGRAM):
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


@contextmanager
def none_left() -> Iterator[None]:
    """After what is inside no process of a rank runs."""
    before = {child.pid for child in ranks_of_this_process()}
    yield
    end = time.monotonic() + 20
    while left := {child.pid for child in ranks_of_this_process()} - before:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def test_answers_are_those_of_one_rank() -> None:
    """Greedy and drawn, chunked, cold and warm, several to a prompt; of a retraction, too."""
    with runtime(1) as alone:
        expected = [alone.generate(LINES, PARAMS) for _ in range(2)]
        scores = [output.outputs[0].logprobs for output in expected[0]]  # type: ignore[union-attr]
    with none_left(), runtime(2) as both:
        assert len(ranks_of_this_process()) == 1
        found = [both.generate(LINES, PARAMS) for _ in range(2)]
        for own, other in zip(expected, found, strict=True):
            assert tokens_of(own) == tokens_of(other)  # type: ignore[arg-type]
        again = both.generate(LINES, PARAMS)
        assert again[0].usage.cached_tokens > 0  # type: ignore[index]
    logprobs = found[0][2].outputs[0].logprobs  # type: ignore[index]
    assert scores[2] is not None
    assert logprobs is not None
    for mine, theirs in zip(scores[2], logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_forms_two_tiers_and_a_small_pool() -> None:
    """Masks and transfers reach all ranks; answers are retracted where the pool is too small for all."""
    params = [SamplingParams(max_new_tokens=30, temperature=0.0, regex="( [a-z]+)+[.]"), *PARAMS[:2]]
    lines = [line + " " + str(k) for k in range(4) for line in LINES]
    options = {"max_total_tokens": 90, "host_memory_gb": 0.01}
    given = [params[k % 3] for k in range(len(lines))]
    with runtime(1, **options) as alone:
        expected = [tokens_of(alone.generate(lines, given)) for _ in range(2)]  # type: ignore[arg-type]
        assert alone.parts.scheduler.num_retractions
    with runtime(2, **options) as both:
        assert [tokens_of(both.generate(lines, given)) for _ in range(2)] == expected  # type: ignore[arg-type]


def test_a_transfer_that_fails_ends_all() -> None:
    """Between passes, too: the other ranks have made it."""
    own, others = Mock(), Mock()
    own.model.stage = WHOLE
    own.transfer.side_effect = RuntimeError("out of memory")
    others.why_lost.return_value = "a pass has failed on rank 0"
    with pytest.raises(DeviceLostError, match="on rank 0"):
        leading_runner.LeadingRunner(own, others).transfer(deque())


@pytest.mark.long  # tests/ranks/test_stages.py has the same with threads
def test_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks read them, also after a Ctrl-C; a folder that is none changes nothing. Another plan on one rank
    ends all.
    """
    with none_left(), runtime(2) as both:
        expected = both.generate(LINES, PARAMS)
        with pytest.raises(ModelError):
            both.update_weights(tmp_path)
        with monkeypatch.context() as patch:  # Ctrl-C on the first rank, while the other one reads them
            patch.setattr(loader, "_fill", Mock(side_effect=KeyboardInterrupt))
            for source in (MODEL_PATH, load_file(MODEL_PATH / "model.safetensors"), MODEL_PATH):
                with pytest.raises(KeyboardInterrupt):
                    both.update_weights(source)
        both.generate(LINES[0], PARAMS[0])  # the other one has read them now
        both.update_weights(MODEL_PATH)
        found = both.generate(LINES, PARAMS)
        assert tokens_of(found) == tokens_of(expected)  # type: ignore[arg-type]
        assert found[0].usage == expected[0].usage  # type: ignore[index]  # of no prefix of before
        monkeypatch.setattr(leading_runner, "digest_of", lambda runner: -1)
        with pytest.raises(DeviceLostError, match="another pass"):
            both.generate(LINES * 20, SamplingParams(max_new_tokens=200, ignore_eos=True))


def test_a_rank_that_is_left_ends_its_passes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may wait for its part, though nobody asks for what it draws."""
    parts, channel = Mock(), Mock(is_closed=True)
    parts.decoder.stage = WHOLE
    channel.receive.return_value = [Message({}), Message({})]
    monkeypatch.setattr(group, "store_at", Mock())
    monkeypatch.setattr(group, "joined", Mock())
    monkeypatch.setattr(rank, "folder_of", Mock())
    monkeypatch.setattr(rank, "assemble_rank", Mock(return_value=parts))
    passes = iter(("first", "second"))
    monkeypatch.setattr(follower.Follower, "handle", lambda self, message: self._in_flight.append(next(passes)))
    config = {"device": "cpu", "tensor_parallel_size": 2}
    follower.follow(channel, {"config": config, "rank": 1, "port": 0, "kept_file": -1})
    assert [call.args for call in parts.runner.collect.call_args_list] == [("first",), ("second",)]


@pytest.mark.usefixtures("real_workers")
def test_a_runtime_that_is_dropped_ends_its_ranks() -> None:
    """Also with requests that have not ended; not before."""
    with none_left():
        both = runtime(2)
        both.submit(both.prepare(LINES[0], PARAMS[0]))
        both.step()
        gc.collect()
        assert len(ranks_of_this_process()) == 1
        del both
        gc.collect()


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    """By name; no process is left."""
    with none_left(), pytest.raises(ModelError, match="tensor_parallel_size"):
        runtime(7)
    with none_left(), pytest.raises(ModelError, match=r"config\.json"):
        runtime(2, model=tmp_path)
    with pytest.raises(ParameterError, match="tensor_parallel_size"):
        runtime(0)
