"""radixrt as a model of lm-evaluation-harness; `pip install '.[eval]'` in the clone installs the harness.

From a shell, with any option of `lm-eval run`:

    python -m radixrt.integrations.lm_eval --model_args pretrained=path/to/model,dtype=bfloat16 --tasks hellaswag

From Python:

    from lm_eval import simple_evaluate
    from radixrt.integrations.lm_eval import RadixLM

    results = simple_evaluate(RadixLM("path/to/model", dtype="bfloat16"), tasks=["hellaswag"])

Importing this module also registers the model under the name `radixrt`.

All requests of one kind go to the Runtime at once, so that few-shot heads and the contexts of multiple-choice
questions are computed once each. After each kind of requests a log line shows the reuse, and
`results["config"]` has the same for the whole run (`RadixLM.get_model_info`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "lm_eval":
        raise
    needs = "radixrt.integrations.lm_eval needs lm-evaluation-harness, which is not installed: pip install lm-eval"
    if __name__ != "__main__":
        raise ImportError(needs) from error
    print(f"radixrt: error: {needs}", file=sys.stderr)
    sys.exit(2)

import numpy as np

import radixrt
from radixrt.arrays import Int32Array
from radixrt.errors import ParameterError, PassError, PromptError, TokenizerError
from radixrt.frontend.sampling_aliases import sampling_params_from_dict
from radixrt.sampling_params import SamplingParams
from radixrt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

# A child of the harness's own logger, whose messages its command line shows.
_log = logging.getLogger("lm_eval.models.radixrt")

# Names in the harness's tasks; the first given one counts.
_MAX_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")

# A pair to score: texts (None for a window of a longer text), context ids, continuation ids.
_Pair = tuple[tuple[str, str] | None, list[int], list[int]]


HARNESS_DEVICE = "cuda:0"  # the harness's default, with or without a GPU


if __name__ == "__main__":  # a task that imports this module gets the same class: the harness takes a name once
    sys.modules["radixrt.integrations.lm_eval"] = sys.modules[__name__]


@register_model("radixrt")
class RadixLM(TemplateLM):
    """A model of the harness that runs on a Runtime.

    Args:
        pretrained: folder or hub id of the model; None is the small built-in model.
        model: another name of `pretrained`.
        max_length: maximum tokens of a context with its continuation or answer; None is the model's own.
        max_gen_toks: maximum tokens to generate, for tasks without a limit.
        device: as in `Runtime`; the harness's default leaves the choice to Runtime.
        batch_size, max_batch_size: the harness always gives them; the Runtime makes its batches itself and
            results do not depend on them (see `max_running_requests` of Runtime).
        options: go to Runtime: dtype, memory_fraction, chunked_prefill_size, ...

    Raises:
        ParameterError: an option is outside its bounds, or the model is named twice.
        ModelError, TokenizerError: the model cannot be used, or has no tokenizer.
    """

    def __init__(
        self,
        pretrained: str | Path | None = None,
        *,
        model: str | Path | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        import torch  # a second, hence here

        if pretrained is not None and model is not None:
            raise ParameterError(f"pretrained is {pretrained!r} and model is {model!r}; give one of them")
        self._name = str(pretrained or model or "built-in")
        if device == HARNESS_DEVICE and not torch.cuda.is_available():
            device = None
        self.runtime = radixrt.Runtime(pretrained or model, device=device, context_length=max_length, **options)
        if self.runtime.tokenizer is None:
            self.runtime.close()
            raise TokenizerError(f"{self._name} has no tokenizer, and the harness asks in text")
        self._tokenizer: Tokenizer = self.runtime.tokenizer
        self._ids: dict[str, Int32Array] = {}  # of texts that are asked for now
        self._device = self.runtime.device
        self._max_gen_toks = max_gen_toks

    # -- properties of the model -----------------------------------------------------------------------------

    @property
    def max_length(self) -> int:
        return self.runtime.context_length

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def eot_token_id(self) -> int:
        if self._tokenizer.eos_token_id is None:
            raise TokenizerError(f"the tokenizer of {self._name} has no end token")
        return self._tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, or the end token if there is none."""
        bos = self._tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text. `add_special_tokens` None: with BOS where the tokenizer adds it, but never two."""
        if add_special_tokens is None:
            known = self._ids.get(string)
            ids = self._all_encoded([string])[0] if known is None else known
        else:
            ids = self._tokenizer.encode(string, add_special_tokens=add_special_tokens)
        found: list[int] = ids.tolist()
        return found

    def _all_encoded(self, texts: Sequence[str]) -> list[Int32Array]:
        """Token ids of texts, with BOS where the tokenizer adds it, but never two."""
        bos = self._tokenizer.bos_token_id
        ids = self._tokenizer.encode_batch(texts)
        if bos is None:
            return ids
        piece = self._tokenizer.piece(bos)
        twice = [i for i, text in enumerate(texts) if text.startswith(piece)]
        bare = self._tokenizer.encode_batch([texts[i] for i in twice], add_special_tokens=False)
        for i, own in zip(twice, bare, strict=True):
            if own[:1].tolist() == [bos]:  # from a chat template
                ids[i] = own
        return ids

    @contextmanager
    def _encoded(self, texts: Iterable[str]) -> Iterator[None]:
        """Encode texts together, ahead of the harness, which asks for one after the other."""
        distinct = list(dict.fromkeys(texts))
        self._ids = dict(zip(distinct, self._all_encoded(distinct), strict=True))
        try:
            yield
        finally:
            self._ids = {}

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages as text, by the checkpoint's template.

        Args:
            add_generation_prompt: False: the last message is the beginning of the answer, and the text ends
                with it.

        Raises:
            TokenizerError: there is no template, it refuses the messages, or leaves one out.
        """
        if add_generation_prompt:
            return self._tokenizer.chat_text(chat_history)
        return self._tokenizer.chat_text({"messages": list(chat_history), "continue_final_message": True})

    def get_model_info(self) -> dict[str, Any]:
        """Entries for `results["config"]`: figures of all answers of this model."""
        stats = self.runtime.cache_stats()
        return {
            "radixrt_version": radixrt.__version__,
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "cache_hit_rate": stats.hit_rate,
        }

    # -- requests ------------------------------------------------------------------------------------------

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """What `_loglikelihood_tokens` gives for each context and continuation."""
        pairs = [(before, after) for before, after in (request.args for request in requests) if before]
        with self._encoded(text for before, after in pairs for text in (before.rstrip(), before + after)):
            found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[_Pair], disable_tqdm: bool = False, kind: str = "loglikelihood", **_: Any
    ) -> list[tuple[float, bool]]:
        """For each pair the continuation's natural log-likelihood, and whether greedy decoding would give it.

        Too long contexts are cut on the left.

        Raises:
            PromptError: a continuation has no token of its own, or does not fit.
            PassError: the model computed values that are not finite, or a request was aborted.
        """
        contexts: list[list[int]] = []
        num_cut = 0
        for texts, context, continuation in requests:
            room = self.max_length - len(continuation)
            if not continuation or room < 1:
                raise PromptError(
                    f"a continuation has {len(continuation)} tokens of its own; with a context of "
                    f"{self.max_length} it may have 1 to {self.max_length - 1}: {_shown(texts)}"
                )
            num_cut += len(context) > room
            contexts.append(context[-room:])
        self._warn_of_cut(num_cut, len(requests))
        with self._reported(kind, len(requests)):
            scores = self.runtime.score(
                [np.array(context, dtype=np.int32) for context in contexts],
                [continuation for _, _, continuation in requests],
                progress=not disable_tqdm,
            )
        results = []
        for (texts, _context, _continuation), score in zip(requests, scores, strict=True):
            assert not isinstance(score, list)  # one continuation was given
            results.append((float(score.logprob), score.is_greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows of `max_length` tokens where it is longer."""
        windows: list[_Pair] = []
        owners: list[int] = []
        texts = [text for (text,) in (request.args for request in requests)]
        for i, ids in enumerate(self._all_encoded(texts)):
            pairs = get_rolling_token_windows(
                token_list=ids.tolist(),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,  # tokens that a window reads; it predicts one more
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, pairs):
                windows.append((None, context, continuation))
                owners.append(i)
        totals = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows, disable_tqdm, kind="loglikelihood_rolling")
        for i, (logprob, _) in zip(owners, scored, strict=True):
            totals[i] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to each context, up to the first of its stop strings.

        Contexts lose as much of their left as leaves no room for the longest answer.

        Raises:
            ParameterError: generation_kwargs have an unknown name or a value outside its bounds.
            PassError: the model computed values that are not finite, or a request was aborted.
        """
        prompts: list[Int32Array] = []
        params: list[SamplingParams] = []
        num_cut = 0
        encoded = self._all_encoded([request.args[0] for request in requests])
        for request, context in zip(requests, encoded, strict=True):
            own = self.sampling_params(request.args[1])
            room = self.max_length - own.max_new_tokens
            if room < 1:
                raise ParameterError(
                    f"max_gen_toks is {own.max_new_tokens}; with a context of {self.max_length} it must be less"
                )
            ids = context if len(context) else np.array([self.prefix_token_id], np.int32)
            num_cut += len(ids) > room
            prompts.append(ids[-room:])
            params.append(own)
        self._warn_of_cut(num_cut, len(requests))
        texts = [""] * len(requests)
        with self._reported("generate_until", len(requests)):
            for output in self.runtime.generate_iter(prompts, params, progress=not disable_tqdm):
                if (failure := output.failure) is not None:
                    raise PassError(f"{failure}: {_shown(requests[output.index].args[0])}")
                texts[output.index] = output.text
                self.cache_hook.add_partial("generate_until", requests[output.index].args, output.text)
        return texts

    # -- inside --------------------------------------------------------------------------------------------

    def sampling_params(self, generation_kwargs: Mapping[str, Any]) -> SamplingParams:
        """The parameters of a task's generation_kwargs. Without do_sample and temperature: greedy. Others that are
        not given have the Runtime's defaults.
        """
        given, defaults = dict(generation_kwargs), self.runtime.default_params
        until = given.pop("until", None) or []
        stop = [string for string in ([until] if isinstance(until, str) else until) if string]
        lengths = [given.pop(name, None) for name in _MAX_NEW_TOKENS]
        max_new_tokens = next((length for length in lengths if length is not None), self.max_gen_toks)
        temperature = given.pop("temperature", None)
        if not given.pop("do_sample", temperature is not None):
            temperature = 0.0
        elif temperature is None:
            temperature = defaults.temperature
        if (beams := given.pop("num_beams", 1)) != 1:
            raise ParameterError(f"num_beams is {beams}; there is no beam search")
        # A special token is not part of the text: as a stop string it has to be found as a token.
        tokens = []
        for string in stop:
            ids = self.tok_encode(string, add_special_tokens=False)
            if len(ids) == 1 and self._tokenizer.piece(ids[0]) == string:
                tokens += ids
        given |= {
            "stop": stop,
            "stop_token_ids": tokens,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
        }
        return sampling_params_from_dict(given, defaults)

    def _warn_of_cut(self, num_cut: int, num_requests: int) -> None:
        if num_cut:
            _log.warning(
                "%d of %d contexts are too long for max_length %d and were cut on the left",
                num_cut,
                num_requests,
                self.max_length,
            )

    @contextmanager
    def _reported(self, kind: str, num_requests: int) -> Iterator[None]:
        """Log the cache hits of the block's requests."""
        before = self.runtime.cache_stats()
        yield
        after = self.runtime.cache_stats()
        prompt_tokens = after.prompt_tokens - before.prompt_tokens
        cached_tokens = after.cached_tokens - before.cached_tokens
        _log.info(
            "%s: %s requests, %s prompt tokens, %s of them cached: hit rate %.2f%%",
            kind,
            f"{num_requests:,}",
            f"{prompt_tokens:,}",
            f"{cached_tokens:,}",
            100 * cached_tokens / max(1, prompt_tokens),
        )


def _shown(texts: object) -> str:
    """The end of a request's text, for an error message."""
    shown = repr(texts)
    return shown if len(shown) <= 200 else f"...{shown[-200:]}"


def main() -> None:
    """`lm-eval run --model radixrt` with the options of this command."""
    from lm_eval.__main__ import cli_evaluate

    sys.argv[1:] = ["run", "--model", "radixrt", *sys.argv[1:]]
    cli_evaluate()


if __name__ == "__main__":
    main()
