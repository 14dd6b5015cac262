"""lm-evaluation-harness asks a server, and gets the numbers of the class that it has in its own process."""

from __future__ import annotations

import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'lm-eval[api]'")
pytest.importorskip("tenacity", reason="its clients need more: pip install 'lm-eval[api]'")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from radixrt.builtin import MODEL_PATH
from radixrt.integrations.lm_eval import RadixLM
from tests.support.serving import ANSWERS, QUESTIONS, Serving


def test_local_completions(serving: Serving) -> None:
    asked = LocalCompletionsAPI(
        base_url=f"{serving()}/v1/completions",
        model="any",
        tokenizer_backend="huggingface",
        tokenizer=str(MODEL_PATH),
        add_bos_token=True,  # as the class, which encodes as the tokenizer says
        batch_size=4,
    )
    own = RadixLM(pretrained=str(MODEL_PATH), device="cpu", max_total_tokens=4000)
    choices = [(question, f" {answer}") for question in QUESTIONS for answer in (*ANSWERS, "tea and more of it")]
    scored = [Instance("loglikelihood", {}, choice, place) for place, choice in enumerate(choices)]
    theirs, ours = asked.loglikelihood(scored), own.loglikelihood(scored)
    assert [is_greedy for _, is_greedy in theirs] == [is_greedy for _, is_greedy in ours]
    assert [logprob for logprob, _ in theirs] == pytest.approx([logprob for logprob, _ in ours], abs=1e-4)
    until = [
        Instance("generate_until", {}, (question, {"until": ["\n"], "max_gen_toks": 8}), place)
        for place, question in enumerate(QUESTIONS)
    ]
    assert asked.generate_until(until) == own.generate_until(until)
