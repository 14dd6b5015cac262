"""Measures throughput on sixteen lists of prompts, as `radixrt bench throughput` does.

python scripts/bench_throughput.py --scale cpu
"""

import sys

from radixrt.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "throughput", *sys.argv[1:]]))
