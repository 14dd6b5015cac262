"""radixrt in lm-evaluation-harness: local tasks, and every number compared with a dense pass."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import llama, write
from tests.support.dense import dense
from tests.support.small_tokenizers import CHATML, byte_level, chat_tokenizer

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm-eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from radixrt import ParameterError, PassError, PromptError, TokenizerError
from radixrt.builtin.task import EVAL_SEED, Question, ask_few_shot, make_document
from radixrt.integrations.lm_eval import HARNESS_DEVICE, RadixLM, main
from radixrt.workloads import best_hit_rate

HOME = Path(__file__).resolve().parents[2]

CHOICE = """
task: facts_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{choices.index(answer)}}}}"
metric_list: [{{metric: acc}}]
"""
GENERATE = """
task: facts_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
filter_list: [{{name: strip, filter: [{{function: remove_whitespace}}, {{function: take_first}}]}}]
metric_list: [{{metric: exact_match}}]
"""


def questions() -> list[Question]:
    rng = random.Random(EVAL_SEED)
    documents = [make_document(rng, max_tokens=tokens) for tokens in (150, 250, 350)]
    return [question for document in documents for question in ask_few_shot(rng, document, 16, 3)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """Both tasks, over the same questions."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "facts.jsonl"
    rng = random.Random(1)
    with data.open("w", encoding="utf-8") as file:
        for question in questions():
            others = sorted({fact.value for fact in question.document.facts} - {question.answer})
            choices = rng.sample([question.answer, *rng.sample(others, 3)], 4)
            line = {"prompt": question.prompt, "answer": question.answer, "choices": choices}
            file.write(json.dumps(line) + "\n")
    for name, task in (("choice", CHOICE), ("generate", GENERATE)):
        (folder / f"{name}.yaml").write_text(task.format(data=data, cache=folder / "cache"), encoding="utf-8")
    return TaskManager(include_path=folder, include_defaults=False)


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(seed=3, vocab_size=len(byte_level()), max_position_embeddings=64, bos_token_id=0, eos_token_id=1)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write(model, tmp_path_factory.mktemp("llama"))
    chat_tokenizer(folder)
    return folder


@pytest.fixture
def tiny(folder: Path) -> Iterator[RadixLM]:
    lm = RadixLM(folder, device="cpu", max_total_tokens=3000)
    yield lm
    lm.runtime.close()


@pytest.fixture(scope="module")
def builtin() -> Iterator[RadixLM]:
    lm = RadixLM(device="cpu", max_total_tokens=20_000)
    yield lm
    lm.runtime.close()


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, own, i) for i, own in enumerate(arguments)]


# -- whole runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "metric"), [("facts_choice", "acc,none"), ("facts_generate", "exact_match,strip")]
)
def test_a_local_task(
    tasks: TaskManager,
    task: str,
    metric: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO, logger="lm_eval.models.radixrt")
    lm = RadixLM(device="cpu", max_total_tokens=20_000)
    try:
        results = simple_evaluate(lm, tasks=[task], task_manager=tasks, bootstrap_iters=0)
        assert results["results"][task][metric] >= 0.95
        asked = [own for sample in results["samples"][task] for own in sample["arguments"]]
        if task == "facts_choice":
            assert len(asked) == 4 * 48
            pairs = [lm._encode_pair(*own) for own in asked]
            prompts = [before + after for before, after in pairs]
        else:
            assert len(asked) == 48
            prompts = [lm.tok_encode(context) for context, _ in asked]
        best = best_hit_rate(prompts)
        assert best > 0.8
        config = results["config"]
        assert best - 0.015 <= config["cache_hit_rate"] <= best
        assert config["prompt_tokens"] == sum(map(len, prompts))
        (line,) = [record.getMessage() for record in caplog.records if "hit rate" in record.getMessage()]
        assert f"{len(asked)} requests" in line
        assert f"hit rate {config['cache_hit_rate']:.2%}" in line
    finally:
        lm.runtime.close()


def test_by_its_name(tasks: TaskManager) -> None:
    """As the harness's command line makes it: options as text, and the harness's own batch size."""
    results = simple_evaluate(
        "radixrt",
        model_args="max_length=700,dtype=float32,max_total_tokens=4000,device=cpu",
        tasks=["facts_generate"],
        task_manager=tasks,
        batch_size=1,
        limit=6,
        bootstrap_iters=0,
    )
    assert results["results"]["facts_generate"]["exact_match,strip"] == 1.0
    assert results["config"]["model"] == "radixrt"


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As a user in the repository's root, with an empty cache of data sets."""
    monkeypatch.chdir(HOME)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    return monkeypatch


