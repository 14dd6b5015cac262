"""Captured decode passes: the outputs of passes that are launched kernel by kernel, whatever is asked for.

Where there is no GPU, what would be captured is computed anew each time from the numbers that were sent: all that
surrounds a graph is the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

import radixrt.ranks.rank
from layers.radix_attention import RadixAttention
from radixrt import FinishReason, PassError, RequestOutput, Runtime
from radixrt import SamplingParams as Params
from radixrt.cache.radix_tree import Namespace
from radixrt.engine.engine import Engine
from radixrt.errors import ParameterError, RadixrtError
from radixrt.execution import executor, graphs
from radixrt.execution.attention import planner as attention_planner
from radixrt.execution.attention.pass_plans import CUT, WHOLE, PlanShape
from radixrt.execution.attention.tuning import PlanTuning, TreeCosts
from radixrt.execution.executor import Executor, Forward
from radixrt.execution.graphs import CAPTURED_DRAWS, Launch, ladder
from radixrt.execution.in_flight import PassTimer
from radixrt.execution.model_runner import ModelRunner, Tuning
from radixrt.execution.pass_builder import PackedPass, PassBuilder, PassKey
from radixrt.execution.sampling import sampler
from radixrt.execution.staging import Staging
from radixrt.limits import NO_PASSES, PassLimits
from radixrt.models.decoder import Decoder
from radixrt.schedule.passes import Pass, PassResult
from tests.execution.attention.test_planner import CUT_TREE, TREE
from tests.models.test_parity import MODELS
from tests.support.checkpoints import (
    VOCAB_SIZE,
    gemma2,
    gemma3,
    glm4_moe,
    gpt_oss,
    llama,
    qwen3_moe,
    smollm3,
    write,
)
from tests.support.recomputing import Recomputing, planner_on_cpu
from tests.support.world.invariants import total_len
from tests.test_forms import STEPS, generate
from triton_ops.e4m3 import FIRST_CAPABILITY
from triton_ops.implementation import gpu_of

pytestmark = pytest.mark.usefixtures("device")

MERGES_BELOW = PlanTuning.cuts_below
GREEDY = Params(temperature=0, max_new_tokens=12, ignore_eos=True)


def runtime_of(folder: Path, *, cuda_graphs: bool = True, max_plan_passes: int = 64, **options: Any) -> Runtime:
    """In float32, with as few graphs as may be, on a CPU too; slots that nobody has filled hold NaN, the reserved
    one too.
    """
    options = {"dtype": "float32", "max_total_tokens": 4000, "max_running_requests": 9, **options}
    device = torch.get_default_device()
    on_gpu = device.type == "cuda"

    def runner(
        model: Decoder, rows: Any, kv_pool: Any, *places: Any, captured: PassLimits, tree: bool
    ) -> ModelRunner:
        tuning = Tuning(token_sizes=(16, 64), max_plan_passes=max_plan_passes)
        if not on_gpu:  # plans are cut and padded as if kernels ran
            kv_dtype = kv_pool.dtype
            planner = planner_on_cpu(model.config, rows.req_to_token, kv_dtype, tree=tree)
            tuning = replace(tuning, recorder=Recomputing, planner=planner)
            most = PassLimits(options["max_running_requests"], options.get("chunked_prefill_size", 2048))
            captured = most if cuda_graphs else NO_PASSES
        return ModelRunner(model, rows, kv_pool, *places, captured=captured, tree=tree, tuning=tuning)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(radixrt.ranks.rank, "ModelRunner", runner)
        own = {"cuda_graphs": cuda_graphs} if on_gpu else {}
        runtime = Runtime(folder, device=device, **own, **options)
    assert bool(runner_of(runtime).executor.graphs) == cuda_graphs
    if runtime.parts.model.kv_pool.scales is None:
        runtime.parts.model.kv_pool.fill(float("nan"))
    return runtime


def captured_keys(runtime: Runtime) -> tuple[set[PassKey], set[tuple[int, Any]]]:
    """What a Runtime has captured: the keys of forward passes, and sizes and features of draws."""
    graphs = runner_of(runtime).executor.graphs
    forwards = {key for key in graphs if isinstance(key, PassKey)}
    return forwards, {(key[0].num_rows, key[1]) for key in graphs.keys() - forwards}  # type: ignore[index]


def runner_of(runtime: Runtime) -> ModelRunner:
    runner = runtime.parts.engine.runner
    assert isinstance(runner, ModelRunner)
    return runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contexts long enough that what decodes read is cut, and merged."""
    with torch.device("cpu"):
        return write(llama(seed=4, max_position_embeddings=1024), tmp_path_factory.mktemp("llama"))


