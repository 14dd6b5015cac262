"""The Runtime: parity with transformers, what it accepts and refuses, and what it promises."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from radixrt import (
    BatchFileError,
    FinishReason,
    ModelError,
    ParameterError,
    PassError,
    PromptError,
    RadixrtError,
    RequestOutput,
    Runtime,
    SamplingParams,
    StreamChunk,
)
from radixrt.execution.model_runner import ModelRunner
from radixrt.frontend.arguments import CallOptions, ScoreOptions
from radixrt.schedule.passes import Pass, PassResult
from tests.support import checkpoints
from tests.support.checkpoints import LLAMA3_ROPE, VOCAB_SIZE, llama, qwen3, write
from tests.support.small_tokenizers import byte_level

pytestmark = pytest.mark.usefixtures("device")

GREEDY = SamplingParams(temperature=0, max_new_tokens=32, ignore_eos=True)

MODELS: dict[str, Any] = {
    "llama2": lambda: llama(),
    "llama3": lambda: llama(seed=1, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "qwen3": lambda: qwen3(seed=2),
}


@pytest.fixture(scope="module", params=list(MODELS))
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> tuple[Any, Path]:
    with torch.device("cpu"):  # the same weights on every device
        model = MODELS[request.param]()
    model.to(device)
    return model, write(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama without a tokenizer whose end tokens are 2 and 7."""
    return write(llama(), tmp_path_factory.mktemp("llama"), eos=[2, 7])


def small_runtime(folder: Path, **options: Any) -> Runtime:
    """A Runtime for a folder without a tokenizer; unused slots hold NaN."""
    runtime = Runtime(folder, **{"device": torch.get_default_device(), "max_total_tokens": 600, **options})
    runtime.parts.model.kv_pool.fill(float("nan"))
    return runtime


@pytest.fixture
def runtime(folder: Path) -> Iterator[Runtime]:
    with small_runtime(folder) as runtime:
        yield runtime


def continuation(model: Any, prompt: list[int], count: int) -> tuple[list[int], float]:
    """The greedy continuation by a dense forward pass, and the least margin between its two best logits."""
    return _continuation(model, tuple(prompt), count)


@cache
def _continuation(model: Any, prompt: tuple[int, ...], count: int) -> tuple[list[int], float]:
    tokens, margin = list(prompt), float("inf")
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            best = logits.topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], margin


def shared_prompts(seed: int = 0) -> list[list[int]]:
    """Prompts that share prefixes at several depths, one of them twice."""
    rng = np.random.default_rng(seed)

    def ids(n: int) -> list[int]:
        return [int(i) for i in rng.integers(3, VOCAB_SIZE, n)]

    head, left, right = ids(20), ids(9), ids(17)
    prompts = [head + left + ids(5), head + left + ids(1), head + right + ids(8), head, ids(3), ids(40)]
    return [*prompts, prompts[0]]


RUNS: dict[str, dict[str, Any]] = {
    "cached and batched": {},
    "one at a time": {"max_running_requests": 1},
    "chunked": {"chunked_prefill_size": 7},
    "misses forced": {"force_miss": True},
    "no cache": {"enable_prefix_cache": False},
    "retracted": {"max_total_tokens": 130, "max_running_requests": 6},
}


@pytest.mark.long_unless(kept=lambda given: given["reference"] == "llama2" or given["run"] == "chunked")
@pytest.mark.parametrize("run", list(RUNS))
def test_greedy_continuations_equal_those_of_transformers(reference: tuple[Any, Path], run: str) -> None:
    model, folder = reference
    prompts = shared_prompts()
    params = GREEDY
    if run == "retracted":  # a request that may stop is expected to stop early: too many are admitted
        sampled = {token for prompt in prompts for token in continuation(model, prompt, 32)[0]}
        unused = next(token for token in range(VOCAB_SIZE) if token not in sampled)
        params = replace(GREEDY, stop_token_ids=(unused,))
    with small_runtime(folder, **RUNS[run]) as runtime:
        cold = runtime.generate(prompts, params)
        warm = runtime.generate(prompts, params)
        retractions = runtime.parts.scheduler.num_retractions
    for prompt, *outputs in zip(prompts, cold, warm, strict=True):
        expected, margin = continuation(model, prompt, GREEDY.max_new_tokens)
        assert margin > 1e-4
        for output in outputs:
            assert list(output.token_ids) == expected
            assert output.finish_reason is FinishReason.LENGTH
            assert output.usage.cached_tokens + output.usage.computed_tokens == len(prompt)
    if run in ("cached and batched", "chunked", "one at a time"):
        assert [o.usage.cached_tokens for o in warm] == [len(p) - 1 for p in prompts]
    if run in ("misses forced", "no cache"):
        assert all(o.usage.cached_tokens == 0 for o in cold + warm)
    if run == "retracted":
        assert retractions > 0
        assert sum(o.usage.recomputed_tokens for o in cold + warm) > 0


