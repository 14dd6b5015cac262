"""radixrt in Ray Data: blocks one by one, and whole jobs on a local Ray, compared with Runtime.generate."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import llama, write
from tests.support.small_tokenizers import byte_level, chat_tokenizer

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[data]'")
pytest.importorskip("ray.data", reason="Ray is installed without Ray Data: pip install 'ray[data]'")

import pandas as pd
import pyarrow as pa
import ray
from pyarrow import parquet
from ray.data import ActorPoolStrategy, DataContext
from ray.data.block import BlockAccessor, BlockType
from ray.data.checkpoint import CheckpointConfig

from radixrt import DeviceLostError, ParameterError
from radixrt.builtin.task import EVAL_SEED, ask_few_shot, make_document
from radixrt.integrations.ray import ERROR, OUTPUT, PromptProcessor
from radixrt.workloads import best_hit_rate
from tests.support.ray_session import ray_session

HOME = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = {"device": "cpu", "max_total_tokens": 20_000}
GREEDY = {"temperature": 0, "max_tokens": 8}


def questions(count: int = 36) -> list[str]:
    """In an order that is not that of their prefixes."""
    rng = random.Random(EVAL_SEED)
    documents = [make_document(rng, max_tokens=tokens) for tokens in (150, 200, 250)]
    asked = [question.prompt for document in documents for question in ask_few_shot(rng, document, count // 3, 3)]
    rng.shuffle(asked)
    return asked


def rows_of(count: int = 36) -> list[dict[str, Any]]:
    return [
        {"id": place, "prompt": prompt, "of": {"page": [place]}} for place, prompt in enumerate(questions(count))
    ]


@pytest.fixture(scope="module")
def builtin() -> Iterator[PromptProcessor]:
    processor = PromptProcessor(sampling_params=GREEDY, **OPTIONS)
    yield processor
    processor.runtime.close()


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PromptProcessor]:
    model = llama(seed=3, vocab_size=len(byte_level()) + 2, max_position_embeddings=200, eos_token_id=1)
    folder = write(model, tmp_path_factory.mktemp("llama"))
    chat_tokenizer(folder)
    processor = PromptProcessor(folder, sampling_params=GREEDY, device="cpu", max_total_tokens=1000)
    yield processor
    processor.runtime.close()


def block_of(*rows: dict[str, Any]) -> pa.Table:
    """With a column for every key that some row has."""
    return pa.table({name: [row.get(name) for row in rows] for row in rows for name in row})


def answered(processor: PromptProcessor, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = processor(block_of(*rows)).to_pylist()
    return found


# -- one block ---------------------------------------------------------------------------------------------


def test_a_block_has_the_answers_of_generate_in_its_own_order(builtin: PromptProcessor) -> None:
    block = block_of(*rows_of())
    found = builtin(block)
    assert found.select(block.column_names).equals(block)
    expected = builtin.runtime.generate(questions(), GREEDY)
    assert found["generated_text"].to_pylist() == [output.text for output in expected]
    assert found["generated_tokens"].to_pylist() == [list(output.token_ids) for output in expected]
    assert found["finish_reason"].to_pylist() == [output.finish_reason for output in expected]
    assert found["num_input_tokens"].to_pylist() == [output.usage.prompt_tokens for output in expected]
    assert found["num_generated_tokens"].to_pylist() == [output.usage.completion_tokens for output in expected]
    assert set(found[ERROR].to_pylist()) == {""}


def test_a_block_runs_in_the_order_of_its_prefixes() -> None:
    """In the order of the rows a small pool would forget each document before its next question."""
    processor = PromptProcessor(sampling_params=GREEDY, **OPTIONS | {"max_total_tokens": 400})
    found = processor(pa.table({"prompt": questions()}))
    prompts = [output.prompt_token_ids for output in processor.runtime.generate(questions(), GREEDY)]
    processor.runtime.close()
    rate = sum(found["num_cached_tokens"].to_pylist()) / sum(found["num_input_tokens"].to_pylist())
    assert rate == pytest.approx(best_hit_rate(prompts), abs=0.01)


@pytest.mark.parametrize("kind", ["numpy", "pandas"])
def test_other_formats_of_blocks(builtin: PromptProcessor, kind: str) -> None:
    block = block_of(*rows_of(6), {"id": 6, "prompt": "Who?", "sampling_params": {"temperature": -1}})
    given = BlockAccessor.for_block(block).to_batch_format(kind)
    assert isinstance(given, dict if kind == "numpy" else pd.DataFrame)
    found = builtin(given)
    assert isinstance(found, pa.Table)
    wanted = [name for name in ("id", *OUTPUT.names) if name != "num_cached_tokens"]
    assert found.select(wanted).to_pylist() == builtin(block).select(wanted).to_pylist()


def test_the_types_of_the_columns_do_not_depend_on_the_rows(builtin: PromptProcessor) -> None:
    blocks = [
        pa.table({"prompt": ["Mira likes Oslo.\nQ: Mira likes?\nA:"]}),
        block_of({"prompt": "Who?", "sampling_params": {"logprobs": 2}}),
        pa.table({"prompt": [""]}),
        pa.table({"prompt": pa.array([], pa.string())}),
    ]
    for block in blocks:
        found = builtin(block)
        assert found.num_rows == block.num_rows
        assert found.select(OUTPUT.names).schema == OUTPUT


def test_rows_have_parameters_of_their_own(builtin: PromptProcessor) -> None:
    """All structs of a column have the same keys: what a row does not give is null there, and means nothing."""
    prompt = questions()[0]
    own = [{"max_tokens": 1}, {"ignore_eos": True}, {"logit_bias": {"5": -100.0}}, {"logprobs": 1}, {}, None]
    found = answered(builtin, *({"prompt": prompt, "sampling_params": params} for params in own))
    expected = [builtin.runtime.generate(prompt, GREEDY | (params or {})) for params in own]
    assert [row["generated_tokens"] for row in found] == [list(output.token_ids) for output in expected]
    assert [row["num_generated_tokens"] for row in found] == [1, 8, 2, 2, 2, 2]


def test_log_probabilities(builtin: PromptProcessor) -> None:
    prompt = questions()[0]
    own = {"logprobs": 2, "prompt_logprobs": 0}
    (plain,) = answered(builtin, {"prompt": prompt})
    (row,) = answered(builtin, {"prompt": prompt, "sampling_params": own})
    assert plain["logprobs"] is None
    assert plain["prompt_logprobs"] is None
    output = builtin.runtime.generate(prompt, GREEDY | own)
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    assert [(token["token_id"], token["rank"]) for token in row["logprobs"]] == [
        (token.token_id, token.rank) for token in output.logprobs
    ]
    for found, token in zip(row["logprobs"], output.logprobs, strict=True):
        assert found["logprob"] == pytest.approx(token.logprob, abs=1e-4)
        assert [other["token_id"] for other in found["top"]] == [other for other, _ in token.top]
    assert [token["token_id"] for token in row["prompt_logprobs"]] == [
        token.token_id for token in output.prompt_logprobs
    ]


@pytest.mark.parametrize("kind", ["pyarrow", "numpy", "pandas"])
def test_chats(chatting: PromptProcessor, kind: str) -> None:
    def told(*texts: str) -> list[dict[str, Any]]:
        return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=False)]

    chats: list[dict[str, Any]] = [
        {"messages": told("Mira?")},
        {"messages": told("Who?", "Mira likes"), "continue_final_message": True},
        {"messages": [*told("Who?"), {"role": "assistant", "content": "?", "reasoning_content": "hm"}]},
    ]
    stop = {"stop": ["o", "a"]}
    block = block_of(*({**chat, "sampling_params": stop} for chat in chats))
    found = chatting(BlockAccessor.for_block(block).to_batch_format(kind)).to_pylist()
    expected = chatting.runtime.generate(chats, GREEDY | stop)
    assert [row["generated_tokens"] for row in found] == [list(output.token_ids) for output in expected]
    assert [row["num_input_tokens"] for row in found] == [output.usage.prompt_tokens for output in expected]
    assert {row[ERROR] for row in found} == {""}


@pytest.mark.parametrize("ids", [[[5, 6, 7], [8, 9]], [[5, 6, 7], [8, 9, 10]]], ids=["ragged", "even"])
@pytest.mark.parametrize("kind", ["pyarrow", "numpy"])
def test_token_ids(builtin: PromptProcessor, ids: list[list[int]], kind: str) -> None:
    block = pa.table({"tokenized_prompt": ids, "prompt": ["what they are", None]})
    given = BlockAccessor.for_block(block).to_batch_format(kind)
    as_tensors = BlockAccessor.batch_to_block({"tokenized_prompt": ids}, BlockType.ARROW)
    expected = builtin.runtime.generate(ids, GREEDY)
    for batch in (given, as_tensors):
        found = builtin(batch)
        assert found["generated_tokens"].to_pylist() == [list(output.token_ids) for output in expected]
        assert found["num_input_tokens"].to_pylist() == [len(own) for own in ids]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"sampling_params": {"temperature": -1}}, "temperature is -1"),
        ({"sampling_params": {"temperatur": 1}}, "did you mean 'temperature'?"),
        ({"sampling_params": {"n": 2}}, "n is 2; a row has one answer: repeat the row"),
        ({"sampling_params": "{}"}, "sampling parameters are a dict"),
        ({"prompt": None}, "the row has no prompt; give one of prompt, messages, tokenized_prompt"),
        ({"prompt": ""}, "is empty"),
        ({"prompt": "Oslo " * 3000}, "by far more tokens than fit: this model's maximum context"),
        ({"messages": [{"role": "user", "content": "Who?"}]}, "the row has prompt and messages"),
        ({"prompt": None, "messages": [{"role": "user"}]}, "no 'content'"),
        ({"tools": [{"type": "function"}]}, "has tools, which only a chat may have"),
        ({"tokenized_prompt": [10**6]}, "holds token id 1000000"),
    ],
)
def test_a_bad_row_has_its_error(chatting: PromptProcessor, row: dict[str, Any], error: str) -> None:
    bad, good = answered(chatting, {"prompt": "Who?", **row}, {"prompt": "Who?"})
    assert error in bad[ERROR]
    assert (bad["generated_text"], bad["generated_tokens"], bad["num_input_tokens"]) == ("", [], 0)
    assert bad["finish_reason"] == "error"
    assert good[ERROR] == ""
    assert good["num_generated_tokens"] > 0


def test_prompts_that_are_no_prompts(builtin: PromptProcessor) -> None:
    for value in (5, {"text": "Who?"}, [1.5]):
        (row,) = answered(builtin, {"prompt": value})
        assert row[ERROR].startswith("the prompt is neither a string, nor")


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"text": ["Who?"], "id": [1]}, "the columns are text, id; prompts are in prompt or messages or token"),
        ({"prompt": ["Who?"], "finish_reason": ["stop"]}, "there is a column finish_reason already"),
    ],
)
def test_a_block_that_cannot_be_answered(
    builtin: PromptProcessor, columns: dict[str, list[Any]], error: str
) -> None:
    with pytest.raises(ParameterError, match=error):
        builtin(pa.table(columns))


# -- making one --------------------------------------------------------------------------------------------


def test_what_cannot_be_made(tmp_path: Path) -> None:
    absent = tmp_path / "absent"  # which is not looked at
    with pytest.raises(ParameterError, match="n is 2"):
        PromptProcessor(absent, sampling_params={"n": 2})
    with pytest.raises(ParameterError, match="max_tokns"):
        PromptProcessor(absent, sampling_params={"max_tokns": 2})
    with pytest.raises(TypeError, match="max_total_tokns"):
        PromptProcessor(max_total_tokns=3)


def test_two_actors_draw_different_answers() -> None:
    drawn = []
    for options in ({}, {}, {"seed": 3}, {"seed": 3}):
        processor = PromptProcessor(**OPTIONS, **options)
        rows = [
            {"prompt": "Mira", "sampling_params": {"temperature": 5.0, "max_tokens": 20, "ignore_eos": True}}
        ] * 2
        drawn.append([tuple(row["generated_tokens"]) for row in answered(processor, *rows)])
        processor.runtime.close()
    one, other, seeded, again = drawn
    assert len({*one, *other}) == 4
    assert seeded == again


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=HOME, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("absent", ["ray", "pandas"])
def test_without_ray_data(absent: str) -> None:
    found = python(f"import sys; sys.modules[{absent!r}] = None; import radixrt.integrations.ray")
    assert f"needs Ray Data, of which {absent} is not installed: pip install 'ray[data]'" in found.stderr


# -- whole jobs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray of its own, whose processes import radixrt from here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", str(HOME))
        with ray_session("local", num_cpus=4, _memory=4 * 2**30):
            DataContext.get_current().enable_progress_bars = False
            yield


@pytest.fixture
def context(cluster: None) -> Iterator[DataContext]:
    """The context of the test's data sets, which others do not see."""
    own = DataContext.get_current().copy()
    with DataContext.current(own):
        yield own


