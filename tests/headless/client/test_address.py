"""Servers as they are: https with a certificate of one's own, a password, a path before all."""

from __future__ import annotations

import asyncio
import base64
import shutil
import ssl
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ...serving import serving
from ..conftest import Headless

USER, PASSWORD = "an na", "pä/ss:w#rd@"
GIVEN = "an%20na:p%C3%A4%2Fss:w%23rd%40"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COURIER_TOKEN", "COURIER_SERVER", "COURIER_CACERT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """own.pem and own.key, for 127.0.0.1; other.pem and other.key, for another host."""
    if shutil.which("openssl") is None:
        pytest.fail("making a certificate needs the command openssl: dev.py test installs it")
    folder = tmp_path_factory.mktemp("certificates")
    for name, host in (("own", "IP:127.0.0.1"), ("other", "DNS:gpu-box")):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
             f"/CN={name}", "-addext", f"subjectAltName={host}", "-keyout", f"{name}.key", "-out",
             f"{name}.pem"],
            cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
    return folder


def app(seen: list[Any]) -> web.Application:
    """Answers below /gpu/0 only, to whom it knows."""

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers.get("Authorization")))
        if request.path.startswith("/locked") and "Authorization" not in request.headers:
            return web.Response(status=401, headers={"WWW-Authenticate": "Basic"})
        return web.json_response({"models": []})

    made = web.Application()
    made.router.add_route("*", "/{tail:.*}", answer)
    return made


@pytest.fixture
def secure(certificates: Path) -> Callable[[str], Any]:
    def serve(name: str) -> Any:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
        return serving(app([]), tls)

    return serve


@pytest.fixture(params=["sync", "async"])
def models(request: pytest.FixtureRequest, headless: Headless) -> Callable[..., Any]:
    """``models(address, cacert=...)``: what either client is answered with."""
    courier = headless.courier

    def ask(address: str, **more: Any) -> Any:
        if request.param == "sync":
            return courier.CourierClient(address, **more).models()

        async def run() -> Any:
            async with courier.AsyncCourierClient(address, **more) as client:
                return await client.models()

        return asyncio.run(run())

    return ask


@pytest.fixture
def plain() -> Iterator[tuple[str, list[Any]]]:
    seen: list[Any] = []
    with serving(app(seen)) as address:
        yield address, seen


def test_a_certificate_of_ones_own_is_trusted_when_it_is_named(
    models: Any, secure: Any, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = str(certificates / "own.pem")
    with secure("own") as address:
        assert models(address, cacert=own) == []
        monkeypatch.setenv("COURIER_CACERT", own)
        assert models(address) == []


def test_one_that_is_not_trusted_is_told_with_what_helps(
    models: Any, headless: Headless, secure: Any, certificates: Path
) -> None:
    lost = headless.courier.ConnectionLostError
    with secure("own") as address:
        with pytest.raises(lost, match=r"self-signed certificate.*--cacert FILE or in COURIER_CAC"):
            models(address)
        with pytest.raises(lost, match="--cacert"):
            models(address, cacert=str(certificates / "other.pem"))
        with pytest.raises(lost):
            models(address.replace("https:", "http:"))
    with secure("other") as address, pytest.raises(lost, match="one of the names that the certifi"):
        models(address, cacert=str(certificates / "other.pem"))


def test_what_does_not_speak_https_is_told(models: Any, headless: Headless, plain: Any) -> None:
    address = plain[0].replace("http:", "https:")
    with pytest.raises(headless.courier.ConnectionLostError, match="does not speak https there"):
        models(address)


@pytest.mark.parametrize("content", [None, "", "hello"])
def test_a_file_that_is_no_certificate_is_told(
    models: Any, headless: Headless, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "no.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(headless.courier.UsageError, match=r"--cacert .*no\.pem: .*as PEM"):
        models("https://127.0.0.1:1", cacert=str(file))


def test_user_password_and_path_are_sent_and_not_shown(models: Any, plain: Any) -> None:
    address, seen = plain
    assert models(address.replace("//", f"//{GIVEN}@") + "/locked/gpu/0/") == []
    scheme, _, sent = seen[0][1].partition(" ")
    assert scheme == "Basic"
    assert base64.b64decode(sent).decode() == f"{USER}:{PASSWORD}"
    assert seen[0][0] == "/locked/gpu/0/courier/v1/models"


def test_no_word_of_a_password_is_in_what_is_said(headless: Headless) -> None:
    for given in (
        "http://me:s3cret@127.0.0.1:1", "ftp://me:s3cret@x", "http://me:s3cret@x:port",
        "me:s3/cret@127.0.0.1:1", "http://me:s3cret#x@127.0.0.1:1", "http://me:s3cret?@127.0.0.1:1",
    ):  # fmt: skip
        with pytest.raises(headless.courier.HeadlessError) as caught:
            headless.courier.CourierClient(given).models()
        said = "".join(traceback.format_exception(caught.value))
        assert "cret" not in said, given
        assert "s3" not in said, given


def test_a_server_before_comfyui_that_wants_a_password_is_told(
    models: Any, headless: Headless, plain: Any
) -> None:
    with pytest.raises(headless.courier.RefusedError, match="another user or password") as caught:
        models(f"{plain[0]}/locked")
    assert (caught.value.status, caught.value.code) == (401, "unauthorized")


def test_a_token_and_a_password_are_one_too_many(
    models: Any, headless: Headless, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = plain[0].replace("//", "//me:you@")
    with pytest.raises(headless.courier.UsageError, match="give one of them"):
        models(address, token="t")
    monkeypatch.setenv("COURIER_TOKEN", "t")  # for other servers
    assert models(address) == []
    assert plain[1][-1][1].startswith("Basic ")


def test_a_server_that_sends_us_on_is_refused_and_nobody_else_is_asked(
    models: Any, plain: Any, headless: Headless
) -> None:
    other, seen = plain

    async def send_on(request: web.Request) -> web.Response:
        raise web.HTTPFound(f"{other}{request.path}")

    made = web.Application()
    made.router.add_route("*", "/{tail:.*}", send_on)
    refused = pytest.raises(headless.courier.RefusedError, match="sends us to another address")
    with serving(made) as address, refused:
        models(address.replace("//", "//me:you@"))
    assert seen == []
