"""`python -m radixrt`: the same as the command `radixrt`."""

import sys

from radixrt.cli import main

sys.exit(main())
