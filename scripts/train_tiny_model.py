"""Train the built-in model; see `--help` and `radixrt.builtin.training`."""

import sys

from radixrt.builtin.training import main

if __name__ == "__main__":
    sys.exit(main())
