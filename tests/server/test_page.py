"""The page at `/`, and the state that it shows."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixrt.cache.radix_tree import Node, RadixTree
from radixrt.runtime import Runtime
from radixrt.server import page as page_module
from radixrt.server import state as state_module
from radixrt.server.app import Server
from radixrt.server.tenants import Tenants
from tests.support.browser import Browser, browser_path
from tests.support.serving import GREEDY, LONG, QUESTIONS, Serving, client_of, held, until

KEYS = ("key-of-one-tenant-1", "key-of-another-one-2")
BROWSER = browser_path()
in_browser = pytest.mark.skipif(
    BROWSER is None,
    reason="there is no Chromium: apt install chromium-headless-shell, or RADIXRT_TEST_BROWSER=PATH",
)


@pytest.fixture(autouse=True)
def an_empty_cache(runtime: Runtime) -> None:
    runtime.flush_cache()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each view is made anew."""
    monkeypatch.setattr(state_module, "_FRESH", 0.0)


def state_of(url: str, key: str | None = None) -> dict[str, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    response = httpx.get(f"{url}/state", headers=headers, timeout=30)
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "no-store"
    state: dict[str, Any] = response.json()
    return state


Shape = list[tuple[int, int, int, Any]]  # of nodes: tokens, hits, locks, and the same of what is below


def told_shape(tree: dict[str, Any]) -> Shape:
    below: dict[int, Shape] = {}
    for place in reversed(range(len(tree["ids"]))):
        node = tree["tokens"][place], tree["hits"][place], tree["locks"][place], sorted(below.get(place, []))
        below.setdefault(tree["parents"][place], []).append(node)
    return sorted(below.get(-1, []))


def own_shape(tree: RadixTree, tenant: str | None = None) -> Shape:
    def shape(node: Node) -> Shape:
        return sorted((len(one.tokens), one.hits, one.lock, shape(one)) for one in node.children.values())

    roots = [root for space, root in tree.roots.items() if tenant is None or space.tenant == tenant]
    return sorted(one for root in roots for one in shape(root))


@pytest.mark.usefixtures("fresh")
def test_the_state_is_the_tree(serving: Serving, runtime: Runtime) -> None:
    """While requests run, and after; nothing of their texts or tokens is in it."""
    url, seen, long = serving(), [], {**LONG, "max_tokens": 150}
    with ThreadPoolExecutor() as threads:
        running = [
            threads.submit(httpx.post, f"{url}/v1/completions", json={**long, "prompt": prompt}, timeout=60)
            for prompt in QUESTIONS
        ]
        until(lambda: runtime.num_running == 3)
        while not all(one.done() for one in running):
            seen.append(state_of(url))
            time.sleep(0.02)
        bodies = [one.result().json() for one in running]
    state = state_of(url)
    tree, cache = state["tree"], runtime.cache_stats()
    assert told_shape(tree) == runtime.read_tree(own_shape)
    assert sum(tree["tokens"]) == state["pool"]["evictable"] == cache.evictable
    assert tree["left_out"] == {"parents": [], "children": [], "tokens": []}
    assert set(tree["tiers"]) == {"device"}
    assert state["requests"] == {"running": 0, "waiting": 0}
    assert state["counters"]["prompt_tokens"] == cache.prompt_tokens
    assert state["counters"]["decoded_tokens"] == runtime.activity().decoded_tokens
    assert (state["model"], state["status"]) == ("built-in", "ok")
    told = {one["id"]: one for one in state["recent"]}
    for body in bodies:
        one, usage = told[body["id"]], body["usage"]
        assert one["prompt_tokens"] == usage["prompt_tokens"]
        assert one["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert one["completion_tokens"] == usage["completion_tokens"]
        assert 0 < one["seconds"] < 60
    assert any(one["requests"]["running"] for one in seen)
    assert max(max(one["tree"]["locks"]) for one in seen) == 3
    for one in seen:
        assert one["tree"].keys() == {"ids", "parents", "tokens", "hits", "locks", "ages", "tiers", "left_out"}
    assert "Mira" not in json.dumps(seen)
    assert max(tree["hits"]) == 2  # what all three begin with was computed once


def test_streams_and_scores_are_noted(serving: Serving) -> None:
    url = serving()
    client = client_of(url)
    chunks = [*client.completions.create(prompt=QUESTIONS[0], stream=True, **GREEDY)]
    body = {"query": QUESTIONS[0], "items": [" Oslo"], "label_token_ids": [5]}
    scored = httpx.post(f"{url}/v1/score", json=body).json()
    recent = state_of(url)["recent"]
    assert [one["id"] for one in recent] == [scored["id"], chunks[0].id]
    assert recent[1]["completion_tokens"] > 0
    assert recent[0]["completion_tokens"] == 0
    for _ in range(25):
        httpx.post(f"{url}/v1/score", json=body)
    time.sleep(0.6)
    assert len(state_of(url)["recent"]) == 20


def test_tenants_see_their_own(serving: Serving, runtime: Runtime) -> None:
    url = serving(Server(runtime, "built-in", tenants=Tenants(KEYS)))
    assert httpx.get(f"{url}/").status_code == 200
    for headers in ({}, {"Authorization": "Bearer another-key-altogether"}):
        assert httpx.get(f"{url}/state", headers=headers).status_code == 401
    ids = []
    for key, prompts in zip(KEYS, ([QUESTIONS[0]], QUESTIONS[1:]), strict=True):
        ids.append([client_of(url, key).completions.create(prompt=one, **GREEDY).id for one in prompts])
    spaces = {key: Tenants(KEYS).of(f"Bearer {key}") for key in KEYS}
    states = [state_of(url, key) for key in KEYS]
    for key, state, own in zip(KEYS, states, ids, strict=True):
        assert told_shape(state["tree"]) == runtime.read_tree(lambda tree, own=spaces[key]: own_shape(tree, own))
        assert [one["id"] for one in state["recent"]] == own[::-1]
        assert not set(KEYS) & set(re.findall(r"[\w-]+", json.dumps(state)))
    assert told_shape(states[0]["tree"]) != told_shape(states[1]["tree"])


def test_one_state_for_several_viewers(
    serving: Serving, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a second long; and where a pass takes long they get the last one, or are told so."""
    url, taken = serving(), 0
    read = runtime.read_tree

    def counting(take: Any) -> Any:
        nonlocal taken
        taken += 1
        return read(take)

    monkeypatch.setattr(runtime, "read_tree", counting)
    monkeypatch.setattr(state_module, "_PATIENCE", 0.2)
    with ThreadPoolExecutor() as threads:
        states = [*threads.map(state_of, [url] * 8)]
    assert len({state["uptime"] for state in states}) <= 2
    assert taken <= 2
    last, other = state_of(url), serving()
    time.sleep(0.6)
    with held(runtime):
        assert state_of(url)["uptime"] == last["uptime"]
        late = httpx.get(f"{other}/state")
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert "a pass takes long" in late.json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == 200  # the loop does not wait
    until(lambda: state_of(url)["uptime"] > last["uptime"])


def test_a_large_tree_has_a_bound(serving: Serving, runtime: Runtime) -> None:
    url = serving()
    prompts = [[1, 2, 3 + i, 4] for i in range(1_200)]
    for start in (0, 600):
        body = {**GREEDY, "prompt": prompts[start : start + 600], "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    response = httpx.get(f"{url}/state")
    tree = response.json()["tree"]
    assert len(tree["ids"]) == 1_000
    assert sum(tree["left_out"]["children"]) >= 200
    assert len(response.content) < 100_000


# -- the page ----------------------------------------------------------------------------------------------


def test_the_page_asks_for_nothing_else(serving: Serving) -> None:
    response = httpx.get(f"{serving()}/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    text = response.text
    assert re.findall(r"https?://[^\s\"'`]+", text) == [
        "http://www.w3.org/2000/svg"
    ]  # a name, which is not asked for
    assert not re.search(
        r"\bon\w+=|javascript:|innerHTML|<link(?! rel=\"icon\" href=\"data:,\")|@import|url\(", text
    )
    assert not re.search(r"\bstyle=|\.setAttribute\(\"style", text)  # the policy would refuse it
    assert not re.search(r"<(?:script|style)\s", text)


def test_the_page_is_where_the_package_is() -> None:
    """So that a wheel has it: all files of the packages are in one."""
    assert Path(page_module.__file__).with_name("page.html").is_file()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    assert BROWSER is not None
    with Browser(BROWSER, tmp_path / "profile") as found:
        yield found


BLOCKS = "[...document.querySelectorAll('#tree rect')].length"


@in_browser
def test_the_page_in_a_browser(browser: Browser, serving: Serving, tmp_path: Path) -> None:
    """The tree grows while requests run, and what was drawn stays the same element; nothing else is asked for."""
    url = serving()
    browser.open(url)
    browser.until("document.querySelector('#about').textContent === 'Nothing is cached yet.'")
    client = client_of(url)
    client.completions.create(prompt=QUESTIONS[0], **GREEDY)
    browser.until(f"{BLOCKS} > 0")
    browser.value("window.first = document.querySelector('#tree rect')")
    for prompt in QUESTIONS[1:]:
        client.completions.create(prompt=prompt, **GREEDY)
    browser.until(f"{BLOCKS} > 3")
    assert browser.value("document.contains(first)")
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(httpx.post, f"{url}/v1/completions", json={**LONG, "n": 4}, timeout=60)
        browser.until("document.querySelector('#tree .used') !== null")
        time.sleep(0.5)  # what moves has come to rest
        browser.picture(tmp_path / "page.png")
        asked.result()
    browser.until("document.querySelectorAll('#recent tr').length === 4")
    browser.until("document.querySelector('#hits').textContent.endsWith(' %')")
    browser.until("document.querySelector('#decoded').textContent.match(/[0-9]/)")
    browser.value("window.first = document.querySelector('#tree rect.h1')")
    browser.value("first.dispatchEvent(new Event('pointerenter'))")
    assert "hits" in browser.value("document.querySelector('#about').textContent")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    browser.value("first.dispatchEvent(new Event('click'))")
    assert browser.value("!document.querySelector('#out').hidden")
    browser.value("document.querySelector('#out').click()")
    browser.until(f"{BLOCKS} > 3")
    assert browser.complaints == []
    assert {one.removeprefix(url) for one in browser.asked} <= {"/", "/state", "data:,", "about:blank"}


@in_browser
def test_the_page_asks_for_a_key(browser: Browser, serving: Serving, runtime: Runtime) -> None:
    url = serving(Server(runtime, "built-in", tenants=Tenants(KEYS)))
    client_of(url, KEYS[1]).completions.create(prompt=QUESTIONS[0], **GREEDY)
    browser.open(url)

    def give(key: str) -> None:
        browser.until("!document.querySelector('#ask').hidden")
        browser.value(f"document.querySelector('#key').value = {json.dumps(key)}")
        browser.value("document.querySelector('#ask button').click()")

    give("a key with blanks")
    browser.until("document.querySelector('#wrong').textContent.startsWith('A key has')")
    give("wrong-key-altogether")
    browser.until("document.querySelector('#wrong').textContent === 'This key is not known.'")
    give(KEYS[1])
    browser.until(f"{BLOCKS} > 0")
    assert browser.value("document.querySelector('#ask').hidden")
    assert browser.value("Object.keys(localStorage).length") == 0
    assert all("401 (Unauthorized)" in one for one in browser.complaints)


@in_browser
@pytest.mark.parametrize("is_dark", [False, True])
def test_the_page_on_a_phone(is_dark: bool, serving: Serving, tmp_path: Path) -> None:
    url = serving()
    client_of(url).completions.create(prompt=QUESTIONS, **GREEDY)
    assert BROWSER is not None
    with Browser(BROWSER, tmp_path / "profile", width=380, is_dark=is_dark) as browser:
        browser.open(url)
        browser.until(f"{BLOCKS} > 3")
        assert browser.value("document.documentElement.scrollWidth") <= 380
        background = browser.value("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(21, 24, 27)" if is_dark else "rgb(255, 255, 255)")
        browser.picture(tmp_path / "phone.png")
        assert browser.complaints == []
