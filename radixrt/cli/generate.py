"""`radixrt generate`: prompts from the command line or standard input, answers on standard output."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from radixrt.cli.exit_status import DONE, FAILED
from radixrt.cli.kept_cache import runtime_with_cache
from radixrt.cli.options import (
    SAMPLING,
    add_command,
    add_options,
    add_runtime_options,
    sampling_params,
)
from radixrt.errors import ParameterError, PromptError
from radixrt.files.standard import standard_input
from radixrt.output import FinishReason, RequestOutput

if TYPE_CHECKING:
    from radixrt.runtime import Runtime
    from radixrt.sampling_params import SamplingParams

_EXAMPLES = """\
examples:
  radixrt generate $'Mira likes Oslo.\\nQ: Mira likes?\\nA:' --temperature 0
  radixrt generate 'Once upon a time' 'Once upon a day' --model FOLDER --max-new-tokens 64 --json
  cat prompt.txt | radixrt generate - --model FOLDER --stop $'\\n\\n'

Prompts are taken verbatim; `radixrt chat` applies the model's chat template. With several answers a line before
each names its prompt, or --json prints one object a line: text, output_ids and meta_info (id, finish_reason,
prompt_tokens, completion_tokens, cached_tokens, e2e_latency, and log-probabilities if asked for), n lines for a
prompt with n answers.

exit status: 0 done; 1 a pass failed; 2 the options, a prompt or the model cannot be used; 75 the GPU or
the disk failed; 129 stopped by SIGHUP, 130 by Ctrl-C, 143 by SIGTERM; 141 the reader of standard output has gone.
"""


def add_generate_command(commands: Any) -> None:
    """Add `generate` to the subparsers of `radixrt`."""
    parser = add_command(
        commands,
        "generate",
        usage="PROMPT [PROMPT ...] [options]",
        help="answer prompts given here",
        description="Answer one prompt or several; shared prefixes are computed once.",
        epilog=_EXAMPLES,
        run=_generate,
    )
    parser.add_argument(
        "prompts", nargs="+", metavar="PROMPT", help="text; - is standard input, without the end of its last line"
    )
    shown = parser.add_argument_group("output").add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print each answer as an object on a line")
    shown.add_argument(
        "--stream",
        action="store_true",
        help="print the text of one answer as it comes; the default on a terminal",
    )
    add_options(parser, "sampling parameters", SAMPLING)
    add_runtime_options(parser)
    parser.set_defaults(seed=None)  # drawn anew


def _generate(arguments: argparse.Namespace) -> int:
    # before the model is loaded, so that a mistake shows at once
    params = sampling_params(arguments)
    if not arguments.json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise ParameterError("log-probabilities are printed with --json only")
    if not (arguments.json or params.detokenize):
        raise ParameterError("--no-detokenize leaves nothing to print; give --json, too")
    one = len(arguments.prompts) == params.n == 1
    if arguments.stream and not one:
        raise ParameterError("--stream takes one prompt and prints one answer")
    prompts = _prompts(arguments.prompts)
    with runtime_with_cache(arguments) as runtime:
        params = sampling_params(arguments, runtime.default_params)
        if arguments.stream or (one and not arguments.json and sys.stdout.isatty()):
            return _status([_stream(runtime, prompts[0], params)])
        outputs = runtime.generate(prompts, params)
    for output in outputs:
        for answer in output.split():
            if arguments.json:
                print(json.dumps(answer.to_dict()))
                continue
            if not one:
                print(f"# prompt {output.index}" + (f", answer {answer.outputs[0].index}" if params.n > 1 else ""))
            print(answer.text)
    return _status(outputs)


def _prompts(given: list[str]) -> list[str]:
    """The prompts, with `-` replaced by the text of standard input."""
    if given.count("-") > 1:
        raise ParameterError("- is given twice; standard input is one prompt")
    try:
        return [standard_input().read().removesuffix("\n") if prompt == "-" else prompt for prompt in given]
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not text: {error}") from None


def _stream(runtime: Runtime, prompt: str, params: SamplingParams) -> RequestOutput:
    try:
        for chunk in runtime.stream(prompt, params):
            print(chunk.text, end="", flush=True)
            if chunk.output is not None:
                output = chunk.output
    except KeyboardInterrupt:
        print()
        raise
    print()
    return output


def _status(outputs: list[RequestOutput]) -> int:
    """The exit status; failed answers are named on stderr."""
    status = DONE
    for output in outputs:
        for answer in output.outputs:
            if answer.finish_reason is FinishReason.ERROR:
                print(f"radixrt: error: prompt {output.index}: {answer.error}", file=sys.stderr)
                status = FAILED
    return status
