"""Times every kernel on a GPU, as `radixrt bench kernels` does.

python scripts/bench_kernels.py --only decode
"""

import sys

from radixrt.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "kernels", *sys.argv[1:]]))
