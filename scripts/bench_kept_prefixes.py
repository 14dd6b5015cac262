"""Documents that are asked about in several rounds: what a host tier and a saved cache bring.

python scripts/bench_kept_prefixes.py
python scripts/bench_kept_prefixes.py --config llama-3.1-8b --documents 24 --document-len 8192 --json out.json

First with a KV pool that holds a quarter of the documents, without and with a host tier; then with a pool that
holds them all, whose cache is saved; then in a second run that loads it. The saved cache needs as much disk as the
documents' KV. Weights are random unless --model is given.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from tqdm import tqdm

from radixrt.bench.catalogue import SHAPES
from radixrt.bench.report import check_files, figure_table, told, wide_console, write_json
from radixrt.bench.subject import environment_of, model_of, model_shape
from radixrt.checks import check_int
from radixrt.errors import ParameterError, RadixrtError
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams

QUESTION_LEN, NEW_TOKENS = 32, 8
_WIDTH = 110  # of the table without a terminal
QUARTER, TIER, WHOLE, NEXT = "a quarter fits", "a quarter, and a host tier", "all fit", "the next run"


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        model, config: a model, or one of SHAPES with random weights.
        device, dtype: as in `Runtime`.
        documents, document_len: how many there are, and the tokens of each.
        rounds: each asks one question about every document.
        folder: where the cache is saved; None: among the temporary files.
        seed: of documents, questions and random weights.
    """

    model: str | None = None
    config: str | None = None
    device: str | None = None
    dtype: str = "auto"
    documents: int = 12
    document_len: int = 1024
    rounds: int = 4
    folder: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model is not None and self.config is not None:
            raise ParameterError("model and config are both given; give one")
        check_int("documents", self.documents, 8, 2**20)
        check_int("document_len", self.document_len, 1, 2**30)
        check_int("rounds", self.rounds, 2, 1000)
        check_int("seed", self.seed, 0, 2**32)


