"""`radixrt chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from radixrt.cli.exit_status import DONE, FAILED, exit_status
from radixrt.cli.kept_cache import runtime_with_cache
from radixrt.cli.options import (
    SAMPLING,
    add_command,
    add_options,
    add_runtime_options,
    runtime_options,
    sampling_params,
)
from radixrt.engine.signals import Interrupted
from radixrt.errors import DeviceLostError, ParameterError, PromptError, RadixrtError, SchedulerError
from radixrt.files.standard import standard_input
from radixrt.output import FinishReason, RequestOutput

if TYPE_CHECKING:
    from radixrt.conversation import Conversation
    from radixrt.runtime import Runtime
    from radixrt.sampling_params import SamplingParams

# A conversation has one answer a turn, and shows its text.
_SAMPLING = tuple(
    option for option in SAMPLING if option.name not in ("n", "detokenize") and "logprobs" not in option.name
)

_BUILTIN_TURN = "\nQ: {}\nA:"  # the built-in model was trained on this

_COMMANDS = {
    "/reset": "begin a new conversation; the cache stays",
    "/tree": "print the cached prefixes",
    "/help": "print this",
    "/quit": "end the chat, as Ctrl-D does",
}

_EXAMPLES = """\
examples:
  radixrt chat --model FOLDER_OR_ID --system 'Be brief.' --max-new-tokens 512
  radixrt chat --system 'Mira likes Oslo. Tarek counts 374.' --temperature 0

Each line is a turn. The answer streams, and the line after it shows how much of the prompt was found in the cache:
usually all earlier turns. /help lists the commands; escape a leading / with a space. Ctrl-C ends the
answer after the current pass, and its turn is forgotten; Ctrl-D ends the chat.

A base model has no chat template and continues plain text: a turn is appended to the last answer, in the form that
--turn gives.

exit status: 0 all turns were answered; 1 or 2 a turn failed in a pass, or could not be run (the last such turn
counts); 2 the options or the model cannot be used; 75 the GPU failed; 130 stopped by Ctrl-C outside an answer,
without a terminal, 129 by SIGHUP, 143 by SIGTERM.
"""


def add_chat_command(commands: Any) -> None:
    """Add `chat` to the subparsers of `radixrt`."""
    parser = add_command(
        commands,
        "chat",
        usage="[options]",
        help="talk with a model in the terminal",
        description="A conversation whose history is never computed twice.",
        epilog=_EXAMPLES,
        run=_chat,
    )
    option = parser.add_argument_group("conversation").add_argument
    option("--system", metavar="TEXT", help="the system message; for a base model, the beginning of its text")
    option(
        "--turn",
        metavar="TEXT",
        help=r"for a base model: the form of a turn, with {} for the line typed ({}; built-in model: \nQ: {}\nA:)",
    )
    add_options(parser, "sampling parameters", _SAMPLING)
    add_runtime_options(parser)
    parser.set_defaults(seed=None)  # drawn anew


def _chat(arguments: argparse.Namespace) -> int:
    # before the model is loaded, so that a mistake shows at once
    sampling_params(arguments)
    standard_input()
    turn: str | None = arguments.turn
    if turn is not None and turn.count("{}") != 1:
        raise ParameterError(f"--turn is {turn!r}; it must contain {{}} once, in the place of the line typed")
    options = runtime_options(arguments)
    with runtime_with_cache(arguments) as runtime:
        params = sampling_params(arguments, runtime.default_params)
        plain = runtime.tokenizer is None or not runtime.tokenizer.has_chat_template
        if turn is not None and not plain:
            raise ParameterError("--turn is for models without a chat template; this model has one")
        if turn is None:
            turn = _BUILTIN_TURN if plain and "model" not in options else "{}"
        chat = _Chat(runtime, arguments.system, turn, params)
        print("/help lists the commands, Ctrl-D ends the chat.")
        if plain:
            print(f"The model has no chat template: it continues plain text, each turn in the form {turn!r}.")
        return chat.run()


class _Chat:
    """A conversation with its commands.

    Args:
        system: the system message, or the beginning of plain text.
        turn: the form of a turn, with {} for the line typed.

    Raises:
        TokenizerError: the model has no tokenizer.
    """

    def __init__(self, runtime: Runtime, system: str | None, turn: str, params: SamplingParams) -> None:
        self._runtime = runtime
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._turn = turn
        self._params = params
        self._talk = self._begin()

    def run(self) -> int:
        """Answer the lines typed until their end. Returns the exit status."""
        status = DONE
        for line in _typed_lines():
            if line == "/quit":
                break
            if line.startswith("/"):
                self._command(line)
            elif line.strip():
                try:
                    failed = self._say(self._turn.replace("{}", line))
                except (SchedulerError, DeviceLostError):
                    raise
                except RadixrtError as error:  # the conversation is as it was before
                    print(f"radixrt: error: {error}", file=sys.stderr)
                    failed = exit_status(error)
                status = failed or status
        return status

    def _begin(self) -> Conversation:
        from radixrt.conversation import Conversation

        return Conversation(self._runtime, self._messages, self._params)

    def _command(self, line: str) -> None:
        if line == "/reset":
            self._talk = self._begin()
            _note("a new conversation")
        elif line == "/tree":
            self._runtime.print_tree()
        else:
            if line != "/help":
                print(f"there is no command {line}; the commands are:")
            for name, what in _COMMANDS.items():
                print(f"{name:<8}{what}")

    def _say(self, text: str) -> int:
        """Stream the answer, then print its cache hits. Returns FAILED if it has failed."""
        output = None
        # Ctrl-C is raised between two passes, also of a long prompt; leaving the stream ends its request.
        try:
            for chunk in self._talk.stream(text):
                output = chunk.output
                print(chunk.text, end="", flush=True)
        except Interrupted:  # SIGTERM, which ends the chat
            raise
        except KeyboardInterrupt:
            pass
        print()
        if output is None:
            _note("stopped; this turn is forgotten")
            return DONE
        if output.finish_reason is FinishReason.ERROR:
            print(f"radixrt: error: {output.error}", file=sys.stderr)
            return FAILED
        _note(_hit(output))
        return DONE


def _hit(output: RequestOutput) -> str:
    usage = output.usage
    cut = ", cut there" if output.finish_reason is FinishReason.LENGTH else ""
    return (
        f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens cached; "
        f"{usage.completion_tokens:,} generated{cut}"
    )


def _note(text: str) -> None:
    """Print a line that is not of the model."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    print(f"{dim}[{text}]{plain}", flush=True)


def _typed_lines() -> Iterator[str]:
    """Lines of standard input to its end; on a terminal they can be edited, and Ctrl-C forgets the line."""
    terminal = standard_input().isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # for `input`
    while True:
        try:
            yield input("> " if terminal else "")
        except EOFError:
            if terminal:
                print()
            return
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input is not text: {error}") from None
        except Interrupted:
            raise
        except KeyboardInterrupt:
            if not terminal:
                raise
            print("\nCtrl-D ends the chat")
