from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def bodies(pack: Any) -> Any:
    return pack.module("nodes.http.bodies")


@pytest.fixture
def refused(pack: Any) -> Any:
    return pack.module("nodes.http.guards").RefusedError


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"{}", {}),
        (b' {"a": [1, 2.5, null, true, "\xc3\xa4"]}\n', {"a": [1, 2.5, None, True, "ä"]}),
    ],
)
def test_object_is_parsed(bodies: Any, body: bytes, value: Any) -> None:
    assert bodies.parse_object(body) == value


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[]", "it is no object"),
        (b"null", "it is no object"),
        (b"true", "it is no object"),
        (b"1", "it is no object"),
        (b'"all"', "it is no object"),
        (b"NaN", "NaN is no JSON number"),
        (b'{"level": NaN}', "NaN is no JSON number"),
        (b'{"level": Infinity}', "Infinity is no JSON number"),
        (b'{"level": -Infinity}', "-Infinity is no JSON number"),
        (b'{"level": 1e999}', "a number is too large"),
        (b'{"level": ' + b"9" * 5000 + b"}", "a number is too long"),
        (b'{"level": 1, "level": 2}', "a field is there twice"),
        (b'{"a": {"b": 1, "b": 1}}', "a field is there twice"),
        (b'{"level"', "line 1, column 9"),
        (b'{"level": 1} {}', "Extra data"),
        (b"{'level': 1}", "Expecting property name"),
        (b'{"level": 1,}', "line 1"),
        ("{}".encode("utf-16"), "it is not UTF-8"),
        ("{}".encode("utf-16-le"), "line 1"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"models": ["\xff"]}', "it is not UTF-8"),
        (b'{"models": ["\xed\xa0\x80"]}', "it is not UTF-8"),
        (b"[" * 60_000, "it is nested too deeply"),
        (b'{"a":' * 12_000, "it is nested too deeply"),
    ],
)
def test_anything_else_is_refused_with_the_reason(
    bodies: Any, refused: Any, body: bytes, why: str
) -> None:
    with pytest.raises(refused, match="the body has to be one JSON object in UTF-8: ") as caught:
        bodies.parse_object(body)
    assert why in str(caught.value)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_empty_body_is_refused_and_the_smallest_one_named(
    bodies: Any, refused: Any, body: bytes
) -> None:
    with pytest.raises(refused, match=r"\{\} is enough") as caught:
        bodies.parse_object(body)
    assert (caught.value.status, caught.value.code) == (400, "empty_body")


@pytest.mark.parametrize("value", ["2", 99, 0, -1, None, True, False, 1.0, 2.0, [1], {}, "1"])
def test_choice_takes_its_values_only_and_with_their_type(
    bodies: Any, refused: Any, value: Any
) -> None:
    field = bodies.Choice("level", (1, 2), 1, "doc")
    assert (field.read(1), field.read(2)) == (1, 2)
    with pytest.raises(refused, match="level has to be 1 or 2, not ") as caught:
        field.read(value)
    assert (caught.value.status, caught.value.code) == (400, "invalid_field")


def test_all_models_and_some_models(bodies: Any) -> None:
    field = bodies.ModelIds("models", "doc")
    assert field.read("all") is None
    assert field.read(["b", "a", "b"]) == ("b", "a")
    assert field.read(["../../x"]) == ("../../x",)


@pytest.mark.parametrize(
    "value",
    [
        *["ALL", "wan-1", "", None, 1, True, {}],
        *[[], [1], [None], [["a"]], ["a", 1], [""], ["x" * 201], ["\ud800"]],
    ],
)
def test_other_models_are_refused(bodies: Any, refused: Any, value: Any) -> None:
    with pytest.raises(refused, match=r"^models ") as caught:
        bodies.ModelIds("models", "doc").read(value)
    assert (caught.value.status, caught.value.code) == (400, "invalid_field")
    assert str(caught.value).isascii()


def test_left_out_is_the_default_and_null_is_not_left_out(bodies: Any, refused: Any) -> None:
    fields = [bodies.ModelIds("models", "doc"), bodies.Choice("level", (1, 2), 1, "doc")]
    assert bodies.read_fields({}, fields) == {"models": None, "level": 1}
    with pytest.raises(refused, match="level has to be 1 or 2, not null"):
        bodies.read_fields({"level": None}, fields)


def test_unknown_field_is_named_and_so_are_the_known_ones(bodies: Any, refused: Any) -> None:
    fields = [bodies.Choice("level", (1, 2), 1, "doc")]
    with pytest.raises(refused, match=r"no field is called 'Level'; there are level") as caught:
        bodies.read_fields({"Level": 2}, fields)
    assert (caught.value.status, caught.value.code) == (400, "unknown_field")


def test_names_that_somebody_sent_stay_short_and_on_one_line(bodies: Any) -> None:
    text = bodies.names_text(["a\nb", "\ud800", "x" * 1000, *"cdefgh"])
    assert text == f"'a\\nb', '\\ud800', '{'x' * 40}', 'c', 'd' and 4 more"