@dataclass(frozen=True)
class Round:
    """A question about every document: seconds, prompt tokens, and prompt tokens found in the cache."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class KeptPrefixes:
    """The rounds of each run, by its name, and the cost of saving and loading the cache.

    Attributes:
        rounds: of QUARTER, TIER, WHOLE and NEXT.
        file_bytes, tokens: of the saved cache.
        save_seconds, load_seconds: the fingerprint of the weights included.
    """

    rounds: dict[str, list[Round]]
    file_bytes: int
    tokens: int
    save_seconds: float
    load_seconds: float


def measure(options: Options) -> KeptPrefixes:
    """All four runs, one after the other; a bar goes to stderr.

    Raises:
        ParameterError, ModelError: a Runtime cannot be made.
        PromptError: a document does not fit into the model's context.
    """
    tokens = options.documents * options.document_len
    # Room for the documents, all questions and answers.
    room = 2 * options.documents * options.rounds * (QUESTION_LEN + NEW_TOKENS)
    fits = tokens + room + options.document_len
    rounds: dict[str, list[Round]] = {}
    with (
        tqdm(total=4 * options.rounds, unit=" rounds", file=sys.stderr) as bar,
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        model_of(options.model, options.config) as (model, load_format),
    ):
        path = Path(folder) / "cache.safetensors"

        def runtime(pool: int, **own: Any) -> Runtime:
            return Runtime(
                model,
                load_format=load_format,
                device=options.device,
                dtype=options.dtype,
                max_total_tokens=pool,
                seed=options.seed,
                **own,
            )

        def play(name: str, runtime: Runtime, first: int = 0) -> None:
            rounds[name] = []
            for i in range(options.rounds):
                bar.set_postfix_str(name)
                rounds[name].append(_round(runtime, options, range(options.documents), first + i))
                bar.update()

        with runtime(fits // 4) as small:
            _warm_up(small, options)
            play(QUARTER, small)
            token_bytes = model_shape(small).kv_bytes
        with runtime(fits // 4, host_memory_gb=1.2 * fits * token_bytes / 1e9) as tiered:
            _warm_up(tiered, options)
            play(TIER, tiered)
        with runtime(fits) as all_fit:
            _warm_up(all_fit, options)
            play(WHOLE, all_fit)
            began = time.perf_counter()
            saved = all_fit.save_cache(path)
            save_seconds = time.perf_counter() - began
        with runtime(fits) as following:
            _warm_up(following, options)
            began = time.perf_counter()
            following.load_cache(path)
            load_seconds = time.perf_counter() - began
            play(NEXT, following, first=options.rounds)  # other questions
        return KeptPrefixes(rounds, path.stat().st_size, saved, save_seconds, load_seconds)


def _round(runtime: Runtime, options: Options, documents: Iterable[int], index: int) -> Round:
    prompts = []
    for document in documents:
        text = _tokens(runtime, options, document, options.document_len)
        question = _tokens(runtime, options, options.documents * (index + 1) + document, QUESTION_LEN)
        prompts.append(np.concatenate([text, question]).tolist())
    before = runtime.cache_stats()
    began = time.perf_counter()
    runtime.generate(prompts, SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True))
    seconds = time.perf_counter() - began
    after = runtime.cache_stats()
    return Round(seconds, after.prompt_tokens - before.prompt_tokens, after.cached_tokens - before.cached_tokens)


def _tokens(runtime: Runtime, options: Options, seed: int, count: int) -> np.ndarray:
    return np.random.default_rng([options.seed, seed]).integers(0, runtime.config.vocab_size, count)


def _warm_up(runtime: Runtime, options: Options) -> None:
    """Warm up with two other documents, which then leave the cache."""
    _round(runtime, options, (2**32, 2**32 + 1), 0)
    runtime.capture_graphs()
    runtime.flush_cache()


def print_kept_prefixes(figures: KeptPrefixes, console: Console) -> None:
    """Print the figures as a table, one run a line."""
    columns = "first\nround, s", "hit rate", "later\nrounds, s", "hit rate"
    caption = "seconds of a round; later: medians. hit rate: share of the prompts' tokens that were cached"
    table = figure_table(None, "documents", *columns, caption=caption)
    for name, (first, *later) in figures.rounds.items():
        hits = sum(played.cached_tokens for played in later) / sum(played.prompt_tokens for played in later)
        table.add_row(
            name,
            f"{first.seconds:.2f}",
            f"{first.cached_tokens / first.prompt_tokens:.1%}",
            f"{median(played.seconds for played in later):.2f}",
            f"{hits:.1%}",
        )
    console.print(table)
    gigabytes = figures.file_bytes / 1e9
    console.print(
        f"{figures.tokens:,} cached tokens, {gigabytes:.2f} GB: saved in {figures.save_seconds:.2f} s "
        f"({gigabytes / figures.save_seconds:.2f} GB/s), loaded in {figures.load_seconds:.2f} s "
        f"({gigabytes / figures.load_seconds:.2f} GB/s)"
    )


def run_benchmark(options: Options, json_file: Path | None = None) -> None:
    """Run, print, and write the requested file.

    Raises:
        RadixrtError: see `measure`; or a file cannot be written, which is found before anything runs.
    """
    check_files(json_file)
    if options.folder is not None and not options.folder.is_dir():
        raise ParameterError(f"{options.folder} is no folder")
    console = wide_console(_WIDTH)
    environment = environment_of(options.device, options.model or f"{options.config or 'tiny'} (random weights)")
    console.print(told(environment))
    figures = measure(options)
    print_kept_prefixes(figures, console)
    if json_file is not None:
        report = {"environment": environment, "options": asdict(options), "figures": asdict(figures)}
        write_json(json_file, report)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # what is not given has the defaults of `Options`
    )
    option = parser.add_argument
    option("--documents", type=int, metavar="N", help="number of documents (12)")
    option("--document-len", type=int, metavar="N", help="tokens of each (1024)")
    option("--rounds", type=int, metavar="N", help="rounds of one question about every document (4)")
    option("--seed", type=int, metavar="N", help="of the documents, the questions and the random weights (0)")
    option("--model", metavar="FOLDER_OR_ID", help="Hugging Face folder or hub id, or: built-in")
    option("--config", choices=tuple(SHAPES), help="random weights of a known shape (tiny)")
    option("--dtype", metavar="DTYPE", help="of weights and KV, such as bfloat16")
    option("--device", metavar="DEVICE", help="such as cpu, cuda or cuda:1")
    option("--folder", type=Path, metavar="FOLDER", help="for the saved cache (that of temporary files)")
    option("--json", type=Path, default=None, metavar="FILE", help="write every round's figures")
    given = vars(parser.parse_args(argv))
    json_file = given.pop("json")
    try:
        run_benchmark(Options(**given), json_file)
    except RadixrtError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
