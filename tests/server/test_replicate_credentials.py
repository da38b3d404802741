"""What a NATS server asks for, from a file: passwords, tokens, NKeys and .creds files, of which nothing is ever told."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest

from draftd.drafter.errors import FailedPrecondition
from draftd.server.config import ServerConfig
from draftd.server.replicate import opening
from draftd.server.replicate.credentials import read_credentials
from draftd.server.security.files import FileRefused
from draftd.server.service import Service
from tests.server.harness import RunningService, wait_until
from tests.server.nats import nats_server
from tests.server.nats_users import ACCOUNT, OPERATOR, USER, creds, jwt, public, seed


def _file(directory: Path, text: str) -> Path:
    path = directory / "credentials"
    path.write_text(text)
    path.chmod(0o600)
    return path


def _replicates(url: str, stream: str, file: Path) -> None:
    """A service with these credentials publishes, and what it shows of itself has none of them."""
    running = RunningService(replicate=url, replicate_stream=stream, replicate_credentials=file)
    try:
        running.seed()
        state = running.service.status
        wait_until(lambda: state()["replication"]["published_documents"] == 1, 30)
        shown = running.get("/v1/status") + running.get("/metrics")
        assert not any(line in shown for line in file.read_text().splitlines() if len(line) > 20)
    finally:
        running.close()


@pytest.mark.parametrize("form", ["{}\n", 'nkey = "{}"\n'])
def test_a_user_of_an_nkey_is_let_in(tmp_path: Path, form: str) -> None:
    secret = seed(USER)
    with nats_server(tmp_path, config=f"authorization {{ users: [ {{ nkey: {public(secret)} }} ] }}") as server:
        _replicates(server.url, "NKEY", _file(tmp_path, form.format(secret)))


def test_another_nkey_is_not(tmp_path: Path) -> None:
    with nats_server(tmp_path, config=f"authorization {{ users: [ {{ nkey: {public(seed(USER))} }} ] }}") as server:
        file = _file(tmp_path, seed(USER))
        running = RunningService(replicate=server.url, replicate_stream="NKEY", replicate_credentials=file)
        try:
            state = running.service.status
            wait_until(lambda: "authorization" in (state()["replication"]["failure"] or "").lower(), 30)
            assert file.read_text() not in running.get("/v1/status") + running.get("/readyz")
        finally:
            running.close()


def test_a_user_of_a_creds_file_is_let_in(tmp_path: Path) -> None:
    operator, system, account, user = seed(OPERATOR), seed(ACCOUNT), seed(ACCOUNT), seed(USER)
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf", "mem_storage", "disk_storage"), -1)
    of_account = jwt(operator, public(account), "nodes", "account", limits=limits | {"wildcards": True, "streams": -1, "consumer": -1})
    config = f"""
        operator: {jwt(operator, public(operator), "op", "operator")}
        resolver: MEMORY
        system_account: {public(system)}
        resolver_preload: {{ {public(account)}: {of_account}, {public(system)}: {jwt(operator, public(system), "system", "account")} }}
    """
    secret = creds(jwt(account, public(user), "draftd", "user", subs=-1, data=-1, payload=-1), user)
    with nats_server(tmp_path, config=config) as server:
        # As an editor of another system may have left it.
        _replicates(server.url, "CREDS", _file(tmp_path, secret.replace("\n", "\r\n")))


@pytest.mark.parametrize("kind", [ACCOUNT, OPERATOR])
def test_a_key_of_an_account_is_not_that_of_a_user(tmp_path: Path, kind: int) -> None:
    secret = seed(kind)
    with pytest.raises(FileRefused) as refused:
        read_credentials(_file(tmp_path, f'nkey = "{secret}"'))
    assert secret not in str(refused.value)


def test_a_seed_with_a_mistake_is_found_before_it_is_used(tmp_path: Path) -> None:
    secret = seed(USER)
    assert read_credentials(_file(tmp_path, secret)) == {"nkey": secret}
    wrong = secret[:20] + ("A" if secret[20] != "A" else "B") + secret[21:]
    for text in (
        wrong,
        secret[:-1],
        secret + "A",
        "SU",
        creds("a.b.c", wrong),
        creds("a.b", secret),
        creds("", secret),
        creds("a.b.c", ""),
    ):
        with pytest.raises(FileRefused) as refused:
            read_credentials(_file(tmp_path, text))
        assert "SU" + wrong[2:8] not in str(refused.value)


def test_without_the_library_that_signs_the_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda name: None if name == "nkeys" else find_spec(name))
    config = ServerConfig(
        socket="off",
        listen="127.0.0.1:0",
        insecure=True,
        http="off",
        replicate="nats://127.0.0.1:9",
        replicate_credentials=_file(tmp_path, seed(USER)),
    )
    with pytest.raises(FailedPrecondition, match=r"draftd\[nats\]"):
        asyncio.run(Service(config).start())