@pytest.mark.usefixtures("at_home")
def test_the_example_prints_what_the_document_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (HOME / "docs" / "lm-eval.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, flags=re.DOTALL)
    assert found is not None
    code, printed = found.groups()
    exec(code, {})
    assert capsys.readouterr().out == printed


def test_the_command_line(
    at_home: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--include_path", "examples/lm_eval", "--tasks", "facts", "--limit", "5", "--device", "cpu"]
    at_home.setattr("sys.argv", ["lm_eval.py", *options])
    at_home.setattr("lm_eval.__main__.setup_logging", lambda: None)  # it would hide logs from later tests
    # Ten seconds to read all that the harness brings.
    at_home.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    caplog.set_level(logging.INFO, logger="lm_eval.models.radixrt")
    main()
    assert "|exact_match|↑  |    1|" in capsys.readouterr().out
    assert "generate_until: 5 requests" in caplog.text


def test_the_command_line_by_its_module() -> None:
    assert "usage: lm-eval run" in python("-m", "radixrt.integrations.lm_eval", "--help").stdout


# -- log-likelihoods ---------------------------------------------------------------------------------------


def test_loglikelihood_is_a_dense_pass_s(tiny: RadixLM, model: Any) -> None:
    context = "Mira likes Oslo. Tarek counts 37. "  # its last blank belongs to the continuation
    pairs = [(context, word) for word in ("the quick", "Oslo", "日本", "hello again")]
    pairs += [("the quick brown", " fox"), ("", "hello again")]
    found = tiny.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for (before, after), (logprob, is_greedy) in zip(pairs, found, strict=True):
        ids = tiny._encode_pair(before, after) if before else ([0], tiny.tok_encode(after))
        expected, greedy = dense(model, *ids)
        assert logprob == pytest.approx(expected, abs=1e-4)
        assert is_greedy == greedy
    assert tiny.runtime.cache_stats().cached_tokens > 0


def test_greedy_continuations_are_told(tiny: RadixLM, model: Any) -> None:
    context = tiny.tok_encode("the quick brown fox")
    best: list[int] = []
    for _ in range(3):
        with torch.no_grad():
            best.append(int(model(torch.tensor([context + best])).logits[0, -1].argmax()))
    other = [*best[:2], (best[2] + 1) % 300]
    found = tiny._loglikelihood_tokens([(None, context, best), (None, context, other)], disable_tqdm=True)
    assert [is_greedy for _, is_greedy in found] == [True, False]
    assert found[0][0] == pytest.approx(dense(model, context, best)[0], abs=1e-4)


def test_contexts_lose_their_left(tiny: RadixLM, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert tiny.max_length == 64
    context, continuation = "the quick brown fox, " * 30, "hello"
    ((logprob, _),) = tiny.loglikelihood(requests("loglikelihood", (context, continuation)), disable_tqdm=True)
    before, after = tiny._encode_pair(context, continuation)
    assert logprob == pytest.approx(dense(model, before[len(after) - 64 :], after)[0], abs=1e-4)
    assert "1 of 1 contexts are too long for max_length 64" in caplog.text


@pytest.mark.parametrize("words", [1, 8, 300])
def test_rolling_loglikelihood_is_a_dense_pass_s(tiny: RadixLM, model: Any, words: int) -> None:
    rng = random.Random(words)
    text = " ".join(rng.choice(["Mira", "likes", "fox", "日本", "é", "again"]) for _ in range(words))
    ids = tiny.tok_encode(text)
    expected = 0.0
    for start in range(0, len(ids), 63):  # 63 tokens a window after BOS; each token as late in it as possible
        end = min(start + 63, len(ids))
        window = [0, *ids] if start == 0 else ids
        first = start + 1 if start == 0 else start
        last = end + 1 if start == 0 else end
        expected += dense(model, window[max(0, last - 64) : first], window[first:last])[0]
    (found,) = tiny.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)), disable_tqdm=True)
    assert found == pytest.approx(expected, abs=1e-3)
    assert (len(ids) > 63 * 3) == (words == 300)


def test_an_empty_text_has_nothing_to_score(tiny: RadixLM) -> None:
    assert tiny.loglikelihood_rolling(requests("loglikelihood_rolling", ("",)), disable_tqdm=True) == [0.0]


@pytest.mark.parametrize("continuation", [[], [5] * 64])
def test_what_cannot_be_scored(tiny: RadixLM, continuation: list[int]) -> None:
    with pytest.raises(PromptError, match=rf"has {len(continuation)} tokens .* 1 to 63: \('a', 'b'\)"):
        tiny._loglikelihood_tokens([(("a", "b"), [5, 6], continuation)], disable_tqdm=True)


