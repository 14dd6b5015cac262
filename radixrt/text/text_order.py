"""The lexicographic order of texts that begin alike: what a group of them shares is compared once."""

from __future__ import annotations

from collections.abc import Sequence

from radixrt.text.common_length import common_length

FEW = 16  # texts: fewer are compared whole
WINDOW = 16  # characters after what a group shares, by which it is parted


def text_order(texts: Sequence[str]) -> list[int]:
    """The number of the text at each place; equal texts stay in their order.

    A sort compares each text with a dozen others from their first characters on. Here a group's least and greatest
    text tell what all of it share, and the next characters part it: as in a radix sort from the left.
    """
    order: list[int] = []
    groups = [list(range(len(texts)))]  # the first one last
    while groups:
        group = groups.pop()
        if len(group) < FEW:
            order += sorted(group, key=texts.__getitem__)
            continue
        own = [texts[i] for i in group]
        shared = common_length(min(own), max(own))
        parts: dict[str, list[int]] = {}
        for i, text in zip(group, own, strict=True):
            parts.setdefault(text[shared : shared + WINDOW], []).append(i)
        if len(parts) == 1:  # all are equal
            order += group
        elif 4 * len(parts) > len(group):
            order += sorted(group, key=lambda i: texts[i][shared:])
        else:
            groups += [parts[window] for window in sorted(parts, reverse=True)]
    return order