Launches = list[tuple[Pass, PackedPass]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """All passes, and as they were packed; the words may be of later ones."""
    seen: Launches = []
    forward = Executor.forward

    def watched(self: Executor, pass_: Pass, packed: PackedPass) -> Forward:
        seen.append((pass_, packed))
        return forward(self, pass_, packed)

    monkeypatch.setattr(Executor, "forward", watched)
    return seen


def decodes_of(launches: Launches) -> list[tuple[int, int, bool]]:
    """Of each captured decode: its requests, the size that it was padded to, and whether rows had changed."""
    return [
        (pass_.num_rows, packed.key.shape.num_rows, "changed_rows" in packed.extras.places)
        for pass_, packed in launches
        if packed.key is not None and packed.key.shape.is_decode
    ]


def extends_of(launches: Launches) -> list[PassKey]:
    """The keys of the other captured passes."""
    return [packed.key for _, packed in launches if packed.key is not None and not packed.key.shape.is_decode]


def random_prompts(count: int, *, least: int = 2, most: int = 30, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, rng.integers(least, most + 1)).tolist() for _ in range(count)]


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Tokens, and why they end, are the same; log-probabilities as far as the order of sums allows."""
    for output, other in zip(outputs, expected, strict=True):
        assert output.error == other.error
        for answer, wanted in zip(output.outputs, other.outputs, strict=True):
            assert answer.token_ids == wanted.token_ids, output.index
            assert (answer.finish_reason, answer.matched) == (wanted.finish_reason, wanted.matched)
            assert (answer.logprobs is None) == (wanted.logprobs is None)
            for token, like in zip(answer.logprobs or (), wanted.logprobs or (), strict=True):
                assert (token.token_id, token.rank) == (like.token_id, like.rank)
                assert token.logprob == pytest.approx(like.logprob, abs=1e-4)
                assert [p for _, p in token.top] == pytest.approx([p for _, p in like.top], abs=1e-4)


def check_both(folder: Path, prompts: list[list[int]], params: Any, **options: Any) -> list[RequestOutput]:
    """Outputs with and without graphs are the same, cold and from the cache. Returns the cold ones."""
    with runtime_of(folder, cuda_graphs=False, **options) as eager:
        expected = eager.generate(prompts, params)
    with runtime_of(folder, **options) as captured:
        assert_same(captured.generate(prompts, params), expected)
        assert_same(captured.generate(prompts, params), expected)
    return expected


# --- passes with extends ---


@pytest.mark.long_unless(kept=lambda given: given["chunk"] == 64)
@pytest.mark.parametrize("chunk", [2, 7, 64, 1000])
def test_passes_with_extends(folder: Path, chunk: int, launches: Launches) -> None:
    """Chunks, cached prefixes, decodes beside them; passes that no shape fits among them."""
    shared = random_prompts(1, least=40, most=40, seed=9)[0]
    prompts = [*random_prompts(12, most=50), *(shared + own for own in random_prompts(8, most=9, seed=8))]
    params = [replace(one, seed=i) for i, one in enumerate([*KINDS.values()] * 2)][: len(prompts)]
    check_both(folder, prompts, params, chunked_prefill_size=chunk)
    shapes = {key.shape for key in extends_of(launches)}
    assert {shape.num_tokens for shape in shapes} == ({16, 64} if chunk > 16 else {chunk})
    assert {9} <= {shape.num_rows for shape in shapes} <= {3, 9}


def test_padding_has_no_positions_beyond_the_context(tmp_path: Path, launches: Launches) -> None:
    """A shape may have more tokens than a context has positions, and so than there are rotations."""
    with torch.device("cpu"):
        folder = write(llama(seed=3, max_position_embeddings=24), tmp_path)
    check_both(folder, random_prompts(4, least=9, most=11), replace(GREEDY, max_new_tokens=4))
    assert {key.shape.num_tokens for key in extends_of(launches)} == {64}


def test_a_pass_beyond_all_shapes_is_launched_kernel_by_kernel(folder: Path, launches: Launches) -> None:
    check_both(folder, random_prompts(3, least=70, most=90), GREEDY)
    assert launches
    assert not extends_of(launches)


@pytest.mark.parametrize("changes", [{"n": 3}, {"prompt_logprobs": 2}])
def test_answers_to_one_prompt_and_scores_are_launched_kernel_by_kernel(
    folder: Path, launches: Launches, changes: dict[str, int]
) -> None:
    """The first tokens of several answers have more rows of logits; scores want hidden states."""
    check_both(folder, random_prompts(3), replace(GREEDY, max_new_tokens=1, **changes))
    assert launches
    assert not extends_of(launches)


def test_an_extend_that_is_not_finite_ends_alone(folder: Path, launches: Launches) -> None:
    """Its flags are those of its own pass, though the next one is launched before they are read."""
    with runtime_of(folder) as runtime:
        (bad,) = random_prompts(1, least=9, most=9, seed=5)
        runtime.parts.model.decoder.embedding.weight[bad[4]] = float("nan")
        good = [
            [token for token in prompt if token != bad[4]] + [3, 4]
            for prompt in random_prompts(3, least=5, most=15, seed=6)
        ]
        outputs = runtime.generate([bad, *good], GREEDY)
    assert extends_of(launches)
    assert outputs[0].finish_reason is FinishReason.ERROR
    for output in outputs[1:]:
        assert output.finish_reason is not FinishReason.ERROR or bad[4] in output.token_ids


@pytest.mark.parametrize("chunk", [7, 1000])
def test_a_pass_begins_on_the_device_once_the_host_has_planned_it(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    launches: Launches,
    chunk: int,
) -> None:
    """Whichever way it goes, and before anything of it is sent there."""
    events: list[str] = []

    def watch(owner: type, method: str, name: str) -> None:
        original = getattr(owner, method)

        def watched(*arguments: Any, **options: Any) -> Any:
            events.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, method, watched)

    with runtime_of(folder, chunked_prefill_size=chunk) as runtime:
        runtime.capture_graphs()
        for method in ("begin", "start", "end"):
            watch(PassTimer, method, method)
        watch(PassBuilder, "build", "build")
        watch(Staging, "upload", "upload")
        prompts = random_prompts(len(KINDS) + 1, most=40, seed=21)
        prompts[-1] = random_prompts(1, least=200, most=200)[0]
        runtime.generate(prompts, [*KINDS.values(), GREEDY])
        passes = runtime.activity().passes
    timed = " ".join(events).split("begin ")[1:]
    assert len(timed) == passes
    assert {tuple(names.split()) for names in timed} == {("build", "start", "upload", "end")}
    decodes, extends = decodes_of(launches), extends_of(launches)
    assert decodes
    assert extends
    assert len(timed) > len(decodes) + len(extends)  # some go kernel by kernel


# --- the same outputs ---


def test_a_batch_that_shrinks_through_the_whole_ladder(folder: Path, launches: Launches) -> None:
    """From more than MERGES_BELOW requests down to one, with long contexts among them and without."""
    most = MERGES_BELOW + 2
    short = random_prompts(most, most=9)
    long = [*random_prompts(3, least=600, most=700, seed=1), *short[3:]]
    params = [replace(GREEDY, max_new_tokens=1 + i) for i in range(most)]
    for prompts in (short, long):
        launches.clear()
        check_both(folder, prompts, params, max_running_requests=most, max_total_tokens=8000)
        counts, sizes = ({row[i] for row in decodes_of(launches)} for i in (0, 1))
        assert sizes == set(ladder(most))
        assert counts >= set(range(1, most))


KINDS: dict[str, Params] = {
    "greedy": GREEDY,
    "random": Params(seed=1, max_new_tokens=14, ignore_eos=True),
    "top-k": Params(seed=2, temperature=1.3, top_k=7, max_new_tokens=11, ignore_eos=True),
    "top-p": Params(seed=3, temperature=0.8, top_p=0.7, max_new_tokens=9, ignore_eos=True),
    "min-p": Params(seed=4, min_p=0.1, max_new_tokens=13, ignore_eos=True),
    "everything": Params(seed=5, temperature=0.9, top_k=9, top_p=0.9, min_p=0.02, max_new_tokens=7),
    "penalties": Params(
        temperature=0,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=0.4,
        max_new_tokens=12,
        ignore_eos=True,
    ),
    "random penalties": Params(seed=6, repetition_penalty=1.2, top_k=20, max_new_tokens=12, ignore_eos=True),
    "bias": Params(seed=7, logit_bias={7: 3.0, 8: -5.0}, max_new_tokens=10, ignore_eos=True),
    "bad words": Params(temperature=0, bad_words=[[7], [8, 9], [40]], max_new_tokens=15, ignore_eos=True),
    "allowed": Params(seed=8, allowed_token_ids=range(3, 40), max_new_tokens=8, ignore_eos=True),
    "held back": Params(temperature=0, min_new_tokens=5, stop_token_ids=tuple(range(3, 60)), max_new_tokens=9),
    "log-probabilities": Params(temperature=0, logprobs=3, max_new_tokens=9, ignore_eos=True),
    "random log-probabilities": Params(seed=9, top_p=0.9, logprobs=0, max_new_tokens=6, ignore_eos=True),
    "processed log-probabilities": Params(
        seed=12,
        n=2,
        temperature=1.4,
        top_k=9,
        min_p=0.02,
        logprobs=3,
        logprobs_mode="processed_logprobs",
        max_new_tokens=7,
        ignore_eos=True,
    ),
    "greedy processed log-probabilities": Params(
        temperature=0,
        presence_penalty=0.7,
        logprobs=2,
        logprobs_mode="processed_logprobs",
        max_new_tokens=10,
        ignore_eos=True,
    ),
    "scored prompt": Params(temperature=0, prompt_logprobs=1, max_new_tokens=5, ignore_eos=True),
    "three answers": Params(seed=10, n=3, max_new_tokens=10, ignore_eos=True),
    "two filtered answers": Params(seed=11, n=2, top_k=5, logprobs=1, max_new_tokens=8, ignore_eos=True),
}


# In `test_all_kinds_together` are the others, too.
FEW_KINDS = (
    "greedy",
    "everything",
    "random penalties",
    "bad words",
    "held back",
    "log-probabilities",
    "processed log-probabilities",
    "scored prompt",
    "three answers",
)


@pytest.mark.long_unless(kept=lambda given: given["kind"] in FEW_KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_request_beside_others(folder: Path, kind: str, launches: Launches) -> None:
    """Four of it, of which three share a prefix; then it is alone, for the others have ended."""
    head = random_prompts(1, least=20)[0]
    prompts = [[*head, 5], [*head, 6, 7], head, *random_prompts(3, seed=2)]
    params = [KINDS[kind]] * 4 + [replace(GREEDY, max_new_tokens=3), Params(seed=0, max_new_tokens=4)]
    check_both(folder, prompts, params)
    assert decodes_of(launches)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 7},
        {"enable_prefix_cache": False},
        {"overlap": False},
        {"max_running_requests": 3},
    ],
    ids=str,
)
def test_all_kinds_together(folder: Path, options: dict[str, Any], launches: Launches) -> None:
    """Prefills, chunks and decodes mixed; more requests than run at once."""
    head = random_prompts(1, least=20)[0]
    prompts = [head[: 5 + i] + tail for i, tail in enumerate(random_prompts(len(KINDS), seed=3))]
    check_both(folder, prompts, list(KINDS.values()), **options)
    assert len({count for count, _, _ in decodes_of(launches)}) > 2


def test_draws_that_are_only_masked_are_the_captured_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch, launches: Launches
) -> None:
    """Answers with a form beside others, as they are without graphs; nothing is drawn twice."""
    prompts = random_prompts(6, least=3, seed=4)
    params = [replace(Params(seed=place, top_k=20, max_new_tokens=9, ignore_eos=True)) for place in range(4)]
    params += [replace(GREEDY, max_new_tokens=5), replace(params[0], logprobs=2)]
    forms = dict.fromkeys((0, 2, 4, 5), STEPS)
    with runtime_of(folder, cuda_graphs=False) as eager:
        expected = generate(eager, prompts, params, forms)
    drawn: list[Any] = []
    plain, processed = sampler.sample_plain, executor.sample_processed
    monkeypatch.setattr(executor, "sample_processed", lambda *_, **__: drawn.append(processed))
    monkeypatch.setattr(executor, "sample_plain", lambda *a, **k: (drawn.append(plain), plain(*a, **k))[1])
    launches.clear()
    with runtime_of(folder) as runtime:
        runtime.capture_graphs()  # which draws, too
        drawn.clear()
        assert_same(generate(runtime, prompts, params, forms), expected)
    assert processed not in drawn
    assert decodes_of(launches)
    if torch.get_default_device().type == "cuda":  # elsewhere what is captured is computed anew
        assert len(drawn) == len(launches) - len(decodes_of(launches))


MANY_PASSES = [("llama", True), ("gemma3", False), ("llama", False), ("mistral", True)]


@pytest.mark.long_unless(kept=lambda given: (given["family"], given["overlap"]) in MANY_PASSES[:2])
@pytest.mark.parametrize(("family", "overlap"), MANY_PASSES)
def test_many_passes_of_the_same_requests(
    family: str, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a plan serves, with windows and without; some leave and others come, of every kind. What a pass
    found stays what it was while others run.
    """
    with torch.device("cpu"):
        folder = write(MODELS[family](), tmp_path)
    collect = ModelRunner.collect
    results: list[tuple[PassResult, PassResult]] = []

    def remembered(self: ModelRunner, handle: object) -> PassResult:
        result = collect(self, handle)
        results.append((result, replace(result, token_ids=result.token_ids.copy(), finite=result.finite.copy())))
        return result

    monkeypatch.setattr(ModelRunner, "collect", remembered)
    prompts = random_prompts(len(KINDS), most=20, seed=16)
    lengths = [47, 21, 7, 5]
    params = [replace(kind, max_new_tokens=lengths[i % 4], n=1) for i, kind in enumerate(KINDS.values())]
    check_both(folder, prompts, params, overlap=overlap, max_plan_passes=16)
    assert len(results) > 3 * 2 * 16
    for result, before in results:
        np.testing.assert_array_equal(result.token_ids, before.token_ids)
        np.testing.assert_array_equal(result.finite, before.finite)


