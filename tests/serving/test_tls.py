"""TLS on a real server: connections that are secured, renewed, or never get that far."""

from __future__ import annotations

import contextlib
import datetime
import signal
import ssl
from pathlib import Path

import httpx
import pytest
import wire
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from retrieval.errors import RetrievalError
from retrieval.serving.http.tls import PASSWORD, Certificate


def certify(folder: Path, password: bytes | None = None) -> tuple[Path, Path]:
    """Write a certificate for localhost and its key; return their paths."""
    folder.mkdir(exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(1))
        .not_valid_after(now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    forms = serialization
    how = forms.NoEncryption() if password is None else forms.BestAvailableEncryption(password)
    certificate, private = folder / "fullchain.pem", folder / "privkey.pem"
    certificate.write_bytes(made.public_bytes(forms.Encoding.PEM))
    private.write_bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, how))
    return certificate, private


def test_a_search_over_https(served, index_path, photos, tmp_path):
    certificate, private = certify(tmp_path / "tls")
    context = ssl.create_default_context(cafile=certificate)
    options = ("--host", "localhost", "--certificate", str(certificate), "--private-key", str(private),
               "--connections", "32", "--idle-seconds", "3")  # fmt: skip
    server = served(index_path, *options, verify=context)
    assert server.url.startswith("https://localhost:")
    image = (photos / "3" / "0003.png").read_bytes()

    def search() -> int:
        return server.client.post(
            "/v1/search", files={"image": ("q.png", image)}, data={"k": "3"}
        ).status_code

    assert search() == 200

    # the attack: connections that never get through their handshake; the oldest give way, then all are closed
    silent = [wire.connect(server.port) for _ in range(100)]
    plain = wire.ask(server.port, wire.get("/livez"))
    assert plain.status == 0
    with httpx.Client(base_url=server.url, timeout=30, verify=context) as client:  # a handshake of its own
        assert client.get("/v1/index").status_code == 200
    for one in silent:
        one.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""
        one.close()

    # a renewed certificate, and a broken one
    before = ssl.get_server_certificate(("localhost", server.port))
    assert before.strip() == certificate.read_text().strip()
    renewed, _ = certify(tmp_path / "tls")
    server.process.send_signal(signal.SIGHUP)
    wire.until(
        lambda: ssl.get_server_certificate(("localhost", server.port)).strip() == renewed.read_text().strip()
    )
    with httpx.Client(
        base_url=server.url, timeout=30, verify=ssl.create_default_context(cafile=renewed)
    ) as client:
        assert client.get("/v1/index").status_code == 200
    kept = renewed.read_text().strip()
    private.write_text("nonsense")
    server.process.send_signal(signal.SIGHUP)
    for _ in range(5):
        assert ssl.get_server_certificate(("localhost", server.port)).strip() == kept

    # the end, while a handshake is under way
    with wire.connect(server.port):
        server.process.terminate()
        assert server.process.wait(15) == 0
    log = server.process.stderr.read()
    assert (
        "Read the certificate" in log and "The certificate stays as it was" in log and "Traceback" not in log
    )


def test_files_that_are_no_certificate(tmp_path, monkeypatch, cli, index_path):
    certificate, private = certify(tmp_path / "one")
    _, other = certify(tmp_path / "other")
    _, locked = certify(tmp_path / "locked", b"secret word")
    (tmp_path / "nonsense").write_bytes(b"\0" * 1000)
    for pair, says in (
        ((tmp_path / "none", private), "none cannot be read: No such file"),
        ((certificate, tmp_path / "none"), "none cannot be read"),
        ((certificate, other), "another certificate's"),
        ((tmp_path / "nonsense", private), "must be PEM"),
        ((certificate, tmp_path / "nonsense"), "must be PEM"),
        ((certificate, None), "must be PEM"),
        ((locked.with_name("fullchain.pem"), locked), PASSWORD),
    ):
        with pytest.raises(RetrievalError, match=says):
            Certificate(*pair)
    monkeypatch.setenv(PASSWORD, "secret word")
    assert Certificate(locked.with_name("fullchain.pem"), locked).context
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + private.read_bytes())
    assert Certificate(both, None).context
    told = cli("serve", index_path, "--port", "0", "--certificate", certificate, "--private-key", other)
    assert told.code == 2 and "another certificate's" in told.err
    told = cli("serve", index_path, "--port", "0", "--private-key", other)
    assert told.code == 2 and "needs --certificate" in told.err


def test_only_current_tls_is_spoken(tmp_path):
    certificate, private = certify(tmp_path / "tls")
    assert Certificate(certificate, private).context.minimum_version >= ssl.TLSVersion.TLSv1_2
