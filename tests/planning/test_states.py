"""Plans for models whose layers keep a state of each sequence: how many there are, and what they cost."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from memory_pool.layout import Layout
from memory_pool.state_pool import state_parts
from memory_pool.token_to_kv_pool import kv_part
from radixrt.cache.states import FOR_FRESH
from radixrt.cli import main
from radixrt.config import RuntimeConfig
from radixrt.errors import ParameterError
from radixrt.execution import memory_budget
from radixrt.execution.memory_budget import pool_slots, pool_states
from radixrt.limits import RunLimits
from radixrt.planning.cards import MEMORY_FRACTION, PASS_BYTES, Card, find_card
from radixrt.planning.demands import Demands
from radixrt.planning.kept_states import KeptStates
from radixrt.planning.shards import cut_in_pieces
from radixrt.ranks import rank
from radixrt.report.figures import PlannedRun
from radixrt.sampling_params import SamplingParams
from radixrt.workloads.bound import DeviceSpeed, ModelShape, RecurrentLayers
from tests.planning.test_batch_plan import SMALL, TOY, modelled_run, plan_of, real_run
from tests.support import checkpoints
from tests.support.plans import planned
from tests.support.runtimes import scheduled_runtime

# Of eight layers, six keep states of 19.1 MB in all, and two keep KV of 4,096 bytes a token.
LAYOUT = Layout((kv_part(2, 4, 128, torch.bfloat16),), state_parts(6, (6144,), 4, (32, 128, 192), torch.bfloat16))
SIZE = LAYOUT.bytes_per_sequence
PLAIN = ModelShape(8, 1024, 4096, 8, 4, 128, 50_000, 16_384)
SHAPE = replace(PLAIN, kv_bytes=LAYOUT.bytes_per_token, recurrent=RecurrentLayers(6, 4_000_000, SIZE))
CARD = Card("a card", 24e9, DeviceSpeed(1e12, 1e14))


@pytest.mark.parametrize("running", [None, 1, 40, 400])
@pytest.mark.parametrize("tokens", [None, 5000])
def test_a_plan_has_the_states_of_a_run(
    monkeypatch: pytest.MonkeyPatch, running: int | None, tokens: int | None
) -> None:
    """As a GPU with so much memory computes them, once the weights are there."""
    free = int(CARD.memory - SHAPE.weight_bytes)
    for module in (memory_budget, rank):
        monkeypatch.setattr(module, "free_bytes", lambda device: free)
    config = RuntimeConfig(max_running_requests=running, max_total_tokens=tokens)
    model, device = SimpleNamespace(context_length=4096, vocab_size=SHAPE.vocab_size), torch.device("cuda")
    limits = rank._pass_limits(config, model, device, LAYOUT, MEMORY_FRACTION)  # type: ignore[arg-type]
    states = pool_states(device, LAYOUT, limits, MEMORY_FRACTION, promised=PASS_BYTES)
    sizes = {"promised": int(PASS_BYTES), "beside": states * SIZE}
    slots = pool_slots(device, LAYOUT.bytes_per_token, MEMORY_FRACTION, tokens, **sizes)

    found = CARD.limits(SHAPE, 4096, max_running_requests=running, max_total_tokens=tokens)
    assert (found.of_pass, found.num_states) == (limits, states - 1)
    assert found.pool_tokens == pytest.approx(slots - 1, abs=2)
    assert found.num_states > found.of_pass.own_states
    assert CARD.limits(PLAIN, 4096, max_running_requests=running).num_states == 0


def test_states_that_do_not_fit_on_a_card() -> None:
    with pytest.raises(ParameterError, match=f"is 1536, whose sequences have 1,730 states of {SIZE:,} bytes each"):
        CARD.limits(SHAPE, 4096, max_running_requests=1536)
    assert find_card("h200", None, None, None).limits(SHAPE, 4096, max_running_requests=1536).num_states > 1730


def test_steps_read_and_write_states() -> None:
    """Two answers of three tokens: of each, two steps."""
    plan = planned([[1, 2, 3], [1, 2, 4]], 3)
    speed = DeviceSpeed(1.0, 1e30)
    with_states = replace(TOY, recurrent=RecurrentLayers(0, 0, 1000))
    works = [plan.expect(RunLimits(50), shape, speed).work for shape in (TOY, with_states)]
    assert works[0] is not None
    assert works[1] is not None
    assert works[1].min_seconds - works[0].min_seconds == 2 * 2 * 2 * 1000
    assert works[1].decode_seconds - works[0].decode_seconds == works[1].passes * 2 * 2 * 1000


def test_replicas_share_the_work_of_states() -> None:
    lengths = np.array([100, 100])
    asked = Demands.of(lengths, np.array([1, 51]))
    none, limits, speed = np.zeros(2, np.int64), RunLimits(10_000, 1), DeviceSpeed(1.0, 1e30)
    with_states = replace(TOY, recurrent=RecurrentLayers(0, 0, 1000))
    before, after = (
        cut_in_pieces(asked, none.astype(np.int32), none, 1, limits, shape, speed).seconds
        for shape in (TOY, with_states)
    )
    np.testing.assert_allclose(after - before, [0, 50 * 2 * 1000])


def test_hits_end_at_states() -> None:
    """There are too few of them for all heads, which come in turn in the order of the file."""
    heads = [[*range(1000 * group, 1000 * group + 200)] for group in range(10)]
    plan = planned([[*heads[index % 10], 50_000 + index] for index in range(80)], 2)
    without, with_states = RunLimits(100_000, 4), RunLimits(100_000, 4, num_states=14)
    found, reaches = plan.expect(with_states), plan.expect(without)
    assert found.planned.is_rehearsed
    assert found.planned.cached_tokens == reaches.planned.cached_tokens
    assert found.file_order.cached_tokens < reaches.file_order.cached_tokens


@pytest.mark.parametrize(("running", "kept", "chunk"), [(8, 12, 256), (64, 64, 2048)])
@pytest.mark.parametrize("name", [name for name in SMALL if name != "a chain"])
def test_states_are_modelled(name: str, running: int, kept: int, chunk: int) -> None:
    """Beside the real scheduler: as exactly as without them in the planned order, and roughly in the file's, where
    KV alone would be up to a third too high.
    """
    plan, _ = plan_of(SMALL[name]())
    limits = RunLimits(50_000, running, chunk)
    limits = replace(limits, num_states=limits.of_pass.num_rows + kept)
    for planned_order, tolerance in ((True, 0.01), (False, 0.08)):
        real, modelled = (run(plan, limits, planned=planned_order) for run in (real_run, modelled_run))
        assert modelled.hit_rate == pytest.approx(real.hit_rate, abs=tolerance)


def test_without_a_state_nothing_is_found() -> None:
    """Three prompts, one after the other, share 100 tokens. Beside that of the running one two stay free."""
    plan = planned([[*range(100), 200 + i] for i in range(3)], 2)
    for num_states, cached in ((3, 0), (4, 200)):
        assert plan.predict(RunLimits(1000, 1, 64, num_states)).cached_tokens == cached


def test_who_waits_tells_a_leader_of_several_passes() -> None:
    """Documents of three passes each; their questions follow one another in the order of the file."""
    heads = [[*range(1000 * group, 1000 * group + 300)] for group in range(1, 5)]
    plan = planned([[*heads[index % 4], 9000 + index] for index in range(40)], 2)
    limits = RunLimits(50_000, 4, 100, num_states=60)
    real, modelled = (run(plan, limits, planned=False) for run in (real_run, modelled_run))
    assert modelled.cached_tokens == real.cached_tokens == plan.statistics.best_cached_tokens


def test_answers_begin_with_a_state_of_their_prompt() -> None:
    plan = planned([[*range(1000)]], 3, 16)
    limits = RunLimits(50_000, 32, 100, num_states=60)
    real, modelled = real_run(plan, limits), modelled_run(plan, limits)
    assert modelled.timeline.passes.sum() == pytest.approx(real.passes, abs=3)


def test_what_is_evicted_has_no_state() -> None:
    """A prefix is computed again, and leaves a state for those that still wait."""
    head, others = [*range(100)], ([*range(1000 * i, 1000 * i + 150)] for i in range(1, 9))
    shared = [[*head, 500 + i] for i in range(6)]
    prompts = [*shared[:3], next(others), next(others), shared[3], [7], shared[4], [8], shared[5]]
    plan = planned(prompts, 2)
    limits = RunLimits(250, 1, num_states=40)
    found = [run(plan, limits, planned=False).cached_tokens for run in (real_run, modelled_run)]
    assert found == [400, 400]


def test_states_whose_next_use_is_farthest_go_first() -> None:
    """Of those that are used no more, at place 9, the one that was used longest ago."""
    states = KeptStates(4 + FOR_FRESH)
    for node, place in ((1, 9), (2, 5), (3, 7), (4, 9)):
        states.leave(node, 0, place)
    states.use_next(2, 8)
    states.use_next(1, 9)
    states.use_next(5, 1)  # it has none
    left = []
    for running in (0, 1, 2, 3, 4):
        states.make_room(running)
        left.append([node for node in (1, 2, 3, 4, 5) if states.ready(node) is not None])
    assert left == [[1, 2, 3, 4], [1, 2, 3], [2, 3], [3], []]
    states.leave(4, 7, 3)
    states.leave(4, 8, 3)
    assert states.ready(4) == 7


def test_the_next_use_changes_often() -> None:
    states = KeptStates(3 + FOR_FRESH)
    for node in (1, 2, 3):
        states.leave(node, 0, node)
    for place in range(4, 1000):
        states.use_next(place % 2 + 1, place)  # 2 comes last, at 999; 1 at 998
    states.make_room(1)
    states.make_room(2)
    assert [states.ready(node) for node in (1, 2, 3)] == [None, None, 0]
    states.leave(1, 5, 2)
    states.make_room(2)
    assert [states.ready(node) for node in (1, 2, 3)] == [5, None, None]


def test_a_lack_of_states_is_told() -> None:
    prompts = [[*range(100 * group), *range(9000, 9100)] for group in range(1, 6)] * 4
    plan = planned([[*prompt, 10_000 + index] for index, prompt in enumerate(prompts)], 2)
    few = plan.expect(RunLimits(100_000, 1, 64, num_states=2))
    assert few.planned.hit_rate < plan.statistics.best_hit_rate
    assert "a larger pool (--max-total-tokens) or more states may bring the rest" in PlannedRun(plan, few).advice()
    figures = PlannedRun(plan, few, SHAPE).figures()
    assert figures["states"] == "2 (38.2 MB): 2 for 1 request at once, 0 kept for others that begin alike"
    assert figures["memory, 1 at once"].endswith(" MB), states 19.1 MB")
    assert "states" not in PlannedRun(plan, plan.expect(RunLimits(100_000)), PLAIN).figures()


def test_the_command_counts_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints.write(checkpoints.qwen3_5(), tmp_path / "model")
    lines, page = tmp_path / "in.jsonl", tmp_path / "plan.html"
    lines.write_text("".join(json.dumps({"token_ids": [5, 6, 7, index]}) + "\n" for index in range(3, 9)))
    options = ["--model", str(folder), "--max-running-requests", "10", "--max-new-tokens", "4"]
    assert main(["plan", str(lines), *options, "--html", str(page)]) == 0
    told = r"states +76 \(486\.4 kB\): 12 for 10 requests at once, 64 kept for others that begin alike\n"
    shown = capsys.readouterr().out
    assert re.search(told, shown), shown
    assert "12 for 10 requests at once, 64 kept" in page.read_text()


def test_what_is_cached_ends_at_a_state() -> None:
    """What a plan may rely on: not the KV of what the first prompt shares with others."""
    with scheduled_runtime(pool_tokens=5000, context_length=200, num_states=900) as runtime:
        found = []
        for last in range(3):
            found.append(runtime.cached_len(np.array([*range(100), 500 + last], np.int32)))
            runtime.generate([*range(100), 500 + last], SamplingParams(max_new_tokens=2))
    assert found == [0, 0, 100]