@pytest.mark.parametrize("overlap", [True, False])
def test_results_need_no_more_memory_than_passes_are_in_flight(folder: Path, overlap: bool) -> None:
    with runtime_of(folder, overlap=overlap) as runtime:
        counts = []
        for _ in range(3):
            runtime.generate(random_prompts(5), GREEDY)
            counts.append(runner_of(runtime).copies.num_allocated)
        assert counts[0] <= 2 * (1 + overlap)
        assert len(set(counts)) == 1


def test_overlap_changes_nothing(folder: Path) -> None:
    prompts = random_prompts(len(KINDS), seed=4)
    with runtime_of(folder, overlap=False) as one, runtime_of(folder) as other:
        expected = one.generate(prompts, list(KINDS.values()))
        assert_same(other.generate(prompts, list(KINDS.values())), expected)


def test_cached_prompts_begin_with_a_captured_pass(folder: Path, launches: Launches) -> None:
    """All but their last token is found: what remains is a decode, with a new line of the table."""
    prompts = random_prompts(7, least=5)
    with runtime_of(folder) as runtime:
        cold = runtime.generate(prompts, GREEDY)
        launches.clear()
        warm = runtime.generate(prompts, GREEDY)
    assert [output.usage.cached_tokens for output in warm] == [len(prompt) - 1 for prompt in prompts]
    assert (7, 8, True) in decodes_of(launches)
    assert_same(warm, cold)