def test_each_step_of_a_chain_reads_the_one_before_in_the_same_pass(reference: tuple[Any, Path]) -> None:
    """Steps of one token and of several; the last one is a branch, whose prompt is scored in part."""
    model, folder = reference
    (long,) = shared_prompts()[5:6]
    lens = [3, 4, 9, 10, 11, 20, 33, 40]
    prompts = [long[:length] for length in lens]
    branch, scored = long[:25] + prompts[0], replace(GREEDY, prompt_logprobs=0, prompt_logprobs_start=20)
    with small_runtime(folder, enable_prefix_cache=False) as runtime:
        expected_scores = runtime.generate(branch, scored).prompt_logprobs
    with small_runtime(folder, schedule_policy="fcfs") as runtime:
        *outputs, last = runtime.generate([*prompts, branch], [GREEDY] * len(prompts) + [scored])
        assert runtime.activity().passes == GREEDY.max_new_tokens
    for prompt, output in zip([*prompts, branch], [*outputs, last], strict=True):
        expected, margin = continuation(model, prompt, GREEDY.max_new_tokens)
        assert margin > 1e-4
        assert list(output.token_ids) == expected
    assert [output.usage.cached_tokens for output in outputs] == [0, *lens[:-1]]
    assert last.usage.cached_tokens == 19
    scores, wanted = ([token.logprob for token in given] for given in (last.prompt_logprobs, expected_scores))
    assert scores == pytest.approx(wanted, abs=1e-4)


