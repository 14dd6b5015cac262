"""Other weights for a group: no list is ever answered with two kinds of them, whatever fails or dies meanwhile."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file

from radixrt.errors import DeviceLostError, ModelError, ParameterError
from radixrt.models import weight_files
from radixrt.replicas.group import ReplicaGroup
from radixrt.replicas.replica import TRIAL, Replica
from radixrt.runtime import Runtime
from radixrt.schedule.activity import Activity
from radixrt.schedule.request import Request
from tests.replicas.test_group import HANG, PARAMS, Clock, group_of, tree
from tests.support.local_replicas import LocalLinks
from tests.support.runtimes import simulated_runtime

MODEL = "that of the model"


class Loading:
    """Makes Runtimes that have weights in name alone.

    Attributes:
        fails: the error of a Runtime, by its number, that cannot load a source.
        used: the weights with which requests were answered.
    """

    def __init__(self) -> None:
        self.fails: Callable[[int, str], Exception | None] = lambda number, source: None
        self.used: set[str] = set()
        self.loaded: list[str] = []

    def make(self) -> Runtime:
        runtime, number = simulated_runtime(), len(self.loaded)
        self.loaded.append(MODEL)
        update, submit = runtime.update_weights, runtime.submit

        def update_weights(source: Any) -> None:
            if (error := self.fails(number, source)) is not None:
                raise error
            update(source)
            self.loaded[number] = source

        def submits(*requests: Request, in_order: bool = False) -> None:
            if any(request.id != TRIAL for request in requests):
                self.used.add(self.loaded[number])
            submit(*requests, in_order=in_order)

        runtime.update_weights, runtime.submit = update_weights, submits  # type: ignore[method-assign]
        return runtime

    def of_list(self, group: ReplicaGroup) -> set[str]:
        """The weights with which a list is answered, by all replicas that are there."""
        group._wait_for(lambda: all(lane.is_ready or lane.is_gone for lane in group.lanes))
        self.used.clear()
        assert len(group.generate(tree(9), PARAMS)) == 9
        return self.used.copy()


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which is empty in the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_all_have_other_weights(tmp_path: Path) -> None:
    """Also if what replicas say of it comes twice, and a process in the place of a lost one."""
    loading, folder = Loading(), tmp_path / "checkpoint"
    folder.mkdir()

    def on_wait(links: LocalLinks) -> None:
        links.advance()
        for link in links.links.values():
            link.double()

    links = LocalLinks(loading.make, on_wait)
    with group_of(links, 3) as group, contextlib.chdir(tmp_path):
        assert loading.of_list(group) == {MODEL}
        group.update_weights("checkpoint")
        assert loading.of_list(group) == {str(folder)}
        group.update_weights("of/the-hub")
        assert loading.of_list(group) == {"of/the-hub"}
        links.links[1].crash()
        group.step()
        assert loading.of_list(group) == {"of/the-hub"}
        assert loading.loaded == ["of/the-hub"] * 4


def test_what_none_can_load_changes_nothing() -> None:
    loading = Loading()
    links = LocalLinks(loading.make)
    with group_of(links, 3) as group:
        group.update_weights("a")
        loading.fails = lambda number, source: ModelError(f"there is no {source}")
        with pytest.raises(ModelError, match="there is no b"):
            group.update_weights("b")
        loading.fails = lambda number, source: None
        assert loading.of_list(group) == {"a"}
        links.links[0].crash()
        group.step()
        assert loading.of_list(group) == {"a"}
        assert links.started == 4


def test_one_that_cannot_load_what_others_have_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """As on a host that does not see the folder."""
    loading = Loading()
    links = LocalLinks(loading.make)
    with group_of(links, 3) as group:
        loading.fails = lambda number, source: ModelError("no folder") if number not in (0, 2) else None
        group.update_weights("a")
        assert loading.of_list(group) == {"a"}
        assert [lane.is_gone for lane in group.lanes] == [False, True, False]
        assert "it could not load other weights: no folder" in caplog.text


def test_an_update_that_a_ctrl_c_has_ended() -> None:
    """It ends before the next list, whether it can be done or not."""
    loading = Loading()
    links = LocalLinks(loading.make)
    with group_of(links, 2) as group:
        for source, error in (("a", None), ("b", ModelError("no folder"))):

            def interrupt(links: LocalLinks) -> None:
                links.links[0].advance()
                raise KeyboardInterrupt

            loading.fails = lambda number, source, error=error: error  # type: ignore[misc]
            links.on_wait = interrupt
            with pytest.raises(KeyboardInterrupt):
                group.update_weights(source)
            links.on_wait = lambda links: links.advance()
            assert loading.of_list(group) == {"a"}
        links.links[0].crash()
        loading.fails = lambda number, source: None
        group.step()
        assert loading.of_list(group) == {"a"}


def test_a_ctrl_c_while_one_that_could_not_load_them_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, renew = Loading(), Replica.renew
    with group_of(LocalLinks(loading.make), 3) as group:
        loading.fails = lambda number, source: ModelError("no folder") if number == 1 else None

        def renew_after_signal(replica: Replica, reason: str) -> None:
            signal.raise_signal(signal.SIGINT)
            renew(replica, reason)

        monkeypatch.setattr(Replica, "renew", renew_after_signal)
        with pytest.raises(KeyboardInterrupt):
            group.update_weights("a")
        assert loading.of_list(group) == {"a"}


def test_an_update_after_a_list_that_was_left_early() -> None:
    """What was aborted is told of, though no pass comes after the update."""
    clock = Clock()

    def on_wait(links: LocalLinks) -> None:
        clock.now += HANG / 10
        links.advance()

    links = LocalLinks(Loading().make, on_wait)
    with group_of(links, 2, clock) as group:
        outputs = group.generate_iter(tree(30), PARAMS)
        next(outputs)
        outputs.close()  # type: ignore[attr-defined]
        assert group.has_work
        group.update_weights("a")
        while group.has_work:
            group.step()
        assert links.started == 2, "none was lost"


def test_none_can_be_loaded_while_one_starts_anew() -> None:
    loading = Loading()
    links = LocalLinks(loading.make)
    with group_of(links, 2) as group:
        links.links[1].crash()
        group.received()
        loading.fails = lambda number, source: ModelError("no folder")
        with pytest.raises(ModelError, match="no folder"):
            group.update_weights("a")
        assert links.started == 3
        assert loading.of_list(group) == {MODEL}


def test_what_a_process_says_besides_is_not_of_the_one_in_its_place() -> None:
    loading = Loading()
    links = LocalLinks(loading.make)
    with group_of(links, 1) as group:
        group.update_weights("a")
        links.links[0].crash()
        group.received()
        loading.fails = lambda number, source: ModelError("no folder")
        group.received()
        links.advance()
        assert len(links.links[0].said) == 2, "that it cannot load them, and the answer to its trial"
        group.received()
        assert links.started == 3
        assert group.activity() == Activity()


def test_no_replica_is_left_to_load_them() -> None:
    with group_of(LocalLinks(Loading().make), 1) as group:
        group.lanes[0].give_up()
        with pytest.raises(DeviceLostError, match="no replica is left"):
            group.update_weights("a")


def test_an_identity_of_weights_that_were_replaced_is_not_kept() -> None:
    """Of which a Ctrl-C has left the answer to come."""

    def interrupt(links: LocalLinks) -> None:
        raise KeyboardInterrupt

    links = LocalLinks(Loading().make)
    with group_of(links, 1) as group:
        links.on_wait = interrupt
        with pytest.raises(KeyboardInterrupt):
            group.identity()
        links.on_wait = lambda links: links.advance()
        group.update_weights("a")
        group.step()
        assert group.lanes[0].identity is None


@pytest.mark.parametrize("source", [None, 3, b"folder"])
def test_what_is_no_path_is_refused(source: Any) -> None:
    with group_of(LocalLinks(Loading().make), 1) as group, pytest.raises(ModelError, match="give a path"):
        group.update_weights(source)


ACTIONS = st.tuples(
    st.sampled_from(["advance", "crash", "crash and lose", "double", "slow", "hang"]), st.integers(0, 2)
)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["none", "all", "odd"])), min_size=1, max_size=3),
    st.lists(ACTIONS, max_size=30),
)
@example(2, [("a", "none")], [("crash", 0)])
@example(2, [("a", "odd"), ("b", "none")], [("advance", 0), ("crash", 1)])
@example(3, [("a", "all"), ("b", "odd")], [("double", 0), ("double", 1), ("crash and lose", 2)])
def test_faults(num_replicas: int, updates: list[tuple[str, str]], actions: list[tuple[str, int]]) -> None:
    loading, clock, waiting = Loading(), Clock(), actions[::-1]

    def on_wait(links: LocalLinks) -> None:
        clock.now += 1.0
        if not waiting:
            clock.now += HANG
            for link in links.links.values():
                link.is_slow = False
            links.advance()
            return
        action, which = waiting.pop()
        link = links.links[which % num_replicas]
        if action == "advance":
            links.advance()
        elif action == "double":
            link.double()
        elif action == "slow":
            link.is_slow = not link.is_slow
        elif action == "hang":
            link.hangs = True
        else:
            link.crash(loses_messages=action == "crash and lose")

    expected = MODEL
    with (
        contextlib.suppress(DeviceLostError),
        group_of(LocalLinks(loading.make, on_wait), num_replicas, clock) as group,
    ):
        for source, failing in updates:
            loading.fails = lambda number, own, failing=failing: (  # type: ignore[misc]
                ModelError("no folder") if failing == "all" or (failing == "odd" and number % 2) else None
            )
            try:
                group.update_weights(source)
                expected = source
            except ModelError:
                assert failing != "none"
            loading.used.clear()
            found = group.generate(tree(9), PARAMS, on_error="return")
            assert len(found) == 9
            assert loading.used <= {expected}


def test_tensors_go_to_all_in_a_file(temporary: Path) -> None:
    """It stays as long as a process in a lost one's place may need it."""
    loading, tensors = Loading(), {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    tensors["tied"] = tensors["a"]
    links = LocalLinks(loading.make)
    with group_of(links, 2) as group:
        for _ in range(2):
            group.update_weights(tensors)
            (file,) = temporary.glob("*/*")
            assert loading.of_list(group) == {str(file)}
            assert {name: tensor.tolist() for name, tensor in load_file(file).items()} == {
                name: tensor.tolist() for name, tensor in tensors.items()
            }
        loading.fails = lambda number, source: ModelError("no weights")
        with pytest.raises(ModelError, match="no weights"):
            group.update_weights(tensors)
        assert [*temporary.glob("*/*")] == [file]
        with pytest.raises(ModelError, match="'c' of the given weights is a int, not a tensor"):
            group.update_weights({"c": 3})  # type: ignore[dict-item]
        loading.fails = lambda number, source: None
        group.update_weights("a")
        assert not [*temporary.iterdir()]
        group.update_weights(tensors)
    assert not [*temporary.iterdir()]


def test_tensors_that_cannot_be_written_leave_nothing(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(tensors: Any, file: Path) -> None:
        file.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(weight_files, "save_file", write_half)
    with group_of(LocalLinks(Loading().make), 1) as group:
        with pytest.raises(OSError, match="No space left"):
            group.update_weights({"a": torch.ones(1)})
        assert not [*temporary.iterdir()]


def test_replicas_end_also_where_a_file_cannot_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    links = LocalLinks(Loading().make)
    group = group_of(links, 2)
    group.update_weights({"a": torch.ones(1)})
    with monkeypatch.context() as patched:
        patched.setattr(tempfile.TemporaryDirectory, "cleanup", Mock(side_effect=PermissionError("no")))
        with pytest.raises(PermissionError):
            group.close()
    assert all(link.is_dead for link in links.links.values())


def test_tensors_do_not_go_to_other_hosts() -> None:
    links = LocalLinks(simulated_runtime)
    links.are_here = False
    with group_of(links, 1) as group, pytest.raises(ParameterError, match="with Ray"):
        group.update_weights({"a": torch.ones(1)})
