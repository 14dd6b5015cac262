"""Whether a batch may read and write where it is told to."""

from __future__ import annotations

from pathlib import Path

from radixrt.batch.formats.compression import check_output_name
from radixrt.batch.journal.run_folder import has_run
from radixrt.errors import BatchFileError
from radixrt.files.standard import STANDARD


def check_paths(input_path: str | Path, output_path: str | Path, *, overwrite: bool) -> None:
    """Raise BatchFileError unless the batch can read its input and may write its output; "-" is always fine."""
    if input_path != STANDARD:
        input_path = Path(input_path)
        if not input_path.exists():
            raise BatchFileError(f"the input {input_path} does not exist")
        if input_path.is_dir():
            raise BatchFileError(f"the input {input_path} is a folder; it must be a file of JSON lines")
    check_output_name(output_path)
    if output_path == STANDARD:
        return
    output_path = Path(output_path)
    if not output_path.parent.is_dir():
        raise BatchFileError(f"the folder {output_path.parent} of the output does not exist; make it first")
    if not output_path.exists():
        return
    if input_path != STANDARD and output_path.samefile(input_path):
        raise BatchFileError(f"the input {input_path} would be overwritten; give another output")
    if not output_path.is_file():
        raise BatchFileError(f"{output_path} is in the way of the output and is not a plain file")
    if not overwrite and not has_run(output_path):  # one that has only to be cleared away, perhaps
        raise BatchFileError(f"the output {output_path} exists; --overwrite replaces it")