def processed(rows: Any, **options: Any) -> Any:
    """A data set with its answers, by two actors at most."""
    constructor = {"sampling_params": GREEDY, **OPTIONS, **options.pop("constructor", {})}
    return rows.map_batches(
        options.pop("processor", PromptProcessor),
        fn_constructor_kwargs=constructor,
        compute=ActorPoolStrategy(**{"size": 1, **options}),
        num_cpus=1,
        batch_size=9,
        batch_format="pyarrow",
    )


@pytest.mark.usefixtures("context")
def test_a_job_with_two_actors(builtin: PromptProcessor) -> None:
    rows = rows_of()
    rows[20]["sampling_params"] = {"temperature": -1.0}
    found = processed(ray.data.from_items(rows, override_num_blocks=6), size=2).take_all()
    by_id = {row["id"]: row for row in found}
    assert sorted(by_id) == list(range(36))
    assert len(found) == 36
    for row, output in zip(rows, builtin.runtime.generate(questions(), GREEDY), strict=True):
        answer = by_id[row["id"]]
        assert (answer["prompt"], answer["of"]) == (row["prompt"], row["of"])
        if row["id"] == 20:
            assert (answer["generated_text"], answer[ERROR]) == (
                "",
                "temperature is -1.0; it must be a number from 0 to 100",
            )
        else:
            assert (answer["generated_text"], answer[ERROR]) == (output.text, "")


