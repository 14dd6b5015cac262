"""The files that a batch's report goes to: checked before anything runs, written when it has ended."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path

from radixrt.batch.report import BatchReport
from radixrt.batch.source import STANDARD, place_name
from radixrt.cache.atomic_file import AtomicFile
from radixrt.errors import BatchFileError
from radixrt.planning.batch_plan import BatchPlan
from radixrt.planning.outline import Show, as_ids
from radixrt.text.tokenizer import Tokenizer

JSON, PAGE = ".json", ".html"

Paths = str | Path | Iterable[str | Path]


class ReportError(BatchFileError):
    """A batch is complete, but its report cannot be written.

    Attributes:
        report: what it would have told.
    """

    def __init__(self, message: str, report: BatchReport) -> None:
        super().__init__(message)
        self.report = report


class ReportFiles:
    """Files of one report: JSON or a page, by their suffix. They replace what has their name.

    Args:
        paths: one, or several; () is none.
        input_path, output_path: of the batch; "-" is standard input or output.

    Raises:
        BatchFileError: one of them cannot be written, must not be, or needs a package that is missing.
    """

    def __init__(self, paths: Paths, input_path: str | Path, output_path: str | Path) -> None:
        listed = [paths] if isinstance(paths, (str, Path)) else paths
        self._paths = list(dict.fromkeys(Path(path) for path in listed))
        self._title = place_name(input_path, "input")
        for path in self._paths:
            _check(path)
            for what, other in (("input", input_path), ("output", output_path)):
                if other != STANDARD and _is_same(path, Path(other)):
                    raise BatchFileError(f"the report {path} is the batch's {what}; give it another name")
        if self.has_page and importlib.util.find_spec("matplotlib") is None:
            raise BatchFileError(
                "a report as a page needs matplotlib: pip install 'radixrt[report]', or name the report .json"
            )

    @property
    def has_page(self) -> bool:
        """Whether one of them is a page, which shows the shared prefixes."""
        return any(path.suffix == PAGE for path in self._paths)

    def write(self, report: BatchReport, plan: BatchPlan | None, tokenizer: Tokenizer | None) -> None:
        """Write all of them, each in one step.

        Args:
            plan: for a page; None if there is none.
            tokenizer: of the prompts.

        Raises:
            BatchFileError: the disk refuses.
        """
        for path in self._paths:
            text = _json(report) if path.suffix == JSON else _page(report, self._title, plan, _show(tokenizer))
            try:
                with AtomicFile(path) as file:
                    file.write(text.encode("utf-8", "backslashreplace"))
                    file.finish()
            except OSError as error:
                raise BatchFileError(f"cannot write the report {path}: {error.strerror or error}") from error


def _check(path: Path) -> None:
    if path.suffix not in (JSON, PAGE):
        raise BatchFileError(f"the report {path} is neither a page nor JSON; name it {PAGE} or {JSON}")
    if not path.parent.is_dir():
        raise BatchFileError(f"the folder {path.parent} of the report does not exist; make it first")
    if path.exists() and not path.is_file():
        raise BatchFileError(f"{path} is in the way of the report and is not a plain file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise BatchFileError(f"the report {path} cannot be written: no files can be made in {path.parent}")


def _is_same(path: Path, other: Path) -> bool:
    if path.exists() and other.exists():
        return path.samefile(other)
    return path.resolve() == other.resolve()


def _show(tokenizer: Tokenizer | None) -> Show:
    if tokenizer is None:
        return as_ids
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)


def _json(report: BatchReport) -> str:
    return json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n"


def _page(report: BatchReport, title: str, plan: BatchPlan | None, show: Show) -> str:
    from radixrt.batch.report_page import report_page  # matplotlib, which not everybody has, takes half a second

    return report_page(report, title=title, plan=plan, show=show)