# Run in one way each, which chunks, batches and reuses; the runs above are about the engine, not about the model.
FAMILIES: dict[str, Any] = {
    "qwen2, dynamic rope": lambda: checkpoints.qwen2(rope_parameters=checkpoints.DYNAMIC_ROPE),
    "mistral, linear rope": lambda: checkpoints.mistral(rope_parameters=checkpoints.LINEAR_ROPE),
    "phi3, partial rotary": lambda: checkpoints.phi3(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "olmo2, yarn rope": lambda: checkpoints.olmo2(seed=1, rope_parameters=checkpoints.YARN_ROPE),
    "smollm3": checkpoints.smollm3,
    "gemma2": checkpoints.gemma2,
    "gemma3": checkpoints.gemma3,
    "mixtral": checkpoints.mixtral,
    "qwen3-moe": checkpoints.qwen3_moe,
    "gpt-oss": checkpoints.gpt_oss_in_mxfp4,
    "glm4-moe": checkpoints.glm4_moe,
    "ministral3": checkpoints.ministral3,
    "granite4": checkpoints.granite4,
    "exaone4": checkpoints.exaone4,
    "ernie4.5": checkpoints.ernie4_5,
    "hunyuan": checkpoints.hunyuan,
}


@pytest.mark.long_unless(
    kept=lambda given: (
        given["family"]
        in ("smollm3", "gemma3", "gpt-oss", "ministral3")
    )
)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_continue_as_transformers(family: str, tmp_path: Path) -> None:
    with torch.device("cpu"):
        model = FAMILIES[family]()
    model.to(torch.get_default_device())
    prompts, params = shared_prompts(), replace(GREEDY, max_new_tokens=10)
    with small_runtime(write(model, tmp_path), chunked_prefill_size=13) as runtime:
        cold, warm = runtime.generate(prompts, params), runtime.generate(prompts, params)
    for prompt, *outputs in zip(prompts, cold, warm, strict=True):
        expected, margin = continuation(model, prompt, params.max_new_tokens)
        assert margin > 1e-4
        assert [list(output.token_ids) for output in outputs] == [expected] * 2
    assert sum(o.usage.cached_tokens for o in cold) > 0
    assert [o.usage.cached_tokens for o in warm] == [len(p) - 1 for p in prompts]


def test_a_wrong_context_changes_the_tokens(reference: tuple[Any, Path]) -> None:
    """The comparison above can fail: one other token in the prompt gives another continuation."""
    model, _ = reference
    for prompt in shared_prompts()[:3]:
        middle = len(prompt) // 2
        other = [*prompt[:middle], (prompt[middle] + 1) % VOCAB_SIZE, *prompt[middle + 1 :]]
        assert continuation(model, prompt, 32)[0] != continuation(model, other, 32)[0]


def test_retraction_at_every_step_loses_nothing(folder: Path) -> None:
    prompts = shared_prompts(3)
    with small_runtime(folder, chunked_prefill_size=16) as runtime:
        expected = [o.token_ids for o in runtime.generate(prompts, GREEDY)]
        runtime.flush_cache()
        for index, prompt in enumerate(prompts):
            runtime.submit(runtime.prepare(prompt, GREEDY, index=index))
        got, steps = {}, 0
        while runtime.has_work:
            got |= {o.index: o.token_ids for o in runtime.step()}
            steps += 1
            running = runtime.parts.scheduler.running
            if steps % 5 == 0 and running:
                runtime.parts.scheduler.retract(running[steps % len(running)])
        assert runtime.parts.scheduler.num_retractions > 5
    assert [got[i] for i in range(len(prompts))] == expected


def test_a_batch_from_file_to_file(folder: Path, tmp_path: Path) -> None:
    """The answers are those of `generate`; a run that was cut in two ends as one in one piece."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB_SIZE, n % 9 + 2).tolist() for n in range(12)]
    lines = [json.dumps({"token_ids": prompt, "temperature": 1.0, "max_new_tokens": 5}) for prompt in prompts]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*lines, "{"]), encoding="utf-8")
    with Runtime(folder, dtype="float32", max_running_requests=3, max_total_tokens=200) as runtime:
        expected = runtime.generate(prompts, SamplingParams(max_new_tokens=5))
        step, steps = runtime.step, 0

        def interrupted() -> list[RequestOutput]:
            nonlocal steps
            steps += 1
            if steps == 14:
                signal.raise_signal(signal.SIGINT)
            return step()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime, "step", interrupted)
            with pytest.raises(KeyboardInterrupt, match=r"the same command goes on"):
                runtime.run_batch(source, out)
        report = runtime.run_batch(source, out)
        assert (report.requests, report.written, report.errors) == (13, 13, 1)
        assert 0 < report.completion_tokens < 60
        with pytest.raises(BatchFileError, match="1 of 13 lines is bad"):
            runtime.run_batch(source, out, overwrite=True, strict=True)
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [tuple(record["token_ids"]) for record in records[:12]] == [output.token_ids for output in expected]
    assert records[12]["error"]["type"] == "invalid_line"


def test_a_batch_after_the_last_answer(runtime: Runtime, tmp_path: Path) -> None:
    """A pass may still run when its answer is known, in this thread or in one that an event loop has begun."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"token_ids": [5, 6, 7], "max_tokens": 1}\n')

    def run(name: str) -> None:
        assert (runtime.num_running, runtime.num_waiting) == (0, 0)
        assert runtime.run_batch(source, tmp_path / name).errors == 0

    async def ask_and_run() -> None:
        for number in range(8):
            await runtime.async_generate([5, 6, 7], replace(GREEDY, stop_token_ids=(first,)))
            run(f"{number}.jsonl")

    first, *_ = runtime.generate([5, 6, 7], replace(GREEDY, max_new_tokens=1)).token_ids
    runtime.submit(runtime.prepare([5, 6, 7], replace(GREEDY, stop_token_ids=(first,))))
    while not runtime.step():
        pass
    assert runtime.has_work
    run("stepped.jsonl")
    asyncio.run(ask_and_run())


def test_end_tokens_come_from_generation_config(folder: Path) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(3, 60)]
    params = SamplingParams(temperature=0, max_new_tokens=60)
    with small_runtime(folder, max_total_tokens=5000) as runtime:
        assert runtime.config.eos_token_ids == (2, 7)
        outputs = runtime.generate(prompts, params)
        ignoring = runtime.generate(prompts, SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True))
    stopped = [o for o in outputs if o.finish_reason is FinishReason.STOP]
    assert {o.token_ids[-1] for o in stopped} == {2, 7}
    for output, free in zip(outputs, ignoring, strict=True):
        assert free.token_ids[: len(output.token_ids)] == output.token_ids
        assert not {2, 7} & set(output.token_ids[:-1])
        assert len(free.token_ids) == 60


