"""How ranks exchange their parts within a kernel: each writes into the others' memory, and signals.

In one shot all ranks get all parts, and add them or put them side by side; in two each block has an owner, which
adds it and writes the sum into the others' memory, as in the all-reduces of TensorRT-LLM. Addends are in the order
of ranks, on each of them and for any size. Below, parts that are put side by side count as a sum.

Two places for what comes suffice. Who has ended sum n - 1 knows that all ranks have begun it: each has told it, or
has told the owner that told it, for the first block as for any. So all have ended sum n - 2, and nobody reads its
place when sum n is written there, whatever the forms, sizes and owners of these sums. What a rank writes in
another's memory, signals among it, no third one does. tests/triton_ops/ranks/test_signals.py models it.

Programs wait for those of the same number on other ranks. A GPU begins programs in order: the first that has not
ended everywhere runs on each rank, or is the next to, and waits for none that comes after it.
"""

# Tests: tests/triton_ops/ranks/test_peer_sum.py, tests/triton_ops/ranks/test_signals.py

from __future__ import annotations

from triton_ops.implementation import tl, triton


@triton.jit
def exchanged(
    own,
    offs,
    mask,
    addresses_ptr,
    counters_ptr,
    most,
    patience,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TRAPS: tl.constexpr,
):
    """Send a program's part to all others, and wait for theirs: where they lie, that of each rank `most` elements
    after the one before.
    """
    nth, place, patience = _begin(counters_ptr, patience, SIZE)
    for step in tl.static_range(1, SIZE):
        theirs = _memory_of((RANK + step) % SIZE, addresses_ptr, own.dtype)
        tl.store(theirs + (place + RANK) * most + offs, own, mask=mask)
    _tell_all(nth, addresses_ptr, RANK, SIZE)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            _wait_for(peer, nth, patience, addresses_ptr, counters_ptr, RANK, SIZE, TRAPS)
    tl.debug_barrier()
    return _memory_of(RANK, addresses_ptr, own.dtype) + place * most


@triton.jit
def sum_in_one_shot(
    own,
    offs,
    mask,
    addresses_ptr,
    counters_ptr,
    most,
    patience,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TRAPS: tl.constexpr,
):
    """The sum of a program's part over ranks, in float32, in one shot."""
    received = exchanged(own, offs, mask, addresses_ptr, counters_ptr, most, patience, RANK, SIZE, TRAPS)
    return _added(own, offs, mask, received, most, RANK, SIZE)


@triton.jit
def sum_in_two_shots(
    part_ptr,
    size,
    addresses_ptr,
    counters_ptr,
    most,
    patience,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TRAPS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """In two shots: where the sum of a program's `ELEMENTS` elements lies in this rank's memory, as those of a
    tensor. It is rounded.
    """
    pid = tl.program_id(0)
    owner = pid % SIZE
    element: tl.constexpr = part_ptr.dtype.element_ty
    nth, place, patience = _begin(counters_ptr, patience, SIZE)
    received = _memory_of(RANK, addresses_ptr, element) + place * most
    if owner == RANK:
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                _wait_for(peer, nth, patience, addresses_ptr, counters_ptr, RANK, SIZE, TRAPS)
        tl.debug_barrier()
        for start in range(0, ELEMENTS, STEP):
            offs, mask = _step(start, size, ELEMENTS, STEP)
            own = tl.load(part_ptr + offs, mask=mask, other=0.0)
            total = _added(own, offs, mask, received, most, RANK, SIZE).to(element)
            for step in tl.static_range(1, SIZE + 1):  # and here, where nobody else writes an own part
                theirs = _memory_of((RANK + step) % SIZE, addresses_ptr, element)
                tl.store(theirs + (place + RANK) * most + offs, total, mask=mask)
        _tell_all(nth, addresses_ptr, RANK, SIZE)
    else:
        theirs = _memory_of(owner, addresses_ptr, element)
        for start in range(0, ELEMENTS, STEP):
            offs, mask = _step(start, size, ELEMENTS, STEP)
            own = tl.load(part_ptr + offs, mask=mask, other=0.0)
            tl.store(theirs + (place + RANK) * most + offs, own, mask=mask)
        tl.debug_barrier()
        tl.atomic_xchg(_signals_of(owner, addresses_ptr, SIZE) + RANK, nth, sem="release", scope="sys")
        _wait_for(owner, nth, patience, addresses_ptr, counters_ptr, RANK, SIZE, TRAPS)
    tl.debug_barrier()
    return received + owner * most


@triton.jit
def _step(start, size, ELEMENTS: tl.constexpr, STEP: tl.constexpr):
    """Elements of a program from `start` on: where they are in a tensor of `size`, and which of them there are."""
    within = start + tl.arange(0, STEP)
    offs = tl.program_id(0).to(tl.int64) * ELEMENTS + within
    return offs, (within < ELEMENTS) & (offs < size)


@triton.jit
def _begin(counters_ptr, patience, SIZE: tl.constexpr):
    """The number of the sum, the first of its places for parts, the attempts it makes."""
    # Sums are counted: signals say of which one a part is there, and are never taken back.
    nth = tl.load(counters_ptr, volatile=True) + 1
    # The place that the sum before did not use: others may still read that one.
    place = (nth & 1) * SIZE
    return nth, place, tl.where(tl.load(counters_ptr + 2, volatile=True) != 0, 0, patience)


@triton.jit
def _memory_of(rank, addresses_ptr, element: tl.constexpr):
    """Its data. Aligned, which a compiler cannot know of an address that it loads: accesses are wide only so."""
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(element)), 16)


