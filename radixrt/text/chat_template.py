"""`ChatTemplate`: the chat template of a checkpoint, rendered in a process with limits of time and memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from radixrt.errors import TokenizerError
from radixrt.text import template_process
from radixrt.text.chat import Chat, Message
from radixrt.workers.process import stopped

# Of one rendering. The templates of known models take milliseconds, and a few times the text of their messages.
MAX_SECONDS = 10.0  # of CPU time
MAX_BYTES = 2**30  # of the whole process; Linux alone heeds it
MAX_CHARACTERS = 2**26

MAX_ENDLESS = 3  # renderings in a row that have passed the limit of time; then it is not tried again
_ENDLESS, _GIVEN_UP, _ENDED = "endless", "given up", "ended"

_WHAT = {
    template_process.FORBIDDEN: "of this checkpoint tries to do what its sandbox forbids: {cause}",
    template_process.REFUSED: "refuses these messages: {cause}",
    template_process.FAILED: "fails on these messages: {cause}",
    template_process.TOO_LONG: f"writes more than {MAX_CHARACTERS:,} characters for these messages",
    template_process.TOO_LARGE: f"needs more than {MAX_BYTES / 2**30:g} GiB of memory for these messages",
    _ENDLESS: f"takes more than {MAX_SECONDS:g} seconds for these messages",
    _GIVEN_UP: f"has taken more than {MAX_SECONDS:g} seconds {MAX_ENDLESS} times in a row: it is not run again",
    _ENDED: "has ended the process that renders it, with the status {cause}",
}

_THINKING = "thinking"  # gpt-oss's name for reasoning_content

# Behind a message that goes on. Its blank shows whether the template strips messages.
_END_MARK = "[end of the message that 9c1f5e27 goes on] "


class ChatTemplate:
    """The templates of one checkpoint: one for chats, and perhaps another for chats with tools.

    The process is started by the first chat, kept for the next ones, and ended with this object. Threads may share
    it: they take turns.
    """

    def __init__(self, plain: str, with_tools: str, special_tokens: Mapping[str, str]) -> None:
        self._sources = {"plain": plain, "with_tools": with_tools}
        self._special_tokens = dict(special_tokens)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._endless = 0
        self._owner = 0  # the process that has started it: one that was forked off starts its own

    def holds(self, text: str) -> bool:
        """Whether one of the templates' sources holds this text."""
        return any(text in source for source in self._sources.values())

    def check_uses(self, names: Mapping[str, Any] | list[str], what: str, *, with_tools: bool = False) -> None:
        """Raise TokenizerError if a name does not occur in the template: what has it would be lost."""
        source = self._sources["with_tools" if with_tools else "plain"]
        for name in names:
            if not re.search(rf"\b{re.escape(name)}\b", source):
                raise TokenizerError(f"{what} {name!r}, which the chat template of this checkpoint does not use")

    def render(
        self, chats: Sequence[Chat], template_kwargs: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> list[str | TokenizerError]:
        """The text of each chat, or the error of one that the template takes not, or that passes a limit.

        `template_kwargs` are for chats that do not give them.
        """
        asked: dict[int, dict[str, Any]] = {}
        texts: dict[int, str | TokenizerError] = {}
        for place, chat in enumerate(chats):
            try:
                asked[place] = self._question(
                    chat, {**template_kwargs, **chat.template_kwargs}, add_generation_prompt
                )
            except TokenizerError as error:
                texts[place] = error
        answers = dict(zip(asked, self._answers(list(asked.values())), strict=True))
        failed = {place for place, answer in answers.items() if answer.get("error") == template_process.FAILED}
        # A message that only calls has no content: some templates ask whether it is none, others fail on that.
        again = {place: _with_contents(asked[place]) for place in failed if _lacks_content(chats[place])}
        answers |= zip(again, self._answers(list(again.values())), strict=True)
        for place, answer in answers.items():
            try:
                text = _text_of(answer)
                texts[place] = _up_to_mark(text, chats[place]) if chats[place].is_continued else text
            except TokenizerError as error:
                texts[place] = error
        return [texts[place] for place in range(len(chats))]

    def _question(
        self, chat: Chat, template_kwargs: Mapping[str, Any], add_generation_prompt: bool
    ) -> dict[str, Any]:
        """What the process is asked. Raises TokenizerError if the template would leave something out."""
        with_tools, messages = bool(chat.tools), list[Message](chat.messages)
        if with_tools:
            self.check_uses(["tools"], "the chat has", with_tools=True)
        if any(message.get("tool_calls") for message in messages):
            self.check_uses(["tool_calls"], "the chat has", with_tools=with_tools)
        self.check_uses(template_kwargs, "chat_template_kwargs have", with_tools=with_tools)
        if chat.is_continued:
            *before, last = messages
            messages = [*before, {**last, "content": last["content"] + _END_MARK}]
        if self.holds("<|channel|>analysis") and self.holds(_THINKING) and not self.holds("reasoning_content"):
            messages = [*map(_with_thinking, messages)]  # it is gpt-oss's
        variables = {
            "messages": messages,
            "tools": chat.tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not chat.is_continued,
            **self._special_tokens,
            **template_kwargs,
        }
        return {"template": "with_tools" if with_tools else "plain", "variables": variables}

    def _answers(self, asked: list[dict[str, Any]]) -> list[dict[str, str]]:
        """The answers of the process; where one ends it, the others are asked one by one."""
        if not asked:
            return []
        line = json.dumps(asked).encode() + b"\n"
        with self._lock:
            if self._endless >= MAX_ENDLESS:  # a batch has many lines
                return [{"error": _GIVEN_UP, "cause": ""}] * len(asked)
            process, first = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(first + line)
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            except BaseException:  # Ctrl-C: the next chat must not get this one's answer
                self._end(process, wait=0)
                raise
            if answer.endswith(b"\n"):
                self._endless = 0
                given: list[dict[str, str]] = json.loads(answer)
                return given
            status = self._end(process, wait=1)
            if len(asked) == 1:
                is_endless = status == -signal.SIGPROF
                self._endless += is_endless
                return [{"error": _ENDLESS if is_endless else _ENDED, "cause": str(status)}]
        return [self._answers([one])[0] for one in asked]

    def _running(self) -> tuple[subprocess.Popen[bytes], bytes]:
        """The process, and what it must be sent first."""
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process, b""
        limits = (str(MAX_SECONDS), str(MAX_BYTES), str(MAX_CHARACTERS))
        file, paths = str(template_process.__file__), json.dumps(sys.path)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", file, paths, *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is not for it
            )
        except OSError as error:
            raise TokenizerError(f"the process that renders chat templates cannot be started: {error}") from error
        self._process, self._owner = process, os.getpid()
        weakref.finalize(self, stopped, process, self._owner, 0)
        return process, json.dumps(self._sources).encode() + b"\n"

    def _end(self, process: subprocess.Popen[bytes], wait: float) -> int:
        """End the process, or wait so many seconds until it ends by itself; how it has ended."""
        self._process = None
        status = stopped(process, self._owner, wait)
        return -signal.SIGKILL if status is None else status


