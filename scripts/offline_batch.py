"""Answers a file of prompts, as `radixrt batch` does.

python scripts/offline_batch.py --input in.jsonl --output out.jsonl
"""

import sys

from radixrt.cli import main

if __name__ == "__main__":
    sys.exit(main(["batch", *sys.argv[1:]]))
