"""What an end means, in words and as an exception. Pure."""

from __future__ import annotations

import ssl

from .records import Run, RunCancelledError, RunFailedError

# Of OpenSSL's verification: X509_V_ERR_CERT_HAS_EXPIRED, ..._HOSTNAME_MISMATCH, ..._IP_...
_EXPIRED, _OTHER_NAMES = 10, (62, 64)


def check_ended_well(run: Run) -> Run:
    """``run``, where it is done. Raises: RunFailedError, RunCancelledError."""
    if run.state == "done":
        return run
    error = run.error or {}
    message = str(error.get("message") or "it ended without a reason")
    if run.state == "cancelled":
        # Of a time limit the server's sentence says so itself.
        is_limit = error.get("code") == "time_limit"
        text = f"the run has ended: {message}" if is_limit else f"the run was stopped: {message}"
        raise RunCancelledError(text, run)
    node = error.get("node")
    if node is None:
        raise RunFailedError(f"the run failed: {message}", run)
    kind, title = error.get("class_type"), error.get("title")
    name = kind if title in (None, "", kind) else f"{kind} {title!r}"
    exception = str(error.get("exception") or "an error").rpartition(".")[2]
    raise RunFailedError(f"node {node} ({name}) failed with {exception}: {message}", run)


def unreachable_text(address: str, error: Exception) -> str:
    """Nobody answers, or nobody who is trusted."""
    reason = _cause(error)
    what = str(reason) or type(reason).__name__
    if isinstance(reason, ssl.SSLCertVerificationError):
        return _untrusted_text(address, reason)
    if isinstance(reason, ssl.SSLError):
        return (
            f"no answer from {address} ({what}); it does not speak https there: write http://, or "
            "name the port that does"
        )
    return (
        f"no answer from {address} ({what}); is ComfyUI running there? Start it, name another with "
        "--server, or let this command start one with --comfyui PATH"
    )


def _cause(error: BaseException) -> BaseException:
    """What the libraries wrap: urllib as ``reason``, aiohttp as ``certificate_error``."""
    for name in ("certificate_error", "os_error", "reason", "__cause__"):
        inner = getattr(error, name, None)
        if isinstance(inner, BaseException):
            return _cause(inner)
    return error


def _untrusted_text(address: str, error: ssl.SSLCertVerificationError) -> str:
    why = getattr(error, "verify_message", "") or str(error)
    if getattr(error, "verify_code", 0) in _OTHER_NAMES:
        help_ = "use one of the names that the certificate is for, in the address"
    elif getattr(error, "verify_code", 0) == _EXPIRED:
        help_ = "it has to be renewed there, or the clock here is wrong"
    else:
        help_ = (
            "where it is your own, name its file, or that of whoever signed it (PEM), with "
            "--cacert FILE or in COURIER_CACERT"
        )
    return f"{address} answers with a certificate that is not trusted ({why}); {help_}"


def lost_text(address: str, run_id: str) -> str:
    """Nobody answers any more."""
    return (
        f"{address} does not answer any more; what became of run {run_id} is not known. If ComfyUI "
        "was stopped, the run is lost; if it still runs, so does the run"
    )
