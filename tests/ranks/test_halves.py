"""Ranks on a CPU that compute passes in two halves: answers are those of one rank, which computes them at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixrt.execution import halves
from radixrt.ranks import leading_runner
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.passes import Pass
from tests.models.test_hybrid import answers, prompts
from tests.ranks.test_hybrids import ASKED, FULL, MANY, NET, SEVERAL, all_parts, poison
from tests.ranks.test_ranks import LINES, PARAMS, none_left, runtime, tokens_of
from tests.support import checkpoints
from tests.support.stages import staged

MODELS: dict[str, Callable[..., Any]] = {
    "olmo2": checkpoints.olmo2,
    "qwen3.5-moe": partial(checkpoints.qwen3_5_moe, layer_types=[NET, NET, FULL], tie_word_embeddings=True),
    "granite4-moe": partial(
        checkpoints.granite4_hybrid_moe, layer_types=["mamba", "mamba", "attention"], mamba_n_groups=1
    ),
    "nemotron-h-moe": checkpoints.nemotron_h_moe,
}


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """The passes that are cut, of which many are: all that may be, from few tokens on."""
    found, cut_of = list[Pass](), leading_runner.cut_of

    def noted(pass_: Pass) -> int:
        if cut := cut_of(pass_):
            found.append(pass_)
        return cut

    monkeypatch.setattr(halves, "FEWEST_TOKENS", 6)
    monkeypatch.setattr(leading_runner, "cut_of", noted)
    return found


def num_of_cut_rows(cut: list[Pass]) -> int:
    """Of how many passes a row is cut."""
    return sum(len(pass_.input_ids) // 2 not in np.cumsum(pass_.seq_lens - pass_.prefix_lens) for pass_ in cut)


def test_answers_are_those_of_one_rank(cut: list[Pass]) -> None:
    """Of processes: greedy and drawn, in a form, chunks beside decodes, cold and warm, scored."""
    form = SamplingParams(max_new_tokens=20, temperature=0.0, regex="( [a-z]+)+[.]")
    others = [f"{word} and the bay of Oslo, {word} and all who like {word}" for word in ("Snow", "Boats", "It")]
    lines, params = [*LINES, *others], [*PARAMS, form, *PARAMS[:2]]
    with runtime(1) as alone:
        expected = [alone.generate(lines, params) for _ in range(2)]
    assert not cut
    with none_left(), runtime(2) as both:
        found = [both.generate(lines, params) for _ in range(2)]
    for own, other in zip(expected, found, strict=True):
        assert tokens_of(own) == tokens_of(other)  # type: ignore[arg-type]
    right, scores = (outputs[2].prompt_logprobs for outputs in (expected[0], found[0]))  # type: ignore[index]
    assert right is not None
    assert scores is not None
    logprobs = ([each.logprob for each in of_all[1:] if each is not None] for of_all in (right, scores))
    assert next(logprobs) == pytest.approx(next(logprobs), abs=1e-4)
    assert len(cut) > num_of_cut_rows(cut) > 3
    assert any(pass_.num_extends < pass_.num_rows for pass_ in cut)
    assert any(len(pass_.scored) for pass_ in cut)


@pytest.mark.long_unless(kept=lambda given: given["name"] == "granite4-moe")
@pytest.mark.parametrize(
    ("name", "stages"), [("olmo2", 1), ("qwen3.5-moe", 1), ("granite4-moe", 2), ("nemotron-h-moe", 1)]
)
def test_other_layers(name: str, stages: int, cut: list[Pass], tmp_path: Path) -> None:
    """States that go from half to half, sums within a layer, mixtures, stages; prefixes that rows lend others."""
    folder = checkpoints.write(MODELS[name](), tmp_path)
    asked = [*ASKED, *prompts(50, 30)]
    with runtime(1, model=folder, dtype="float32", **MANY) as one:
        expected = [answers(one, asked) for _ in range(2)]
        forked = [answer.token_ids for answer in one.generate(asked[3], SEVERAL).outputs]
    with staged(stages, 2, model=folder, **MANY) as several:
        if name != "olmo2":
            poison([part.kv_pool for part in all_parts(several)])
        assert [answers(several, asked) for _ in range(2)] == expected
        assert [answer.token_ids for answer in several.generate(asked[3], SEVERAL).outputs] == forked
    assert num_of_cut_rows(cut) > 5
