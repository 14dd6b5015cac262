"""Options shared by several commands: each is a keyword of `SamplingParams` or `Runtime`."""

# Tests: tests/cli/test_cli.py

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixrt.batch.formats.source import MAX_LINE
from radixrt.form_spec import FORM_ENGINES
from radixrt.frontend.sampling_aliases import chosen_length, sampling_params_from_dict
from radixrt.sampling_params import LOGPROBS_MODES, SamplingParams


@dataclass(frozen=True)
class Option:
    """A keyword as an option. Without it the keyword keeps the default of the API.

    Attributes:
        name: of the keyword; the option is `--name` with dashes.
        help: its effect and default.
        metavar: name of its value; None for an option without one.
        read: parses the value; raises ArgumentTypeError or ValueError.
        repeats: may be given several times; the values make a list.
        choices: the possible values.
        value: set by an option without a value; False makes it `--no-...`.
        flag: another spelling of the option.
        also: one more.
    """

    name: str
    help: str
    metavar: str | None = None
    read: Callable[[str], Any] = str
    repeats: bool = False
    choices: tuple[str, ...] | None = None
    value: bool = True
    flag: str | None = None
    also: str | None = None

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Add the option to a group of a parser."""
        flags = [self.flag or f"--{'' if self.value else 'no-'}{self.name.replace('_', '-')}"]
        if self.also is not None:
            flags.append(self.also)
        if self.metavar is None and self.choices is None:
            group.add_argument(
                *flags,
                dest=self.name,
                action="store_const",
                const=self.value,
                default=argparse.SUPPRESS,
                help=self.help,
            )
        else:
            group.add_argument(
                *flags,
                dest=self.name,
                action="append" if self.repeats else "store",
                type=self.read,
                metavar=self.metavar,
                choices=self.choices,
                default=argparse.SUPPRESS,
                help=self.help,
            )


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids, such as 2,13") from None


def _biases(text: str) -> dict[int, float]:
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of biases, such as 2=-100,13=1.5") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _schema(text: str) -> str:
    """A JSON schema, or the file that holds it."""
    return text if text.lstrip().startswith("{") else _file_text(text)


def file_path(text: str) -> Path:
    """A path; of an empty one pathlib would make that of the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def _file_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from None


_DEFAULT = SamplingParams()

SAMPLING = (
    Option(
        "max_new_tokens", f"maximum tokens to generate ({_DEFAULT.max_new_tokens})", "N", int, also="--max-tokens"
    ),
    Option("min_new_tokens", f"minimum tokens to generate ({_DEFAULT.min_new_tokens})", "N", int),
    Option("n", f"answers to draw; the prompt is computed once for all ({_DEFAULT.n})", "N", int),
    Option("temperature", f"0 is greedy ({_DEFAULT.temperature})", "T", float),
    Option("top_k", f"draw from the K likeliest tokens; 0 is all ({_DEFAULT.top_k})", "K", int),
    Option("top_p", f"draw from the fewest tokens that reach probability P ({_DEFAULT.top_p})", "P", float),
    Option("min_p", f"draw no token less likely than P times the likeliest ({_DEFAULT.min_p})", "P", float),
    Option(
        "repetition_penalty",
        f"above 1: makes tokens of prompt and answer less likely ({_DEFAULT.repetition_penalty})",
        "X",
        float,
    ),
    Option(
        "presence_penalty",
        f"subtracted from logits of the answer's tokens ({_DEFAULT.presence_penalty})",
        "X",
        float,
    ),
    Option("frequency_penalty", f"the same for each occurrence ({_DEFAULT.frequency_penalty})", "X", float),
    Option("logit_bias", "added to logits, such as 2=-100,13=1.5", "ID=X,...", _biases),
    Option("allowed_token_ids", "draw no other tokens", "ID,...", _token_ids),
    Option("bad_words", "text never generated; may be repeated", "TEXT", repeats=True, flag="--bad-word"),
    Option("sampling_seed", "of each prompt's draws, instead of one from --seed and the prompt's place", "N", int),
    Option("stop", "end before this text; may be repeated", "TEXT", repeats=True),
    Option(
        "stop_regex",
        "end before what this regular expression first matches; may be repeated",
        "REGEX",
        repeats=True,
    ),
    Option("include_stop_str", "keep the stop text, or that of the token that ended it"),
    Option("stop_token_ids", "also end at these tokens", "ID,...", _token_ids),
    Option("ignore_eos", "do not end at the model's end tokens"),
    Option("skip_special_tokens", "leave special tokens in the text", value=False),
    Option("detokenize", "make no text", value=False),
    Option("logprobs", "log-probabilities of the answer, with the N likeliest tokens", "N", int),
    Option("prompt_logprobs", "the same for the prompt", "N", int),
    Option(
        "logprobs_mode",
        f"those of --logprobs are the model's, or of what a token was drawn from ({_DEFAULT.logprobs_mode})",
        choices=LOGPROBS_MODES,
    ),
    Option(
        "prompt_logprobs_start",
        "first prompt token that --prompt-logprobs scores (0); earlier ones may be cached",
        "N",
        int,
    ),
    Option("truncate_prompt_tokens", "keep the last N tokens of a longer prompt", "N", int),
    Option("json_schema", "answers are JSON that this schema takes", "FILE_OR_JSON", _schema),
    Option("json_object", "answers are JSON objects"),
    Option("regex", "answers match this regular expression as a whole", "REGEX"),
    Option("choice", "answers are this text, or one of several; may be repeated", "TEXT", repeats=True),
    Option("grammar", "answers are texts of this grammar, in Lark or GBNF", "FILE", _file_text),
    Option("form_engine", f"what compiles that ({_DEFAULT.form_engine})", choices=FORM_ENGINES),
)

