"""How long every kernel takes on a GPU, beside what the GPU allows: the same as `radixrt bench kernels`.

python scripts/bench_kernels.py --only decode
"""

import sys

from radixrt.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "kernels", *sys.argv[1:]]))
