"""`ReplicaGroup`: several Runtimes, each in a process of its own, that answer lists of prompts together."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from radixrt.batch.dispatch import Dispatch
from radixrt.batch.lanes import Handout
from radixrt.batch.parts import Part, PartialOutputs, part_at
from radixrt.batch.suspects import killed
from radixrt.builtin import MODEL_PATH
from radixrt.cache.cache_stats import CacheStats
from radixrt.checks import check_float, check_int
from radixrt.config import RuntimeConfig
from radixrt.engine.gc_control import old_objects_left_alone
from radixrt.engine.signals import deferred
from radixrt.errors import DeviceLostError, ParameterError, PassError, RadixrtError, ReplicaLostError
from radixrt.frontend.arguments import Call, OnError, Params, Prompt, listed_prompts
from radixrt.frontend.request_builder import builder_without_weights
from radixrt.limits import HANG_SECONDS, RunLimits
from radixrt.output import RequestOutput
from radixrt.planning.batch_plan import BatchPlan, plan_batch
from radixrt.planning.cards import CARDS, shape_of
from radixrt.planning.shards import Pieces, pieces_of, shards
from radixrt.replicas.links import Links, Processes, placements
from radixrt.replicas.replica import Replica, ReplicaFigures
from radixrt.replicas.weights import GroupWeights
from radixrt.request_list import request_list, store_of
from radixrt.schedule.activity import Activity
from radixrt.schedule.request import Request

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from radixrt.batch.options import BatchOptions
    from radixrt.models.weight_files import WeightSource
    from radixrt.report.batch_report import BatchReport

_log = logging.getLogger(__name__)

EXIT_SECONDS = 10.0  # that processes have to end by themselves
WAIT_SECONDS = 0.1  # for news, before signals and replicas are looked at again


class ReplicaGroup:
    """Runtimes in processes of their own, which share each list of prompts. Use it as a context manager.

        with ReplicaGroup("path/to/model", num_replicas=8) as group:
            outputs = group.generate(prompts, SamplingParams(max_new_tokens=64))

    A list is cut into ranges of equal predicted work where prompts share little; a replica that has ended its own
    takes from others (`radixrt.planning.shards`, `radixrt.batch.dispatch`). The requests of a replica that is
    lost run on others, and on a new process in its place. One that is lost with each process that runs it, by
    itself in the end (`radixrt.batch.suspects`), ends with an error as if its pass had failed.

    Args:
        model, options: of `radixrt.config.RuntimeConfig`, for each Runtime; `device` without a number.
        num_replicas: None: one for each visible card, and one on a CPU. More than cards share them.
        hang_seconds: a replica that has requests and has ended no pass for so long counts as lost.
        ray: the address of a Ray cluster, as in `ray.init`, whose actors are the replicas
            (`radixrt.replicas.ray_links`); "local" starts one here.
        links: another way to reach replicas than processes.
        clock: seconds.

    Raises as `Runtime` does, and ParameterError where the device has a number or there is no such Ray cluster.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        num_replicas: int | None = None,
        hang_seconds: float = HANG_SECONDS,
        ray: str | None = None,
        links: Links | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        config = RuntimeConfig(model, **options)
        if num_replicas is not None:
            check_int("num_replicas", num_replicas, 1, 1024)
        check_float("hang_seconds", hang_seconds, 0.0, 1e9, above=True)
        told = {name: getattr(config, name) for name in ("revision", "chat_template_kwargs", "generation_config")}
        source = MODEL_PATH if config.model is None else config.model
        self._builder = builder_without_weights(source, config.context_length, **told)
        self._builder.seed = self.seed = config.run_seed
        self.tokenizer, self.default_params = self._builder.tokenizer, self._builder.defaults
        self.reuses_prefixes = config.enable_prefix_cache and not config.force_miss
        if links is None and ray is not None:
            from radixrt.replicas.ray_links import RayLinks

            links = RayLinks(config, num_replicas, ray)
            num_replicas = links.num_replicas
        elif links is None:
            placed = placements(config, num_replicas)
            links, num_replicas = Processes(placed), len(placed)
        self._links, self._calls = links, itertools.count()
        self._clock = clock
        self._weights = GroupWeights()
        self._call = threading.Lock()  # held by a call that is not over
        self.lanes: tuple[Replica, ...] = ()
        self._end_dropped: weakref.finalize[..., ReplicaGroup] | None = None
        try:
            for number in range(num_replicas or 1):
                self.lanes += (Replica(number, links, hang_seconds, clock),)
            self._wait_for_all()
        except BaseException:
            self.close()
            raise
        # Replicas of a group that is dropped. At the process's exit they end by themselves.
        self._end_dropped = weakref.finalize(self, _end, self.lanes)
        self._end_dropped.atexit = False
        said = [lane.ready for lane in self.lanes if lane.is_ready]
        self.limits = RunLimits(*map(min, zip(*(each["limits"] for each in said), strict=True)))
        self.context_length = self._builder.context_length = min(each["context_length"] for each in said)
        self._builder.refusal, self._builder.pool_tokens = self._refusal, self.limits.pool_tokens
        for lane in self.lanes:
            lane.least = self.limits
        self.products = tuple(_Told(table) for table in said[0]["products"])

    # -- prompts in, outputs out ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | Iterable[Params] = None,
        *,
        on_error: OnError = "raise",
        progress: bool = False,
    ) -> RequestOutput | list[RequestOutput]:
        """`Runtime.generate`, on all replicas."""
        listed, many = listed_prompts(prompts)
        found = self.generate_iter(listed, sampling_params, on_error=on_error, progress=progress)
        outputs = sorted(found, key=attrgetter("index"))
        return outputs if many else outputs[0]

    def generate_iter(
        self,
        prompts: Iterable[Prompt],
        sampling_params: Params | Iterable[Params] = None,
        *,
        on_error: OnError = "raise",
        progress: bool = False,
    ) -> Iterator[RequestOutput]:
        """`Runtime.generate_iter`, on all replicas.

        Raises DeviceLostError once no replica is left, and RadixrtError while another call is not over.
        """
        self._check_open()
        listed, _ = listed_prompts(prompts)
        with self._only_call(), old_objects_left_alone():
            yield from self._answers(listed, sampling_params, on_error, progress)

    def _answers(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params | Iterable[Params],
        on_error: OnError,
        progress: bool,
    ) -> Iterator[RequestOutput]:
        outputs, requests = request_list(
            self._builder, prompts, sampling_params, Call(next(self._calls), on_error=on_error)
        )
        work: _Work | None = None
        try:
            yield from outputs
            if not requests:
                return
            work = _Work(self, requests)
            with tqdm(total=len(requests), unit=" requests", disable=not progress, file=sys.stderr) as bar:
                while not work.is_done:
                    for output in work.step():
                        if output.cause is not None and on_error == "raise":
                            raise PassError(f"prompt {output.index}: {output.failure}") from output.cause
                        bar.update()
                        yield output
        finally:
            for each in self.lanes:
                each.abort(*(() if work is None else work.running))

    def run_batch(
        self, input_path: str | Path, output_path: str | Path, **options: Unpack[BatchOptions]
    ) -> BatchReport:
        """`Runtime.run_batch`, on all replicas. It may go on with what fewer or more of them have begun."""
        from radixrt.batch.job import run_batch

        self._check_open()
        with self._only_call():
            while self.has_work:  # of a call that was left early: it was aborted, and nobody has looked since
                self.step()
            return run_batch(self, input_path, output_path, **options)

    def update_weights(self, source: WeightSource) -> None:
        """`Runtime.update_weights`, on all replicas.

        A process that is started in the place of a lost one loads them, too: files have to stay until the next
        update. Tensors go through a file in the folder for temporary files.

        Raises as `Runtime.update_weights`, where no replica could load them. One that could not load what others
        have is started anew. Raises ParameterError where tensors would have to go to other hosts.
        """
        self._check_open()
        if isinstance(source, Mapping) and not self._links.are_here:
            raise ParameterError(
                "weights in memory go to processes of this host alone; with Ray write them to a folder that all "
                "hosts read, and give its path"
            )
        with self._only_call():
            self._wait_for_all()  # one that starts is told of what others have, once it can answer
            self._weights.load(source, self.lanes)
            if (error := self._settled()) is not None:
                raise error

    def _settled(self) -> RadixrtError | None:
        """Wait until all replicas have the same weights. Returns why none could load others."""
        if not self._weights.are_loading:
            return None
        self._wait_for_all()
        return self._weights.settle(self.lanes)

    # -- step by step: a `BatchRuntime` ----------------------------------------------------------------------

    def prepare(
        self, prompt: Prompt, sampling_params: Params = None, *, index: int = 0, keep: int | None = None
    ) -> Request:
        """`Runtime.prepare`."""
        kept = None if keep is None else check_int("keep", keep, 0, 2**31 - 1)
        index = check_int("index", index, -1, 2**63 - 1)  # -1: of no list
        return replace(self._builder.build(prompt, sampling_params, index=index), reusable_len=kept)

    def step(self) -> list[RequestOutput]:
        """Wait a moment for replicas. Returns what has ended, with a ReplicaLostError as the cause where a replica
        was lost: that may be submitted again.

        Raises DeviceLostError once no replica is left.
        """
        outputs = self.received()
        if not outputs:
            self._links.wait([lane.link for lane in self.lanes if not lane.is_gone], WAIT_SECONDS)
            outputs = self.received()
        return outputs

    def abort(self, request: Request) -> None:
        """End a request at its replica's next step."""
        for lane in self.lanes:
            lane.abort(request.id)

    def has_begun(self, request: Request) -> bool:
        """Whether a pass has computed some of a submitted request; True if it has ended."""
        return all(lane.has_begun(request) for lane in self.lanes)

    def drain(self) -> None:
        """Wait a moment for requests that were aborted. A replica that has not ended them then is ended."""
        ends = self._clock() + EXIT_SECONDS
        with suppress(DeviceLostError):
            while self.has_work and self._clock() < ends:
                self.step()
        for lane in self.lanes:
            if lane.has_work:
                lane.give_up()

    @property
    def has_work(self) -> bool:
        """Whether submitted requests have not ended."""
        return any(lane.has_work for lane in self.lanes)

    @property
    def num_running(self) -> int:
        """Answers that are admitted and have not ended, when each replica last said so."""
        return sum(lane.num_running for lane in self.lanes)

    @property
    def num_waiting(self) -> int:
        """Requests that replicas have and have not begun."""
        return sum(lane.num_waiting for lane in self.lanes)

    def activity(self) -> Activity:
        """Work and time of all passes of all replicas, added up."""
        return Activity(*map(sum, zip(*(vars(lane.activity).values() for lane in self.lanes), strict=True)))

    def cache_stats(self) -> CacheStats:
        """Token counts and sizes of all replicas, added up."""
        return CacheStats(*map(sum, zip(*(vars(lane.cache_stats).values() for lane in self.lanes), strict=True)))

    def cached_len(self, prompt_ids: npt.NDArray[np.int32]) -> int:
        """None that a plan may rely on: which replica gets a prompt is not known."""
        return 0

    def identity(self) -> Mapping[str, Any]:
        """`Runtime.identity`, which is the same for all."""
        self._wait_for(lambda: any(lane.is_ready for lane in self.lanes))
        lane = next(lane for lane in self.lanes if lane.is_ready)
        if lane.identity is None:
            lane.ask_identity()
            self._wait_for(lambda: lane.identity is not None or not lane.is_ready)
        return self.identity() if lane.identity is None else lane.identity

    # -- how a list is shared --------------------------------------------------------------------------------

    @property
    def replica_figures(self) -> tuple[ReplicaFigures, ...]:
        """What each replica has done of the latest list."""
        return tuple(lane.figures for lane in self.lanes)

    def pieces(self, plan: BatchPlan) -> Pieces:
        """A plan's prompts with the work that each is. Only ratios count: an H200's peak stands for any device."""
        speed = CARDS["h200"].speed
        shape = shape_of(self._builder.config)
        return pieces_of(plan, len(self.lanes), self.limits, shape, speed, split=self.reuses_prefixes)

    def part_of(self, request: Request, part: Part) -> Request:
        """The request for some of the answers that another one asks for."""
        return part.request(request)

    def handout(self, pieces: Pieces) -> Handout:
        """Ranges of pieces for all replicas, which may take from one another."""
        self._check_open()
        for lane in self.lanes:
            lane.begin_list()
        own, progress = shards(pieces, len(self.lanes)), lambda replica: self.lanes[replica].progress
        dispatch = Dispatch(own, progress=progress, clock=self._clock)
        answers = float(pieces.num_answers.mean()) if len(pieces) else 1.0  # of a piece
        first = max(1, int(self.limits.max_running_requests / answers))
        return Handout(dispatch, self.lanes, first, answers)

    def close(self) -> None:
        """End all replicas, as those of a group that is dropped; again: nothing."""
        lanes, self.lanes = self.lanes, ()
        if self._end_dropped is not None:
            self._end_dropped.detach()
        try:
            _end(lanes)
        finally:
            self._weights.close()

    def __enter__(self) -> ReplicaGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------

    @contextmanager
    def _only_call(self) -> Iterator[None]:
        """Two calls at once would take each other's answers."""
        is_own = False
        try:
            with deferred():  # a Ctrl-C would come before it is known whether the lock is held
                is_own = self._call.acquire(blocking=False)
            if not is_own:
                raise RadixrtError("a group answers one call at a time, and another one is not over")
            if (error := self._settled()) is not None:  # of an update that a Ctrl-C has ended
                _log.warning("replicas have the weights of before: %s", error)
            yield
        finally:
            if is_own:
                self._call.release()

    def _check_open(self) -> None:
        if not self.lanes:
            raise RadixrtError("the group is closed")

    def received(self) -> list[RequestOutput]:
        """What has ended, as `step` without waiting."""
        outputs: list[RequestOutput] = []
        with deferred():  # what is read of a link and not noted is lost
            for lane in self.lanes:
                if not lane.is_gone:
                    outputs += lane.receive()
                    if lane.refusal is not None:
                        raise lane.refusal
        if not outputs and all(lane.is_gone for lane in self.lanes):
            raise DeviceLostError("no replica is left; the log says why each was lost")
        return outputs

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Until a condition holds. Nobody has requests meanwhile."""
        while not condition():
            self.step()

    def _wait_for_all(self) -> None:
        """Until all replicas are ready, or gone: but not all of them."""
        lanes = self.lanes
        self._wait_for(lambda: any(o.is_ready for o in lanes) and all(o.is_ready or o.is_gone for o in lanes))

    def _refusal(self, request: Request) -> str | None:
        """Why a request does not fit into the smallest of the pools."""
        if request.max_slots <= self.limits.pool_tokens:
            return None
        return (
            f"needs up to {request.max_slots} KV slots, but the replicas' pools have {self.limits.pool_tokens}: "
            "shorten it, lower max_new_tokens, or raise max_total_tokens or memory_fraction"
        )


def _end(lanes: Sequence[Replica]) -> None:
    links = [lane.link for lane in lanes if not lane.is_gone]
    try:
        for link in links:
            link.close()
        ends = time.monotonic() + EXIT_SECONDS
        for link in links:
            link.wait_for_end(max(0.0, ends - time.monotonic()))
    except BaseException:  # a second Ctrl-C: none may stay
        for link in links:
            link.end()
        raise


class _Work:
    """The requests of a call, and where they run."""

    def __init__(self, group: ReplicaGroup, requests: Sequence[Request]) -> None:
        plan = plan_batch(*store_of(requests))
        self._group, self._requests = group, requests
        self._pieces = group.pieces(plan)
        self._which = plan.run.order[self._pieces.places].tolist()  # the request of each piece
        self._has_parts = bool(self._pieces.is_part.any())
        self._handout = group.handout(self._pieces)
        self._at: dict[int | str, tuple[int, int]] = {}  # of requests that run: lane and piece
        self._partial = PartialOutputs()

    @property
    def is_done(self) -> bool:
        return self._handout.is_done

    @property
    def running(self) -> list[int | str]:
        """Ids of what lanes have."""
        return list(self._at)

    def step(self) -> list[RequestOutput]:
        """Hand out what lanes have room for, and wait a moment. Returns the outputs of prompts that have ended."""
        ended: list[RequestOutput | None] = []
        for lane, pieces in self._handout.next():
            requests: list[Request] = []
            for piece in pieces:
                request, part = self._request(piece)
                if part is not None and (failure := self._partial.failure(request.index)) is not None:
                    self._handout.end(lane, piece)
                    ended.append(self._joined(piece, failure))
                    continue
                requests.append(request if part is None else self._group.part_of(request, part))
                self._at[requests[-1].id] = lane, piece
            if requests:
                self._group.lanes[lane].submit(*requests)
            ended += self._ended(self._group.received())  # a replica may wait until it is read
        if not (self.is_done or ended):
            ended += self._ended(self._group.step())
        return [output for output in ended if output is not None]

    def _ended(self, outputs: list[RequestOutput]) -> list[RequestOutput | None]:
        """Note what replicas have ended or lost. Returns the outputs of prompts that have ended with it."""
        ended: list[RequestOutput | None] = []
        lost: defaultdict[int, dict[int, RequestOutput]] = defaultdict(dict)  # by lane and piece
        for output in outputs:
            if (at := self._at.pop(output.id, None)) is None:
                continue  # of a call that was left early
            lane, piece = at
            if isinstance(output.cause, ReplicaLostError):
                lost[lane][piece] = output
            else:
                self._handout.end(lane, piece)
                ended.append(self._joined(piece, output))
        for lane, found in lost.items():
            ended += [self._joined(p, killed(found[p])) for p in self._handout.lose(lane, list(found))]
        return ended

    def _request(self, piece: int) -> tuple[Request, Part | None]:
        """A piece's prompt, and which answers to it it has, if not all."""
        request = self._requests[self._which[piece]]
        return request, part_at(self._pieces, piece, request.params.n) if self._has_parts else None

    def _joined(self, piece: int, output: RequestOutput) -> RequestOutput | None:
        """The output of a piece's prompt, once it is there."""
        if not self._has_parts:
            return output
        request, part = self._request(piece)
        if part is None:
            return output
        joined = self._partial.add(request.index, part, output)
        return None if joined is None else replace(joined, id=request.id)


class _Told:
    """What a replica has told as JSON values."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        self._value = value

    def to_json(self) -> dict[str, Any]:
        return dict(self._value)
