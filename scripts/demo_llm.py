"""Ask SmolLM2-135M-Instruct 40 questions about three documents; `make demo-llm` runs this.

python scripts/demo_llm.py [--model smollm2]

Each prompt is a whole document and one question, so nearly all of its tokens are another prompt's, too.
"""

import argparse
import json
import os
import sys
from itertools import groupby
from pathlib import Path

from radixrt.cli import main as radixrt

HERE = Path(os.path.relpath(Path(__file__).resolve().parent.parent))
QUESTIONS = HERE / "examples" / "document_questions.jsonl"
PROMPTS, ANSWERS = HERE / "out" / "document_prompts.jsonl", HERE / "out" / "document_answers.jsonl"
ASK = "Answer this question about the text above in one short sentence."


def main(argv: list[str] | None = None) -> int:
    """The exit status of `radixrt batch`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2", metavar="FOLDER_OR_ID", help="another chat model (smollm2)")
    model = parser.parse_args(argv).model
    questions = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    folder = QUESTIONS.parent
    documents = {name: (folder / name).read_text(encoding="utf-8") for name in {q["document"] for q in questions}}
    PROMPTS.parent.mkdir(exist_ok=True)
    with PROMPTS.open("w", encoding="utf-8") as file:
        for asked in questions:
            text = f"{documents[asked['document']]}\n\n{ASK}\n{asked['question']}"
            line = {"messages": [{"role": "user", "content": text}], "metadata": {"document": asked["document"]}}
            file.write(json.dumps(line) + "\n")
    files = ["--input", str(PROMPTS), "--output", str(ANSWERS), "--overwrite"]
    status = radixrt(["batch", *files, "--model", model, "--temperature", "0", "--max-new-tokens", "40"])
    if status == 0:
        records = [json.loads(line) for line in ANSWERS.read_text(encoding="utf-8").splitlines()]
        both = list(zip(questions, records, strict=True))
        for document, asked_of_it in groupby(both, lambda each: each[0]["document"]):
            print(f"\n{document}")
            for asked, record in list(asked_of_it)[:3]:
                print(f"  {asked['question']}\n    {' '.join(record['text'].split())}")
        print(f"\nall of them: {ANSWERS}")
    return status


if __name__ == "__main__":
    sys.exit(main())