# Those whose passes differ; the others differ in weights and frequencies.
FEW_FAMILIES = (
    "llama",
    "qwen3 with a window in its second layer",
    "dynamic rope",
    "mistral",
    "phi3, partial rotary",
    "olmo2",
    "smollm3",
    "gemma2",
    "gemma3",
    "qwen3-moe",
    "gpt-oss",
    "glm4-moe",
)


@pytest.mark.long_unless(kept=lambda given: given["family"] in FEW_FAMILIES)
@pytest.mark.parametrize("family", MODELS)
def test_each_family(family: str, tmp_path: Path, launches: Launches) -> None:
    with torch.device("cpu"):
        folder = write(MODELS[family](), tmp_path)
    prompts = random_prompts(7, most=60)
    params = [replace(GREEDY, max_new_tokens=6 + i) for i in range(7)]
    check_both(folder, prompts, params, max_running_requests=7)
    assert {size for _, size, _ in decodes_of(launches)} == {1, 2, 4, 7}


@pytest.mark.parametrize("most", [1, 3, 65, 131])
def test_more_requests_than_run_at_once(
    folder: Path, most: int, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that may decode together do; passes of more than are captured are launched kernel by kernel."""
    monkeypatch.setattr(graphs, "MAX_CAPTURED_BATCH", 130)
    prompts = random_prompts(2 * most + 3, most=6)
    params = [replace(GREEDY, max_new_tokens=2 + i % 5) for i in range(len(prompts))]
    options = {"max_running_requests": most, "max_total_tokens": 20 * most + 100}
    with runtime_of(folder, cuda_graphs=False, **options) as eager:
        expected = eager.generate(prompts, params)
    assert not decodes_of(launches)
    launches.clear()
    with runtime_of(folder, **options) as runtime:
        for _ in range(2):  # from the cache all begin together
            assert_same(runtime.generate(prompts, params), expected)
    decodes = [pass_.num_rows for pass_, _ in launches if not pass_.num_extends]
    assert max(decodes) == most
    assert [count for count, _, _ in decodes_of(launches)] == [n for n in decodes if n <= 130]


@pytest.mark.parametrize("attention", ["tree", "flat"])
def test_every_draw_is_captured_for_every_size(folder: Path, attention: str) -> None:
    with runtime_of(folder, max_running_requests=MERGES_BELOW, attention=attention) as runtime:
        runtime.capture_graphs()
        forwards, draws = captured_keys(runtime)
    sizes = ladder(MERGES_BELOW)
    shapes = {(size, CUT) for size in sizes} | {(MERGES_BELOW, WHOLE)}
    if attention == "tree":
        shapes |= {(size, CUT_TREE) for size in sizes if size < MERGES_BELOW} | {(MERGES_BELOW, TREE)}
    assert {(key.shape.num_rows, key.plans) for key in forwards if key.shape.is_decode} == shapes
    assert draws == {(size, features) for size in sizes for features in CAPTURED_DRAWS}


@pytest.mark.parametrize(
    ("model", "num_blocks"),
    [
        (llama(num_hidden_layers=5), 2),  # the first has no residual
        (llama(num_hidden_layers=1), 1),
        (gemma2(num_hidden_layers=6), 2),  # windows in turns
        (gemma3(num_hidden_layers=7), 3),  # the first that reads all
        (smollm3(num_hidden_layers=8, no_rope_layer_interval=4), 4),  # the first without positions
        (gpt_oss(num_hidden_layers=6), 2),  # windows in turns
        (glm4_moe(num_hidden_layers=5, first_k_dense_replace=2), 3),  # the first mixture
        (qwen3_moe(num_hidden_layers=6, mlp_only_layers=[0, 2]), 2),
        (qwen3_moe(num_hidden_layers=6, mlp_only_layers=[1, 2, 4]), 2),
        (qwen3_moe(num_hidden_layers=6, mlp_only_layers=[0, 1, 2, 3, 4]), 6),
    ],
)
def test_graphs_warm_up_with_one_block_of_each_kind(
    model: Any, num_blocks: int, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    forward, attention = Decoder.forward, RadixAttention.forward
    layers: list[RadixAttention] = []  # of the pass

    def watched(self: Decoder, *arguments: Any, num_blocks: int | None = None, **handed: Any) -> Any:
        layers.clear()
        hidden = forward(self, *arguments, num_blocks=num_blocks, **handed)
        assert len(layers) == (num_blocks or self.config.num_layers)
        asked.append(num_blocks)
        return hidden

    def attended(self: RadixAttention, *arguments: Any) -> Any:
        layers.append(self)
        return attention(self, *arguments)

    monkeypatch.setattr(Decoder, "forward", watched)
    monkeypatch.setattr(RadixAttention, "forward", attended)
    with runtime_of(write(model, tmp_path)) as runtime:
        assert runtime.parts.model.decoder.num_unlike_blocks == num_blocks
        assert asked.count(num_blocks) >= len(captured_keys(runtime)[0])
        runtime.generate(random_prompts(3), GREEDY)
        assert asked[-1] is None or device.type == "cuda"  # a pass itself runs them all


# --- captured when they are needed ---


def run_with_forms(
    runtime: Runtime, prompts: list[list[int]], between: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """Tokens of answers in a form, step by step, with `between` after each."""
    params = [replace(GREEDY, max_new_tokens=5 + place % 7) for place in range(len(prompts))]
    requests = map(runtime.prepare, prompts, params)
    runtime.submit(*(replace(request, index=n, form=STEPS) for n, request in enumerate(requests)))
    outputs = []
    while runtime.has_work:
        outputs += runtime.step()
        between()
    return [list(output.token_ids) for output in sorted(outputs, key=attrgetter("index"))]


def test_graphs_may_be_captured_while_draws_wait_for_their_masks(folder: Path) -> None:
    """Captures write where logits wait to be drawn from: those draws begin first."""
    prompts = random_prompts(9, seed=31)
    with runtime_of(folder, cuda_graphs=False) as eager:
        expected = run_with_forms(eager, prompts)
    with runtime_of(folder) as runtime:
        lefts: list[int] = []

        def capture() -> None:
            if runtime.parts.engine._filling is not None:
                lefts.append(runner_of(runtime).num_uncaptured)
                runtime.capture_graphs()

        assert run_with_forms(runtime, prompts, capture) == expected
        assert lefts[0] > 0
        assert runner_of(runtime).num_uncaptured == 0


def test_captured_from_another_thread_while_requests_run(folder: Path) -> None:
    """Between their passes, at any moment; and a second time there is nothing to do."""
    prompts = random_prompts(30, most=40, seed=32)
    params = [replace(one, seed=place) for place, one in enumerate([*KINDS.values()] * 2)][: len(prompts)]
    with runtime_of(folder, cuda_graphs=False, max_running_requests=26) as eager:
        expected = eager.generate(prompts, params)
    with runtime_of(folder, max_running_requests=26) as runtime, ThreadPoolExecutor(1) as other:
        captured = other.submit(runtime.capture_graphs)
        assert_same(runtime.generate(prompts, params), expected)
        captured.result()
        assert runner_of(runtime).num_uncaptured == 0
        graphs = dict(runner_of(runtime).executor.graphs)
        runtime.capture_graphs()
        assert runner_of(runtime).executor.graphs == graphs
    with pytest.raises(RadixrtError, match="closed"):
        runtime.capture_graphs()


class Failing(Recomputing):
    """Raises `error`, once a graph is captured, half of its kernels in between."""

    error: Exception | None = None
    calls = 0

    def captured(self, compute: Launch, warm_up: Launch) -> Launch:
        launch = super().captured(compute, warm_up)
        if self.error is not None:
            type(self).calls += 1
            raise self.error
        return launch


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> type[Failing]:
    if device.type == "cuda":
        pytest.skip("graphs of a GPU are captured by the GPU")
    monkeypatch.setitem(globals(), "Recomputing", Failing)
    monkeypatch.setattr(Failing, "error", None)
    monkeypatch.setattr(Failing, "calls", 0)
    return Failing


def test_without_memory_for_a_graph_kernels_are_launched_one_by_one(
    folder: Path, failing: type[Failing], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No answer is lost; nobody tries to capture the same passes again."""
    prompts = random_prompts(12, most=50, seed=33)
    with runtime_of(folder, cuda_graphs=False) as eager:
        expected = eager.generate(prompts, GREEDY)
    with runtime_of(folder) as runtime:
        monkeypatch.setattr(failing, "error", torch.OutOfMemoryError("none is left\nof 80 GiB"))
        for _ in range(2):
            assert_same(runtime.generate(prompts, GREEDY), expected)
            runtime.flush_cache()
        warned = [record.getMessage() for record in caplog.records if "no memory for a graph" in record.message]
        assert len(warned) == failing.calls >= 2
        assert all(message.endswith("from now on: none is left") for message in warned)
        calls, left = failing.calls, runner_of(runtime).num_uncaptured
        runtime.capture_graphs()
        assert failing.calls >= calls + left > calls
        assert_same(runtime.generate(prompts, GREEDY), expected)


def test_without_memory_for_the_largest_graphs_there_is_no_runtime(
    folder: Path, failing: type[Failing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failing, "error", torch.OutOfMemoryError("none is left"))
    with pytest.raises(ParameterError, match="there is no memory for the largest pass or its captured graphs"):
        runtime_of(folder)


def test_a_capture_that_fails_ends_its_pass_alone(
    folder: Path, failing: type[Failing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise than for want of memory; the next pass tries again."""
    prompts = random_prompts(5, least=12, seed=34)
    with runtime_of(folder, cuda_graphs=False) as eager:
        expected = eager.generate(prompts, GREEDY)
    with runtime_of(folder) as runtime:
        with monkeypatch.context() as patch:
            patch.setattr(failing, "error", RuntimeError("operation not permitted"))
            with pytest.raises(PassError, match="operation not permitted"):
                runtime.generate(prompts, GREEDY)
        assert_same(runtime.generate(prompts, GREEDY), expected)


# --- what requests share, read once ---


@pytest.fixture
def trees(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Lets requests share wherever they can. Of plans with shared items: who made them, of what, and how many."""
    cheap = TreeCosts(reread_bandwidth=4.2e12, operations=1e18, item=0.0, partial_crossings=0.1, launches=0.0)
    # Few programs, so that what is shared here occupies them all.
    tuning = PlanTuning(costs=cheap, shared_programs_per_sm=8 / gpu_of(device).num_sms)
    monkeypatch.setattr(attention_planner, "H200", tuning)
    seen: list[tuple[str, int]] = []

    def watch(name: str) -> None:
        make = getattr(attention_planner.AttentionPlanner, name)

        def watched(self: Any, *arguments: Any, **options: Any) -> Any:
            plans = make(self, *arguments, **options)
            for of in ("decode", "extend"):
                if plans is not None and (shared := sum(map(np.count_nonzero, shared_lens(plans, of)))):
                    seen.append((f"{name}: {of}", int(shared)))
            return plans

        monkeypatch.setattr(attention_planner.AttentionPlanner, name, watched)

    for name in ("plan", "plan_padded_decodes", "plan_padded_extends"):
        watch(name)
    return seen


def shared_lens(plans: Any, of: str) -> list[Any]:
    return [plan.shared_lens for plan in getattr(plans, of).values()]


def families(seed: int) -> list[list[int]]:
    """Prompts behind three documents, of which two have a beginning in common; some are the same."""
    rng = np.random.default_rng(seed)
    head = rng.integers(3, VOCAB_SIZE, 150).tolist()
    documents = [[*head, *rng.integers(3, VOCAB_SIZE, 200)], [*head, *rng.integers(3, VOCAB_SIZE, 90)]]
    documents.append(rng.integers(3, VOCAB_SIZE, 300).tolist())
    prompts = [[*map(int, documents[i % 3]), *own] for i, own in enumerate(random_prompts(24, most=20, seed=seed))]
    return prompts + prompts[:3]


def test_passes_with_extends_launch_what_shares_only_where_something_is_shared(
    folder: Path, trees: list[tuple[str, int]], launches: Launches
) -> None:
    def shapes_of(keys: Iterable[PassKey]) -> set[tuple[int, PlanShape]]:
        return {(key.shape.num_tokens, key.plans) for key in keys if not key.shape.is_decode}

    options: dict[str, Any] = {"chunked_prefill_size": 64}
    every = {(num_tokens, plans) for num_tokens in (16, 64) for plans in (CUT, CUT_TREE)}
    with runtime_of(folder, attention="tree", **options) as runtime:
        runtime.capture_graphs()
        assert shapes_of(captured_keys(runtime)[0]) == every
        runtime.generate(random_prompts(2, most=8), GREEDY)
        assert not trees
        runtime.generate(families(2), GREEDY)
    assert shapes_of(extends_of(launches)) == every
    with runtime_of(folder, attention="flat", **options) as flat:
        flat.capture_graphs()
        assert shapes_of(captured_keys(flat)[0]) == {(16, CUT), (64, CUT)}


@pytest.mark.long_unless(kept=lambda given: given["most"] > 27 if given["captured"] else given["most"] == 27)
@pytest.mark.parametrize("most", [9, 27, MERGES_BELOW + 2])
@pytest.mark.parametrize("captured", [False, True])
def test_what_is_read_once_is_read_by_all(
    folder: Path, captured: bool, most: int, trees: list[tuple[str, int]]
) -> None:
    """Requests join and leave, chunks and decodes are mixed, answers differ in length; so do their plans."""
    prompts = families(1) * (3 if most > 27 else 1)
    kinds = [one for one in KINDS.values() if one.n == 1]
    params = [replace(kinds[i % len(kinds)], seed=i, max_new_tokens=8 + i % 17) for i in range(len(prompts))]
    options: dict[str, Any] = {
        "max_running_requests": most,
        "chunked_prefill_size": 64,  # the longest captured pass
        "max_total_tokens": 9000,
    }
    with runtime_of(folder, cuda_graphs=False, attention="flat", **options) as flat:
        expected = flat.generate(prompts, params)
    assert not trees
    with runtime_of(folder, cuda_graphs=captured, **options) as runtime:
        assert_same(runtime.generate(prompts, params), expected)
        assert_same(runtime.generate(prompts, params), expected)
    names = {name for name, _ in trees}
    makers = ["plan_padded_extends"] if captured else ["plan"]
    assert names >= {f"{maker}: {of}" for maker in makers for of in ("decode", "extend")}
    assert "plan_padded_decodes: decode" in names or not captured
    assert len({count for name, count in trees if name.endswith("decode")}) > 2, "plans change"


def questions() -> list[list[list[int]]]:
    """Prompts, then others that begin like one of them: at borders of nodes, within, and the same ones."""
    rng = np.random.default_rng(7)
    document, other = (rng.integers(3, VOCAB_SIZE, count).tolist() for count in (130, 61))
    first = [document, other, [*document[:64], *random_prompts(1, least=40, most=40, seed=1)[0]]]
    asked = [[*document[: 130 - 33 * (i % 3)], *own] for i, own in enumerate(random_prompts(12, most=6, seed=2))]
    asked += [[*other, *own] for own in random_prompts(6, least=1, most=3, seed=3)]
    return [first, [*asked, *asked[:4], document, other]]


@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 32}, {"overlap": False}], ids=str)
@pytest.mark.parametrize("captured", [False, True])
def test_short_extends_read_once_what_they_share(
    folder: Path, captured: bool, options: dict[str, Any], trees: list[tuple[str, int]]
) -> None:
    """Of a token and of several, with decodes beside them; twice, so that prefixes are whole prompts."""
    options = {"max_running_requests": 24, "chunked_prefill_size": 64, **options}
    params = replace(GREEDY, max_new_tokens=5, logprobs=2)
    rounds = [*questions(), *questions()]
    with runtime_of(folder, cuda_graphs=False, attention="flat", **options) as flat:
        expected = [flat.generate(prompts, params) for prompts in rounds]
    assert not trees
    with runtime_of(folder, cuda_graphs=captured, attention="tree", **options) as runtime:
        for prompts, outputs in zip(rounds, expected, strict=True):
            assert_same(runtime.generate(prompts, params), outputs)
    maker = "plan_padded_extends" if captured else "plan"
    assert sum(count for name, count in trees if name == f"{maker}: extend") > 2


# --- what must not be harmed ---


def check_tables(runtime: Runtime) -> list[tuple[Any, int, int]]:
    """The device's table is the host's wherever a request runs. Returns of each that has sampled: the answer, how
    many tokens, and which was the last.
    """
    executor = runner_of(runtime).executor
    table, last = executor.req_to_token.cpu().numpy(), executor.last_token.cpu().numpy()
    assert not table[-1, 1:].any(), "padded decodes write the first cell of the last row alone"
    sampled = []
    for answer in runtime.parts.scheduler.running:
        if answer.lease is None:
            continue
        row, length = answer.lease.row, answer.lease.allocated_len
        np.testing.assert_array_equal(table[row, :length], runtime.parts.cache.rows.req_to_token[row, :length])
        count = total_len(answer) - answer.request.prompt_len
        if count > 0:
            sampled.append((answer, count, int(last[row])))
    return sampled


@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 8, "max_total_tokens": 260}], ids=str)
def test_the_tables_of_device_and_host_are_the_same_after_each_step(folder: Path, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    heads = random_prompts(2, least=15, seed=5)
    prompts = [heads[i % 2] + tail for i, tail in enumerate(random_prompts(30, seed=6))]
    with runtime_of(folder, **options) as runtime:
        requests = [
            runtime.prepare(prompt, replace(GREEDY, max_new_tokens=int(rng.integers(1, 25))), index=i)
            for i, prompt in enumerate(prompts)
        ]
        waiting, sampled = list(requests), []
        while waiting or runtime.has_work:
            if waiting and rng.random() < 0.5:
                runtime.submit(waiting.pop())
            runtime.step()
            sampled += check_tables(runtime)
        assert len(sampled) > 100
        for answer, count, token in sampled:
            assert answer.output_ids()[count - 1] == token


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 24])
def test_padded_decodes_harm_nobody(folder: Path, size: int, launches: Launches) -> None:
    """Everything that no request owns is NaN, the reserved slot too, whenever a batch begins; what others have
    kept in the cache stays bit for bit.
    """
    prompts = random_prompts(size + 1, least=3, seed=size)
    with runtime_of(folder, cuda_graphs=False, max_running_requests=26) as eager:
        expected = eager.generate(prompts, GREEDY)
    with runtime_of(folder, max_running_requests=26) as runtime:
        kept = random_prompts(1, least=30, seed=99)[0]
        first = runtime.generate(kept, GREEDY)
        cache = runtime.parts.cache
        path = cache.tree.match(Namespace(), np.array(kept, np.int32))
        slots = torch.from_numpy(cache.tree.slots_of(path.node)).long().to(runtime.device)
        assert len(slots) >= len(kept)
        before = runtime.parts.model.kv_pool.memory["kv"][:, :, slots].clone()
        for count in (size - 1, size, size + 1):
            if count:
                launches.clear()
                runtime.parts.model.kv_pool.fill(float("nan"))
                runtime.parts.model.kv_pool.memory["kv"][:, :, slots] = before
                outputs = runtime.generate(prompts[:count], GREEDY, tenant=f"of {count}")
                assert_same(outputs, expected[:count])
                assert (count, next(s for s in ladder(26) if s >= count), False) in decodes_of(launches)
                assert torch.equal(runtime.parts.model.kv_pool.memory["kv"][:, :, slots], before)
        assert_same([runtime.generate(kept, GREEDY)], [first])


