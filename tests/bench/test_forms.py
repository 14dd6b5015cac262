"""The bench of forms, on a tiny shape."""

from __future__ import annotations

import json

import pytest

from scripts import bench_forms

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'radixrt[grammar]'")


@pytest.mark.long  # compiles the schemas' grammars for a whole tokenizer
def test_a_row_for_each_number_of_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--config tiny --requests 4 --schemas 1 --schemas 4 --document-len 20 --repeat 1 --device cpu"
    bench_forms.main(given.split())
    rows = [line for line in capsys.readouterr().out.splitlines() if "tiny" in line]
    assert [row.split("│")[3].strip() for row in rows] == ["1", "4"]
    for row in rows:
        passes, extended, drawn = (int(row.split("│")[place]) for place in (7, 10, 12))
        assert max(passes, extended) < drawn  # of four answers, what is forced takes one pass


def test_schemas_differ_by_their_names() -> None:
    assert json.dumps(bench_forms.schema(1)).replace("_1", "_2") == json.dumps(bench_forms.schema(2))


@pytest.mark.parametrize("wrong", ["--requests 6", "--requests 0", "--schemas 0", "--repeat 0"])
def test_wrong_numbers_are_named(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_forms.main(wrong.split())
    assert wrong.split()[0] in capsys.readouterr().err
