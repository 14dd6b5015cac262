"""Records: what `radixrt bench kernels --json` has written, to be drawn wherever matplotlib is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from radixrt.bench.kernels.groups import chosen
from radixrt.bench.report import check_files
from radixrt.errors import ParameterError


def draw_records(records_file: Path, plot_file: Path, only: Sequence[str] = ()) -> None:
    """Draw what an earlier run has measured, on this machine or another; `only` as in `chosen`.

    Raises:
        ParameterError: the file holds no such records, a pattern matches none, or the picture cannot be written.
        RadixrtError: there is no matplotlib.
    """
    check_files(None, plot_file)
    try:
        report = json.loads(records_file.read_text(encoding="utf-8"))
        card, results = report["machine"]["name"], report["results"]
        cases = [(result["group"], f"{result['shape']} {result['variant']}".strip()) for result in results]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ParameterError(
            f"{records_file} is not what radixrt bench kernels --json has written: {type(error).__name__}: {error}"
        ) from error
    from radixrt.bench.kernels.plot import plot  # matplotlib is an extra

    plot([results[i] for i in chosen(only, cases)], plot_file, card=card)
