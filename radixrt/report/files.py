"""The files of a batch's report: checked before anything runs, written at the end."""

# Tests: tests/report/test_batch_report.py

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from radixrt.errors import BatchFileError
from radixrt.files.path_roles import PathRole
from radixrt.files.standard import place_name
from radixrt.files.text_file import TextFile
from radixrt.planning.batch_plan import BatchPlan
from radixrt.report.batch_report import BatchReport
from radixrt.report.outline import Show, decoded_by
from radixrt.text.tokenizer import Tokenizer

JSON, PAGE = ".json", ".html"

Paths = str | Path | Iterable[str | Path]


class ReportError(BatchFileError):
    """A batch is complete, but its report cannot be written.

    Attributes:
        report: the report that was not written.
    """

    def __init__(self, message: str, report: BatchReport) -> None:
        super().__init__(message)
        self.report = report


class ReportFiles:
    """Files of one report: JSON or a page, by their suffix. Existing files are replaced.

    Args:
        paths: one or several; () for none.
        input_path: of the batch; "-" is standard input.

    Raises:
        BatchFileError: one of them cannot be written.
    """

    def __init__(self, paths: Paths, input_path: str | Path) -> None:
        listed = [paths] if isinstance(paths, (str, Path)) else paths
        self._files = [_file(path) for path in dict.fromkeys(Path(path) for path in listed)]
        self._title = place_name(input_path, "input")

    @property
    def places(self) -> list[PathRole]:
        """What is written, for `check_apart`."""
        return [place for file in self._files for place in file.places]

    @property
    def has_page(self) -> bool:
        """Whether one of the files is a page, which shows the shared prefixes."""
        return any(file.path.suffix == PAGE for file in self._files)

    def write(self, report: BatchReport, plan: BatchPlan | None, tokenizer: Tokenizer | None) -> None:
        """Write all files, each in one step.

        Args:
            plan: for a page; None if there is none.
            tokenizer: of the prompts.

        Raises:
            BatchFileError: the disk refuses.
        """
        for file in self._files:
            if file.path.suffix == JSON:
                file.write(_json(report))
            else:
                file.write(_page(report, self._title, plan, decoded_by(tokenizer)))


def _file(path: Path) -> TextFile:
    if path.suffix not in (JSON, PAGE):
        raise BatchFileError(f"the report {path} is neither a page nor JSON; name it {PAGE} or {JSON}")
    return TextFile(path, "report")


def _json(report: BatchReport) -> str:
    return json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n"


def _page(report: BatchReport, title: str, plan: BatchPlan | None, show: Show) -> str:
    from radixrt.report.page import report_page  # jinja2 takes a while to import

    return report_page(report, title=title, plan=plan, show=show)