def test_a_request_that_is_not_finite_ends_alone(folder: Path) -> None:
    """Found in a captured pass: the token that it samples first has an embedding of NaN."""
    prompts = random_prompts(3, least=5, seed=7)
    with runtime_of(folder) as runtime:
        good = runtime.generate(prompts, GREEDY)
        firsts = [output.token_ids[0] for output in good]
        bad = next(
            i for i, token in enumerate(firsts) if all(token not in o.token_ids for o in good if o.index != i)
        )
        runtime.flush_cache()
        with torch.no_grad():
            runner_of(runtime).model.embedding.weight[firsts[bad]] = torch.nan
        outputs = runtime.generate(prompts, GREEDY)
        assert outputs[bad].finish_reason is FinishReason.ERROR
        assert outputs[bad].token_ids == (firsts[bad],)
        others = [i for i in range(3) if i != bad]
        assert_same([outputs[i] for i in others], [good[i] for i in others])


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_captured_pass_that_fails_leaves_the_runtime_usable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: str, decodes: bool
) -> None:
    """Nothing of it has been started, or all: what it was to compute is not taken for computed."""
    prompts = random_prompts(5, least=12, seed=8)
    with runtime_of(folder, chunked_prefill_size=16) as runtime:
        expected = runtime.generate(prompts, GREEDY)
        runtime.flush_cache()
        forward, calls = Executor.forward, [0]

        def failing(self: Executor, pass_: Pass, packed: PackedPass) -> Forward:
            calls[0] += packed.key is not None and packed.key.shape.is_decode == decodes
            fails = calls[0] == 3
            calls[0] += fails
            done = forward(self, pass_, packed) if when == "after" or not fails else None
            if fails or done is None:
                raise MemoryError("no memory left")
            return done

        monkeypatch.setattr(Executor, "forward", failing)
        with pytest.raises(PassError, match="no memory left"):
            runtime.generate(prompts, GREEDY)
        assert_same(runtime.generate(prompts, GREEDY), expected)
        assert calls[0] > 6


