"""Lists page by page, as OpenAI's clients go through them."""

# Tests: tests/server/test_files.py

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from radixrt.checks import short
from radixrt.errors import ParameterError


class TokenRequests(Protocol):
    """What has a place in a list, by its id, and is shown there."""

    @property
    def id(self) -> str: ...

    def body(self) -> dict[str, Any]: ...


def listed(
    items: Iterable[TokenRequests], given: Mapping[str, str], known: tuple[str, ...], *, limit: int, most: int
) -> dict[str, Any]:
    """The page of a list that is asked for by the parameters of a URL, of those that are `known`.

    Args:
        items: the oldest first; `order` says which comes first in the list, the newest if nothing is given.
        limit, most: items of a page if nothing is given, and at most.

    Raises:
        ParameterError: a parameter is not known, or cannot be.
    """
    if unknown := sorted(given.keys() - {*known}):
        raise ParameterError(f"unknown parameter {short(unknown[0])}; known are {', '.join(known)}")
    asked, order = given.get("limit", str(limit)), given.get("order", "desc")
    if not (asked.isascii() and asked.isdigit() and len(asked) < 10 and 1 <= int(asked) <= most):
        raise ParameterError(f"limit is {short(asked)}; it must be 1 to {most}")
    if order not in ("asc", "desc"):
        raise ParameterError(f"order is {short(order)}; it must be asc or desc")
    in_order = [*items] if order == "asc" else [*items][::-1]
    start = 0
    if (after := given.get("after")) is not None:
        start = 1 + next((place for place, item in enumerate(in_order) if item.id == after), -2)
        if start < 0:
            raise ParameterError(f"after is {short(after)}, which is not in the list")
    page = in_order[start : start + int(asked)]
    return {
        "object": "list",
        "data": [item.body() for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": start + len(page) < len(in_order),
    }
