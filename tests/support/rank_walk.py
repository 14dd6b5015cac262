"""A random walk of a Runtime of two ranks, beside one of one rank that says what is right."""

from __future__ import annotations

import queue
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixrt.arrays import Int32Array
from radixrt.cache.radix_tree import DEVICE, HOST, Namespace
from radixrt.output import RequestOutput, StreamChunk
from radixrt.ranks.followers import Followers
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.request import Request
from radixrt.workers.channel import Message

PROGRAM = "tests.support.watched_follower"
REGEXES = ("( [a-z]+)+[.]", "[A-Z][a-z]{1,8}", "(yes|no|perhaps), [a-z ]+")


@dataclass
class Watch:
    """What followers that were started with PROGRAM show."""

    shown: queue.Queue[Message] = field(default_factory=queue.Queue)

    @classmethod
    def of(cls, patch: pytest.MonkeyPatch) -> Watch:
        """Of all followers that are started from now on."""
        watch, hear = cls(), Followers._hear

        def heard(followers: Followers, rank: int, message: Message) -> None:
            hear(followers, rank, message)
            if "looked" in message.body:
                watch.shown.put(message)

        patch.setattr("radixrt.ranks.followers.PROGRAM", PROGRAM)
        patch.setattr(Followers, "_hear", heard)
        return watch

    def look(self, runtime: Runtime, on_device: Int32Array, on_host: Int32Array) -> list[Int32Array]:
        """The tables `[rows, positions]` of the one follower, and the KV of slots, after all passes."""
        runner: Any = runtime.parts.engine.runner
        slots = np.concatenate([on_device, on_host])
        runner._followers.send(Message({"look": [len(on_device), len(on_host)]}, slots))
        shown = self.shown.get(timeout=30)
        shapes, arrays, begin = shown.body["looked"], [], 0
        for shape in shapes:
            size = int(np.prod(shape))
            arrays.append(shown.numbers[begin : begin + size].reshape(shape))
            begin += size
        return arrays


@dataclass
class OpenAIRequest:
    """A request of the walk: what it asks, and what has come of it."""

    prompt: list[int]
    params: SamplingParams
    request: Request | None = None  # of `submit`; None: a stream
    stream: Iterator[StreamChunk] | None = None
    came: dict[int, list[int]] = field(default_factory=dict)  # tokens of a stream's answers
    output: RequestOutput | None = None
    is_left: bool = False  # aborted, or its stream was left


