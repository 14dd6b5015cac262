"""Measures prefix reuse on eight workloads, as `radixrt bench prefix-reuse` does.

python scripts/bench_prefix_reuse.py --scale cpu
"""

import sys

from radixrt.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "prefix-reuse", *sys.argv[1:]]))