# --- with all else that a Runtime does ---


def test_retraction_and_eviction_in_a_short_pool(folder: Path) -> None:
    params = Params(seed=1, n=6, max_new_tokens=20, stop_token_ids=(0,), ignore_eos=True, bad_words=[[0]])
    prompts = random_prompts(3, least=6, most=9, seed=9)
    with runtime_of(folder, cuda_graphs=False) as roomy:
        expected = roomy.generate(prompts, params)
    with runtime_of(folder, max_total_tokens=60) as tight:
        assert_same(tight.generate(prompts, params), expected)
        assert tight.parts.scheduler.num_retractions > 0
        assert tight.cache_stats().evicted_tokens > 0


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_new_weights_are_read_by_old_graphs(folder: Path, tmp_path: Path, kv_dtype: str) -> None:
    require(kv_dtype)
    with torch.device("cpu"):
        other = write(llama(seed=11, max_position_embeddings=1024), tmp_path)
    prompts = random_prompts(4, least=8, seed=10)
    with runtime_of(folder, kv_dtype=kv_dtype) as runtime, runtime_of(other, kv_dtype=kv_dtype) as fresh:
        before = runtime.generate(prompts, GREEDY)
        runtime.update_weights(other)
        after = runtime.generate(prompts, GREEDY)
        assert_same(after, fresh.generate(prompts, GREEDY))
        assert [output.token_ids for output in after] != [output.token_ids for output in before]