def test_stop_token_ids_stop_though_end_tokens_are_ignored(runtime: Runtime) -> None:
    free = runtime.generate([5, 6, 7], GREEDY)
    stop = free.token_ids[4]
    stopping = SamplingParams(temperature=0, max_new_tokens=32, ignore_eos=True, stop_token_ids=(stop,))
    output = runtime.generate([5, 6, 7], stopping)
    assert output.finish_reason is FinishReason.STOP
    assert output.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert output.usage.completion_tokens == len(output.token_ids)


def test_one_in_one_out_and_lists_in_order(runtime: Runtime) -> None:
    short = SamplingParams(temperature=0, max_new_tokens=3)
    assert isinstance(runtime.generate([5, 6, 7], short), RequestOutput)
    assert isinstance(runtime.generate(np.array([5, 6, 7]), short), RequestOutput)
    assert runtime.generate([]) == []
    outputs = runtime.generate([[5, 6, 7], [8]], [short, SamplingParams(max_new_tokens=1)])
    assert [(o.index, len(o.token_ids)) for o in outputs] == [(0, 3), (1, 1)]
    assert isinstance(runtime.generate([[5, 6, 7]], short), list)
    timings = outputs[0].timings
    assert 0 <= timings.queue <= timings.first_token <= timings.total


def test_draws_depend_on_seed_and_index_alone(folder: Path) -> None:
    prompts = [[5, 6, 7]] * 6
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    seeded = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=11)
    with small_runtime(folder) as runtime, small_runtime(folder, seed=1, max_running_requests=2) as other:
        first = [o.token_ids for o in runtime.generate(prompts, params)]
        assert len(set(first)) == 6
        assert [o.token_ids for o in other.generate(prompts, params)] != first
        alone = runtime.generate([5, 6, 7], seeded).token_ids
        assert {o.token_ids for o in other.generate(prompts, seeded)} == {alone}


def calls_that_draw(runtime: Runtime) -> list[tuple[int, ...]]:
    """What each of eight calls of every kind draws for the same prompt."""
    prompt, params = [5, 6, 7], SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=3)

    async def joined(chunks: AsyncIterator[StreamChunk]) -> tuple[int, ...]:
        return tuple([token async for chunk in chunks for token in chunk.token_ids])

    drawn = [runtime.generate(prompt, params).token_ids for _ in range(2)]
    drawn += [tuple(i for chunk in runtime.stream(prompt, params) for i in chunk.token_ids) for _ in range(2)]
    drawn += [output.token_ids for output in runtime.generate_iter([prompt], params)]
    output = asyncio.run(runtime.async_generate(prompt, params))
    assert isinstance(output, RequestOutput)
    streams = runtime.async_stream(prompt, params), runtime.async_stream_all([prompt], params)
    return [*drawn, output.token_ids, *(asyncio.run(joined(chunks)) for chunks in streams)]


def test_each_call_draws_anew_and_the_same_calls_the_same(tmp_path: Path) -> None:
    tokenizer = byte_level()
    folder = write(llama(seed=1, vocab_size=len(tokenizer)), tmp_path)
    tokenizer.save_pretrained(folder)
    with small_runtime(folder, seed=5) as runtime, small_runtime(folder, seed=5) as other:
        drawn = calls_that_draw(runtime)
        assert len(set(drawn)) == len(drawn) == 8
        assert calls_that_draw(other) == drawn
        runtime.score([[5, 6]], [[7]])  # draws nothing, and is not counted
        assert calls_that_draw(runtime) == calls_that_draw(other) != drawn


def test_a_batch_draws_the_same_after_any_calls(folder: Path, tmp_path: Path) -> None:
    source, params = tmp_path / "in.jsonl", SamplingParams(max_new_tokens=12, ignore_eos=True)
    source.write_text('{"token_ids": [5, 6, 7]}\n' * 3)
    records = []
    with small_runtime(folder) as runtime:
        first = [output.token_ids for output in runtime.generate([[5, 6, 7]] * 3, params)]
        for name in ("one", "two"):
            runtime.run_batch(source, tmp_path / name, default_params=params)
            lines = (tmp_path / name).read_text().splitlines()
            records.append([tuple(json.loads(line)["token_ids"]) for line in lines])
    assert records == [first, first]  # its draws are those of the first call of a Runtime


