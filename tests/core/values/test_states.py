"""The tables of moves and the tree of errors: complete, and without a dead end."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import pytest

import offload_core.values as values
from offload_core.values import ENGINE_MOVES, LAYER_MOVES, EngineState, LayerState

Moves = Mapping[Any, frozenset[Any]]


def reachable(moves: Moves, start: enum.Enum) -> set[enum.Enum]:
    found, todo = set(), [start]
    while todo:
        state = todo.pop()
        if state not in found:
            found.add(state)
            todo.extend(moves[state])
    return found


@pytest.mark.parametrize(
    ("moves", "states", "rest"),
    [
        (LAYER_MOVES, LayerState, LayerState.ABSENT),
        (ENGINE_MOVES, EngineState, EngineState.UNLOADED),
    ],
)
def test_every_state_has_a_row_and_a_way_there_and_back(
    moves: Moves, states: type[enum.Enum], rest: enum.Enum
) -> None:
    assert set(moves) == set(states)
    assert reachable(moves, rest) == set(states)
    for state in states:
        if state is not EngineState.DETACHED:
            assert rest in reachable(moves, state), state


def test_a_detached_engine_is_so_for_good() -> None:
    assert ENGINE_MOVES[EngineState.DETACHED] == frozenset()


def test_a_layer_is_never_used_before_it_is_ready_nor_refilled_while_in_use() -> None:
    assert [s for s in LayerState if LayerState.IN_USE in LAYER_MOVES[s]] == [LayerState.READY]
    assert LAYER_MOVES[LayerState.IN_USE] == {LayerState.RELEASING}


def test_every_error_is_of_the_one_tree() -> None:
    errors = [getattr(values, name) for name in values.__all__ if name.endswith("Error")]
    assert len(errors) == 14
    assert all(issubclass(error, values.CourierError) for error in errors)
