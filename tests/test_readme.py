"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
README = (HOME / "README.md").read_text(encoding="utf-8")


def test_the_python_example_prints_what_the_readme_says() -> None:
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README, flags=re.DOTALL)
    assert found is not None
    code, printed = found.groups()
    assert len(code.splitlines()) <= 10
    result = subprocess.run([sys.executable, "-c", code], cwd=HOME, capture_output=True, text=True, timeout=300)
    assert result.stdout == printed, result.stderr


def test_every_path_that_the_documents_name_exists() -> None:
    documents = [HOME / "README.md", *sorted((HOME / "docs").glob("*.md"))]
    for document in documents:
        for path in re.findall(
            r"`((?:docs|scripts|examples|tests|radixrt)/[\w/.]+)`", document.read_text("utf-8")
        ):
            where = HOME / path
            assert where.exists() or where.with_suffix(".py").exists(), f"{document.name} names {path}"
