"""What a command writes is none of its other files, by whatever name, and a plain file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from radixrt.errors import BatchFileError
from radixrt.files.path_roles import check_apart, check_target, read_role, written_role


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("in")
    Path("model").mkdir()
    Path("model/weights").write_text("weights")
    Path("soft").symlink_to("in")
    os.link("in", "hard")
    os.link("model/weights", "hard-weights")
    Path("soft-weights").symlink_to("model/weights")
    Path("soft-model").symlink_to("model")
    Path("dangling").symlink_to("out")
    return tmp_path


READ = [*read_role("the input", "in"), *read_role("the model's folder", "model")]


@pytest.mark.parametrize("name", ["in", "soft", "hard", "./model/../in", "dangling", "out", "out.partial"])
def test_a_file_that_is_another_one(here: Path, name: str) -> None:
    first = written_role("the output", Path("out"))
    with pytest.raises(
        BatchFileError, match=r"the page .* is (the input|(the partial file of )?the output); give"
    ):
        check_apart([*READ, *first, *written_role("the page", Path(name))])


@pytest.mark.parametrize(
    "name", ["model/new", "model/weights", "hard-weights", "soft-weights", "soft-model/new", "model/a/b"]
)
def test_a_file_of_a_folder(here: Path, name: str) -> None:
    with pytest.raises(BatchFileError, match=r"the page .* is in the model's folder model; put it somewhere else"):
        check_apart([*READ, *written_role("the page", Path(name))])


def test_a_partial_file_that_is_the_input(here: Path) -> None:
    with pytest.raises(BatchFileError, match=r"the partial file of the page in\.partial is the input"):
        check_apart([*read_role("the input", "in.partial"), *written_role("the page", Path("in"))])


def test_a_folder_that_is_written_to(here: Path) -> None:
    with pytest.raises(BatchFileError, match="the input model/weights is in the page model, which is written to"):
        check_apart([*read_role("the input", "model/weights"), *written_role("the page", Path("model"))])


def test_files_apart(here: Path) -> None:
    written = [place for name in ("a", "b", "models", "in.jsonl") for place in written_role(name, Path(name))]
    check_apart([*READ, *READ, *written, *read_role("the input", "-")])


@pytest.mark.parametrize("name", ["in", "new"])
def test_targets(here: Path, name: str) -> None:
    check_target("the page", Path(name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model", "model is in the way of the page and is not a plain file"),
        ("fifo", "fifo is in the way of the page and is not a plain file"),
        ("soft", "the page soft is a symbolic link; give the path that it leads to"),
        ("dangling", "the page dangling is a symbolic link"),
        ("soft-model", "the page soft-model is a symbolic link"),
        ("none/x", "the folder none of the page does not exist; make it first"),
        ("in/x", "the page in/x cannot be written: Not a directory"),
        ("x" * 256, "cannot be written: File name too long"),
        ("a\0b", r"the page 'a\\x00b' is no name of a file"),
        ("", r"(is no name of a file|\. is in the way)"),
    ],
)
def test_targets_that_cannot_be(here: Path, name: str, message: str) -> None:
    os.mkfifo("fifo")
    with pytest.raises(BatchFileError, match=message):
        check_target("the page", Path(name))
    with pytest.raises(BatchFileError, match=f"{message}.*; or so"):
        check_target("the page", Path(name), instead="; or so")
