"""`verify` over models whose products are computed row by row: bits differ only where a test makes them."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import radixrt.ranks.rank
import radixrt.verify.matrix
from memory_pool.layout import Layout
from memory_pool.token_to_kv_pool import kv_part
from radixrt.assembly import LoadedModel
from radixrt.config import RuntimeConfig
from radixrt.engine.parts import Parts
from radixrt.errors import ParameterError, PromptError
from radixrt.limits import PassLimits
from radixrt.models.decoder import Block, Decoder
from radixrt.sampling_params import SamplingParams
from radixrt.verify import verify
from radixrt.verify.questions import Question
from radixrt.verify.situations import situations
from tests.support.checkpoints import llama, write

PARAMS = SamplingParams(max_new_tokens=6, temperature=0.7, ignore_eos=True)
OF_ONE_RUNTIME = (
    "repeated",
    "warm",
    "cut-0",
    "together",
    "together-warm",
    "shuffled-0",
    "samples",
    "aborted",
    "jitter-0",
    "read",
    "saved",
)
OF_OTHERS = ("chunks-64", "batch-1", "small-pool", "small-pool-jitter", "host-tier", "no-cache", "no-overlap")


def prompts(count: int = 3) -> list[list[int]]:
    chance = random.Random(0)
    shared = [chance.randrange(3, 101) for _ in range(37)]
    return [shared + [chance.randrange(3, 101) for _ in range(chance.randrange(1, 40))] for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention adds nothing in it: the sums of its reference depend on the shape of a pass."""
    model = llama(seed=4, num_hidden_layers=3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    return write(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of one row each: those of several have other bits."""
    linear, mm = torch.nn.functional.linear, torch.mm

    def each(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def rows(x: Tensor, *others: Any, out: Tensor | None = None) -> Tensor:
            return torch.cat([product(row[None], *others) for row in x]) if len(x) else product(x, *others)

        return rows

    monkeypatch.setattr(torch.nn.functional, "linear", each(linear))
    monkeypatch.setattr(torch, "mm", each(mm))


@pytest.fixture
def config(folder: Path) -> RuntimeConfig:
    return RuntimeConfig(folder, device="cpu", max_total_tokens=2000)


@pytest.mark.usefixtures("row_by_row")
def test_the_same_bits_in_every_situation(config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    load = radixrt.ranks.rank.load_model
    monkeypatch.setattr(radixrt.ranks.rank, "load_model", lambda *a, **k: loaded.append(a) or load(*a, **k))
    found = verify(prompts(), PARAMS, config=config, seeds=[0])
    assert found.same_bits, found.outcomes
    assert len(loaded) == 1  # all Runtimes share the weights
    by_name = {outcome.name: outcome for outcome in found.outcomes}
    assert tuple(by_name) == OF_ONE_RUNTIME + OF_OTHERS
    lengths = [len(prompt) for prompt in prompts()]
    all_values = 2 * (sum(lengths) - 3 + 3 * PARAMS.max_new_tokens)
    for name in ("repeated", "together", "shuffled-0", "jitter-0", "read", *OF_OTHERS):
        if name != "host-tier":
            assert by_name[name].values == all_values, name
    assert by_name["aborted"].values >= 3 * 2 * PARAMS.max_new_tokens
    assert by_name["samples"].values == 3 * 2 * PARAMS.max_new_tokens  # of the answer that is drawn alone, too
    # What the situations are for has happened.
    assert by_name["repeated"].hit_rate == by_name["no-cache"].hit_rate == 0
    assert by_name["together-warm"].hit_rate > by_name["together"].hit_rate > 0
    assert by_name["jitter-0"].retractions
    assert by_name["small-pool"].evicted_tokens
    assert by_name["small-pool-jitter"].retractions
    assert by_name["host-tier"].loaded_tokens
    assert not by_name["together-warm"].evicted_tokens  # what is forgotten on purpose does not count


def _adds(module: torch.nn.Module, arguments: Any, out: Tensor) -> Tensor:
    """A hook that adds a little that depends on the number of rows."""
    return out + 1e-5 * len(out)


@pytest.fixture(
    params=[
        "attention",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("feed_forward", "embedding")),
        "logits",
    ]
)  # of feed_forward is the result as json, too
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A decoder of which a part, of block 1 or before or after all blocks, depends on the pass."""
    make = Decoder.__init__

    def init(self: Decoder, *arguments: Any) -> None:
        make(self, *arguments)
        block = self.blocks[1]
        assert isinstance(block, Block)
        if request.param in ("attention", "feed_forward"):
            getattr(block, request.param).register_forward_hook(_adds)
        elif request.param == "embedding":
            self.embedding.register_forward_hook(_adds)
        else:
            self.head.register_forward_hook(_adds)

    monkeypatch.setattr(Decoder, "__init__", init)
    return str(request.param)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Those of all Runtimes. Each must be gone when its Runtime gives memory back: the next one needs it."""
    made: list[weakref.ref[Any]] = []
    assemble = radixrt.verify.matrix.assemble

    def noted(*arguments: Any) -> Parts:
        parts = assemble(*arguments)
        assert isinstance(parts.model, LoadedModel)
        pool = weakref.ref(parts.model.kv_pool)
        made.append(pool)

        def free_device() -> None:
            gc.collect()
            assert pool() is None

        return replace(parts, free_device=free_device)

    monkeypatch.setattr(radixrt.verify.matrix, "assemble", noted)
    return made


@pytest.mark.usefixtures("row_by_row")
def test_the_first_layer_that_differs_is_named(
    config: RuntimeConfig, fault: str, pools: list[weakref.ref[Any]]
) -> None:
    found = verify(prompts(2), PARAMS, config=config, seeds=[0], only=["repeated", "together", "chunks-64"])
    repeated, together, chunks = found.outcomes
    assert repeated.same_bits
    assert not found.same_bits
    named = {
        "attention": "layer 1, attention",
        "feed_forward": "layer 1, feed-forward",
        "embedding": "embedding",
        "logits": "logits",
    }
    for outcome in (together, chunks):
        assert outcome.differing
        first, origin = outcome.first, outcome.origin
        assert first is not None
        assert origin is not None
        assert str(origin).partition(", at position")[0] == named[fault]
        assert origin.position < first.position
        assert origin.pass_tokens != origin.alone_tokens
    assert len(pools) == 5  # two in which to ask, and three to look at the layers


@pytest.mark.usefixtures("row_by_row")
def test_answers_of_one_prompt_that_are_drawn_without_chance_are_equal(config: RuntimeConfig) -> None:
    greedy = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True, n=2)
    (samples,) = verify(prompts(2), greedy, config=config, seeds=[0], only=["samples"]).outcomes
    assert samples.same_bits
    assert samples.values == 2 * (2 + 2) * 2 * 4


@pytest.mark.usefixtures("row_by_row")
def test_a_prompt_of_one_token_and_one_without_an_answer(config: RuntimeConfig) -> None:
    params = [PARAMS, SamplingParams(max_new_tokens=0)]
    found = verify([[5], [5, 6, 7]], params, config=config, seeds=[0])
    assert found.same_bits
    values = {outcome.name: outcome.values for outcome in found.outcomes}
    assert values["together"] == 2 * (PARAMS.max_new_tokens + 2)
    assert values["read"] == 2 * (PARAMS.max_new_tokens + 2)


@pytest.mark.usefixtures("row_by_row")
def test_log_probabilities_of_what_is_drawn_from(config: RuntimeConfig) -> None:
    params = replace(PARAMS, logprobs_mode="processed_logprobs", top_k=5, repetition_penalty=1.3)
    together, read = verify(prompts(2), params, config=config, seeds=[0], only=["together", "read"]).outcomes
    assert together.same_bits
    assert read.same_bits
    assert together.values - read.values == 2 * 2 * params.max_new_tokens  # a score is the model's own


def test_what_cannot_be_verified_is_refused(config: RuntimeConfig) -> None:
    with pytest.raises(PromptError, match="prompt 1 holds token id 1000"):
        verify([[5], [1000]], PARAMS, config=config)
    with pytest.raises(PromptError, match=r"prompt 1 needs up to 49 KV slots \(30 prompt tokens"):
        verify([[5], [6] * 30], replace(PARAMS, max_new_tokens=20), config=replace(config, max_total_tokens=40))
    with pytest.raises(ParameterError, match="there are no prompts to verify"):
        verify([], PARAMS, config=config)
    with pytest.raises(ParameterError, match="seeds is empty"):
        verify([[5]], PARAMS, config=config, seeds=[])
    with pytest.raises(ParameterError, match="tensor_parallel_size"):
        verify([[5]], PARAMS, config=replace(config, tensor_parallel_size=2))
    with pytest.raises(
        ParameterError, match=r"there is no situation 'warmer' here; there are repeated, warm, cut-7"
    ):
        verify([[5]], PARAMS, config=config, seeds=[7], only=["warmer"])


def names(config: RuntimeConfig, *, count: int = 100, gpu: bool = False) -> list[str]:
    questions = [Question(line, torch.arange(9).int().numpy(), PARAMS) for line in range(count)]
    limits = PassLimits(512, 16384) if gpu else PassLimits(64, 2048)
    layout = Layout((kv_part(5, 2, 25, torch.bfloat16),))
    found = situations(config, questions, [0, 5], limits=limits, runs_kernels=gpu, captures=gpu, layout=layout)
    listed = [situation.name for situation in found]
    assert len({*listed}) == len(listed)
    return listed


def test_situations_follow_the_options() -> None:
    on_gpu = names(RuntimeConfig(), gpu=True)
    assert {"cut-0", "cut-5", "shuffled-5", "jitter-5", "batch-64", "flat", "no-graphs"} <= {*on_gpu}
    assert not {"batch-64", "flat", "no-graphs"} & {*names(RuntimeConfig())}
    without = {"warm", "cut-0", "cut-5", "together-warm", "saved", "host-tier", "no-cache"}
    everything = names(RuntimeConfig())
    assert [name for name in everything if name not in without] == names(RuntimeConfig(enable_prefix_cache=False))
    assert {*names(RuntimeConfig(), count=1)} & {
        "batch-1",
        "small-pool",
        "small-pool-jitter",
        "host-tier",
    } == set()
    assert "chunks-1000" not in everything
    assert "chunks-1000" in names(RuntimeConfig(), count=200)
    assert "no-overlap" not in names(RuntimeConfig(overlap=False))
    assert "small-pool" not in names(RuntimeConfig(max_total_tokens=100))


@pytest.mark.usefixtures("row_by_row")
def test_the_result_as_json_and_in_words(config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(**changes: Any) -> tuple[dict[str, Any], str]:
        found = verify(prompts(2), PARAMS, config=config, seeds=[0], only=["together"])
        console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
        found.print(console)
        return json.loads(json.dumps(found.to_json(), allow_nan=False)), console.export_text()

    value, text = told()
    assert value["same_bits"] is value["situations"][0]["same_bits"] is True
    assert value["situations"][0]["first_difference"] is None
    assert "together, nothing cached" in text
    assert "the same bits everywhere: 1 situations" in text

    make = Decoder.__init__

    def init(self: Decoder, *arguments: Any) -> None:
        make(self, *arguments)
        self.blocks[2].feed_forward.register_forward_hook(_adds)

    monkeypatch.setattr(Decoder, "__init__", init)
    value, text = told()
    (situation,) = value["situations"]
    assert value["same_bits"] is situation["same_bits"] is False
    assert situation["differing"] == [0, 1]
    first = situation["first_difference"]
    assert (first["line"], first["origin"]["layer"], first["origin"]["part"]) == (0, 2, "feed-forward")
    assert first["expected"]["bits"] != first["found"]["bits"]
    for part in ("2 prompts differ", first["expected"]["bits"], first["found"]["bits"], "layer 2, feed-forward"):
        assert part in text
    assert "not the same bits: 1 situations" in text
