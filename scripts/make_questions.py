"""Write examples/questions.jsonl again, byte for byte: the demo's questions, unfiltered, from a held-out seed."""

import argparse
from pathlib import Path

from radixrt.builtin.task import example_lines, make_questions

DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "examples" / "questions.jsonl"


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, help="file to write (default: examples/questions.jsonl)"
    )
    output: Path = parser.parse_args().output
    lines = list(example_lines(make_questions()))
    output.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"{output}: {len(lines)} questions")


if __name__ == "__main__":
    main()
