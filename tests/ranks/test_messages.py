"""What a pass is survives its way to another rank."""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from layers.stages import WHOLE
from memory_pool.kv_transfers import KVTransfer
from memory_pool.req_to_token_pool import ReqToTokenPool
from radixrt.execution.model_runner import ModelRunner
from radixrt.ranks.follower import Follower
from radixrt.ranks.messages import PassReader, PassWriter, transfers_message, transfers_of
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.passes import Pass, SamplingInputs
from radixrt.workers.channel import decode, encode
from tests.support.passes import plain_pass


def check_same(own: Any, other: Any) -> None:
    """Of one type, and the same in all fields, dtypes too."""
    for field in fields(own):
        mine, theirs = getattr(own, field.name), getattr(other, field.name)
        if field.name == "sampling" or field.name == "row_changes":
            check_same(mine, theirs)
        elif isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype, field.name
            np.testing.assert_array_equal(mine, theirs, err_msg=field.name)
        elif isinstance(own, SamplingInputs) and field.name == "arrays":
            assert list(mine) == list(theirs)
            for name in mine:
                assert mine[name].dtype == theirs[name].dtype, name
                np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
        else:
            assert mine == theirs, field.name


def test_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all kinds of draws: also which of them are of the same requests as the pass before."""
    passes: list[Pass] = []
    launch = ModelRunner.launch

    def watched(self: ModelRunner, pass_: Pass) -> object:
        passes.append(pass_)
        return launch(self, pass_)

    monkeypatch.setattr(ModelRunner, "launch", watched)
    params = [
        SamplingParams(max_new_tokens=9, temperature=0.0),
        SamplingParams(max_new_tokens=7, temperature=0.9, top_p=0.8, n=3),
        SamplingParams(max_new_tokens=8, temperature=0.7, top_k=5, min_p=0.1, repetition_penalty=1.2, logprobs=3),
        SamplingParams(max_new_tokens=5, prompt_logprobs=2, logit_bias={5: -3.0}),
        SamplingParams(max_new_tokens=6, regex="[a-z ]+"),
    ]
    with Runtime(device="cpu", max_total_tokens=2000, chunked_prefill_size=16) as runtime:
        runtime.generate([f"The bay {'of Oslo ' * k}is" for k in range(len(params))], params)
    writer, reader, last = PassWriter(), PassReader(), None
    kept = 0
    for pass_ in passes:
        received = bytearray(encode(writer.message(pass_)))
        (message,) = decode(received)
        back = reader.pass_of(message)
        check_same(pass_, back)
        if last is not None:
            same = pass_.req_pool_indices is last[0].req_pool_indices
            assert (back.req_pool_indices is last[1].req_pool_indices) == same
            kept += same
        last = pass_, back
    assert kept
    assert any(pass_.sampling.masked is not None for pass_ in passes)
    assert any(pass_.sampling.processed is not None for pass_ in passes)
    assert any(len(pass_.scored) for pass_ in passes)


@pytest.mark.parametrize("kept", [{}, {"state_reads": np.arange(2, 4), "state_writes": np.arange(5, 7)}], ids=len)
def test_states_of_rows(kept: dict[str, Any]) -> None:
    """Or none."""
    pass_ = plain_pass([3, 1], [0, 4], [5, 5], **{name: array.astype(np.int32) for name, array in kept.items()})
    (message,) = decode(bytearray(encode(PassWriter().message(pass_))))
    check_same(pass_, PassReader().pass_of(message))


def test_a_follower_s_table_is_the_first_rank_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each launch, at all positions that the pass reads or writes: plans of attention are made of these."""
    launched: list[tuple[Pass, list[Any]]] = []
    launch = ModelRunner.launch

    def watched(self: ModelRunner, pass_: Pass) -> object:
        rows = zip(pass_.req_pool_indices, pass_.seq_lens, strict=True)
        launched.append((pass_, [table[row, :end].copy() for row, end in rows]))
        return launch(self, pass_)

    monkeypatch.setattr(ModelRunner, "launch", watched)
    with Runtime(device="cpu", max_total_tokens=150, chunked_prefill_size=16) as runtime:
        table = runtime.parts.scheduler.cache.rows.req_to_token
        prompts = [f"The bay {'of Oslo ' * (k % 4)}is {k % 3}" for k in range(12)]
        runtime.generate(prompts, SamplingParams(max_new_tokens=20, temperature=1.0, ignore_eos=True))

    class Runner:
        """Looks at the table in place of computing."""

        expected: list[Any]

        def launch(self, pass_: Pass) -> None:
            for row, end, slots in zip(pass_.req_pool_indices, pass_.seq_lens, self.expected, strict=True):
                np.testing.assert_array_equal(rows.req_to_token[row, :end], slots)

        def collect(self, handle: object) -> None: ...

        launched_words = np.zeros(0, np.int32)

    rows = ReqToTokenPool(*table.shape)
    parts: Any = SimpleNamespace(rows=rows, runner=Runner(), decoder=SimpleNamespace(stage=WHOLE))
    follower, writer = Follower(parts, Mock()), PassWriter()
    for pass_, parts.runner.expected in launched:
        follower.handle(writer.message(pass_))
    assert len(launched) > 20


def test_transfers() -> None:
    """In order, with their directions, and what they are of."""
    given = [
        KVTransfer(to_host, np.arange(count, dtype=np.int32), np.arange(5, 5 + count, dtype=np.int32), of_states)
        for to_host, count, of_states in ((True, 3, False), (False, 1, True), (True, 0, True))
    ]
    (message,) = decode(bytearray(encode(transfers_message(given))))
    back = transfers_of(message)
    assert isinstance(back, deque)
    for own, other in zip(given, back, strict=True):
        check_same(own, other)
