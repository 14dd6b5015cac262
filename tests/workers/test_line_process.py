"""What limits and ends do to the processes that use it is in tests/text/test_chat_template.py and tests/forms."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from radixrt.errors import FormError
from radixrt.workers.line_process import LineProcess

PROGRAM = """
import json, sys, time
sys.path[:] = json.loads(sys.argv[1])
for line in sys.stdin:
    for text in json.loads(line):
        sys.stdout.write(text)
        sys.stdout.flush()
        time.sleep(float(sys.argv[2]))
"""


def process(folder: Path, pause: float = 0.0) -> LineProcess:
    (folder / "program.py").write_text(PROGRAM)
    return LineProcess(str(folder / "program.py"), pause, purpose="writes", error=FormError)


def test_answers_are_lines_however_they_come(tmp_path: Path) -> None:
    own = process(tmp_path)
    large = "7" * 200_000
    assert own.ask(b'["1\\n2", "3\\n[4", "]\\n"]\n', 3) == [1, 23, [4]]
    assert own.ask(f'["\\"{large}\\"\\n"]\n["5\\n"]\n'.encode(), 2) == [large, 5]
    assert own.ask(b'["1\\n2"]\n', 2, seconds=0.1) == [1], "the rest of a line does not come"
    assert own.is_running
    assert own.end(0.0) is None
    assert not own.is_running
    own = process(tmp_path)
    with pytest.raises(ValueError, match="Expecting value"):
        own.ask(b'["what?\\n"]\n')
    assert not own.is_running


def test_ctrl_c_is_for_who_asks_and_ends_it(tmp_path: Path) -> None:
    own = process(tmp_path, pause=5.0)
    assert os.getsid(own.pid) == own.pid, "a terminal's Ctrl-C is not for it"
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            own.ask(b'["1\\n"]\n', 2)
    finally:
        signal.signal(signal.SIGINT, before)
        timer.join()
    assert not own.is_running


def test_a_fork_has_none_and_ends_none(tmp_path: Path) -> None:
    own = process(tmp_path)
    if (child := os.fork()) == 0:
        os._exit(own.is_running or own.end(0.0) is not None)
    assert os.waitpid(child, 0)[1] == 0
    assert own.ask(b'["1\\n"]\n') == [1]
    assert own.end(0.0) is None
