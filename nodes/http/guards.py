"""Who may change a state over HTTP. Checks on the head of a request, and nothing else.

A request passes as local: it comes from this machine, through no proxy, and names this machine in
``Host``. Or it carries the token. Both have to come from a page of ours (or from no page at all),
as ``application/json``: a browser sends that to another site only after asking first.

``Host`` is looked at although the peer is: with DNS rebinding, a page of a stranger becomes
"same origin" and the browser that shows it runs on this machine. Only its ``Host`` tells. That is
why a name that is not of this machine needs the token in the request, and not only one configured.
"""

from __future__ import annotations

import hmac
import ipaddress
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeAlias

from aiohttp import HttpVersion11, web
from multidict import CIMultiDict, CIMultiDictProxy

TOKEN_VARIABLE = "COURIER_TOKEN"
TOKEN_FILE_VARIABLE = "COURIER_TOKEN_FILE"
REQUIRE_VARIABLE = "COURIER_REQUIRE_TOKEN"
TOKEN_FILE_LIMIT_BYTES = 4096
BURST = 10
CHANGES_PER_SECOND = 5.0

Headers: TypeAlias = "CIMultiDict[str] | CIMultiDictProxy[str]"

_HOST = r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?"
_HOST_PATTERN = re.compile(_HOST, re.IGNORECASE)
_ORIGIN_PATTERN = re.compile(rf"(?P<scheme>https?)://{_HOST}", re.IGNORECASE)
_JSON_PATTERN = re.compile(
    r'application/json[ \t]*(;[ \t]*charset=("utf-8"|utf-8)[ \t]*)?', re.IGNORECASE
)
_DEFAULT_PORTS = {"http": 80, "https": 443}
# What proxies say of whom they ask for. Anybody may write these, so they can only take trust away.
_PROXY_HEADERS = frozenset(
    {
        "cf-connecting-ip",
        "client-ip",
        "fastly-client-ip",
        "forwarded",
        "true-client-ip",
        "via",
        "x-client-ip",
        "x-cluster-client-ip",
        "x-original-forwarded-for",
        "x-real-ip",
    }
)


