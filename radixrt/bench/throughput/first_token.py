"""A program that generates one token, started and timed by `start_up`.

It imports nothing else, since imports are part of the time. Its one argument is JSON, the keyword arguments of
Runtime; its last line of output is JSON, times of the monotonic clock and the Runtime's own parts.
"""

from __future__ import annotations

import json
import sys
import time

from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams

PROMPT = list(range(10, 42))


def main() -> None:
    imported = time.monotonic()
    with Runtime(**json.loads(sys.argv[1])) as runtime:
        made = time.monotonic()
        runtime.generate(PROMPT, SamplingParams(max_new_tokens=1, temperature=0, ignore_eos=True))
        first_token = time.monotonic()
        times = {"imported": imported, "made": made, "first_token": first_token, "parts": dict(runtime.start_up)}
    print(json.dumps(times))


if __name__ == "__main__":
    main()
