from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

TOKEN = "a-token-of-the-tests"


@pytest.fixture
def guards(pack: Any) -> Any:
    return pack.module("nodes.http.guards")


def heads(*pairs: tuple[str, str], **named: str) -> CIMultiDict[str]:
    """``heads(Host="x")``; names with a dash, or twice, as pairs."""
    return CIMultiDict([*pairs, *named.items()])


# --- from this machine


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8188", "127.0.0.1", "127.0.0.1:8188", "127.255.3.4", "[::1]:8188"],
)
def test_host_of_this_machine_is_known(guards: Any, host: str) -> None:
    assert guards.is_loopback_host(host)


@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "evil.example",
        "evil.example:8188",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "evil.example#localhost",
        "local\thost",
        "localhost ",
        "localhost:",
        "0.0.0.0:8188",
        "192.168.1.5:8188",
        "2130706433",
        "127.1",
        "[::2]:8188",
        "[::1",
        "[::1]evil",
        "localhost:8188:80",
        "localhost:\N{ARABIC-INDIC DIGIT EIGHT}",
    ],
)
def test_every_other_host_is_foreign(guards: Any, host: str | None) -> None:
    assert not guards.is_loopback_host(host)


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_peer_on_this_machine_is_local(guards: Any, peer: str) -> None:
    assert guards.is_local(heads(Host="localhost:8188"), peer)


@pytest.mark.parametrize(
    "peer", [None, "", "192.168.1.5", "10.0.0.1", "::2", "::ffff:8.8.8.8", "localhost", "unix:"]
)
def test_every_other_peer_is_not_local(guards: Any, peer: str | None) -> None:
    assert not guards.is_local(heads(Host="localhost:8188"), peer)


@pytest.mark.parametrize(
    "name",
    ["X-Forwarded-For", "x-forwarded-host", "X-Forwarded", "Forwarded", "X-Real-IP", "Via"],
)
def test_what_came_through_a_proxy_is_not_local(guards: Any, name: str) -> None:
    headers = heads((name, "127.0.0.1"), Host="localhost")
    assert not guards.is_local(headers, "127.0.0.1")


def test_foreign_host_is_not_local_although_the_peer_is(guards: Any) -> None:
    assert not guards.is_local(heads(Host="evil.example:8188"), "127.0.0.1")


def test_two_hosts_are_refused(guards: Any) -> None:
    headers = heads(("Host", "localhost"), ("Host", "evil.example"))
    with pytest.raises(guards.RefusedError, match="Host is there more than once") as caught:
        guards.is_local(headers, "127.0.0.1")
    assert (caught.value.status, caught.value.code) == (400, "repeated_header")


# --- same origin


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8188", "http://localhost:8188"),
        ("LocalHost:8188", "HTTP://LOCALHOST:8188"),
        ("127.0.0.1:8188", "http://127.0.0.1:8188"),
        ("[::1]:8188", "http://[::1]:8188"),
        ("box.example", "https://box.example"),
        ("box.example:443", "https://box.example"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_same_origin_passes(guards: Any, host: str, origin: str) -> None:
    guards.check_origin(heads(("Sec-Fetch-Site", "same-origin"), Host=host, Origin=origin))


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "",
        "http://evil.example",
        "http://evil.example:8188",
        "http://localhost:8189",
        "http://localhost",
        "https://localhost",
        "http://127.0.0.1:8188",
        "http://localhost:8188.evil.example",
        "http://localhost:8188@evil.example",
        "http://localhost:8188/",
        "file://",
        "chrome-extension://localhost:8188",
        "http://localhost:8188 http://evil.example",
    ],
)
def test_foreign_origin_is_refused(guards: Any, origin: str) -> None:
    with pytest.raises(guards.RefusedError, match="send it from ComfyUI's own page") as caught:
        guards.check_origin(heads(Host="localhost:8188", Origin=origin))
    assert (caught.value.status, caught.value.code) == (403, "foreign_origin")


@pytest.mark.parametrize("site", ["cross-site", "same-site", "anything"])
def test_browser_that_says_it_is_another_site_is_refused(guards: Any, site: str) -> None:
    with pytest.raises(guards.RefusedError, match="a page of another origin") as caught:
        guards.check_origin(heads(("Sec-Fetch-Site", site), Host="localhost"))
    assert caught.value.status == 403


def test_program_without_an_origin_passes(guards: Any) -> None:
    guards.check_origin(heads(Host="localhost"))
    guards.check_origin(heads(("Sec-Fetch-Site", "none"), Host="localhost"))


def test_origin_without_a_host_is_refused(guards: Any) -> None:
    with pytest.raises(guards.RefusedError, match="its Host is none"):
        guards.check_origin(heads(Origin="http://localhost"))


# --- content type


@pytest.mark.parametrize(
    "value",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        'application/json;charset="UTF-8"',
        "application/json ; charset=utf-8 ",
    ],
)
def test_json_passes(guards: Any, value: str) -> None:
    guards.check_content_type(heads(("Content-Type", value)))


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "text/plain",
        "text/plain; application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonp",
        "application/json; charset=utf-16",
        "application/json; charset=latin-1",
        "application/json; charset=utf-8; charset=utf-16",
        "application/json, text/plain",
        "application/ld+json",
    ],
)
def test_anything_else_is_refused(guards: Any, value: str | None) -> None:
    headers = heads() if value is None else heads(("Content-Type", value))
    with pytest.raises(guards.RefusedError, match="Content-Type: application/json") as caught:
        guards.check_content_type(headers)
    assert (caught.value.status, caught.value.code) == (415, "wrong_content_type")


