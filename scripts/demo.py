"""Answer examples/questions.jsonl with the built-in model and report; `make demo` runs this.

python scripts/demo.py
"""

import argparse
import os
import sys
from pathlib import Path

from radixrt.cli.demo import run_demo

HERE = Path(os.path.relpath(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    sys.exit(run_demo(HERE / "examples" / "questions.jsonl", HERE / "out" / "answers.jsonl"))