@triton.jit
def _signals_of(rank, addresses_ptr, SIZE: tl.constexpr):
    """Its signals of this program's block."""
    return tl.load(addresses_ptr + SIZE + rank).to(tl.pointer_type(tl.int64)) + tl.program_id(0) * SIZE


@triton.jit
def _tell_all(nth, addresses_ptr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """That what this program wrote into the others' memory is there. By a thread for each of them at once."""
    tl.static_assert(SIZE <= 32)
    peer = tl.arange(0, 32)
    is_other = (peer < SIZE) & (peer != RANK)
    addresses = tl.load(addresses_ptr + SIZE + peer, mask=is_other, other=0)
    signals = addresses.to(tl.pointer_type(tl.int64)) + (tl.program_id(0) * SIZE + RANK)
    tl.debug_barrier()
    tl.atomic_xchg(signals, tl.zeros_like(addresses) + nth, mask=is_other, sem="release", scope="sys")


@triton.jit
def _wait_for(
    peer,
    nth,
    patience,
    addresses_ptr,
    counters_ptr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TRAPS: tl.constexpr,
):
    """Until its signal is there. One thread has then acquired what came with it: a barrier must follow."""
    signal = _signals_of(RANK, addresses_ptr, SIZE) + peer
    tries = 0
    zero = (nth * 0).to(tl.int64)
    while (tl.atomic_add(signal, zero, sem="relaxed", scope="sys") < nth) & (tries < patience):
        tries += 1
    # Whose result is used: else the compiler takes it for a load that nobody needs.
    if tl.atomic_add(signal, zero, sem="acquire", scope="sys") < nth:
        tl.store(counters_ptr + 2, 1)
        if TRAPS:
            tl.inline_asm_elementwise(
                "trap; mov.b32 $0, $1;", "=r,r", [tl.arange(0, 32)], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def _added(own, offs, mask, received, most, RANK: tl.constexpr, SIZE: tl.constexpr):
    """The own and the others' parts, in the order of ranks, in float32."""
    total = tl.zeros_like(own).to(tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            total += own.to(tl.float32)
        else:
            come = tl.load(received + peer * most + offs, mask=mask, other=0.0, volatile=True)
            total += come.to(tl.float32)
    return total


@triton.jit
def end_sum(counters_ptr, num_programs):
    """The last program to end counts the sum."""
    one = tl.full((), 1, tl.int64)
    if tl.atomic_add(counters_ptr + 1, one, sem="acq_rel", scope="gpu") == num_programs - 1:
        tl.store(counters_ptr + 1, 0)
        tl.atomic_add(counters_ptr, one, sem="release", scope="gpu")