def test_values_that_are_not_finite_are_no_score(folder: Path) -> None:
    lm = RadixLM(folder, device="cpu", max_total_tokens=500)
    with torch.no_grad():
        next(lm.runtime.parts.model.decoder.parameters()).fill_(float("nan"))
    with pytest.raises(PassError, match="not finite"):
        lm.loglikelihood(requests("loglikelihood", ("Mira", " likes")), disable_tqdm=True)
    with pytest.raises(PassError, match="not finite"):
        lm.generate_until(requests("generate_until", ("Mira", {"max_gen_toks": 2})), disable_tqdm=True)
    lm.runtime.close()


def test_an_aborted_answer_is_no_answer(tiny: RadixLM) -> None:
    asked = requests("generate_until", ("the fox", {"max_gen_toks": 50, "ignore_eos": True}))
    errors: list[str] = []

    def generate() -> None:
        try:
            tiny.generate_until(asked, disable_tqdm=True)
        except PassError as error:
            errors.append(str(error))

    thread = threading.Thread(target=generate)
    thread.start()
    while not tiny.runtime.abort_all():
        thread.join(0.001)
    thread.join(60)
    assert errors == ["the request was ended before its answer was whole: 'the fox'"]


# -- generation --------------------------------------------------------------------------------------------


def answers(lm: RadixLM, *arguments: tuple[str, dict[str, Any]]) -> list[str]:
    return lm.generate_until(requests("generate_until", *arguments), disable_tqdm=True)


def test_generation_obeys_until(builtin: RadixLM) -> None:
    context = questions()[0].prompt
    endless = {"max_gen_toks": 30, "ignore_eos": True}
    (whole,) = answers(builtin, (context, endless))
    stop = whole[13:17]  # ends and begins inside words
    assert len(stop) == 4
    cut, kept, none, short = answers(
        builtin,
        (context, {**endless, "until": ["\x00never", stop]}),
        (context, {**endless, "until": stop, "do_sample": False, "temperature": 0.7}),
        (context, {**endless, "until": ["", "\x00never"], "num_beams": 1}),
        (context, {"until": [stop], "max_tokens": 1, "max_gen_toks": None}),
    )
    assert cut == kept == whole[: whole.index(stop)]
    assert none == whole
    assert len(builtin.tok_encode(short, add_special_tokens=False)) == 1


def test_until_names_a_special_token(tiny: RadixLM) -> None:
    own = tiny.sampling_params({"until": ["<|im_end|>", "\n\n"], "max_gen_toks": 3})
    assert own.stop_token_ids == tuple(tiny.tok_encode("<|im_end|>"))
    assert own.stop == ("<|im_end|>", "\n\n")


def test_sampling(tiny: RadixLM) -> None:
    assert tiny.sampling_params({}).temperature == 0.0
    assert tiny.sampling_params({}).max_new_tokens == 256
    assert tiny.sampling_params({"temperature": 0.5}).temperature == 0.5
    assert tiny.sampling_params({"temperature": 0.5, "do_sample": False}).temperature == 0.0
    assert tiny.sampling_params({"do_sample": True, "top_p": 0.9}).temperature == 1.0
    drawn = answers(tiny, *[("the fox", {"do_sample": True, "temperature": 1.5, "max_gen_toks": 12})] * 4)
    assert len(set(drawn)) == 4  # the harness repeats a request to draw again
    for wrong, named in (({"num_beams": 4}, "num_beams"), ({"top_pp": 0.5}, "top_pp"), ({"top_p": 2}, "top_p")):
        with pytest.raises(ParameterError, match=named):
            answers(tiny, ("the fox", wrong))


def test_sampling_by_generation_config(folder: Path, tmp_path: Path) -> None:
    """`generation_config="auto"` gives what a task leaves open, as in every other call."""
    own = shutil.copytree(folder, tmp_path / "model")
    told = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2, "max_new_tokens": 9}
    (own / "generation_config.json").write_text(json.dumps(told))
    lm = RadixLM(own, generation_config="auto", max_total_tokens=2000)
    greedy, drawn = lm.sampling_params({}), lm.sampling_params({"do_sample": True, "top_k": 5})
    lm.runtime.close()
    assert (greedy.temperature, greedy.repetition_penalty, greedy.max_new_tokens) == (0.0, 1.2, 256)
    assert (drawn.temperature, drawn.repetition_penalty, drawn.top_k) == (0.7, 1.2, 5)