def test_a_seed_of_the_systems(folder: Path) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with small_runtime(folder, seed=None) as runtime, small_runtime(folder, seed=None) as other:
        assert runtime.seed != other.seed
        drawn = runtime.generate([5, 6, 7], params).token_ids
        assert other.generate([5, 6, 7], params).token_ids != drawn
        with small_runtime(folder, seed=runtime.seed) as again:
            assert again.generate([5, 6, 7], params).token_ids == drawn
    identities = []
    for seed in (None, 0):  # a kept cache of random weights can be loaded again
        with small_runtime(folder, seed=seed, load_format="dummy") as dummy:
            identities.append(dummy.identity())
    assert identities[0] == identities[1]


def passes_in_flight(runtime: Runtime) -> list[object]:
    """Those that are launched and not collected, from now on; it changes with every step."""
    runner, in_flight = runtime.parts.engine.runner, []
    launch, collect = runner.launch, runner.collect

    def launched(pass_: Pass) -> object:
        in_flight.append(launch(pass_))
        return in_flight[-1]

    def collected(handle: object) -> PassResult:
        in_flight.remove(handle)
        return collect(handle)

    runner.launch, runner.collect = launched, collected  # type: ignore[method-assign]
    return in_flight


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_overlap_changes_no_output(folder: Path, temperature: float) -> None:
    """Prompts that share prefixes, are more than run at once, and end on their own or after their own lengths."""
    prompts = shared_prompts()
    params = [
        SamplingParams(temperature=temperature, max_new_tokens=5 + 3 * i, ignore_eos=bool(i % 3), n=1 + i % 2)
        for i in range(len(prompts))
    ]
    found = []
    for overlap in (True, False):
        with small_runtime(folder, overlap=overlap, max_running_requests=4, chunked_prefill_size=16) as runtime:
            in_flight = passes_in_flight(runtime)
            requests = [
                runtime.prepare(p, own, index=i) for i, (p, own) in enumerate(zip(prompts, params, strict=True))
            ]
            runtime.submit(*requests)
            outputs, most = [], 0
            while runtime.has_work:
                outputs += runtime.step()
                most = max(most, len(in_flight))
            assert most == overlap
            outputs.sort(key=lambda output: output.index)
            found.append([[(a.token_ids, a.finish_reason) for a in output.outputs] for output in outputs])
    assert found[0] == found[1]


def test_start_up_tells_its_parts(runtime: Runtime) -> None:
    assert 0 < runtime.start_up["weights"] <= runtime.start_up["total"]


def test_context_length_ends_generation(folder: Path) -> None:
    with small_runtime(folder, context_length=24) as runtime:
        for length in (1, 20, 23):
            output = runtime.generate([9] * length, GREEDY)
            assert output.finish_reason is FinishReason.LENGTH
            assert length + len(output.token_ids) == min(24, length + 32)
        with pytest.raises(
            PromptError, match=r"has 24 tokens, but .* length is 24 tokens: it may have at most 23"
        ):
            runtime.generate([9] * 24, GREEDY)


def test_a_rope_that_reaches_farther_gives_a_longer_context(tmp_path: Path) -> None:
    with torch.device("cpu"):
        model = llama(max_position_embeddings=32, rope_parameters=checkpoints.LINEAR_ROPE)
    folder, prompt = write(model.to(torch.get_default_device()), tmp_path), shared_prompts()[0]
    with small_runtime(folder) as runtime, pytest.raises(PromptError, match="maximum context length is 32"):
        runtime.generate(prompt, GREEDY)
    with small_runtime(folder, context_length=128) as runtime:
        assert list(runtime.generate(prompt, GREEDY).token_ids) == continuation(model, prompt, 32)[0]


def test_ids_of_a_prompt_may_be_of_any_kind_of_integer(runtime: Runtime) -> None:
    plain = [5, 6, 7]
    kinds: list[Any] = [plain, (5, np.int64(6), np.uint8(7)), np.array(plain, dtype=np.uint16)]
    outputs = runtime.generate(kinds, GREEDY)
    assert {output.token_ids for output in outputs} == {outputs[0].token_ids}
    for output in outputs:
        assert output.prompt_token_ids == (5, 6, 7)
        assert {type(token) for token in output.prompt_token_ids} == {int}
        assert output.split()[0].prompt_token_ids == (5, 6, 7)
    for wrong in ([5, True], [5, np.True_], [5, 6.0]):
        with pytest.raises(PromptError, match="the prompt is neither a string"):
            runtime.generate([wrong], GREEDY)  # type: ignore[list-item]