def _with_thinking(message: Message) -> Message:
    """A message with its thoughts where gpt-oss's template looks for them. It takes a call's message with either
    thoughts or a content: then the content is kept.
    """
    thoughts, calls = message.get("reasoning_content"), message.get("tool_calls")
    if not thoughts or (calls and message.get("content")):
        return message
    return {**message, _THINKING: thoughts}


def _text_of(answer: dict[str, str]) -> str:
    if "error" in answer:
        raise TokenizerError(f"the chat template {_WHAT[answer['error']].format(cause=answer['cause'])}")
    return answer["text"]


def _lacks_content(chat: Chat) -> bool:
    return any(message.get("content") is None for message in chat.messages)


def _with_contents(question: dict[str, Any]) -> dict[str, Any]:
    """The same with empty contents where there are none."""
    messages = [{**one, "content": one.get("content") or ""} for one in question["variables"]["messages"]]
    return {**question, "variables": {**question["variables"], "messages": messages}}


def _up_to_mark(text: str, chat: Chat) -> str:
    """A text up to the mark behind its last message. Raises TokenizerError if the template has changed that."""
    before, mark, _ = text.rpartition(_END_MARK)
    if not mark:  # the template strips messages: the blank at the mark's end is gone, and one before it would be
        before, mark, _ = text.rpartition(_END_MARK.rstrip())
        before = before.rstrip()
    if not mark or chat.messages[-1]["content"].strip() not in before:
        raise TokenizerError("the chat template does not keep the last message, so it cannot be continued")
    return before