def test_generation_after_a_long_context(tiny: RadixLM, caplog: pytest.LogCaptureFixture) -> None:
    context = "the quick brown fox, " * 30
    (found,) = answers(tiny, (context, {"max_gen_toks": 10}))
    rest = tiny.tok_encode(context)[-54:]
    expected = tiny.runtime.generate(rest, {"temperature": 0, "max_new_tokens": 10})
    assert found == expected.text
    assert "1 of 1 contexts are too long" in caplog.text
    with pytest.raises(ParameterError, match="max_gen_toks is 64; with a context of 64 it must be less"):
        answers(tiny, ("fox", {"max_gen_toks": 64}))


# -- texts -------------------------------------------------------------------------------------------------


def test_a_text_has_one_bos(builtin: RadixLM) -> None:
    bos = builtin.prefix_token_id
    plain = builtin.tok_encode("Mira likes Oslo.")
    assert plain[0] == bos
    assert builtin.tok_encode("Mira likes Oslo.", add_special_tokens=False) == plain[1:]
    assert builtin.tok_encode("<s>Mira likes Oslo.").count(bos) == 1
    assert builtin.eot_token_id == 2


def test_chat_templates(tiny: RadixLM, builtin: RadixLM, tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "Mira?"}]
    opened = "<|im_start|>user\nMira?<|im_end|>\n<|im_start|>assistant\n"
    assert tiny.apply_chat_template(asked) == opened
    begun = [*asked, {"role": "assistant", "content": "Mira likes"}]
    assert tiny.apply_chat_template(begun, add_generation_prompt=False) == f"{opened}Mira likes"
    assert "/" not in tiny.tokenizer_name
    # A template that trims, as Llama 3's: the prefix is also that of the example before.
    trimming = CHATML.replace("message['content']", "message['content'] | trim")
    tiny._tokenizer = chat_tokenizer(tmp_path, trimming.replace("m.content", "m.content | trim"))
    answer = {"role": "assistant", "content": "The answer is: "}
    few = [*asked, {**answer, "content": "The answer is: 3"}, {"role": "user", "content": "Tarek?"}, answer]
    text = tiny.apply_chat_template(few, add_generation_prompt=False)
    assert text.endswith("user\nTarek?<|im_end|>\n<|im_start|>assistant\nThe answer is:")
    with pytest.raises(TokenizerError, match="no chat template"):
        builtin.apply_chat_template(asked)


# -- making one --------------------------------------------------------------------------------------------


def test_what_cannot_be_made(model: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="give one of them"):
        RadixLM("a", model="b")
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        RadixLM(write(model, tmp_path), device="cpu", max_total_tokens=100)
    with pytest.raises(TypeError, match="max_lenght"):
        RadixLM(model=folder, max_lenght=3)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=HOME,
        capture_output=True,
        text=True,
        timeout=120,
    )


NEEDS = "radixrt.integrations.lm_eval needs lm-evaluation-harness"


def test_without_the_harness() -> None:
    found = python("-c", "import sys; sys.modules['lm_eval'] = None; import radixrt.integrations.lm_eval")
    assert f"ImportError: {NEEDS}, which is not installed" in found.stderr
    assert "pip install lm-eval" in found.stderr


def test_without_the_harness_the_command_says_so() -> None:
    program = "import sys, runpy; sys.modules['lm_eval'] = None"
    module = "radixrt.integrations.lm_eval"
    found = python("-c", f"{program}; runpy.run_module('{module}', run_name='__main__')")
    assert found.returncode == 2
    assert found.stderr.startswith(f"radixrt: error: {NEEDS}, which is not installed")
    assert "Traceback" not in found.stderr


def test_a_task_may_import_the_module_that_runs_as_the_command() -> None:
    module = "radixrt.integrations.lm_eval"
    program = (
        "import sys, runpy; from lm_eval import __main__ as harness; "
        f"harness.cli_evaluate = lambda: __import__('{module}', fromlist=['RadixLM']).RadixLM; "
        f"runpy.run_module('{module}', run_name='__main__', alter_sys=True)"
    )
    found = python("-c", program)
    assert (found.returncode, found.stderr) == (0, "")


def test_imports_are_no_heavier_than_needed() -> None:
    assert python("-c", "import sys, radixrt.runtime; sys.exit('lm_eval' in sys.modules)").returncode == 0
    program = "import sys, radixrt.integrations.lm_eval; sys.exit('torch' in sys.modules)"
    assert python("-c", program).returncode == 0


def test_the_device_that_the_harness_gives_unasked_is_no_demand() -> None:
    lm = RadixLM(device=HARNESS_DEVICE, max_total_tokens=2000)
    assert lm.runtime.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    lm.runtime.close()