def test_bad_prompts_are_named_together_and_nothing_runs(runtime: Runtime) -> None:
    prompts: list[Any] = [[5], [], [-1], [VOCAB_SIZE], "text", [1.5], [3] * 300, None, [10**30]]
    with pytest.raises(PromptError) as error:
        runtime.generate(prompts, GREEDY)
    message = str(error.value)
    assert message.startswith("8 of 9 prompts cannot be run:")
    for expected in (
        "prompt 1 is empty: it has no tokens",
        "prompt 2 holds token id -1; the model's ids are 0 to 100",
        "prompt 3 holds token id 101",
        "prompt 4 is text, but the model's folder has no tokenizer",
        "prompt 5 is neither a string, nor a list of token ids, nor a list of chat messages",
        "prompt 6 has 300 tokens, but this model's maximum context length is 256 tokens: it may have at most 255",
        "prompt 7 is neither",
        "prompt 8 holds token id 1000000000000000000000000000000",
    ):
        assert expected in message
    assert runtime.cache_stats().prompt_tokens == 0
    assert not runtime.has_work
    with pytest.raises(PromptError, match="stop_token_ids holds 101"):
        runtime.generate([5], SamplingParams(stop_token_ids=(101,)))
    with pytest.raises(ParameterError, match="2 sampling_params for 1 prompts"):
        runtime.generate([[5]], [GREEDY, GREEDY])


def test_options_of_calls_are_documented_and_others_named(runtime: Runtime) -> None:
    documented = str(Runtime.generate.__doc__)
    for option in CallOptions.__annotations__ | ScoreOptions.__annotations__:
        assert f"    {option}: " in documented
    for hinted in (Runtime.generate, Runtime.stream, Runtime.async_stream):
        assert "options" in get_type_hints(hinted)  # as programs that wrap functions read them
    first = runtime._calls.__reduce__()
    for name in ("tennant", "temperature", "streams"):
        wrong: dict[str, Any] = {name: True}
        for call in (
            lambda wrong: runtime.generate([5], **wrong),
            lambda wrong: runtime.generate_iter([[5]], **wrong),
            lambda wrong: runtime.stream([5], **wrong),
            lambda wrong: runtime.async_stream([5], **wrong),
            lambda wrong: runtime.score([[5]], [[6]], **wrong),
            lambda wrong: asyncio.run(runtime.async_generate([5], **wrong)),
        ):
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
                call(wrong)
    assert runtime._calls.__reduce__() == first, "a call that is refused is none: it draws for no other"


def test_a_prompt_that_never_fits_is_refused(folder: Path) -> None:
    with small_runtime(folder, max_total_tokens=40) as runtime:
        with pytest.raises(PromptError, match=r"needs up to 51 KV slots .* the pool has 40"):
            runtime.generate([9] * 20, GREEDY)
        assert len(runtime.generate([9] * 9, GREEDY).token_ids) == 32


def test_tenants_share_nothing(runtime: Runtime) -> None:
    prompt = list(range(3, 40))
    short = SamplingParams(temperature=0, max_new_tokens=2)
    cached = [runtime.generate(prompt, short, tenant=t).usage.cached_tokens for t in ("a", "b", "a", None)]
    assert cached == [0, 0, 36, 0]


def test_cache_stats_and_flush(runtime: Runtime) -> None:
    runtime.generate([list(range(3, 40))] * 2, SamplingParams(temperature=0, max_new_tokens=2))
    stats = runtime.cache_stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (74, 36)
    assert stats.hit_rate == pytest.approx(36 / 74)
    assert stats.capacity == runtime.limits.pool_tokens == 600
    assert stats.free + stats.evictable == 600
    assert runtime.flush_cache() == stats.evictable > 0
    assert runtime.cache_stats().free == 600


def test_numbers_that_are_not_finite_end_one_request(runtime: Runtime) -> None:
    # The embedding of one token is spoilt: only the prompts that hold it suffer.
    sampled = set(runtime.generate([5, 6, 7], GREEDY).token_ids)
    runtime.flush_cache()
    spoilt = next(token for token in range(10, VOCAB_SIZE) if token not in sampled)
    model = runtime.parts.engine.runner.model
    with torch.no_grad():
        model.embedding.weight[spoilt] = float("nan")
    good, bad, again = runtime.generate([[5, 6, 7], [5, 6, spoilt, 7], [5, 6, spoilt, 8]], GREEDY)
    assert good.finish_reason is FinishReason.LENGTH
    for output in (bad, again):
        assert output.finish_reason is FinishReason.ERROR
        assert output.error == "the model computed values that are not finite"
        assert output.token_ids == ()


