"""The benchmark of documents that are asked about again: its figures, its output, its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench_kept_prefixes import NEXT, QUARTER, QUESTION_LEN, TIER, WHOLE, Options, main, measure

SMALL = ["--documents", "8", "--document-len", "128", "--rounds", "3", "--device", "cpu"]


def test_tiers_and_yesterdays_cache_hit_what_a_small_pool_forgets() -> None:
    figures = measure(Options(device="cpu", documents=8, document_len=128, rounds=3))
    hits = {
        name: [played.cached_tokens / played.prompt_tokens for played in rounds]
        for name, rounds in figures.rounds.items()
    }
    all_documents = 128 / (128 + QUESTION_LEN)
    for name in (QUARTER, TIER, WHOLE):
        assert hits[name][0] == 0
    assert max(hits[QUARTER]) < 0.6 * all_documents
    for later in (hits[TIER][1:], hits[WHOLE][1:], hits[NEXT]):
        assert later == pytest.approx([all_documents] * len(later), abs=0.01)
    assert figures.tokens >= 8 * 128
    assert figures.file_bytes > 0
    assert all(played.seconds > 0 for rounds in figures.rounds.values() for played in rounds)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "out.json"
    main([*SMALL, "--folder", str(tmp_path), "--json", str(report)])
    printed = capsys.readouterr().out
    for words in (QUARTER, TIER, WHOLE, NEXT, "saved in", "loaded in"):
        assert words in printed
    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["options"]["documents"] == 8
    assert len(written["figures"]["rounds"][NEXT]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]  # the saved cache is gone


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--documents", "7"], "documents is 7"),
        (["--rounds", "1"], "rounds is 1"),
        (["--folder", "/no/such/folder"], "/no/such/folder is no folder"),
        (["--json", "/no/such/folder/out.json"], "does not exist"),
        (["--document-len", "1000000"], "context"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_options(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, *options])
    assert words in capsys.readouterr().err