@pytest.mark.long
def test_a_job_goes_on_from_its_checkpoint(context: DataContext, tmp_path: Path) -> None:
    """The first half, with a bad row, is answered and written; then the whole has only the other half to do."""
    rows = rows_of(18)
    rows[4]["prompt"] = None
    (tmp_path / "in").mkdir()
    for part in range(2):
        parquet.write_table(block_of(*rows[9 * part : 9 * part + 9]), tmp_path / f"in/{part}.parquet")
    context.checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=str(tmp_path / "checkpoint"), delete_checkpoint_on_success=False
    )

    def run(path: Path) -> list[int]:
        processed(ray.data.read_parquet(str(path))).write_parquet(str(tmp_path / "out"))
        return [row["id"] for row in parquet.read_table(tmp_path / "out").sort_by("id").to_pylist()]

    assert run(tmp_path / "in/0.parquet") == list(range(9))
    first = set((tmp_path / "out").iterdir())
    assert run(tmp_path / "in") == list(range(18))
    later = [path for path in (tmp_path / "out").iterdir() if path not in first]
    assert sum(parquet.read_table(path).num_rows for path in later) == 9
    found = parquet.read_table(tmp_path / "out")
    assert [row["id"] for row in found.to_pylist() if row[ERROR]] == [4]


