"""How evenly concurrent streams get their tokens: the same as `radixrt bench streams`. No GPU, half a minute.

python scripts/bench_streams.py
"""

import sys

from radixrt.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "streams", *sys.argv[1:]]))
