"""Answer a file of prompts: the same as `radixrt batch`.

python scripts/offline_batch.py --input in.jsonl --output out.jsonl
"""

import sys

from radixrt.cli import main

if __name__ == "__main__":
    sys.exit(main(["batch", *sys.argv[1:]]))
