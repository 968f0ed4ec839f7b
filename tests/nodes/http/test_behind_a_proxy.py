"""Who comes through a proxy: real ones where they are installed, and the lines of the docs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ...serving import serving

DOCS = Path(__file__).resolve().parents[3] / "docs" / "http.md"
SLEEP = "/courier/v1/sleep"
TOKEN = "a-token-of-the-tests"
SECONDS = 20.0


def documented(language: str) -> str:
    """The block of the docs in that language, with the ports of a test to be put in."""
    match = re.search(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None, f"docs/http.md has no block of {language}"
    return match[1]


@pytest.fixture
def environment() -> dict[str, str]:
    return {}


@pytest.fixture
def upstream(pack: Any, service: Any, control: Any, environment: dict[str, str]) -> Iterator[str]:
    """Our routes; who is there is told by the connection itself."""
    guards = pack.module("nodes.http.guards")
    app = web.Application()
    made = guards.Guards(environment, rate=guards.RateLimit(clock=lambda: 0.0))
    assert pack.module("nodes.http.register").register_routes(app.router, service, control, made)
    with serving(app) as address:
        yield address.removeprefix("http://")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(command: list[str], port: int, **variables: str) -> Iterator[str]:
    environment = {**os.environ, **variables}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, "it ended instead of starting"
                assert time.monotonic() < deadline, "it did not start"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(SECONDS)


Proxy = Callable[[str], Any]


@pytest.fixture
def nginx(tmp_path: Path) -> Proxy:
    """``nginx(location)``: one server with that content of its ``location /``."""
    program = shutil.which("nginx")
    if program is None:
        pytest.fail("needs nginx: dev.py test installs it, or apt-get install nginx-light")

    def start(location: str) -> Any:
        port = free_port()
        file = tmp_path / "nginx.conf"
        temp = " ".join(
            f"{name}_temp_path {tmp_path}/{name};"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        # Its workers have to read what the test writes.
        user = "user root; " if os.geteuid() == 0 else ""
        file.write_text(
            f"{user}daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}}\n"
            f"http {{ access_log off; {temp}\n"
            f"server {{ listen 127.0.0.1:{port}; location / {{\n{location}\n}} }} }}"
        )
        return started([program, "-e", f"{tmp_path}/error.log", "-c", str(file)], port)

    return start


@pytest.fixture
def caddy(tmp_path: Path) -> Proxy:
    """``caddy(site)``: one site with that content."""
    program = shutil.which("caddy")
    if program is None:
        pytest.fail("needs caddy: dev.py test installs it, or apt-get install caddy")

    def start(site: str) -> Any:
        port = free_port()
        file = tmp_path / "Caddyfile"
        file.write_text(
            f"{{\n admin off\n auto_https off\n}}\nhttp://127.0.0.1:{port} {{\n{site}\n}}\n"
        )
        command = [program, "run", "--adapter", "caddyfile", "--config", str(file)]
        places = {name: str(tmp_path) for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")}
        return started(command, port, COURIER_TOKEN=TOKEN, **places)

    return start


def ask(address: str, **headers: str) -> tuple[int, Any]:
    """(status, code of the error or None) of an order to sleep."""
    request = urllib.request.Request(address + SLEEP, b"{}", method="POST")
    for name, value in {"Content-Type": "application/json", **headers}.items():
        request.add_header(name.replace("_", "-"), value)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=SECONDS) as answer:
            return answer.status, None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]["code"]


def page_of(address: str) -> dict[str, str]:
    """What a browser says of itself that shows the page at that address."""
    return {"Origin": address, "Sec_Fetch_Site": "same-origin"}


# nginx


def test_a_plain_proxy_pass_lets_nobody_change_anything(upstream: str, nginx: Proxy) -> None:
    with nginx(f"proxy_pass http://{upstream};") as address:
        assert ask(address) == (403, "not_local")
        assert ask(address, Host="localhost") == (403, "not_local")


def test_a_silent_proxy_lets_nobody_in_where_a_token_is_required(
    upstream: str, environment: dict[str, str], nginx: Proxy
) -> None:
    """It says nothing of whom it asks for: only the setting tells."""
    with nginx(f"proxy_pass http://{upstream}; proxy_http_version 1.1;") as address:
        assert ask(address) == (200, None), "as the docs warn"
        environment["COURIER_REQUIRE_TOKEN"] = "1"
        assert ask(address) == (403, "not_local")
        assert ask(f"http://{upstream}") == (403, "not_local"), "this machine neither"
        environment["COURIER_TOKEN"] = TOKEN
        assert ask(address) == (401, "token_missing")
        assert ask(address, Authorization="Bearer other") == (401, "token_wrong")
        assert ask(address, Authorization=f"Bearer {TOKEN}") == (200, None)


def test_the_lines_for_nginx_let_in_whom_it_lets_in(
    upstream: str, environment: dict[str, str], nginx: Proxy, tmp_path: Path
) -> None:
    environment["COURIER_TOKEN"] = TOKEN
    people = tmp_path / "people"
    people.write_text("me:{PLAIN}secret\n")
    lines = (
        documented("nginx")
        .replace("127.0.0.1:8188", upstream)
        .replace("/etc/nginx/comfyui.people", str(people))
        .replace("<the token>", TOKEN)
    )
    with nginx(lines) as address:
        with pytest.raises(json.JSONDecodeError):
            ask(address)  # nginx's own page: 401
        me = {"Authorization": "Basic bWU6c2VjcmV0"}
        assert ask(address, **me) == (200, None)
        assert ask(address, **me, **page_of(address)) == (200, None)
        assert ask(address, **me, **page_of("http://evil.example")) == (403, "foreign_origin")


# Caddy


def test_a_plain_reverse_proxy_of_caddy_says_whom_it_asks_for(upstream: str, caddy: Proxy) -> None:
    with caddy(f"reverse_proxy {upstream}") as address:
        assert ask(address) == (403, "not_local")
        assert ask(address, X_Forwarded_For="") == (403, "not_local")


def test_the_lines_for_caddy_let_in_whom_it_lets_in(
    upstream: str, environment: dict[str, str], caddy: Proxy
) -> None:
    environment["COURIER_TOKEN"] = TOKEN
    program = shutil.which("caddy") or ""
    command = [program, "hash-password", "--plaintext", "secret"]
    hashed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    site = documented("caddyfile").partition("{\n")[2].rpartition("}")[0]
    site = site.replace("127.0.0.1:8188", upstream).replace("<hash>", hashed)
    with caddy(site) as address:
        me = {"Authorization": "Basic bWU6c2VjcmV0"}
        assert ask(address, **me) == (200, None)
        assert ask(address, **me, **page_of(address)) == (200, None)
        assert ask(address, **me, **page_of("http://evil.example")) == (403, "foreign_origin")


# Traefik, by what it sends


TRAEFIK = {
    "X_Forwarded_For": "192.0.2.7",
    "X_Forwarded_Host": "comfy.example.com",
    "X_Forwarded_Port": "443",
    "X_Forwarded_Proto": "https",
    "X_Forwarded_Server": "gateway",
    "X_Real_Ip": "192.0.2.7",
    "Host": "comfy.example.com",
}


def test_what_traefik_sends_is_from_elsewhere_and_comes_in_with_the_token(
    upstream: str, environment: dict[str, str]
) -> None:
    address = f"http://{upstream}"
    assert ask(address, **TRAEFIK) == (403, "not_local")
    environment["COURIER_TOKEN"] = TOKEN
    assert ask(address, **TRAEFIK) == (401, "token_missing")
    page = page_of("https://comfy.example.com")
    assert f"Authorization: Bearer {TOKEN}" in documented("yaml").replace("<the token>", TOKEN)
    assert ask(address, **TRAEFIK, **page, Authorization=f"Bearer {TOKEN}") == (200, None)


@pytest.mark.parametrize("value", ["0", "false", "no", "off", " ", ""])
def test_the_words_for_no_require_no_token(pack: Any, value: str) -> None:
    guards = pack.module("nodes.http.guards")
    assert not guards.requires_token({"COURIER_REQUIRE_TOKEN": value})
    assert not guards.requires_token({})
    assert guards.requires_token({"COURIER_REQUIRE_TOKEN": "true"})
