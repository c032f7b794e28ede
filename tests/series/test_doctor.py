"""Test ``vllm-kv-checksum doctor``: what it says of instances, and of whatever else may listen at an address."""

import contextlib
import json
import re
import socket
import ssl
import subprocess
import sys
import threading
import time

import pytest
from rig import documents

from vllm.distributed.kv_transfer.kv_checksum.checksum import Skipped
from vllm.distributed.kv_transfer.kv_checksum.verdict import LeftOut, Unverified
from vllm_kv_checksum import cli, reasons, scrape

INFO = {
    "state": "on",
    "definition": "2",
    "payload_version": "2",
    "role": "kv_consumer",
    "fail_mode": "closed_fail",
    "connectors": "NixlConnector",
    "carriers": "kv_transfer_params",
    "block_size": "16",
}
P = {"role": "kv_producer", "fail_mode": "open"}
HOST = "127.0.0.1"


def page(counts=(), **info) -> bytes:
    """Return what an instance shows on /metrics."""
    told = {"model_name": "m", "engine": "0", **INFO, **info}
    labels = ",".join(f'{k}="{v}"' for k, v in told.items() if v is not None)
    lines = [
        "# HELP vllm:num_requests_running Number of requests.",
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{engine="0",model_name="m"} 0.0',
        "# TYPE vllm:kv_checksum_info gauge",
        f"vllm:kv_checksum_info{{{labels}}} 1.0",
        *(
            f"vllm:kv_checksum_{name} {float(value)}"
            for name, value in dict(counts).items()
        ),
    ]
    return "\n".join([*lines, ""]).encode()


VERIFIED = {'loads_total{verdict="verified",carrier="connector"}': 3}
SENT = {"payload_bytes_total": 99}


