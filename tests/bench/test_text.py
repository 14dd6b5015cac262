"""The bench of texts and chats, on a few chats."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import bench_text
from tests.support.small_tokenizers import chat_tokenizer


def test_a_row_for_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    bench_text.main(["--model", str(tmp_path), "--chats", "3", "--system-len", "5", "--repeat", "1"])
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line[:1] == "│"]
    assert [row[0] for row in rows] == ["chats rendered", "texts together", "chats to ids", "each text by itself"]
    assert (rows[1][2], rows[1][4]) == ("1.00", "1.00")
    assert float(rows[2][1]) >= float(rows[0][1])
    texts = bench_text.rendered(tokenizer, bench_text.chats_of(tokenizer, 3, 5))
    with pytest.raises(SystemExit, match="differ from those of each by itself"):
        bench_text.encode_each(tokenizer, texts, tokenizer.encode_batch(texts[::-1], add_special_tokens=False))