def require(kv_dtype: str) -> None:
    if kv_dtype == "fp8" and gpu_of(torch.get_default_device()).capability < FIRST_CAPABILITY:
        pytest.skip("this GPU does not know e4m3")


def test_kv_in_e4m3(folder: Path) -> None:
    """A batch of a size that is captured, all of the same length: products have the same shapes in both."""
    require("fp8")
    check_both(folder, random_prompts(4, seed=11), GREEDY, kv_dtype="fp8", max_running_requests=4)


def test_a_kept_cache(folder: Path, tmp_path: Path) -> None:
    prompts = random_prompts(5, least=10, seed=12)
    with runtime_of(folder) as first:
        expected = first.generate(prompts, GREEDY)
        saved = first.save_cache(tmp_path / "kept")
        assert_same(first.generate(prompts, GREEDY), expected)
    with runtime_of(folder) as second:
        assert second.load_cache(tmp_path / "kept") == saved
        outputs = second.generate(prompts, GREEDY)
        assert all(output.usage.cached_tokens == len(p) - 1 for output, p in zip(outputs, prompts, strict=True))
        assert_same(outputs, expected)


def test_the_host_tier(folder: Path) -> None:
    prompts = [*random_prompts(8, least=50, most=60, seed=13)] * 2
    with runtime_of(folder, cuda_graphs=False) as roomy:
        expected = roomy.generate(prompts, GREEDY)
    options: dict[str, Any] = {"max_total_tokens": 200, "schedule_policy": "fcfs", "host_memory_gb": 0.02}
    with runtime_of(folder, **options) as tiered:
        assert_same(tiered.generate(prompts, GREEDY), expected)
        assert tiered.cache_stats().loaded_tokens > 0


# --- a GPU alone knows ---

on_gpu = pytest.mark.parametrize("device", ["cuda"], indirect=True)