MODEL = (
    Option("model", "Hugging Face folder or hub id, or a .gguf file (the small built-in model)", "FOLDER_OR_ID"),
    Option("revision", "branch, tag or commit of a hub id (its main branch)", "NAME"),
    Option("dtype", "of weights and KV, such as bfloat16", "DTYPE"),
    Option("kv_dtype", "of KV; fp8: 8 bits a number (that of the weights)", choices=("auto", "fp8")),
    Option("quantization", "of weights, as they are loaded; fp8: 8 bits a number (none)", choices=("fp8",)),
    Option("device", "such as cpu, cuda or cuda:1", "DEVICE"),
    Option(
        "tensor_parallel_size",
        "cards that hold the model together, each a part of its weights (1)",
        "N",
        int,
        also="--tp",
    ),
    Option(
        "pipeline_parallel_size",
        "stages of consecutive layers, each on as many cards as --tp says (1)",
        "N",
        int,
        also="--pp",
    ),
    Option("impl", "kernels or references (kernels on a GPU)", choices=("auto", "torch", "triton")),
    Option("load_format", "dummy: random weights from config.json alone", choices=("auto", "dummy")),
    Option(
        "generation_config",
        "auto: begin with the parameters that the model's own generation_config.json gives (none)",
        choices=("auto", "none"),
    ),
    Option(
        "chat_template_kwargs",
        "variables of the chat template, such as '{\"enable_thinking\": false}'",
        "JSON",
        _json_object,
    ),
    Option("threads", "processors used on a CPU (all that the process may use)", "N", int),
    Option("context_length", "maximum tokens of a prompt with its answer", "N", int),
    Option("seed", "of the run, for prompts without a seed (generate and chat: drawn anew; else 0)", "N", int),
)

SCHEDULE = (
    Option("memory_fraction", "share for KV of the memory that the weights leave", "X", float),
    Option("max_total_tokens", "slots of the KV pool, instead of --memory-fraction", "N", int),
    Option("host_memory_gb", "host memory in gigabytes for prefixes evicted from the KV pool", "GB", float),
    Option("max_running_requests", "maximum requests in a pass", "N", int),
    Option("chunked_prefill_size", "maximum prompt tokens in a pass", "N", int),
    Option("schedule_policy", "longest prefix match, or first come, first served", choices=("lpm", "fcfs")),
    Option("enable_prefix_cache", "keep and reuse no prefixes", value=False, flag="--no-prefix-cache"),
    Option("force_miss", "find nothing in the cache, on the same code path (for measurements)"),
    Option(
        "overlap",
        "plan each pass after the previous one has ended (for measurements)",
        value=False,
        flag="--no-overlap",
    ),
    Option("cuda_graphs", "replay no captured graphs", value=False, flag="--no-graphs"),
    Option(
        "attention",
        "tree: kernels read shared KV once for all its requests, where that is cheaper; references, as on a CPU, "
        "read it once for each. flat: each request by itself, for comparison (tree)",
        choices=("tree", "flat"),
    ),
    Option("deterministic", "the same bits for a prompt whatever is cached and whatever runs beside it"),
)

KEPT_CACHE = (
    Option("load_cache", "begin with the prefixes that an earlier run has saved", "FILE", file_path),
    Option(
        "save_cache",
        "save all cached prefixes when the work is done, for --load-cache; replaces only such a file",
        "FILE",
        file_path,
    ),
)


def add_command(
    commands: Any,
    name: str,
    *,
    usage: str,
    help: str,
    description: str,
    epilog: str,
    run: Callable[[argparse.Namespace], int],
    prints: bool = True,
) -> argparse.ArgumentParser:
    """Add a command to the subparsers of `radixrt`. `run` gets the arguments, and returns the exit status.

    Unless it `prints`, it runs without standard output, too.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        usage=f"radixrt {name} {usage}",
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, prints=prints)
    return parser


def add_options(parser: argparse.ArgumentParser, title: str, options: Iterable[Option]) -> None:
    """Add a group of options."""
    group = parser.add_argument_group(title)
    for option in options:
        option.add_to(group)


def add_runtime_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `runtime_options` and `runtime_with_cache`."""
    add_options(parser, "model", MODEL)
    add_options(parser, "memory and schedule", SCHEDULE)
    add_options(parser, "cache kept across runs", KEPT_CACHE)
    parser.add_argument("--verbose", action="store_true", help="tell on stderr what starting up takes")


def add_line_option(option: Callable[..., object]) -> None:
    """Add --max-line-bytes by a group's `add_argument`."""
    option(
        "--max-line-bytes",
        type=int,
        default=MAX_LINE,
        metavar="N",
        help=f"a longer line is a bad one ({MAX_LINE})",
    )


def sampling_params(arguments: argparse.Namespace, defaults: SamplingParams | None = None) -> SamplingParams:
    """The given parameters, and `defaults`, or SamplingParams(), for the others. Raises ParameterError."""
    return sampling_params_from_dict(_given(arguments, SAMPLING), defaults)


def chat_max_tokens(arguments: argparse.Namespace, defaults: SamplingParams | None = None) -> int:
    """That of chats in OpenAI's format that give no maximum."""
    return chosen_length(_given(arguments, SAMPLING), defaults or SamplingParams())


def runtime_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The given keywords of Runtime."""
    return _given(arguments, (*MODEL, *SCHEDULE))


def _given(arguments: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    given = vars(arguments)
    return {option.name: given[option.name] for option in options if option.name in given}
