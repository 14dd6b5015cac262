"""radixrt as a stage of Ray Data; `pip install '.[ray]'` in the clone installs Ray.

    answers = ray.data.read_parquet("prompts").map_batches(
        PromptProcessor,
        fn_constructor_kwargs={"model": "path/to/model", "sampling_params": {"max_tokens": 256}},
        compute=ray.data.ActorPoolStrategy(size=8),
        num_gpus=1,
        batch_size=4096,
        batch_format="pyarrow",
    )

Columns have the names that they have in `ray.data.llm`, errors among them: `__inference_error__` is "" where a row
has its answer. docs/ray.md has the details.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

try:
    import ray
    from ray.data.block import BlockAccessor, BlockType
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("ray", "pandas", "pyarrow"):
        raise
    raise ImportError(
        f"radixrt.integrations.ray needs Ray Data, of which {error.name} is not installed: pip install 'ray[data]'"
    ) from error

import numpy as np
import pyarrow as pa

from radixrt.errors import DeviceLostError, ParameterError, PromptError
from radixrt.frontend.arguments import read_params
from radixrt.output import RequestOutput, TokenLogprob
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

PROMPTS = ("prompt", "messages", "tokenized_prompt")
OF_CHATS = ("tools", "chat_template_kwargs", "continue_final_message")
ERROR = "__inference_error__"

_TOKEN = {"token_id": pa.int32(), "logprob": pa.float64()}
_LOGPROBS = pa.list_(pa.struct({**_TOKEN, "rank": pa.int32(), "top": pa.list_(pa.struct(_TOKEN))}))
# Types are said: of a block without errors, or without log-probabilities, Arrow could not tell them.
OUTPUT = pa.schema(
    {
        "generated_text": pa.string(),
        "generated_tokens": pa.list_(pa.int32()),
        "finish_reason": pa.string(),
        "num_input_tokens": pa.int32(),
        "num_cached_tokens": pa.int32(),
        "num_generated_tokens": pa.int32(),
        "logprobs": _LOGPROBS,
        "prompt_logprobs": _LOGPROBS,
        ERROR: pa.string(),
    }
)


class PromptProcessor:
    """Answers blocks of prompts, for `Dataset.map_batches`: each actor has a Runtime of its own.

    The rows of a block run in the Runtime's planned order and come back in their own, with all their columns and
    those of `OUTPUT`. A row that cannot be answered has its error there; the others run.

    Args:
        model: folder or hub id of the model, as every node finds it; None is the small built-in model.
        sampling_params: for what a row's own `sampling_params` do not give; None: `Runtime.default_params`.
        options: go to Runtime: dtype, memory_fraction, context_length, ... But `seed` is None here unless it is
            given: of one seed, two actors would draw the same answers to the same prompts.

    Raises:
        ParameterError: an option or a parameter is outside its bounds.
        ModelError, TokenizerError: the model cannot be used.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        _one_answer(read_params(sampling_params))  # before the model is loaded
        self.runtime = Runtime(model, **{"seed": None, **options})
        self._defaults = read_params(sampling_params, self.runtime.default_params)

    def __call__(self, batch: Any) -> pa.Table:
        """A block with its answers; it may have any format that `map_batches` offers, "pyarrow" at best.

        Raises ParameterError if it has no column of prompts, or has one of `OUTPUT` already.
        """
        table = _as_table(batch)
        columns = {
            name: [_plain(value) for value in table[name].to_pylist(maps_as_pydicts="strict")]
            for name in (*PROMPTS, *OF_CHATS, "sampling_params")
            if name in table.column_names
        }
        prompts: list[dict[str, Any]] = []
        params: list[SamplingParams] = []
        places: list[int] = []
        rows: dict[int, dict[str, Any]] = {}  # by their places
        for place in range(table.num_rows):
            row = {name: values[place] for name, values in columns.items() if values[place] is not None}
            try:
                own = _one_answer(read_params(row.pop("sampling_params", None) or None, self._defaults))
                prompts.append(_prompt(row))
            except (ParameterError, PromptError) as error:
                rows[place] = _refused(str(error))
                continue
            params.append(own)
            places.append(place)
        for place, output in zip(places, self._answered(prompts, params), strict=True):
            rows[place] = _answer(output)
        answers = pa.Table.from_pylist([rows[place] for place in range(table.num_rows)], schema=OUTPUT)
        for name in OUTPUT.names:
            table = table.append_column(OUTPUT.field(name), answers[name])
        return table

    def _answered(self, prompts: list[dict[str, Any]], params: list[SamplingParams]) -> list[RequestOutput]:
        try:
            return self.runtime.generate(prompts, params, on_error="return")
        except DeviceLostError:
            if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
                raise
            # Ray runs the block again in a new actor if this one dies, but not if it raises or ends in order.
            _log.exception("the device is lost; this actor ends, so that Ray starts another one")
            os._exit(1)


