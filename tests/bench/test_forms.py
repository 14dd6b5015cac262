"""The bench of forms, on a tiny shape."""

from __future__ import annotations

import json

import pytest

from scripts import bench_form_host, bench_forms

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


def test_the_host_beside_a_device_that_takes_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--answers 8 --forward-ms 1 --draw-ms 0.5 --mask-ms 1 --launch-forward-ms 0.01 --launch-draw-ms 0.01"
    bench_form_host.main(given.split())
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if " 8 " in line]
    assert [row[2].strip() for row in rows] == ["yes", "no"]
    for row in rows:
        assert min(float(row[3]), float(row[4])) >= 1.4  # the device takes 1.5


def test_schemas_differ_by_their_names() -> None:
    assert json.dumps(bench_forms.schema(1)).replace("_1", "_2") == json.dumps(bench_forms.schema(2))


@pytest.mark.parametrize("wrong", ["--requests 6", "--requests 0", "--schemas 0", "--repeat 0"])
def test_wrong_numbers_are_named(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_forms.main(wrong.split())
    assert wrong.split()[0] in capsys.readouterr().err
