"""A process that writes its descriptors' numbers into them, and a variable of its environment; its status is 7."""

import os
import signal
import sys

if __name__ == "__main__":
    if sys.argv[1:] == ["waits"]:
        signal.pause()
    for number in sys.argv[1:]:
        os.write(int(number), f"{number}\n".encode())
    print(os.environ.get("TOLD"), flush=True)
    sys.exit(7)