def _as_table(batch: Any) -> pa.Table:
    """A block as a table that is fit for answers. Raises ParameterError."""
    table = batch if isinstance(batch, pa.Table) else BlockAccessor.batch_to_block(batch, BlockType.ARROW)
    names = table.column_names
    if names and not any(name in names for name in PROMPTS):
        raise ParameterError(f"the columns are {', '.join(names)}; prompts are in {' or '.join(PROMPTS)}")
    if taken := [name for name in OUTPUT.names if name in names]:
        raise ParameterError(f"there is a column {taken[0]} already: rename or drop it before")
    return table


def _plain(value: Any) -> Any:
    """A cell without arrays, and without the keys whose value is null: all structs of a column have the same."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _prompt(row: dict[str, Any]) -> dict[str, Any]:
    """What a row asks, as a prompt of Runtime. Raises PromptError."""
    given = [name for name in PROMPTS if name in row]
    if not given or ("messages" in given and len(given) > 1):
        what = " and ".join(given) or "no prompt"
        raise PromptError(f"the row has {what}; give one of {', '.join(PROMPTS)}")
    if "messages" in given:
        return row
    if own := [name for name in OF_CHATS if name in row]:
        raise PromptError(f"the row has {own[0]}, which only a chat may have: give messages")
    if "tokenized_prompt" in given:  # with or without the text that it was made of
        return {"prompt_token_ids": row["tokenized_prompt"]}
    return row


def _one_answer(params: SamplingParams) -> SamplingParams:
    if params.n != 1:
        raise ParameterError(f"n is {params.n}; a row has one answer: repeat the row, its prompt is computed once")
    return params


def _answer(output: RequestOutput) -> dict[str, Any]:
    """The columns of a row that ran, or was refused."""
    if output.failure is not None:
        return _refused(output.failure)
    return {
        "generated_text": output.text,
        "generated_tokens": output.token_ids,
        "finish_reason": str(output.finish_reason),
        "num_input_tokens": output.usage.prompt_tokens,
        "num_cached_tokens": output.usage.cached_tokens,
        "num_generated_tokens": output.usage.completion_tokens,
        "logprobs": _logprobs(output.logprobs),
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        ERROR: "",
    }


def _refused(error: str) -> dict[str, Any]:
    """The columns of a row without an answer: no nulls, as in `ray.data.llm`."""
    counts = dict.fromkeys(("num_input_tokens", "num_cached_tokens", "num_generated_tokens"), 0)
    return {"generated_text": "", "generated_tokens": [], "finish_reason": "error", **counts, ERROR: error}


def _logprobs(tokens: Iterable[TokenLogprob] | None) -> list[dict[str, Any]] | None:
    if tokens is None:
        return None
    return [
        {
            "token_id": token.token_id,
            "logprob": token.logprob,
            "rank": token.rank,
            "top": [{"token_id": other, "logprob": logprob} for other, logprob in token.top],
        }
        for token in tokens
    ]