def test_a_chunk_without_logits_is_checked_too(folder: Path) -> None:
    with small_runtime(folder, chunked_prefill_size=4) as runtime:
        with torch.no_grad():
            runtime.parts.engine.runner.model.embedding.weight[50] = float("nan")
        request = runtime.prepare([5, 50, 7, 8, *range(3, 40)], GREEDY)
        runtime.submit(request)
        runtime.step()
        (output,) = runtime.step()  # its first chunk has no logits, and is the last one all the same
        assert output.finish_reason is FinishReason.ERROR
        while runtime.has_work:
            runtime.step()
        assert runtime.cache_stats().free == runtime.cache_stats().capacity


def test_logits_are_checked_though_hidden_states_are_finite(runtime: Runtime) -> None:
    with torch.no_grad():
        runtime.parts.engine.runner.model.head.weight[7] = float("inf")
    output = runtime.generate([5, 6, 7], GREEDY)
    assert output.finish_reason is FinishReason.ERROR
    assert output.token_ids == ()


def test_a_failed_pass_raises_and_leaves_the_runtime_usable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of its launch. Captured passes, which do not call the model, have a test of their own."""
    with small_runtime(folder, cuda_graphs=False) as runtime:
        runner = runtime.parts.engine.runner
        expected = runtime.generate([[5, 6, 7], [8, 9]], GREEDY)
        calls = []

        def failing(*arguments: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise MemoryError("no memory left")
            return type(runner.model).forward(runner.model, *arguments, **options)

        monkeypatch.setattr(runner.model, "forward", failing)
        with pytest.raises(PassError, match="its pass failed: MemoryError: no memory left") as error:
            runtime.generate([[5, 6, 7], [8, 9]], GREEDY)
        assert isinstance(error.value.__cause__, MemoryError)
        assert not runtime.has_work
        stats = runtime.cache_stats()
        assert stats.free + stats.evictable == stats.capacity
        again = runtime.generate([[5, 6, 7], [8, 9]], GREEDY)
        assert [o.token_ids for o in again] == [o.token_ids for o in expected]


def test_abort_from_another_thread(runtime: Runtime) -> None:
    request = runtime.prepare([5, 6, 7], SamplingParams(max_new_tokens=200, temperature=0, ignore_eos=True))
    runtime.submit(request)
    outputs = runtime.step() + runtime.step() + runtime.step()
    assert outputs == []
    thread = threading.Thread(target=runtime.abort, args=(request,))
    thread.start()
    thread.join()
    (output,) = runtime.step()
    assert output.finish_reason is FinishReason.ABORT
    assert 0 < len(output.token_ids) < 200
    while runtime.has_work:
        runtime.step()


@pytest.mark.parametrize("keep", [-1, 2.5, "2", True])
def test_what_is_kept_of_a_prompt_is_a_count(runtime: Runtime, keep: Any) -> None:
    """Another value would fail where the request ends, and with that all others."""
    with pytest.raises(ParameterError, match=r"keep is .*; it must be a whole number from 0 to"):
        runtime.prepare([5, 6, 7], GREEDY, keep=keep)


def test_calls_and_submitted_requests_run_together(runtime: Runtime) -> None:
    alone = runtime.generate([5, 6, 7], GREEDY).token_ids
    runtime.submit(runtime.prepare([5, 6, 7], GREEDY, index=9))
    assert runtime.generate([8, 9], GREEDY).index == 0
    outputs = []
    while runtime.has_work or not outputs:
        outputs += runtime.step()
    assert [(o.index, o.token_ids) for o in outputs] == [(9, alone)]


def test_two_runtimes_know_nothing_of_each_other(folder: Path) -> None:
    with small_runtime(folder) as one, small_runtime(folder) as two:
        one.generate([5, 6, 7], GREEDY)
        assert two.cache_stats().prompt_tokens == 0


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_no_pass_waits_for_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for: torch raises where a launch would wait. Captured passes have a test of their own."""
    params = [
        SamplingParams(temperature=0, max_new_tokens=8),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=1, max_new_tokens=8, n=2),
        SamplingParams(temperature=1, seed=2, repetition_penalty=1.1, presence_penalty=0.5, max_new_tokens=8),
        SamplingParams(
            temperature=1, seed=3, logit_bias={3: 1.0}, bad_words=[[7], [8, 9]], logprobs=3, max_new_tokens=8
        ),
        SamplingParams(temperature=1, seed=4, allowed_token_ids=range(3, 60), min_new_tokens=4, max_new_tokens=8),
        SamplingParams(temperature=0, prompt_logprobs=2, max_new_tokens=8),
        SamplingParams(
            top_p=0.9, min_p=0.01, seed=5, logprobs=2, logprobs_mode="processed_logprobs", max_new_tokens=8
        ),
    ]
    runtime = small_runtime(folder, max_total_tokens=4000, chunked_prefill_size=16, cuda_graphs=False)
    launch = ModelRunner.launch

    def watched(self: ModelRunner, batch: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(self, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    prompts = shared_prompts()[: len(params)]
    expected = [output.token_ids for output in runtime.generate(prompts, params)]  # kernels are compiled
    runtime.flush_cache()
    monkeypatch.setattr(ModelRunner, "launch", watched)
    assert [output.token_ids for output in runtime.generate(prompts, params)] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_gpu_that_is_not_the_current_one(folder: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    prompts = shared_prompts()
    params = SamplingParams(temperature=0.7, seed=1, max_new_tokens=12)
    options: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4000, "cuda_graphs": False}
    first, second = (
        Runtime(folder, device=device, **options).generate(prompts, params) for device in ("cuda:0", "cuda:1")
    )
    assert [output.token_ids for output in first] == [output.token_ids for output in second]


def test_closed_is_closed(folder: Path) -> None:
    runtime = small_runtime(folder)
    runtime.close()
    runtime.close()
    calls: list[Callable[[], Any]] = [
        lambda: runtime.generate([5]),
        lambda: runtime.score([[5]], [[6]]),
        lambda: runtime.prepare([5]),
        runtime.step,
        lambda: runtime.has_work,
        lambda: runtime.num_running,
        lambda: runtime.num_waiting,
        runtime.activity,
        runtime.cache_stats,
        runtime.print_tree,
        runtime.flush_cache,
        lambda: runtime.update_weights(folder),
    ]
    for call in calls:
        with pytest.raises(RadixrtError, match="the runtime is closed"):
            call()
    assert not runtime.abort(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "meta"}, "must be on cpu or cuda"),
        ({"memory_fraction": 0}, "memory_fraction is 0; it must be a number above 0 to 1"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5"),
        ({"memory_fraction": 1e-12, "max_total_tokens": None}, "less than a KV slot"),
        ({"max_total_tokens": 0}, "max_total_tokens is 0; it must be a whole number from 1 to"),
        ({"max_total_tokens": 10**15}, "max_total_tokens is 1000000000000000"),
        ({"max_running_requests": 0}, "max_running_requests is 0"),
        ({"max_running_requests": 2.5}, "max_running_requests is 2.5"),
        ({"context_length": 257}, "context_length is 257; it must be a whole number from 2 to 256"),
        ({"context_length": 1}, "context_length is 1"),
        ({"chunked_prefill_size": True}, "chunked_prefill_size is True"),
        ({"schedule_policy": "random"}, "schedule_policy is 'random'; it must be one of: lpm, fcfs"),
        ({"seed": -1}, "seed is -1"),
        ({"attention": "paged"}, "attention is 'paged'; it must be one of: tree, flat"),
        ({"impl": "cuda"}, """impl must be "auto", "torch" or "triton", but is 'cuda'"""),
    ],
)
def test_parameters_out_of_bounds(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as error:
        small_runtime(folder, **options)
    assert message in str(error.value)


def test_kernels_need_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ParameterError, match="the tensors are on cpu; a kernel needs a CUDA device"):
        small_runtime(folder, device="cpu", impl="triton")


def test_impl_reaches_every_layer(folder: Path) -> None:
    with small_runtime(folder, impl="torch") as runtime:
        modules = list(runtime.parts.model.decoder.modules())
    told = [module.impl for module in modules if hasattr(module, "impl")]
    told += [module.activation.keywords["impl"] for module in modules if hasattr(module, "activation")]
    assert set(told) == {"torch"}
    # Of each block two norms, attention, the feed-forward, its activation and four products; the last norm and the
    # head.
    assert len(told) == 2 * 9 + 2


def test_a_wrong_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        Runtime(tmp_path / "nowhere")


def test_dummy_weights_need_a_config_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with small_runtime(tmp_path, load_format="dummy") as one, small_runtime(tmp_path, load_format="dummy") as two:
        assert one.tokenizer is None
        assert one.generate([5, 6], GREEDY).token_ids == two.generate([5, 6], GREEDY).token_ids