def forbid_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises where a step would wait for the device, but in `collect`; what an event stands for that a step
    synchronizes with has been done before.
    """
    step, collect, synchronize = Engine.step, ModelRunner.collect, torch.cuda.Event.synchronize
    watching = [False]

    def watch(on: bool) -> None:
        watching[0] = on
        torch.cuda.set_sync_debug_mode("error" if on else "default")

    def watched_step(self: Engine, *aborts: Any) -> Any:
        watch(True)
        try:
            return step(self, *aborts)
        finally:
            watch(False)

    def free_collect(self: ModelRunner, handle: object) -> Any:
        watch(False)
        try:
            return collect(self, handle)
        finally:
            watch(True)

    def checked(self: torch.cuda.Event) -> None:
        if watching[0]:
            assert self.query(), "a step waits for an event"
        synchronize(self)

    monkeypatch.setattr(Engine, "step", watched_step)
    monkeypatch.setattr(ModelRunner, "collect", free_collect)
    monkeypatch.setattr(torch.cuda.Event, "synchronize", checked)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_no_step_waits_but_for_its_result(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
    shared: bool,
    launches: Launches,
    trees: list[tuple[str, int]],
) -> None:
    prompts = families(14)[: len(KINDS)] if shared else random_prompts(len(KINDS), seed=14)
    with runtime_of(folder, overlap=overlap) as runtime:
        runtime.capture_graphs()
        expected = runtime.generate(prompts, list(KINDS.values()))  # kernels are compiled
        warm = runtime.generate(prompts, list(KINDS.values()))
        forbid_waits(monkeypatch)
        launches.clear()
        trees.clear()
        assert_same(runtime.generate(prompts, list(KINDS.values())), warm)
        assert decodes_of(launches)
        assert trees or not shared
        runtime.flush_cache()
        assert_same(runtime.generate(prompts, list(KINDS.values())), expected)


@pytest.mark.gpu
@on_gpu
def test_no_step_waits_for_masked_draws(folder: Path, monkeypatch: pytest.MonkeyPatch, launches: Launches) -> None:
    """Masks are sent beside the pass, and drawn with by what was captured."""
    prompts = random_prompts(9, seed=5)
    params = [Params(seed=place, top_k=20, max_new_tokens=4 + place, ignore_eos=True) for place in range(9)]
    forms = dict.fromkeys((0, 1, 2, 4, 5, 7, 8), STEPS)
    with runtime_of(folder) as runtime:
        runtime.capture_graphs()
        expected = generate(runtime, prompts, params, forms)  # kernels are compiled
        runtime.flush_cache()
        forbid_waits(monkeypatch)
        launches.clear()
        assert_same(generate(runtime, prompts, params, forms), expected)
    assert decodes_of(launches)


def dummy(folder: Path) -> Path:
    """A config alone, of a model whose KV, logits and activations weigh something: a token's KV has 16 KiB."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
    )
    config.save_pretrained(folder)
    return folder


@pytest.fixture
def little_memory(device: torch.device) -> Iterator[int]:
    """Bytes that are left free on the GPU: everything else is taken."""
    gc.collect()
    torch.cuda.empty_cache()
    left = 3 * 2**30
    free, _ = torch.cuda.mem_get_info(device)
    if free < left:
        pytest.skip(f"{free:,} bytes are free on the GPU")
    ballast = torch.empty(free - left, dtype=torch.uint8, device=device)
    yield left
    del ballast
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.whole_gpu
@on_gpu
@pytest.mark.parametrize("limits", [(64, 4096), (1, 4096), (200, 512)], ids=str)
def test_all_free_memory_is_not_too_much(tmp_path: Path, little_memory: int, limits: tuple[int, int]) -> None:
    """The pool takes what passes and graphs leave; then a pass at all limits comes, and decodes of all sizes."""
    most, chunk = limits
    wants_all: dict[str, Any] = {
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "logprobs": 20,
        "ignore_eos": True,
    }
    with Runtime(
        dummy(tmp_path),
        device="cuda",
        dtype="float32",
        load_format="dummy",
        memory_fraction=1.0,
        max_running_requests=most,
        chunked_prefill_size=chunk,
    ) as runtime:
        assert runtime.parts.model.kv_pool.memory["kv"].nbytes > little_memory // 4
        rng = np.random.default_rng(0)
        lengths = [chunk // most if chunk >= 2 * most else 2] * most
        lengths[0] = min(lengths[0], 4000)
        prompts = [rng.integers(3, 32_000, length).tolist() for length in lengths]
        params = [
            Params(n=2, max_new_tokens=2 + i % 40, seed=i, prompt_logprobs=20, **wants_all) for i in range(most)
        ]
        for _ in range(2):  # another shape of memory; the second time from the cache
            outputs = runtime.generate(prompts, params)
            assert all(output.error is None for output in outputs)
        long = rng.integers(3, 32_000, 4000).tolist()
        assert runtime.generate([long] * 3, Params(max_new_tokens=30, ignore_eos=True))[2].error is None


@pytest.mark.gpu
@pytest.mark.whole_gpu
@on_gpu
def test_close_gives_the_memory_back(tmp_path: Path, little_memory: int, device: torch.device) -> None:
    """Each of these takes most of what is free."""
    folder = dummy(tmp_path)
    reserved, free = [], []
    for _ in range(4):
        with Runtime(
            folder,
            device="cuda",
            dtype="float32",
            load_format="dummy",
            memory_fraction=0.9,
            max_running_requests=24,
            chunked_prefill_size=1024,
        ) as runtime:
            assert runtime.parts.model.kv_pool.memory["kv"].nbytes > little_memory // 3
            runtime.generate([[5, 6, 7]] * 30, Params(max_new_tokens=9, ignore_eos=True, n=2))
        del runtime
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved(device))
        free.append(torch.cuda.mem_get_info(device)[0])
    # The first one left what a process keeps: kernels, and cuBLAS's workspaces.
    assert reserved[-1] <= reserved[0] + 2**20
    assert free[-1] >= free[0] - 2**26


@pytest.mark.gpu
@on_gpu
def test_graphs_of_a_gpu_that_is_not_the_current_one(folder: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    prompts = random_prompts(9, seed=15)
    make = partial(Runtime, folder, dtype="float32", max_total_tokens=2000, max_running_requests=9)
    with make(device="cuda:0") as first, make(device="cuda:1") as second:
        for runtime in (first, second):
            assert runner_of(runtime).executor.graphs
        expected = first.generate(prompts, GREEDY)
        assert_same(second.generate(prompts, GREEDY), expected)
        assert_same(first.generate(prompts, GREEDY), expected)
