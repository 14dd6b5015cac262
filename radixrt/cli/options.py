"""Options that several commands share: each is a keyword of `SamplingParams` or `Runtime`, told once."""

# Tests: tests/cli/test_cli.py

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixrt.frontend.sampling_aliases import sampling_params_from_dict
from radixrt.sampling_params import SamplingParams


@dataclass(frozen=True)
class Option:
    """One keyword as an option. What is not given is not there, so that it keeps the default of the API.

    Attributes:
        name: of the keyword; the option is `--name` with dashes.
        help: what it does, with its default.
        metavar: what its value is called; None for an option that takes none.
        read: makes a value of the text; raises ArgumentTypeError or ValueError.
        repeats: may be given several times; the values are listed.
        choices: the values there are.
        value: of an option that takes none; False makes it `--no-...`.
        flag: another spelling of the option.
    """

    name: str
    help: str
    metavar: str | None = None
    read: Callable[[str], Any] = str
    repeats: bool = False
    choices: tuple[str, ...] | None = None
    value: bool = True
    flag: str | None = None

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Add the option to a group of a parser."""
        flag = self.flag or f"--{'' if self.value else 'no-'}{self.name.replace('_', '-')}"
        if self.metavar is None and self.choices is None:
            group.add_argument(
                flag,
                dest=self.name,
                action="store_const",
                const=self.value,
                default=argparse.SUPPRESS,
                help=self.help,
            )
        else:
            group.add_argument(
                flag,
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


_DEFAULT = SamplingParams()

SAMPLING = (
    Option("max_new_tokens", f"most tokens to generate ({_DEFAULT.max_new_tokens})", "N", int),
    Option("min_new_tokens", f"nothing ends an answer before it has N ({_DEFAULT.min_new_tokens})", "N", int),
    Option("n", f"answers to draw; the prompt is computed once for all ({_DEFAULT.n})", "N", int),
    Option("temperature", f"0 is greedy ({_DEFAULT.temperature})", "T", float),
    Option("top_k", f"draw from the K most likely tokens; 0 is all ({_DEFAULT.top_k})", "K", int),
    Option("top_p", f"draw from the fewest that reach probability P ({_DEFAULT.top_p})", "P", float),
    Option("min_p", f"none less likely than P times the likeliest ({_DEFAULT.min_p})", "P", float),
    Option(
        "repetition_penalty",
        f"above 1: tokens of prompt and answer less likely ({_DEFAULT.repetition_penalty})",
        "X",
        float,
    ),
    Option("presence_penalty", f"off the logits of the answer's tokens ({_DEFAULT.presence_penalty})", "X", float),
    Option("frequency_penalty", f"the same for each time they occur ({_DEFAULT.frequency_penalty})", "X", float),
    Option("logit_bias", "added to logits, such as 2=-100,13=1.5", "ID=X,...", _biases),
    Option("allowed_token_ids", "nothing else is drawn", "ID,...", _token_ids),
    Option("bad_words", "text that is not generated; may be repeated", "TEXT", repeats=True, flag="--bad-word"),
    Option("sampling_seed", "of each answer, in place of one from --seed and the prompt's place", "N", int),
    Option("stop", "end where this text is complete, and before it; may be repeated", "TEXT", repeats=True),
    Option("include_stop_str", "end after the stop text instead"),
    Option("stop_token_ids", "end at these tokens too", "ID,...", _token_ids),
    Option("ignore_eos", "do not end at the model's end tokens"),
    Option("skip_special_tokens", "leave special tokens in the text", value=False),
    Option("logprobs", "log-probabilities of the answer, with the N likeliest tokens", "N", int),
    Option("prompt_logprobs", "the same of the prompt", "N", int),
    Option("prompt_logprobs_start", "the first prompt token that gets one; before it the cache serves", "N", int),
)

MODEL = (
    Option("model", "Hugging Face folder or hub id (the small built-in model)", "FOLDER_OR_ID"),
    Option("dtype", "of weights and KV, such as bfloat16", "DTYPE"),
    Option("kv_dtype", "of KV: fp8 takes 8 bits a number (that of the weights)", choices=("auto", "fp8")),
    Option("device", "such as cpu, cuda or cuda:1", "DEVICE"),
    Option("impl", "what computes: kernels or references (kernels on a GPU)", choices=("auto", "torch", "triton")),
    Option("load_format", "dummy: random weights from config.json alone", choices=("auto", "dummy")),
    Option("context_length", "most tokens of a prompt with its answer", "N", int),
    Option("seed", "of the run: what prompts without a seed of their own draw", "N", int),
)

SCHEDULE = (
    Option("memory_fraction", "share of the memory left beside the weights for KV", "X", float),
    Option("max_total_tokens", "slots of the KV pool, whatever is free", "N", int),
    Option("host_memory_gb", "gigabytes of the host's memory for prefixes that leave the KV pool", "GB", float),
    Option("max_running_requests", "most requests in a pass", "N", int),
    Option("chunked_prefill_size", "most prompt tokens in a pass", "N", int),
    Option("schedule_policy", "longest prefix, or first come, first served", choices=("lpm", "fcfs")),
    Option("enable_prefix_cache", "reuse nothing, keep nothing", value=False, flag="--no-prefix-cache"),
    Option("force_miss", "find nothing in the cache, on the same code path: for measurements"),
    Option(
        "overlap",
        "plan no pass before the one before it has ended: for measurements",
        value=False,
        flag="--no-overlap",
    ),
    Option("cuda_graphs", "replay no captured graphs", value=False, flag="--no-graphs"),
    Option(
        "attention",
        "tree: kernels read KV that requests share once for all of them, where that is cheaper; references, as on "
        "a CPU, read it once for each. flat: each request by itself, for comparison (tree)",
        choices=("tree", "flat"),
    ),
)

KEPT_CACHE = (
    Option("load_cache", "begin with the prefixes that a run before this one has saved", "FILE", Path),
    Option("save_cache", "save all cached prefixes when the work is done, for --load-cache", "FILE", Path),
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
) -> argparse.ArgumentParser:
    """Add a command to the subparsers of `radixrt`. `run` gets what was parsed and returns the exit status."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        usage=f"radixrt {name} {usage}",
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def add_options(parser: argparse.ArgumentParser, title: str, options: Iterable[Option]) -> None:
    """Add a group of options."""
    group = parser.add_argument_group(title)
    for option in options:
        option.add_to(group)


def add_runtime_options(parser: argparse.ArgumentParser) -> None:
    """Add what `runtime_options` reads, and the files of `runtime_with_cache`."""
    add_options(parser, "model", MODEL)
    add_options(parser, "memory and schedule", SCHEDULE)
    add_options(parser, "cache kept across runs", KEPT_CACHE)


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """The parameters that were given, the others at their defaults. Raises ParameterError."""
    return sampling_params_from_dict(_given(arguments, SAMPLING))


def runtime_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keywords of Runtime that were given."""
    return _given(arguments, (*MODEL, *SCHEDULE))


def _given(arguments: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    given = vars(arguments)
    return {option.name: given[option.name] for option in options if option.name in given}
