"""Windows: the fewest bytes stream that fit, each layer in one piece, alike layers about alike."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from offload_core.plan import NOTHING, Footprint, Held, Streaming, Window, stream_least

EXACT = Footprint()
ROUNDED = Footprint(large_bytes=40, granularity_bytes=16)
SMALL_BYTES = 1 << 20
"""Edges up to this size fall together when room is given away."""

Layers = Sequence[tuple[int, ...]]


def sizes(layers: Layers, found: Streaming) -> list[int]:
    """Bytes that each layer streams."""
    return [
        sum(layer[window.first : window.last])
        for layer, window in zip(layers, found.windows, strict=True)
    ]


def cost(layers: Layers, streamed: Sequence[int], slots: int, footprint: Footprint) -> int:
    """Device bytes when that much of each layer streams."""
    resident = sum(
        footprint.of(sum(layer) - size) for layer, size in zip(layers, streamed, strict=True)
    )
    used = min(slots, sum(size > 0 for size in streamed))
    return resident + used * footprint.of(max(streamed, default=0))


def with_windows(layers: Layers, all_windows: Sequence[Window]) -> Streaming:
    return Streaming(tuple(all_windows), 0, 0, 0)


def any_layers(chance: random.Random, unit: int = 1) -> list[tuple[int, ...]]:
    kinds = [
        tuple(unit * chance.choice([0, 1, 2, 5, chance.randrange(1, 60)]) for _ in range(count))
        for count in [chance.randrange(7) for _ in range(chance.randrange(1, 4))]
    ]
    return [chance.choice(kinds) for _ in range(chance.randrange(1, 9))]


def test_what_fits_whole_streams_nothing() -> None:
    found = stream_least([(10, 20), (30,)], 2, 60, EXACT)
    assert found == Streaming((NOTHING, NOTHING), 0, 0, 60)


def test_no_layers_need_no_room() -> None:
    assert stream_least([], 2, 0, EXACT) == Streaming((), 0, 0, 0)


def test_no_layers_in_less_than_no_room_are_refused() -> None:
    assert stream_least([], 2, -1, EXACT) is None


def test_the_smallest_room_is_a_slot_for_the_largest_layer_and_a_byte_less_is_refused() -> None:
    layers = [(10, 20), (5, 5), (30, 7)]
    found = stream_least(layers, 1, 37, EXACT)
    assert found is not None
    # A slot of 30 and 7 that stay cost as much as a slot of 37, and stream less.
    assert (found.slots, found.slot_bytes, found.device_bytes) == (1, 30, 37)
    assert sizes(layers, found) == [30, 10, 30]
    assert stream_least(layers, 1, 36, EXACT) is None


def test_a_little_less_than_everything_streams_a_little_of_every_layer() -> None:
    # With two slots and six layers, what is missing is saved by slots a quarter as large.
    layers = [(10,) * 10] * 6
    found = stream_least(layers, 2, 600 - 40, EXACT)
    assert found is not None
    assert sizes(layers, found) == [10] * 6
    assert (found.slots, found.slot_bytes, found.device_bytes) == (2, 10, 560)


def test_a_window_takes_the_run_with_the_most_bytes_and_the_edges_stay() -> None:
    layers = [(1, 30, 30, 1), (1, 30, 30, 1)]
    found = stream_least(layers, 1, 64, EXACT)
    assert found is not None
    assert found.windows == (Window(1, 3), Window(1, 3))
    assert 0 not in found.windows[0]
    assert 2 in found.windows[0]
    assert 3 not in found.windows[0]


@pytest.mark.parametrize("footprint", [EXACT, ROUNDED], ids=["exact", "rounded"])
def test_properties_of_every_plan(footprint: Footprint) -> None:
    chance = random.Random(1)
    planned = 0
    for _ in range(4000):
        layers = any_layers(chance)
        slots = chance.randrange(1, 5)
        whole = sum(footprint.of(sum(layer)) for layer in layers)
        room = chance.randrange(whole + 3)
        found = stream_least(layers, slots, room, footprint)
        if found is None:
            check_refusal(layers, slots, room, footprint)
            continue
        planned += 1
        check(layers, slots, room, footprint, found)
    assert planned > 1000


def check_refusal(layers: Layers, slots: int, room: int, footprint: Footprint) -> None:
    """The slot that leaves the least resident: as large as the k-th largest layer."""
    totals = [sum(layer) for layer in layers]
    slot = sorted(totals, reverse=True)[: max(1, slots)][-1]
    least = min(
        cost(layers, [largest_run(layer, slot) for layer in layers], slots, footprint),
        sum(map(footprint.of, totals)),
    )
    assert least > room


def largest_run(layer: tuple[int, ...], limit: int) -> int:
    return max(
        (
            size
            for first in range(len(layer) + 1)
            for last in range(first, len(layer) + 1)
            if (size := sum(layer[first:last])) <= limit
        ),
        default=0,
    )


def check(layers: Layers, slots: int, room: int, footprint: Footprint, found: Streaming) -> None:
    assert found.device_bytes <= room
    streamed = sizes(layers, found)
    for layer, window in zip(layers, found.windows, strict=True):
        assert 0 <= window.first <= window.last <= len(layer)
    moving = [window for window in found.windows if not window.is_empty]
    assert found.slots == min(slots, len(moving))
    assert found.slot_bytes == max(streamed, default=0)
    resident = sum(
        footprint.of(sum(layer) - size) for layer, size in zip(layers, streamed, strict=True)
    )
    assert found.device_bytes == resident + found.slots * footprint.of(found.slot_bytes)
    if sum(footprint.of(sum(layer)) for layer in layers) <= room:
        assert not moving
    # What is left is less than any edge would cost, the slots that it would shrink counted.
    left = room - found.device_bytes
    for index, window in enumerate(found.windows):
        for smaller in narrower(window):
            now = sum(layers[index]) - streamed[index]
            then = sum(layers[index]) - sum(layers[index][smaller.first : smaller.last])
            assert footprint.of(then) - footprint.of(now) > left, (layers, slots, room, found)


def narrower(window: Window) -> Iterator[Window]:
    if not window.is_empty:
        yield Window(window.first + 1, window.last)
        yield Window(window.first, window.last - 1)


def test_edges_that_only_smaller_slots_make_room_for_are_given_too() -> None:
    # One edge of each layer costs 20 together, and a slot that is smaller by 10 gives half back.
    layers = [(10, 10, 10, 10)] * 2
    found = stream_least(layers, 1, 50, EXACT)
    assert found is not None
    left = 50 - found.device_bytes
    assert left < 10
    for first, last in product((0, 1), repeat=2):
        shrunk = [Window(w.first + first, w.last - last) for w in found.windows]
        streamed = sizes(layers, with_windows(layers, shrunk))
        if shrunk != list(found.windows):
            assert cost(layers, streamed, 1, EXACT) > 50


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_alike_layers_stream_about_the_same(slots: int) -> None:
    chance = random.Random(2)
    for _ in range(300):
        layer = tuple(chance.randrange(1, 50) for _ in range(chance.randrange(1, 12)))
        layers = [layer] * chance.randrange(slots, 20)
        room = chance.randrange(slots * sum(layer), len(layers) * sum(layer) + 1)
        found = stream_least(layers, slots, room, EXACT)
        assert found is not None
        streamed = sizes(layers, found)
        if room < len(layers) * sum(layer):
            # Small weights at the edge of one window may fall together, as far as the room goes.
            left_over = room - cost(layers, [max(streamed)] * len(layers), slots, EXACT)
            assert max(streamed) - min(streamed) <= max(max(layer), left_over)


def test_large_edges_are_given_to_layers_in_turn() -> None:
    layers = [(4 * SMALL_BYTES,) * 8] * 8
    even = stream_least(layers, 2, 16 * 4 * SMALL_BYTES, EXACT)
    assert even is not None
    for extra in range(1, 40):
        found = stream_least(layers, 2, (16 + extra) * 4 * SMALL_BYTES, EXACT)
        assert found is not None
        streamed = sizes(layers, found)
        assert max(streamed) - min(streamed) <= 4 * SMALL_BYTES
        assert sum(streamed) < sum(sizes(layers, even))


def all_choices(layers: Layers) -> Iterator[tuple[int, ...]]:
    """Every amount that each layer can stream in one run."""
    yield from product(
        *(
            sorted(
                {sum(layer[a:b]) for a in range(len(layer) + 1) for b in range(a, len(layer) + 1)}
            )
            for layer in layers
        )
    )


@pytest.mark.parametrize("footprint", [EXACT, ROUNDED], ids=["exact", "rounded"])
def test_no_more_than_a_weight_a_layer_streams_beyond_the_best_there_is(
    footprint: Footprint,
) -> None:
    chance = random.Random(3)
    tried = exact = 0
    while tried < 400:
        layers = [
            tuple(chance.randrange(1, 40) for _ in range(chance.randrange(1, 5)))
            for _ in range(chance.randrange(1, 5))
        ]
        slots = chance.randrange(1, 4)
        room = chance.randrange(sum(footprint.of(sum(layer)) for layer in layers))
        found = stream_least(layers, slots, room, footprint)
        if found is None:
            continue
        tried += 1
        best = min(
            sum(choice)
            for choice in all_choices(layers)
            if cost(layers, choice, slots, footprint) <= room
        )
        got = sum(sizes(layers, found))
        slack = sum(max(layer) for layer in layers)
        if footprint is ROUNDED:
            slack += (len(layers) + slots) * footprint.granularity_bytes
        assert best <= got <= best + slack, (layers, slots, room, found)
        exact += got == best
    # Most of these have a weight that fits nothing else; still many are as good as can be.
    assert exact > tried // 4


@pytest.mark.parametrize("footprint", [EXACT, ROUNDED], ids=["exact", "rounded"])
def test_what_is_held_stays_and_what_is_added_is_an_allocation_of_its_own(
    footprint: Footprint,
) -> None:
    chance = random.Random(2)
    grown = 0
    for _ in range(2000):
        layers = any_layers(chance)
        slots = chance.randrange(1, 4)
        whole = sum(footprint.of(sum(layer)) for layer in layers)
        room = chance.randrange(whole + 1)
        found = stream_least(layers, slots, room, footprint)
        if found is None:
            continue
        held = [
            Held(window, footprint.of(sum(layer) - size))
            for layer, window, size in zip(layers, found.windows, sizes(layers, found), strict=True)
        ]
        for _ in range(3):
            room += chance.randrange(whole // 2 + 2)
            before = found
            # As the planner does: fewer slots where fewer layers are left to stream.
            tries = (
                stream_least(layers, count, room, footprint, held) for count in range(slots, 0, -1)
            )
            found = next(one for one in tries if one is not None)
            held = check_addition(layers, footprint, before, found, held)
            assert found.device_bytes <= room
            grown += found.windows != before.windows
    assert grown > 500


def check_addition(
    layers: Layers, footprint: Footprint, before: Streaming, found: Streaming, held: Sequence[Held]
) -> list[Held]:
    """What is held once ``found`` is in force."""
    after = []
    was, now = sizes(layers, before), sizes(layers, found)
    for old, window, had, has, part in zip(
        before.windows, found.windows, was, now, held, strict=True
    ):
        assert window.is_empty or old.first <= window.first <= window.last <= old.last
        after.append(Held(window, part.device_bytes + footprint.of(had - has)))
    slots = found.slots * footprint.of(found.slot_bytes)
    assert found.device_bytes == sum(part.device_bytes for part in after) + slots
    assert found.slot_bytes == max(now, default=0)
    return after


def test_more_room_never_streams_much_more() -> None:
    chance = random.Random(4)
    for _ in range(60):
        layers = any_layers(chance)
        slots = chance.randrange(1, 4)
        largest = sum(max(layer, default=0) for layer in layers)
        before = None
        for room in range(0, sum(map(sum, layers)) + 1, 7):
            found = stream_least(layers, slots, room, EXACT)
            assert found is not None or before is None
            if found is not None:
                now = sum(sizes(layers, found))
                assert before is None or now <= before + largest
                before = now


class Counted(Footprint):
    """Every guess of the search asks once a layer what it costs, and once for the slots."""

    asked = 0

    def of(self, size_bytes: int) -> int:
        type(self).asked += 1
        return super().of(size_bytes)


def test_ten_thousand_weights_are_planned_in_a_few_guesses_and_one_look_at_each() -> None:
    layers = [tuple(256 * (number + shift) for number in range(250)) for shift in range(40)]
    whole = sum(map(sum, layers))
    for share in range(10, 100, 5):
        Counted.asked = 0
        assert stream_least(layers, 2, whole * share // 100, Counted()) is not None
        # About 7 guesses, then twice a weight that is given back while room is left.
        assert 0 < Counted.asked < 12 * (len(layers) + 1) + 4 * 10_000


def test_a_footprint_rounds_what_is_large_and_leaves_what_is_small() -> None:
    footprint = Footprint(large_bytes=100, granularity_bytes=32)
    assert [footprint.of(size) for size in (0, 1, 99, 100, 128, 129)] == [0, 1, 99, 128, 128, 160]
    assert [EXACT.of(size) for size in (0, 1, 100)] == [0, 1, 100]