def test_compressed_body_is_refused(guards: Any) -> None:
    headers = heads(("Content-Type", "application/json"), ("Content-Encoding", "gzip"))
    with pytest.raises(guards.RefusedError, match="not compressed") as caught:
        guards.check_content_type(headers)
    assert caught.value.status == 415


# --- token


def test_right_token_passes(guards: Any) -> None:
    for scheme in ("Bearer", "bearer"):
        headers = heads(Authorization=f"{scheme} {TOKEN}")
        guards.check_token(headers, {"COURIER_TOKEN": f" {TOKEN}\n"})


@pytest.mark.parametrize(
    "sent", ["Bearer wrong", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \udcff\udc80 ä"]
)
def test_wrong_token_is_refused(guards: Any, sent: str) -> None:
    with pytest.raises(guards.RefusedError, match="the token is not the one") as caught:
        guards.check_token(heads(Authorization=sent), {"COURIER_TOKEN": TOKEN})
    assert (caught.value.status, caught.value.code) == (401, "token_wrong")
    assert 'error="invalid_token"' in caught.value.headers["WWW-Authenticate"]
    assert TOKEN not in str(caught.value)
    assert sent.removeprefix("Bearer ") not in str(caught.value)


@pytest.mark.parametrize("sent", [None, "", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}"])
def test_no_token_is_refused(guards: Any, sent: str | None) -> None:
    headers = heads() if sent is None else heads(Authorization=sent)
    with pytest.raises(guards.RefusedError, match="needs the header Authorization") as caught:
        guards.check_token(headers, {"COURIER_TOKEN": TOKEN})
    assert (caught.value.status, caught.value.code) == (401, "token_missing")
    assert caught.value.headers["WWW-Authenticate"] == 'Bearer realm="courier"'


@pytest.mark.parametrize("environment", [{}, {"COURIER_TOKEN": ""}, {"COURIER_TOKEN": "  "}])
def test_without_a_token_nobody_comes_in(guards: Any, environment: dict[str, str]) -> None:
    for sent in ("Bearer ", "Bearer x"):
        with pytest.raises(guards.RefusedError, match="COURIER_TOKEN or COURIER_TOKEN_FILE") as e:
            guards.check_token(heads(Authorization=sent), environment)
        assert (e.value.status, e.value.code) == (403, "not_local")


@pytest.mark.parametrize("written", [f"{TOKEN}\n", f"\ufeff{TOKEN}\r\n", TOKEN])
def test_token_is_read_from_its_file_each_time(guards: Any, tmp_path: Path, written: str) -> None:
    file = tmp_path / "token"
    environment = {"COURIER_TOKEN_FILE": str(file)}
    file.write_bytes(written.encode())
    guards.check_token(heads(Authorization=f"Bearer {TOKEN}"), environment)
    file.write_text("another")
    with pytest.raises(guards.RefusedError, match="the token is not the one"):
        guards.check_token(heads(Authorization=f"Bearer {TOKEN}"), environment)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "cannot be read"),
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"x" * 5000, "is too long"),
    ],
)
def test_token_file_without_a_token_lets_in_nobody(
    guards: Any, tmp_path: Path, content: bytes | None, what: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    for sent in ("Bearer", "Bearer x"):
        with pytest.raises(guards.RefusedError, match=f"COURIER_TOKEN_FILE {what}") as caught:
            guards.check_token(heads(Authorization=sent), {"COURIER_TOKEN_FILE": str(file)})
        assert (caught.value.status, caught.value.code) == (403, "token_unusable")
        assert str(tmp_path) not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with a name here")
def test_token_file_that_is_a_pipe_does_not_hang(guards: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "token"
    os.mkfifo(pipe)
    # With something in it, so that code that does read it fails here instead of waiting.
    writer = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(writer, b"x" * 5000)
        with pytest.raises(guards.RefusedError, match="cannot be read"):
            guards.configured_token({"COURIER_TOKEN_FILE": str(pipe)})
    finally:
        os.close(writer)


# --- rate


def test_rate_is_a_burst_and_then_so_many_a_second(guards: Any) -> None:
    now = [100.0]
    rate = guards.RateLimit(burst=3, per_second=2.0, clock=lambda: now[0])
    for _ in range(3):
        rate.take()
    with pytest.raises(guards.RefusedError, match="ask again in 1 s") as caught:
        rate.take()
    assert (caught.value.status, caught.value.code) == (429, "too_many_requests")
    assert caught.value.headers == {"Retry-After": "1"}
    now[0] += 0.5
    rate.take()
    with pytest.raises(guards.RefusedError):
        rate.take()
    now[0] += 1000
    for _ in range(3):
        rate.take()
    with pytest.raises(guards.RefusedError):
        rate.take()


def test_rate_says_when_and_refused_ones_do_not_make_it_later(guards: Any) -> None:
    now = [0.0]
    rate = guards.RateLimit(burst=1, per_second=0.1, clock=lambda: now[0])
    rate.take()
    for _ in range(100):
        with pytest.raises(guards.RefusedError, match="ask again in 10 s"):
            rate.take()
    now[0] = 10.0
    rate.take()


def test_clock_that_goes_back_gives_nothing(guards: Any) -> None:
    now = [100.0]
    rate = guards.RateLimit(burst=1, per_second=1.0, clock=lambda: now[0])
    rate.take()
    now[0] = 0.0
    with pytest.raises(guards.RefusedError):
        rate.take()
