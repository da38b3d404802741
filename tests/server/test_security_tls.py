"""TLS as a client meets it: who is let in, the command line and an engine over it, and certificates that are replaced meanwhile."""

import shutil
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftd.client import Credentials, Drafter
from draftd.client.channel import open_channel
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.security.files import FileRefused
from draftd.server.security.tls import Certificates
from tests.server.certificates import Authority
from tests.server.harness import REFRAIN, RunningService, Stubs, draftd, error_of, wait_until
from tests.server.test_security_rpc import PRINCIPALS, token_file

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")


class Secured(RunningService):
    """A service that wants TLS, a client certificate and a token over TCP, and serves HTTPS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        certificate, key = self.authority.sign("localhost", "server")
        self.client = self.authority.sign("trainer")
        settings: dict[str, Any] = {"tls_cert": certificate, "tls_key": key, "tls_client_ca": self.authority.ca, "http_tls": True}
        super().__init__(listen="127.0.0.1:0", token_file=token_file(folder, PRINCIPALS), **settings)
        self.target = f"localhost:{self.service.listen_port}"

    def credentials(self, principal: str = "engine", **changes: Any) -> Credentials:
        """What a client of that principal needs."""
        certificate, key = self.client
        given = {"tls_ca": self.authority.ca, "tls_cert": certificate, "tls_key": key, "token_file": self.secret(principal)} | changes
        return Credentials(**given)

    def secret(self, principal: str) -> Path:
        """The file with a principal's token."""
        path = self.folder / f"{principal}.token"
        path.write_text(f"{principal}-token\n")
        path.chmod(0o600)
        return path

    def get(self, path: str, token: str = "") -> str:
        """The body of an HTTPS answer."""
        request = urllib.request.Request(f"https://localhost:{self.service.http_port}{path}", headers={"Authorization": f"Bearer {token}"})
        context = ssl.create_default_context(cafile=self.authority.ca)
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return str(answer.read().decode())


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A secured service that holds the refrain."""
    running = Secured(tmp_path_factory.mktemp("tls"))
    running.seed()
    yield running
    running.close()


def _draft(target: str, credentials: Credentials) -> list[int]:
    with open_channel(target, credentials) as channel:
        return Stubs("", channel).draft(REFRAIN[:5])


def test_client_with_certificate_and_token_is_served(secured: Secured) -> None:
    assert _draft(secured.target, secured.credentials()) == REFRAIN[5:13]


def test_client_is_refused_without_any_one_of_them(secured: Secured, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    certificate, key = other.sign("trainer")
    assert error_of(lambda: _draft(secured.target, secured.credentials(token_file=None)))[0] == "UNAUTHENTICATED"
    for changes in (
        {"tls_cert": None, "tls_key": None},
        {"tls_cert": certificate, "tls_key": key},
        {"tls_ca": other.ca},
        {"tls_ca": None, "tls": True},
        {"tls_server_name": "elsewhere"},
    ):
        assert error_of(lambda changes=changes: _draft(secured.target, secured.credentials(**changes)))[0] == "UNAVAILABLE"
    assert error_of(lambda: Stubs(secured.target).draft([1]))[0] == "UNAVAILABLE"
    # The name in the certificate may be given where the endpoint is an address.
    address = secured.target.replace("localhost", "127.0.0.1")
    assert error_of(lambda: _draft(address, secured.credentials()))[0] == "UNAVAILABLE"
    assert _draft(address, secured.credentials(tls_server_name="localhost"))


def test_command_line_reaches_it(secured: Secured) -> None:
    certificate, key = secured.client
    files = {"TLS_CA": secured.authority.ca, "TLS_CERT": certificate, "TLS_KEY": key, "TOKEN_FILE": secured.secret("engine")}
    flags = [part for name, path in files.items() for part in (f"--{name.lower().replace('_', '-')}", str(path))]
    by_flags = draftd("propose", "-t", "100,101,102", "--endpoint", secured.target, *flags)
    assert (by_flags.returncode, "103 104" in by_flags.stdout) == (0, True), by_flags.stderr
    variables = {f"DRAFTD_CLIENT_{name}": str(path) for name, path in files.items()} | {"DRAFTD_ENDPOINT": secured.target}
    shown = draftd("status", **variables)
    assert (shown.returncode, "SERVING" in shown.stdout) == (0, True), shown.stderr
    assert "store: none that this token may see" in shown.stdout
    exported = draftd("export", **variables)
    assert (exported.returncode, "refrain" in exported.stdout) == (0, True), exported.stderr
    denied = draftd("explain", "-t", "1", **variables | {"DRAFTD_CLIENT_TOKEN_FILE": str(secured.secret("writer"))})
    assert (denied.returncode, denied.stderr) == (1, "draftd: PERMISSION_DENIED: the token of 'writer' lacks the right 'read'\n")
    blind = draftd("propose", "-t", "1", "--endpoint", secured.target, "--tls")
    assert (blind.returncode, "see --tls-ca" in blind.stderr) == (1, True), blind.stderr
    half = draftd("propose", "-t", "1", "--endpoint", secured.target, "--tls-cert", str(certificate))
    assert (half.returncode, half.stderr) == (2, "draftd: tls_cert and tls_key go together\n")


def test_engine_drafts_over_it(secured: Secured) -> None:
    with Drafter(
        secured.target,
        engine="far",
        vocab_size=1000,
        max_rows=2,
        max_length=256,
        timeout_ms=5000,
        strict=True,
        credentials=secured.credentials(),
    ) as drafter:
        drafter.wait_attached(60)
        assert drafter.transport == "inline"
        drafter.start(0, REFRAIN[:5])
        drafts = drafter.propose([0])
        assert drafts.tokens[0, : drafts.counts[0]].tolist() == REFRAIN[5:13]
        drafter.append(0, np.array(REFRAIN[5:8]))
        drafter.finish(0)
        assert drafter.wait_visible(10)


def test_engine_takes_up_a_replaced_token(secured: Secured) -> None:
    path = secured.folder / "own.token"
    path.write_text("no-token-yet")
    path.chmod(0o600)
    settings: dict[str, Any] = {"engine": "patient", "vocab_size": 1000, "max_rows": 2, "max_length": 256, "timeout_ms": 5000}
    with Drafter(secured.target, **settings, credentials=secured.credentials(token_file=path)) as drafter:
        session = drafter._connection.session
        wait_until(lambda: session.trouble[1].startswith("UNAUTHENTICATED"), 60)
        assert not drafter.attached
        path.write_text("engine-token")
        drafter.wait_attached(30)
        drafter.start(0, REFRAIN[:5])
        assert drafter.propose([0]).counts[0] > 0


def test_certificates_that_are_replaced_are_used_for_new_connections(secured: Secured) -> None:
    certificate, key = secured.folder / "server.crt", secured.folder / "server.key"
    kept = Stubs(secured.target, open_channel(secured.target, secured.credentials()))
    assert kept.draft(REFRAIN[:5])
    first = secured.service._certificates
    assert first is not None
    fresh, fresh_key = secured.authority.sign("renewed")
    failed = 'draftd_reloads_total{file="certificates",result="failed"}'
    try:
        # Half of the pair is refused, and the old one goes on.
        shutil.copy(fresh, certificate)
        wait_until(lambda: secured.metric(failed, "admin") >= 1)
        assert _draft(secured.target, secured.credentials())
        shutil.copy(fresh_key, key)
        wait_until(lambda: _opens(secured, "renewed"))
        assert not _opens(secured, "localhost")
        assert kept.draft(REFRAIN[:5]), "an open connection goes on"
        context = ssl.create_default_context(cafile=secured.authority.ca)
        context.check_hostname = False
        with urllib.request.urlopen(f"https://127.0.0.1:{secured.service.http_port}/healthz", timeout=10, context=context) as answer:
            assert answer.status == 200
    finally:
        restored, restored_key = secured.authority.sign("localhost", "restored")
        shutil.copy(restored, certificate)
        shutil.copy(restored_key, key)
        secured.on_loop(secured.service.reload)
        kept.channel.close()
    assert _draft(secured.target, secured.credentials())


def _opens(secured: Secured, name: str) -> bool:
    """The service shows a certificate for that name."""
    return _code(secured, secured.credentials(tls_server_name=name)) == "OK"


def _code(secured: Secured, credentials: Credentials) -> str:
    with open_channel(secured.target, credentials) as channel:
        try:
            Stubs("", channel).corpus.ListNamespaces(pb.ListNamespacesRequest(), timeout=10)
        except Exception as error:  # noqa: BLE001 - compared by its code
            return str(error.code().name)  # type: ignore[attr-defined]
    return "OK"


def test_https_asks_for_tokens_and_not_for_client_certificates(secured: Secured) -> None:
    assert secured.get("/healthz") == "ok\n"
    assert secured.metric("draftd_ready", "admin") == 1
    assert secured.service.endpoints()["http"].startswith("https://")


@pytest.mark.usefixtures("json_logs")
def test_audit_names_a_client_certificate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    authority = Authority(tmp_path)
    (certificate, key), (own, own_key) = authority.sign("localhost"), authority.sign("operator")
    running = RunningService(listen="localhost:0", tls_cert=certificate, tls_key=key, tls_client_ca=authority.ca)
    try:
        running.seed()
        credentials = Credentials(tls_ca=authority.ca, tls_cert=own, tls_key=own_key)
        with open_channel(f"localhost:{running.service.listen_port}", credentials) as channel:
            Stubs("", channel).corpus.DropNamespace(pb.DropNamespaceRequest(namespace="default"))
    finally:
        running.close()
    assert '"principal": "cert:operator"' in capfd.readouterr().err


@pytest.mark.parametrize("wrong", ["certificate", "key", "pair", "authority", "encrypted", "missing"])
def test_files_that_do_not_fit_are_refused(tmp_path: Path, wrong: str) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign("localhost")
    ca: Path | None = authority.ca
    if wrong == "certificate":
        certificate.write_text("nonsense")
    elif wrong == "key":
        key.write_text("nonsense")
    elif wrong == "pair":
        key = authority.sign("other")[1]
    elif wrong == "authority":
        (tmp_path / "ca").write_text("nonsense")
        ca = tmp_path / "ca"
    elif wrong == "encrypted":
        encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n"
        key.write_text(encrypted)
    else:
        key.unlink()
    with pytest.raises(FileRefused):
        Certificates(certificate, key, ca)
