"""Where a server is, who one is there, and whom one trusts. Nothing is asked over the network."""

from __future__ import annotations

import base64
import os
import ssl
import urllib.parse
from dataclasses import dataclass, field

from ..errors import UsageError
from ..text import text_of

DEFAULT_ADDRESS = "http://127.0.0.1:8188"
ADDRESS_VARIABLE = "COURIER_SERVER"
CERTIFICATE_VARIABLE = "COURIER_CACERT"


@dataclass(frozen=True)
class Server:
    """``address`` has neither user nor password, so that it may be shown; no slash at its end.

    Attributes:
        basic: user and password as the header Authorization has them; never shown.
    """

    address: str
    basic: str | None = field(default=None, repr=False)

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine."""
        host = urllib.parse.urlsplit(self.address).hostname or ""
        return host in ("localhost", "::1") or host.startswith("127.")

    @property
    def is_safe(self) -> bool:
        """Whether what is sent there is encrypted."""
        return self.address.startswith("https:")


def server_of(given: str | None) -> Server:
    """``given``, the variable COURIER_SERVER, or ComfyUI's own default.

    Raises: UsageError where it is no address, without a word of a password.
    """
    text = (given or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS).strip()
    if "://" not in text:
        text = f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        is_address = False
    if not is_address:
        # A password with a slash in it ends the host too early: what stands before an @ is hidden.
        shown = text if "@" not in text else f"...@{text.rpartition('@')[2]}"
        raise UsageError(
            f"{shown!r} is no address of a server; write http://127.0.0.1:8188, or "
            "https://user:password@host/path with any of / ? # @ in the password as %2F %3F %23 %40"
        )
    if parts.query or parts.fragment:
        raise UsageError(
            "the address of a server has no ? and no # in it; in a password they are %3F and %23"
        )
    user, at, host = parts.netloc.rpartition("@")
    address = urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", "")).rstrip("/")
    return Server(address, _basic(user) if at else None)


def _basic(user: str) -> str:
    name, _, password = user.partition(":")
    plain = f"{urllib.parse.unquote(name)}:{urllib.parse.unquote(password)}"
    return f"Basic {base64.b64encode(plain.encode()).decode('ascii')}"


def trust(server: Server, certificate: str | None) -> ssl.SSLContext | None:
    """Whom to trust beside those that this system trusts: the certificates in a file.

    Args:
        certificate: path of a PEM; None: the variable COURIER_CACERT, where it is set.
    Returns: None where nothing is encrypted.
    Raises: UsageError where the file is no such thing.
    """
    if not server.is_safe:
        return None
    context = ssl.create_default_context()
    path = certificate or os.environ.get(CERTIFICATE_VARIABLE, "").strip()
    if path:
        try:
            context.load_verify_locations(cafile=os.path.expanduser(path))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"--cacert {text_of(path)}: {reason}; it has to be a file with the certificate of "
                "the server, or of whoever signed it, as PEM (-----BEGIN CERTIFICATE-----)"
            ) from None
        # Certificates that people make themselves lack what newer Pythons insist on, and the
        # server's own is as good as its signer's.
        context.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", 0)
        context.verify_flags |= getattr(ssl, "VERIFY_X509_PARTIAL_CHAIN", 0x80000)
    return context
