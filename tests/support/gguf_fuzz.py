"""Convert mutated GGUF files: `python -m tests.support.gguf_fuzz FOLDER SEED COUNT`, in 2 GB of address space, or
in 1 GB more than what torch for a GPU takes of it.

FOLDER has the files that are mutated. Prints a JSON object: how many were converted, and the errors of the others
with how often they came. Whatever else happens (a crash, a hang, another error, all memory) ends it, with the
mutation's number on standard error.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import sys
import tempfile
from collections import Counter
from pathlib import Path

BYTES, SECONDS = 2 * 10**9, 30
_EXTREMES = [0, 1, 2, 7, 8, 9, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]


def mutated(data: bytes, drawn: random.Random) -> bytes:
    """Mostly within the header, which ends before the tensors' data."""
    found = bytearray(data)
    end = min(len(found), drawn.choice([64, 2000, 20_000, len(found)]))
    for _ in range(drawn.choice([1, 1, 1, 2, 5, 20])):
        place = drawn.randrange(max(1, min(end, len(found))))
        kind = drawn.randrange(7)
        if kind == 0:
            found[place : place + 1] = bytes([drawn.randrange(256)])
        elif kind == 1:
            found[place : place + 8] = struct.pack("<Q", drawn.choice(_EXTREMES))
        elif kind == 2:
            found[place : place + 4] = struct.pack("<I", drawn.choice(_EXTREMES) % 2**32)
        elif kind == 3:
            del found[place : place + drawn.choice([1, 4, 8, 100])]
        elif kind == 4:
            found[place:place] = found[place : place + drawn.choice([1, 8, 64])]
        elif kind == 5:
            found[place : place + 1] = (
                bytes([found[place] ^ 1 << drawn.randrange(8)]) if place < len(found) else b""
            )
        else:
            del found[drawn.randrange(len(found)) :]
            found += b"\0" * drawn.choice([0, 0, 1000])
        if not found:
            found = bytearray(b"G")
    return bytes(found)


def main(folder: Path, seed: int, count: int) -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["RADIXRT_CACHE"] = cache
        from radixrt import ModelError
        from radixrt.models.loader import model_folder

        sources = [path.read_bytes() for path in sorted(folder.glob("*.gguf"))]
        for path in sorted(folder.glob("*.gguf")):
            model_folder(path)  # all is imported
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit := max(BYTES, mapped + BYTES // 2), limit))
        errors: Counter[str] = Counter()
        converted = 0
        file = Path(cache) / "mutated.gguf"
        for number in range(seed, seed + count):
            drawn = random.Random(number)
            file.write_bytes(mutated(drawn.choice(sources), drawn))
            signal.alarm(SECONDS)  # ends the process
            try:
                model_folder(file)
                converted += 1
            except ModelError as error:
                errors[str(error).removeprefix(f"{file} cannot be used: ")] += 1
            except BaseException:
                print(f"mutation {number}", file=sys.stderr)
                raise
            signal.alarm(0)
            left = [path.name for path in (Path(cache) / "gguf").iterdir() if path.name.startswith(".")]
            assert not left, (number, left)
    print(json.dumps({"converted": converted, "errors": errors}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
