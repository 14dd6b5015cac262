"""Five lists of prompts beside bound, goals, ablations and transformers: the same as `radixrt bench throughput`.

python scripts/bench_throughput.py --scale cpu
"""

import sys

from radixrt.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "throughput", *sys.argv[1:]]))