class RefusedError(Exception):
    """A request that is not let in. ``str`` is the sentence for whoever sent it."""

    def __init__(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


class RateLimit:
    """So many changes at once, then so many a second. Whoever is refused here takes nothing.

    Threads: one event loop.
    """

    def __init__(
        self,
        burst: int = BURST,
        per_second: float = CHANGES_PER_SECOND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._per_second = per_second
        self._clock = clock
        self._left = float(burst)
        self._filled_at = clock()

    def take(self) -> None:
        """Count one change.

        Raises: RefusedError (429) where there is none left; ``Retry-After`` says when there is.
        """
        now = self._clock()
        grown = max(0.0, now - self._filled_at) * self._per_second
        self._left = min(float(self._burst), self._left + grown)
        self._filled_at = now
        if self._left < 1.0:
            seconds = max(1, math.ceil((1.0 - self._left) / self._per_second))
            text = f"too many changes in a short time; ask again in {seconds} s"
            raise RefusedError(429, "too_many_requests", text, {"Retry-After": str(seconds)})
        self._left -= 1.0


def peer_of(request: web.Request) -> str | None:
    """The address at the other end of the connection; None where nobody can say.

    Not ``request.remote``: a middleware that trusts X-Forwarded-For may have put another one there.
    """
    name = None if request.transport is None else request.transport.get_extra_info("peername")
    return name[0] if isinstance(name, tuple) and name else None


@dataclass(frozen=True)
class Guards:
    """The checks with what they ask: the environment, the connection's peer, the clock.

    Threads: the event loop of the server.
    """

    environment: Mapping[str, str]
    peer_of: Callable[[web.Request], str | None] = peer_of
    rate: RateLimit = field(default_factory=RateLimit)

    def check(self, request: web.Request) -> None:
        """Everything that can be told from the head of the request.

        Raises: RefusedError.
        """
        self.check_sender(request)
        check_content_type(request.headers)

    def check_sender(self, request: web.Request) -> None:
        """Of a request without a body, that is all there is to check.

        Raises: RefusedError.
        """
        headers = request.headers
        # A proxy may say nothing of whom it asks for; many speak the older HTTP to whom they ask.
        is_plain = request.version >= HttpVersion11 and not requires_token(self.environment)
        if not (is_plain and is_local(headers, self.peer_of(request))):
            check_token(headers, self.environment)
        check_origin(headers)


def requires_token(environment: Mapping[str, str]) -> bool:
    """Whether nobody counts as local. Whatever is set means yes, but for the words for no."""
    value = environment.get(REQUIRE_VARIABLE, "").strip().lower()
    return value not in ("", "0", "false", "no", "off")


def is_local(headers: Headers, peer: str | None) -> bool:
    """Whether the request is from this machine, came through no proxy, and was meant for it."""
    return is_loopback_peer(headers, peer) and is_loopback_host(_single(headers, "Host"))


def is_loopback_peer(headers: Headers, peer: str | None) -> bool:
    """Whether ``peer`` is this machine, and speaks for itself."""
    if any(name.lower().startswith("x-forwarded") for name in headers):
        return False
    if any(name.lower() in _PROXY_HEADERS for name in headers):
        return False
    return peer is not None and _is_loopback_address(peer)


def is_loopback_host(host: str | None) -> bool:
    """Whether a ``Host`` names this machine: localhost, 127.0.0.0/8 or ::1, with any port."""
    match = _HOST_PATTERN.fullmatch(host or "")
    if match is None:
        return False
    name = _name_of(match)
    return name.lower() == "localhost" or _is_loopback_address(name)


def check_origin(headers: Headers) -> None:
    """Refuse what a page of another site sends. Programs send neither header.

    Raises: RefusedError (403).
    """
    # "same-site" is not enough: another port of this machine is another program.
    if _single(headers, "Sec-Fetch-Site") not in (None, "same-origin", "none"):
        _refuse_origin("the browser says that a page of another origin sends it")
    origin = _single(headers, "Origin")
    if origin is None:
        return
    ours = _HOST_PATTERN.fullmatch(_single(headers, "Host") or "")
    theirs = _ORIGIN_PATTERN.fullmatch(origin)  # "null" and every other scheme do not match
    if ours is None or theirs is None:
        _refuse_origin("its Origin is no http address, or its Host is none")
    # Which scheme the browser used is the Origin's to say: a proxy may have ended the encryption.
    port = _DEFAULT_PORTS[theirs["scheme"].lower()]
    if _address(ours, port) != _address(theirs, port):
        _refuse_origin("its Origin and its Host differ")


def check_content_type(headers: Headers) -> None:
    """Let in JSON as such only: what a form of another site can send is anything but that.

    Raises: RefusedError (415).
    """
    if _JSON_PATTERN.fullmatch((_single(headers, "Content-Type") or "").strip()) is None:
        text = "send the header Content-Type: application/json (charset utf-8, or none)"
        raise RefusedError(415, "wrong_content_type", text)
    if _single(headers, "Content-Encoding") not in (None, "identity"):
        raise RefusedError(415, "wrong_content_encoding", "send the body as it is, not compressed")


def check_token(headers: Headers, environment: Mapping[str, str]) -> None:
    """Let in who has the token. Neither it nor what was sent for it is in any text.

    Raises: RefusedError: 403 where no token can let in anybody, 401 where this one does not.
    """
    expected = configured_token(environment)
    if expected is None:
        text = (
            "only requests from this machine, to localhost, may do this; for others start ComfyUI "
            f"with a token in {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE} (docs/http.md)"
            if not requires_token(environment)
            else f"{REQUIRE_VARIABLE} is set, but no token: start ComfyUI with one in "
            f"{TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE} (docs/http.md)"
        )
        raise RefusedError(403, "not_local", text)
    scheme, _, given = (_single(headers, "Authorization") or "").partition(" ")
    if scheme.lower() != "bearer" or not given.strip():
        text = "this request needs the header Authorization: Bearer <the token>"
        raise RefusedError(401, "token_missing", text, _challenge())
    # Headers arrive as UTF-8 with surrogates for what is none.
    sent = given.strip().encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(sent, expected.encode("utf-8", "surrogateescape")):
        text = f"the token is not the one that ComfyUI was started with ({TOKEN_VARIABLE})"
        raise RefusedError(401, "token_wrong", text, _challenge(', error="invalid_token"'))


def configured_token(environment: Mapping[str, str]) -> str | None:
    """The token that ComfyUI was started with; None if there is none. Reads its file each time.

    Raises: RefusedError (403) where the file gives none: that must not be taken for "no token".
    """
    token = environment.get(TOKEN_VARIABLE, "").strip()
    if token:
        return token
    name = environment.get(TOKEN_FILE_VARIABLE, "").strip()
    if not name:
        return None
    path = Path(name)
    try:
        # A pipe would hang here, and a device never end.
        if not path.is_file():
            raise OSError("no file")
        with path.open("rb") as file:
            data = file.read(TOKEN_FILE_LIMIT_BYTES + 1)
        token = data.decode("utf-8-sig").strip()  # Windows' editor puts a mark before the text
    except (OSError, ValueError):
        _refuse_token_file("cannot be read")
    if not token:
        _refuse_token_file("is empty")
    if len(data) > TOKEN_FILE_LIMIT_BYTES:
        _refuse_token_file("is too long for a token")
    return token


def _single(headers: Headers, name: str) -> str | None:
    """The header; twice is refused, since who reads the other one would see something else."""
    values = headers.getall(name, [])
    if len(values) > 1:
        raise RefusedError(400, "repeated_header", f"the header {name} is there more than once")
    return values[0] if values else None


def _name_of(match: re.Match[str]) -> str:
    return str(match["v6"] or match["name"])


def _address(match: re.Match[str], default_port: int) -> tuple[str, int]:
    return _name_of(match).lower(), int(match["port"] or default_port)


def _is_loopback_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    # A socket for both families shows 127.0.0.1 as ::ffff:127.0.0.1.
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _challenge(more: str = "") -> dict[str, str]:
    return {"WWW-Authenticate": f'Bearer realm="courier"{more}'}


def _refuse_origin(why: str) -> NoReturn:
    text = f"the request is refused: {why}; send it from ComfyUI's own page or from a program"
    raise RefusedError(403, "foreign_origin", text)


def _refuse_token_file(what: str) -> NoReturn:
    text = f"nobody is let in from elsewhere: the file in {TOKEN_FILE_VARIABLE} {what}"
    raise RefusedError(403, "token_unusable", text)
