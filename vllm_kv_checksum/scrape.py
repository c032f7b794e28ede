"""Ask servers for ``/metrics``, whatever listens there: bounded in time and in bytes.

Every failure becomes a sentence for the operator. Nothing is followed (redirects) and no
proxy of the environment is used: the question is what this very address answers.
"""

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

MAX_BYTES = 8 * 2**20
"""More than this is no page of a vLLM server, which has some hundred kilobytes."""

_TLS_ALERT = "\x15\x03"
"""With this a TLS port answers a request in plain text."""


@dataclass
class Page:
    """The answer of one server.

    Attributes:
        url: the address as it was given, without credentials.
        text: the page, or None if there is none.
        problem: why there is none, as a sentence without a full stop.

    """

    url: str
    text: str | None = None
    problem: str = ""


class _AskError(Exception):
    """Raised if an answer is no page of metrics; the message says why."""


def printable(text: object, limit: int = 80) -> str:
    """Return text of a stranger as one short line that a terminal shows as it is."""
    line = "".join(c if c.isprintable() else "?" for c in str(text))
    return line if len(line) <= limit else line[: limit - 3] + "..."


def ask_all(urls: Sequence[str], timeout: float) -> list[Page]:
    """Ask all servers at once, and return their answers in the same order.

    Args:
        urls: such as ``http://host:8000`` or ``host:8000``; the path ``/metrics`` is added.
        timeout: seconds after which every answer must be there, all told.

    """
    questions = [_Question(url, timeout) for url in urls]
    until = time.monotonic() + timeout
    for question in questions:
        question.start()
    return [question.answer(until) for question in questions]


class _Question:
    """One request in a thread of its own, which is left behind if it takes too long.

    Neither the resolver nor a server that sends a byte now and then keeps to a time-out
    of sockets.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._url, self._timeout = url, timeout
        self._stage = "its name did not resolve"
        self._page: Page | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def answer(self, until: float) -> Page:
        """Return the answer, or what was waited for when the time was over."""
        self._thread.join(max(0.0, until - time.monotonic()))
        shown = printable(_without_credentials(self._url))
        late = f"{self._stage} within {self._timeout:g} s"
        return self._page or Page(shown, problem=late)

    def _run(self) -> None:
        page = Page(printable(_without_credentials(self._url)))
        try:
            page.text = self._ask()
        except Exception as error:  # whatever it is, the operator reads why
            page.problem = self._told(error)
        self._page = page

    def _ask(self) -> str:
        target = _target(self._url)
        tls = target.scheme == "https"
        host, port = str(target.hostname), target.port or (443 if tls else 80)
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._stage = "there was no connection"
        connection: http.client.HTTPConnection
        if tls:
            connection = http.client.HTTPSConnection(host, port, timeout=self._timeout)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout)
        try:
            connection.connect()
            self._stage = "it did not answer"
            connection.request("GET", target.path, headers={"Accept": "text/plain"})
            response = connection.getresponse()
            self._stage = "its answer did not end"
            return _text(response)
        finally:
            connection.close()

    def _told(self, error: Exception) -> str:
        """Return in words why a request failed."""
        match error:
            case _AskError():
                return str(error)
            case socket.gaierror() | UnicodeError():
                return "its name does not resolve"
            case ConnectionRefusedError():
                return "nothing listens there (connection refused)"
            case TimeoutError():
                return f"{self._stage} within {self._timeout:g} s"
            case ssl.SSLCertVerificationError():
                why = printable(error.verify_message)
                return f"its TLS certificate is not trusted: {why}"
            case ssl.SSLError():
                return "it does not speak TLS: try http://"
            case http.client.IncompleteRead():
                return "its answer was cut short"
            case http.client.BadStatusLine() if _TLS_ALERT in str(error):
                return "it is a TLS port: try https://"
            case ConnectionError():
                return "it closed the connection (a TLS port? try https://)"
            case http.client.InvalidURL() | ValueError():
                return f"this is no URL: {printable(error)}"
            case http.client.HTTPException():
                return "what it answers is not HTTP"
            case OSError():
                return printable(error.strerror or error)
        return f"asking failed: {printable(repr(error))}"


def _without_credentials(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def _target(url: str) -> SplitResult:
    """Return the parts of the address of a server's metrics.

    Raises:
        _AskError: nothing can be asked there.

    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _AskError("this is no URL: give http://host:port or host:port")
    if parts.username is not None:
        raise _AskError("a URL with credentials is not asked: /metrics needs none")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/metrics") else f"{path}/metrics"
    return parts._replace(path=path)


def _text(response: http.client.HTTPResponse) -> str:
    """Return the page of an answer.

    Raises:
        _AskError: it is none, or too long.

    """
    status = response.status
    if 300 <= status < 400:
        where = printable(response.getheader("Location") or "nowhere")
        raise _AskError(f"it redirects to {where}, which was not followed: ask P or D")
    if status in (401, 403):
        raise _AskError(
            f"it refuses (HTTP {status}): a proxy? /metrics of vLLM is open"
        )
    if status == 404:
        raise _AskError("it has no /metrics (HTTP 404): a proxy or another service?")
    if status != 200:
        raise _AskError(f"it answers HTTP {status}, not its metrics")
    declared = response.length or 0
    data = b"" if declared > MAX_BYTES else response.read(MAX_BYTES + 1)
    if max(declared, len(data)) > MAX_BYTES:
        raise _AskError(
            f"its answer is longer than {MAX_BYTES // 2**20} MiB: no page of vLLM's"
        )
    text = data.decode("utf-8", "replace")
    kind = response.getheader("Content-Type") or ""
    if kind.startswith("text/html") or text.lstrip()[:1] == "<":
        raise _AskError("it answers with a web page: a proxy or another service?")
    if response.length:
        raise _AskError("its answer was cut short")
    return text