class RankWalk:
    """Acts at random, by a seed. Raises AssertionError where two ranks are not what one is.

    Args:
        both: of two ranks on CPUs in float32, whose followers are watched.
        alone: of one rank, with room for all.
        weights: folders of the model and of other weights.
        kept: where a cache can be kept.
    """

    def __init__(
        self, both: Runtime, alone: Runtime, watch: Watch, weights: list[Path], kept: Path, seed: int
    ) -> None:
        self.both, self.alone, self._watch, self._weights = both, alone, watch, weights
        self.rng, self.events = random.Random(seed), Counter[str]()
        self.asked: list[OpenAIRequest] = []  # with the present weights
        self._kept, self._kept_of = kept, Path()
        self._trunks = [[self.rng.randrange(3, 1600) for _ in range(24)] for _ in range(3)]

    # -- what is done --------------------------------------------------------------------------------------

    def act(self) -> None:
        """Do one thing, and check all."""
        actions: dict[Callable[[], None], float] = {
            self.submit: 6,
            self.step: 9,
            self.open_stream: 1,
            self.read_stream: 3,
            self.abort: 1,
            self.leave_stream: 1,
            self.flush: 1,
            self.save_cache: 0.4,
        }
        if self._kept_of == self._weights[0]:
            actions[self.load_cache] = 0.6
        if len(self.asked) > 12:
            actions[self.update_weights] = 2
        action = self.rng.choices([*actions], [*actions.values()])[0]
        action()
        self.check()

    def prompt(self) -> list[int]:
        trunk = self.rng.choice(self._trunks)
        known = [one.prompt for one in self.asked[-6:]]
        begin = self.rng.choice([trunk, trunk, *known])
        tail = [self.rng.randrange(3, 1600) for _ in range(self.rng.randrange(1, 8))]
        return begin[: self.rng.randrange(1, 25)] + tail

    def params(self) -> SamplingParams:
        """Draws are from few tokens: where there are many, rounding alone decides some of them otherwise."""
        new, seed = self.rng.choice([1, 4, 12, 30]), self.rng.randrange(1000)
        kind: dict[str, Any] = self.rng.choice(
            [
                {"temperature": 0.0},
                {"temperature": 0.0, "logprobs": 2},
                {"temperature": 0.9, "seed": seed, "n": self.rng.randrange(1, 4), "top_k": 8},
                {"temperature": 0.7, "seed": seed, "top_k": 8, "repetition_penalty": 1.3},
                {"temperature": 0.0, "regex": self.rng.choice(REGEXES)},
                {"temperature": 0.8, "seed": seed, "n": 2, "regex": REGEXES[0], "top_k": 8},
            ]
        )
        return SamplingParams(max_new_tokens=new, ignore_eos="regex" not in kind, **kind)

    def submit(self) -> None:
        self.events["submit"] += 1
        for _ in range(self.rng.randrange(1, 5)):
            asked = OpenAIRequest(self.prompt(), self.params())
            asked.request = self.both.prepare(asked.prompt, asked.params, priority=self.rng.choice([0, 0, 1]))
            self.asked.append(asked)
            self.both.submit(asked.request)

    def step(self) -> None:
        by_id = {one.request.id: one for one in self.asked if one.request is not None}
        for _ in range(self.rng.randrange(1, 4)):
            for output in self.both.step():
                by_id[output.id].output = output

    def open_stream(self) -> None:
        asked = OpenAIRequest(self.prompt(), self.params())
        asked.stream = self.both.stream(asked.prompt, asked.params)
        self.asked.append(asked)
        self._read(asked)

    def read_stream(self) -> None:
        if live := self.streams():
            self._read(self.rng.choice(live))

    def leave_stream(self) -> None:
        if live := self.streams():
            asked = self.rng.choice(live)
            asked.is_left = True
            asked.stream.close()  # type: ignore[union-attr]
            self.events["left stream"] += 1

    def abort(self) -> None:
        if live := [one for one in self.asked if one.request is not None and one.output is None]:
            asked = self.rng.choice(live)
            assert asked.request is not None
            asked.is_left |= self.both.abort(asked.request)
            self.events["abort"] += 1

    def flush(self) -> None:
        self.events["flushed tokens"] += self.both.flush_cache()

    def save_cache(self) -> None:
        self.both.save_cache(self._kept)
        self._kept_of = self._weights[0]

    def load_cache(self) -> None:
        if self.rng.random() < 0.5:
            self.flush()
        self.events["loaded tokens"] += self.both.load_cache(self._kept)

    def update_weights(self) -> None:
        self._weights.reverse()
        self.both.update_weights(self._weights[0])
        self.step()  # for what has ended
        for asked in self.streams():
            while asked.output is None:
                self._read(asked)
        self.settle()
        assert not self.asked
        self.alone.update_weights(self._weights[0])
        self.events["update"] += 1

    def streams(self) -> list[OpenAIRequest]:
        return [one for one in self.asked if one.stream is not None and not one.is_left and one.output is None]

    def _read(self, asked: OpenAIRequest) -> None:
        assert asked.stream is not None
        chunk = next(asked.stream)
        asked.came.setdefault(chunk.index, []).extend(chunk.token_ids)
        asked.output = chunk.output
        self.events["chunk"] += 1

    # -- what must hold ------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Compare the answers that have ended, and the beginnings of others, with those of one rank."""
        asked, self.asked = self.asked, [one for one in self.asked if one.output is None and not one.is_left]
        expected = self.alone.generate([one.prompt for one in asked], [one.params for one in asked])
        for one, right in zip(asked, expected, strict=True):
            tokens = [answer.token_ids for answer in right.outputs]
            for index, came in one.came.items():
                assert tuple(came) == tokens[index][: len(came)], one
            if one.output is None:
                continue
            for answer, known in zip(one.output.outputs, tokens, strict=True):
                cut = len(answer.token_ids) if one.is_left else None
                assert answer.token_ids == known[:cut], (one, known)
            if not one.is_left:
                reasons = [[answer.finish_reason for answer in each.outputs] for each in (one.output, right)]
                assert reasons[0] == reasons[1], one
            self.events["answers"] += 1

    def check(self) -> None:
        """Compare the follower's tables with the first rank's, and the KV of both with one rank's, all anew."""
        parts = self.both.parts
        on_device, on_host = self._known()
        slots, host_slots = (
            np.concatenate([np.zeros(0, np.int32), *(at for _, at in known)]) for known in (on_device, on_host)
        )
        table, device_table, *kv = self._watch.look(self.both, slots, host_slots)
        runner: Any = parts.engine.runner
        own_table = runner._own.executor.req_to_token.numpy()
        assert np.array_equal(own_table, device_table)
        truth, stale = parts.cache.rows.req_to_token, self._not_told()
        for lease in parts.cache.leases:
            if not lease.released:
                told = ~stale[lease.row, : lease.allocated_len]
                for each in (table, device_table):
                    same = each[lease.row, : lease.allocated_len] == truth[lease.row, : lease.allocated_len]
                    assert same[told].all(), lease.row
                self.events["rows"] += 1
        pools = [runner._own.executor._kv_pool]
        if (mover := runner._own._mover) is not None:
            pools.append(mover._host_pool)
        for pool, known, at, theirs in zip(pools, (on_device, on_host), (slots, host_slots), kv, strict=False):
            if known:
                mine, others = pool.memory["kv"][:, :, at], torch.from_numpy(theirs.view(np.float32).copy())
                self._compare_kv(known, torch.cat([mine, others], 3))

    def _known(self) -> tuple[list[tuple[list[int], Int32Array]], list[tuple[list[int], Int32Array]]]:
        """Tokens with the slots of their KV: of each end in the tree, and of running answers; then of the host."""
        cache, found = self.both.parts.cache, ([], [])  # type: ignore[var-annotated]
        are_made = not cache.transfers.booked  # else some slots are still to be filled
        stack = list(cache.tree.roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            path = list(cache.tree.path(node))[::-1]
            tokens = np.concatenate([step.tokens for step in path]).tolist()
            if node.parent is not None and are_made:
                for tier in (DEVICE, HOST):
                    if node.slots[tier] is not None:
                        found[tier].append((tokens, node.slots[tier]))
        for answer in self.both.parts.scheduler.running:
            lease, computed = answer.lease, answer.computed_len
            assert lease is not None
            if computed and are_made:
                slots = cache.rows.req_to_token[lease.row, :computed]
                found[DEVICE].append((answer.tokens(computed).tolist(), slots))
        return found

    def _not_told(self) -> Any:
        """Where the table has changed since the last pass: bool `[rows, positions]`."""
        rows: Any = self.both.parts.cache.rows
        changed = np.zeros(rows.req_to_token.shape, bool)
        for change in rows._changes:
            changed[change.rows, change.positions] = True
        for row, runs in rows._runs.items():
            for start, slots in runs:
                changed[row, start : start + len(slots)] = True
        return changed

    def _compare_kv(self, known: list[tuple[list[int], Int32Array]], kv: Tensor) -> None:
        """`kv` `[layers, 2, slots, heads, head_dim]` of all `known` in turn is that of one rank."""
        tree, version = self.alone.parts.cache.tree, self.alone._builder.weights_version
        namespace, begin = Namespace(version), 0
        missing = [
            tokens for tokens, _ in known if tree.match(namespace, np.array(tokens, np.int32)).length < len(tokens)
        ]
        if missing:
            self.alone.generate(missing, SamplingParams(max_new_tokens=0))
        for tokens, at in known:
            match = tree.match(namespace, np.array(tokens, np.int32))
            assert match.length == len(tokens)
            slots = tree.slots_of(match.node)[len(tokens) - len(at) : len(tokens)]
            right = self.alone.parts.model.kv_pool.memory["kv"][:, :, slots]  # type: ignore[attr-defined]
            found = kv[:, :, begin : begin + len(at)]
            assert torch.allclose(found, right, rtol=1e-3, atol=1e-3), tokens
            begin += len(at)
            self.events["KV of tokens"] += len(at)