@pytest.mark.long
@pytest.mark.usefixtures("context")
def test_an_actor_that_lost_its_device_is_replaced(tmp_path: Path) -> None:
    class Losing(PromptProcessor):
        def __call__(self, batch: Any) -> pa.Table:
            marker = tmp_path / "lost"
            if not marker.exists():
                marker.touch()

                def lost(*_: Any, **__: Any) -> Any:
                    raise DeviceLostError("an illegal access")

                self.runtime.generate = lost  # type: ignore[method-assign]
            return super().__call__(batch)

    found = processed(ray.data.from_items(rows_of(9)), processor=Losing).take_all()
    assert (tmp_path / "lost").exists()
    assert {row[ERROR] for row in found} == {""}
    assert len(found) == 9


def test_outside_of_an_actor_a_lost_device_raises(
    monkeypatch: pytest.MonkeyPatch, builtin: PromptProcessor
) -> None:
    def lost(*_: Any, **__: Any) -> Any:
        raise DeviceLostError("an illegal access")

    monkeypatch.setattr(builtin.runtime, "generate", lost)
    with pytest.raises(DeviceLostError):
        builtin(pa.table({"prompt": ["Who?"]}))


@pytest.mark.usefixtures("context")
@pytest.mark.long
@pytest.mark.parametrize("blocks", [1, 2])
def test_the_page_prints_what_it_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(HOME / "examples")
    text = (HOME / "docs" / "ray.md").read_text(encoding="utf-8")
    found = re.findall(r"<!-- run by .*? -->\n```python\n(.*?)```\n(?:\n```\n(.*?)```)?", text, flags=re.DOTALL)
    assert len(found) == 2
    names: dict[str, Any] = {}
    for code, printed in found[:blocks]:
        capsys.readouterr()
        exec(compile(code, "ray.md", "exec"), names)
        assert capsys.readouterr().out == printed, code
