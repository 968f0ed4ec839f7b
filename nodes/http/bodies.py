"""The body of a request: read up to a limit, parsed strictly, and checked field by field.

A field says of itself what it takes (``read``) and how that is written down (``schema``), so that
the OpenAPI document cannot tell anything else than what the routes do.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ...offload_core.values import gib_to_bytes
from ..requests.records import KEEP, Keep
from .guards import RefusedError

BODY_LIMIT_BYTES = 64 * 1024
SILENCE_SECONDS = 30.0
ID_LIMIT = 200
ALL = "all"
_SHOWN_NAMES = 5
_SHOWN_LENGTH = 40


@dataclass(frozen=True)
class Choice:
    """A field that is one of some values. ``True`` and ``1.0`` are not ``1``."""

    name: str
    values: tuple[str, ...] | tuple[int, ...]
    default: str | int
    doc: str
    required: bool = False

    def read(self, value: Any) -> str | int:
        """Raises: RefusedError (400) for anything else."""
        for allowed in self.values:
            # In Python True == 1 == 1.0: what was sent as another type was meant as another thing.
            if type(value) is type(allowed) and value == allowed:
                return allowed
        wanted = " or ".join(json.dumps(allowed) for allowed in self.values)
        refuse_field(self.name, f"has to be {wanted}, not {kind_text(value)}")

    def schema(self) -> dict[str, Any]:
        """As JSON Schema."""
        kind = "integer" if isinstance(self.default, int) else "string"
        return {
            "type": kind,
            "enum": list(self.values),
            "default": self.default,
            "description": self.doc,
        }


@dataclass(frozen=True)
class ModelIds:
    """A field that names models by the ids of the status, or all of them. None stands for all."""

    name: str
    doc: str
    default: None = None
    required: bool = False

    def read(self, value: Any) -> tuple[str, ...] | None:
        """Raises: RefusedError (400). Whether there is such a model is not looked at here."""
        if value == ALL:
            return None
        if not isinstance(value, list):
            refuse_field(self.name, f'has to be a list of ids or "{ALL}", not {kind_text(value)}')
        if not value:
            refuse_field(self.name, f'names no model; leave it out, or say "{ALL}"')
        for item in value:
            if not isinstance(item, str):
                refuse_field(
                    self.name, f"has to hold ids, which are strings, not {kind_text(item)}"
                )
            if not 1 <= len(item) <= ID_LIMIT or not is_text(item):
                refuse_field(self.name, f"holds an id that is not 1 to {ID_LIMIT} characters")
        return tuple(dict.fromkeys(value))

    def schema(self) -> dict[str, Any]:
        """As JSON Schema."""
        an_id = {"type": "string", "minLength": 1, "maxLength": ID_LIMIT}
        return {
            "oneOf": [
                {"type": "string", "const": ALL},
                {"type": "array", "items": an_id, "minItems": 1},
            ],
            "default": ALL,
            "description": self.doc,
        }


@dataclass(frozen=True)
class ModelId:
    """A field that names one model by its id; it has to be there."""

    name: str
    doc: str
    default: None = None
    required: bool = True

    def read(self, value: Any) -> str:
        """Raises: RefusedError (400). Whether there is such a model is not looked at here."""
        if not isinstance(value, str):
            refuse_field(self.name, f"has to be the id of a model, not {kind_text(value)}")
        if not 1 <= len(value) <= ID_LIMIT or not is_text(value):
            refuse_field(self.name, f"is an id that is not 1 to {ID_LIMIT} characters")
        return value

    def schema(self) -> dict[str, Any]:
        """As JSON Schema."""
        return {
            "type": "string",
            "minLength": 1,
            "maxLength": ID_LIMIT,
            "description": self.doc,
        }


@dataclass(frozen=True)
class GibOrNone:
    """A field that is a figure in GiB, or null. It is read as whole bytes, or None."""

    name: str
    most_gib: int
    doc: str
    zero_means: str
    """What is wrong with 0; empty where 0 may be meant."""
    default: Keep = KEEP
    required: bool = False

    def read(self, value: Any) -> int | None:
        """Raises: RefusedError (400)."""
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            refuse_field(self.name, f"has to be a number of GiB or null, not {kind_text(value)}")
        if not 0 <= value <= self.most_gib:
            refuse_field(self.name, f"has to be between 0 and {self.most_gib}, or null")
        if value == 0:
            if self.zero_means:
                refuse_field(self.name, self.zero_means)
            return 0
        # Less than a byte is a small figure, and not the figure 0, which means another thing.
        return max(1, gib_to_bytes(value, self.name))

    def schema(self) -> dict[str, Any]:
        """As JSON Schema."""
        least = {"exclusiveMinimum": 0} if self.zero_means else {"minimum": 0}
        return {
            "type": ["number", "null"],
            **least,
            "maximum": self.most_gib,
            "description": self.doc,
        }


class Field(Protocol):
    """What a field of a body has to say of itself."""

    @property
    def name(self) -> str:
        """As it is called in the body."""

    @property
    def default(self) -> Any:
        """What it is where it is left out."""

    @property
    def required(self) -> bool:
        """Whether it may not be left out."""

    def read(self, value: Any) -> Any:
        """The value that was sent. Raises: RefusedError (400)."""

    def schema(self) -> dict[str, Any]:
        """As JSON Schema."""


def read_fields(body: Mapping[str, Any], fields: Sequence[Field]) -> dict[str, Any]:
    """Every field by name, with its default where it is left out. ``null`` is not "left out".

    Raises: RefusedError (400), naming the field.
    """
    known = {field.name: field for field in fields}
    unknown = [name for name in body if name not in known]
    if unknown:
        text = f"no field is called {names_text(unknown)}; there are {', '.join(known)}"
        raise RefusedError(400, "unknown_field", text)
    for field in fields:
        if field.required and field.name not in body:
            refuse_field(field.name, "has to be there")
    return {
        name: field.read(body[name]) if name in body else field.default
        for name, field in known.items()
    }


def names_text(names: Sequence[str]) -> str:
    """Names that somebody sent, on one line and not too many."""
    shown = [ascii(name[:_SHOWN_LENGTH]) for name in names[:_SHOWN_NAMES]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


async def read_body(request: web.Request, limit_bytes: int = BODY_LIMIT_BYTES) -> bytes:
    """The body, of which never more than ``limit_bytes`` and one piece are held.

    Raises: RefusedError: 413 where it is too long, 400 where it does not arrive.
    """
    length = request.content_length
    if length is not None and length > limit_bytes:
        _refuse_length(limit_bytes)
    body = bytearray()
    try:
        if request.content.at_eof():
            # A middleware of another pack may have read it; then aiohttp has kept it.
            body += await request.read()
        while not request.content.at_eof():
            body += await asyncio.wait_for(request.content.readany(), SILENCE_SECONDS)
            if len(body) > limit_bytes:
                break
    except asyncio.TimeoutError:  # its own class before Python 3.11
        text = f"nothing more of the body came for {SILENCE_SECONDS:.0f} s"
        raise RefusedError(400, "body_broken", text) from None
    # Which of them it is depends on aiohttp's version and on where the connection broke.
    except (aiohttp.ClientError, web.RequestPayloadError, HttpProcessingError, ConnectionError):
        raise RefusedError(400, "body_broken", "the body did not arrive as announced") from None
    if len(body) > limit_bytes:
        _refuse_length(limit_bytes)
    return bytes(body)


def parse_object(body: bytes, decoder: type[json.JSONDecoder] = json.JSONDecoder) -> dict[str, Any]:
    """The one JSON object that ``body`` is.

    Raises: RefusedError (400), with the reason.
    """
    if not body.strip():
        raise RefusedError(400, "empty_body", "the body is empty; {} is enough for the defaults")
    try:
        value = json.loads(
            body.decode("utf-8"),
            cls=decoder,
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError:
        _refuse_json("it is not UTF-8")
    except RecursionError:
        _refuse_json("it is nested too deeply")
    except json.JSONDecodeError as error:
        _refuse_json(f"{error.msg} at line {error.lineno}, column {error.colno}")
    except ValueError as error:
        _refuse_json(str(error) if isinstance(error, _JsonError) else "a number is too long")
    if not isinstance(value, dict):
        _refuse_json("it is no object; {} is the smallest one")
    return value


class _JsonError(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _JsonError("a field is there twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise _JsonError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _JsonError("a number is too large")
    return number


def refuse_field(name: str, what: str) -> NoReturn:
    """Raises: RefusedError (400), always."""
    raise RefusedError(400, "invalid_field", f"{name} {what}")


def kind_text(value: Any) -> str:
    """What was sent, without showing all of it: it may be long."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return f"the string {value[:_SHOWN_LENGTH]!a}"
    if isinstance(value, (int, float)):
        return f"the number {str(value)[:_SHOWN_LENGTH]}"
    return "a list" if isinstance(value, list) else "an object"


def is_text(value: str) -> bool:
    """JSON can spell half a character ("\\ud800"), which no log and no answer can write."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_length(limit_bytes: int) -> NoReturn:
    text = f"the body is longer than {limit_bytes} bytes, the most that this server takes"
    raise RefusedError(413, "body_too_large", text)


def _refuse_json(why: str) -> NoReturn:
    raise RefusedError(400, "invalid_json", f"the body has to be one JSON object in UTF-8: {why}")
