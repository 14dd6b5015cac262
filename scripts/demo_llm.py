"""Ask SmolLM2-135M-Instruct 40 questions about three documents; `make demo-llm` runs this.

python scripts/demo_llm.py [--model smollm2]

Each prompt is a whole document and one question, so nearly all of its tokens are another prompt's, too.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from radixrt.cli import main as radixrt

HERE = Path(os.path.relpath(Path(__file__).resolve().parent.parent))
QUESTIONS = HERE / "examples" / "document_questions.jsonl"
PROMPTS, ANSWERS = HERE / "out" / "document_prompts.jsonl", HERE / "out" / "document_answers.jsonl"
ASK = "Answer this question about the text above in one short sentence."


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def documents_of(questions: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The texts that they are about, by name."""
    names = dict.fromkeys(asked["document"] for asked in questions)
    return {name: (QUESTIONS.parent / name).read_text(encoding="utf-8") for name in names}


def prompt(document: str, question: str) -> str:
    return f"{document}\n\n{ASK}\n{question}"


def main(argv: list[str] | None = None) -> int:
    """The exit status of `radixrt batch`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2", metavar="FOLDER_OR_ID", help="another chat model (smollm2)")
    model = parser.parse_args(argv).model
    questions = read(QUESTIONS)
    documents = documents_of(questions)
    PROMPTS.parent.mkdir(exist_ok=True)
    with PROMPTS.open("w", encoding="utf-8") as file:
        for asked in questions:
            text = prompt(documents[asked["document"]], asked["question"])
            line = {"messages": [{"role": "user", "content": text}], "metadata": {"document": asked["document"]}}
            file.write(json.dumps(line) + "\n")
    files = ["--input", str(PROMPTS), "--output", str(ANSWERS), "--overwrite"]
    status = radixrt(["batch", *files, "--model", model, "--temperature", "0", "--max-new-tokens", "40"])
    if status == 0:
        both = list(zip(questions, read(ANSWERS), strict=True))
        for document, asked_of_it in groupby(both, lambda each: each[0]["document"]):
            print(f"\n{document}")
            for asked, record in list(asked_of_it)[:3]:
                print(f"  {asked['question']}\n    {' '.join(record['text'].split())}")
        print(f"\nall of them: {ANSWERS}")
    return status


if __name__ == "__main__":
    sys.exit(main())
