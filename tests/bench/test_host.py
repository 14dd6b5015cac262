"""The bench of the host's work: every list, as ids and as texts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from radixrt.runtime import Runtime
from radixrt.workloads import lists
from scripts import bench_host
from tests.support.tiny_workloads import SIZES


def test_lists_are_all_of_the_workloads() -> None:
    assert lists.LISTS.items() <= bench_host.LISTS.items()


@pytest.mark.parametrize("with_text", [False, True])
def test_what_the_host_does(
    with_text: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given, generate = [], Runtime.generate

    def watched(self: Runtime, prompts: list[Any], params: Any) -> Any:
        given.append(set(map(type, prompts)))
        return generate(self, prompts, params)

    monkeypatch.setattr(Runtime, "generate", watched)
    monkeypatch.setitem(bench_host.LISTS, "thoughts", partial(lists.thoughts, **SIZES["thoughts"]))
    words = "--list thoughts --running 16 --repeat 1" + " --text --tokenizer built-in" * with_text
    bench_host.main(words.split())
    shown = capsys.readouterr().out
    assert ("tokens of built-in" in " ".join(shown.split())) == with_text
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    rows = {name: cells for name, *cells in lines}
    # Of a column for texts and one for their ids, or of one for ids.
    assert len(rows["total"]) == 1 + with_text
    assert len(set(rows["passes"])) == 1
    assert given == ([{str}] * 2 + [{np.ndarray}] * 2 if with_text else [{np.ndarray}] * 2)  # by part once more


def test_a_tokenizer_without_texts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_host.main(["--tokenizer", "built-in"])
    assert "--tokenizer is of texts" in capsys.readouterr().err