def http(
    body: bytes,
    kind="text/plain; version=0.0.4; charset=utf-8",
    status="200 OK",
    more="",
):
    """Return a behaviour: send one whole answer."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return lambda connection: connection.sendall(head.encode() + body)


@contextlib.contextmanager
def listening(behave, wrap=lambda connection: connection):
    """Yield the address of a server that reads each request and then does `behave`."""
    server = socket.create_server((HOST, 0))

    def serve(connection):
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection = wrap(connection)
            connection.recv(65536)
            behave(connection)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(
                    target=serve, args=(server.accept()[0],), daemon=True
                ).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"{HOST}:{server.getsockname()[1]}"
    finally:
        server.close()


@pytest.fixture
def ask(capsys):
    """Return a function that runs the command on servers that behave in these ways."""

    def run(*behaviours, options=("--timeout", "5")):
        with contextlib.ExitStack() as stack:
            urls = [
                b if isinstance(b, str) else stack.enter_context(listening(b))
                for b in behaviours
            ]
            status = cli.main(["doctor", *urls, *options])
        out = capsys.readouterr()
        assert out.err == ""
        return status, out.out

    return run


def test_a_pair_that_verifies(ask):
    status, text = ask(http(page(SENT, **P)), http(page(VERIFIED)))
    assert status == 0
    assert "will verify what" in text and "note" not in text
    assert text.endswith("P and D will verify each other (exit status 0)\n")
    assert "loads since its start: 3 verified, 0 mismatch, 0 unverified" in text


@pytest.mark.parametrize(
    ("p", "d", "said"),
    [
        ({"definition": "1"}, {}, "P sums by definition 1, D by 2"),
        ({"payload_version": "3"}, {}, "P sends payload version 3, D reads 2"),
        ({"state": "off"}, {}, "cannot work in this set-up"),
        ({}, {"state": "off"}, "cannot work in this set-up"),
        (
            {"connectors": "MooncakeConnector"},
            {},
            "different connectors (MooncakeConnector and Nixl",
        ),
        (
            {"carriers": "connector"},
            {},
            "no connector that both have carries checksums",
        ),
        ({"carriers": "none"}, {}, "nobody checks the loads"),
        ({}, {"block_size": "24"}, "block sizes 16 and 24 do not fit"),
        # Their units are of 24 and of 16 tokens, and of 20 and of 16.
        ({"block_size": "24"}, {"block_size": "48"}, "sizes 24 and 48 do not fit"),
        ({"block_size": "80"}, {"block_size": "20"}, "sizes 80 and 20 do not fit"),
    ],
)
def test_a_pair_that_does_not_verify(ask, p, d, said):
    status, text = ask(http(page(SENT, **{**P, **p})), http(page(VERIFIED, **d)))
    assert status == 1 and said in text, text
    assert "will verify" not in text


@pytest.mark.parametrize(
    ("p", "d"), [("16", "48"), ("8", "24"), ("8", "32"), ("24", "24"), ("None", "24")]
)
def test_block_sizes_that_fit(ask, p, d):
    status, _ = ask(
        http(page(SENT, **P, block_size=p)), http(page(VERIFIED, block_size=d))
    )
    assert status == 0


def test_every_pair_is_judged(ask):
    old = http(page(SENT, **P, definition="1"))
    new = http(page(SENT, **P))
    status, text = ask(
        old, new, http(page(VERIFIED)), http(page(VERIFIED)), options=("--json",)
    )
    told = json.loads(text)
    assert status == told["status"] == 1
    assert [bool(pair["why_not"]) for pair in told["pairs"]] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("counts", "status", "said"),
    [
        ({'unverified_loads_total{reason="no_payload"}': 2}, 1, "were not verified: no_payload\n    " + reasons.UNVERIFIED["no_payload"]),
        ({'unsent_total{reason="workers_missing"}': 2}, 1, "2 prefills since its start were sent without checksums: workers_missing"),
        ({'loads_total{verdict="mismatch",carrier="connector"}': 4}, 1, "4 of 7 loads since its start were a mismatch"),
        ({'skipped_groups{reason="packed_heads"}': 1}, 1, "1 KV cache groups are never checked: packed_heads\n    " + reasons.SKIPPED["packed_heads"]),
        ({'groups_left_out_total{reason="states"}': 1}, 0, "note: "),
        ({'unverified_loads_total{reason="of_tomorrow"}': 1}, 1, "not known here"),
    ],
)  # fmt: skip
def test_what_was_counted_is_told_with_its_meaning(ask, counts, status, said):
    found, text = ask(http(page(SENT, **P)), http(page({**VERIFIED, **counts})))
    assert found == status and said in text, text


def test_notes_do_not_change_the_exit_status(ask):
    settings = {"fail_mode": "open", "connectors": "KVChecksumFaultDrill"}
    status, text = ask(http(page(**P)), http(page(**settings)))
    assert status == 0
    for said in (
        "fail-open",
        "damages loads there on purpose",
        "loaded and sent nothing yet",
    ):
        assert said in text


def test_one_side_alone_is_not_enough_but_for_stores(ask):
    status, text = ask(http(page(VERIFIED)))
    assert status == 2 and "no P was asked beside it" in text
    status, text = ask(http(page(VERIFIED, role="kv_both", carriers="ledger,stored")))
    assert status == 0 and "Each instance verifies what it loads" in text


def test_checksums_off_and_versions_without_a_description(ask):
    off = b'vllm:num_requests_running{engine="0"} 0.0\n'
    status, text = ask(http(off), http(page(VERIFIED)))
    assert status == 1 and "enable_kv_checksum" in text
    old = off + b'vllm:kv_checksum_loads_total{verdict="verified",carrier="none"} 1.0\n'
    status, text = ask(http(old), http(page(VERIFIED)))
    assert status == 2 and "does not describe itself" in text
    status, text = ask(http(page(**P) + page()))
    assert status == 2 and "several instances at once" in text


def trickle(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    for _ in range(100):
        connection.sendall(b"#")
        time.sleep(0.1)


def trickling_head(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for n in range(100):
        connection.sendall(f"X-{n}: a\r\n".encode())
        time.sleep(0.1)


def endless(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while True:
        connection.sendall(b"# more of it\n" * 10_000)


def endless_chunks(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"10000\r\n" + b"#" * 0x10000 + b"\r\n")


HTML = b"<!doctype html><html><body>Welcome to the proxy</body></html>"
CUT = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 900\r\n\r\nvllm:x 1\n"
ANSWERS = {
    "10 MB": (http(b"# no\n" * 2_000_000), "longer than 8 MiB"),
    "endless": (endless, "longer than 8 MiB"),
    "endless chunks": (endless_chunks, "longer than 8 MiB"),
    "cut": (lambda c: c.sendall(CUT), "cut short"),
    "redirect": (http(b"", status="302 Found", more="Location: http://elsewhere/login\r\n"), "it redirects to http://elsewhere/login"),
    "html": (http(HTML, "text/html"), "a web page"),
    "html as text": (http(b"\n " + HTML), "a web page"),
    "gateway": (http(b"bad gateway", status="502 Bad Gateway"), "HTTP 502"),
    "login": (http(b"", status="401 Unauthorized"), "refuses (HTTP 401)"),
    "not found": (http(b"", status="404 Not Found"), "no /metrics (HTTP 404)"),
    "another service": (http(b"# TYPE up gauge\nup 1.0\n"), "none of vLLM's"),
    "broken metrics": (http(b'vllm:kv_checksum_info{state="on 1.0\n'), "cannot be read"),
    "not a number": (http(b"vllm:kv_checksum_failed_total NaN\n"), "cannot be read"),
    "bytes": (http(bytes(range(256)) * 99), "none of vLLM's"),
    "ssh": (lambda c: c.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"), "not HTTP"),
    "alert": (lambda c: c.sendall(b"\x15\x03\x03\x00\x02\x02\x46"), "try https://"),
    "hangs up": (lambda c: None, "closed the connection"),
    "empty": (http(b""), "none of vLLM's"),
    "escapes": (http(b"", status="302 Found", more="Location: \x1b[2Jx\r\n"), "redirects to ?[2Jx"),
}  # fmt: skip


@pytest.mark.parametrize(("behave", "said"), ANSWERS.values(), ids=ANSWERS.keys())
def test_whatever_answers_is_told_in_words(ask, behave, said):
    status, text = ask(behave, options=())
    assert status == 2 and said in text, text
    assert "Traceback" not in text and "\x1b" not in text
    assert max(map(len, text.splitlines())) < 300


@pytest.mark.parametrize(
    ("behave", "said"),
    [
        (lambda c: time.sleep(9), "it did not answer within 0.5 s"),
        (trickle, "its answer did not end within 0.5 s"),
        (trickling_head, "it did not answer within 0.5 s"),
    ],
)
def test_no_answer_takes_longer_than_the_time_out(ask, behave, said):
    began = time.monotonic()
    # All told, however many there are.
    status, text = ask(behave, behave, behave, options=("--timeout", "0.5"))
    assert status == 2 and text.count(said) == 6, text
    assert time.monotonic() - began < 1.5


def test_the_command_ends_while_a_server_still_trickles():
    with listening(trickle) as url:
        began = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "vllm_kv_checksum.cli",
            "doctor",
            url,
            "--timeout",
            "0.5",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert time.monotonic() - began < 4
    assert done.returncode == 2 and done.stderr == ""


def test_a_resolver_that_does_not_answer(ask, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(9))
    status, text = ask("host:8000", options=("--timeout", "0.5"))
    assert status == 2 and "its name did not resolve within 0.5 s" in text


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"{HOST}:1", "nothing listens there"),
        ("host.invalid:8000", "its name does not resolve"),
        ("http://" + "a" * 70 + ":8000", "its name does not resolve"),
        ("ftp://host", "this is no URL"),
        ("http://", "this is no URL"),
        ("host:port", "this is no URL"),
        ("http://host:99999", "this is no URL"),
        ("http://ho st:80", "its name does not resolve"),
        ("http://me:secret@host:80", "a URL with credentials is not asked"),
    ],
)
def test_addresses_where_nothing_is(ask, url, said):
    status, text = ask(url)
    assert status == 2 and said in text, text
    assert "secret" not in text


def test_a_path_stands_before_metrics():
    assert scrape._target("host:8000").path == "/metrics"
    assert scrape._target("http://host/vllm/").path == "/vllm/metrics"
    assert scrape._target("http://host/vllm/metrics").path == "/vllm/metrics"


@pytest.fixture
def tls(tmp_path):
    """Return what makes a connection a TLS one, with a certificate that nobody trusts."""
    pytest.importorskip("cryptography")
    from datetime import datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "host")])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1)
    now = datetime(2026, 1, 1)
    made = made.not_valid_before(now).not_valid_after(now + timedelta(days=9999))
    pem = tmp_path / "pem"
    pem.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return lambda connection: context.wrap_socket(connection, server_side=True)


def test_tls_where_plain_text_is_asked_and_the_reverse(ask, tls):
    with listening(http(page()), tls) as url:
        status, text = ask(url)
        assert status == 2 and "try https://" in text
        status, text = ask(f"https://{url}")
        assert status == 2 and "its TLS certificate is not trusted" in text
    with listening(http(page())) as url:
        status, text = ask(f"https://{url}")
        assert status == 2 and "it does not speak TLS: try http://" in text


def test_a_proxy_of_the_environment_is_not_asked(ask, monkeypatch):
    with listening(http(HTML, "text/html")) as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy}")
        monkeypatch.setenv("HTTP_PROXY", f"http://{proxy}")
        assert ask(http(page(SENT, **P)), http(page(VERIFIED)))[0] == 0


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_out_is_a_number_of_seconds(capsys, seconds):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["doctor", "host:1", "--timeout", seconds])
    assert "--timeout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "texts", "values"),
    [
        ("Unverified loads", reasons.UNVERIFIED, Unverified),
        ("Groups left out of one request", reasons.LEFT_OUT, LeftOut),
        ("Skipped groups", reasons.SKIPPED, Skipped),
    ],
)
def test_the_meanings_are_those_of_the_guide(section, texts, values):
    text = documents.GUIDE.read_text().split(f"### {section}\n")[1].split("\n#")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    plain = {k: re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", v) for k, v in rows.items()}
    del plain["reason"]
    assert {k: v.replace("`", "") for k, v in plain.items()} == texts
    assert list(texts) == [v.value for v in values]
