"""Token files: what is refused, who a token is, what stays in force when the file changes, and how fast a principal may be."""

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftd.drafter.errors import ResourceExhausted
from draftd.server.security.files import FileRefused
from draftd.server.security.principal import PermissionDenied, Principal, Unauthenticated
from draftd.server.security.rates import RATE_LIMIT, Bucket, Rates
from draftd.server.security.tokens import MAX_TOKENS, Tokens, bearer_token, hash_of, new_token, parse
from tests.server.harness import draftd

HASH = "ab" * 32


def _entry(name: str, token: str, **fields: object) -> str:
    values = {"sha256": hash_of(token), "rights": ["read"], "namespaces": ["*"]} | fields
    return f'[tokens."{name}"]\n' + "".join(f"{key} = {value!r}\n" for key, value in values.items())


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_token_is_known_by_its_hash_only(tmp_path: Path) -> None:
    token = new_token()
    assert hash_of(token) == hashlib.sha256(token.encode()).hexdigest()
    path = _write(tmp_path / "tokens.toml", _entry("a", token) + _entry("b", "other"))
    assert token not in path.read_text()
    tokens = Tokens(path, 0, 0)
    found = tokens.authenticate(f"Bearer {token}")
    assert found is not None
    assert (len(tokens._principals), found.name) == (2, "a")
    assert tokens.authenticate(f"bearer {token}".encode()) is found
    for wrong in (None, "", token, f"Basic {token}", "Bearer ", "Bearer", f"Bearer {token}x", f"Bearer {hash_of(token)}", "Bearer ü"):
        assert tokens.authenticate(wrong) is None


def test_every_entry_is_compared_whichever_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"t{i}" for i in range(20)]
    tokens = Tokens(_write(tmp_path / "tokens.toml", "".join(_entry(name, name) for name in names)), 0, 0)
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return known == given

    monkeypatch.setattr("hmac.compare_digest", compare)
    for token in ("t0", "t19", "unknown"):
        compared.clear()
        tokens.authenticate(f"Bearer {token}")
        assert len(compared) == len(names)


def test_empty_token_is_nobodys(tmp_path: Path) -> None:
    tokens = Tokens(_write(tmp_path / "tokens.toml", _entry("empty", "")), 0, 0)
    assert tokens.authenticate("Bearer ") is None


@given(st.one_of(st.text(), st.binary()))
def test_any_header_is_read_without_an_error(header: str | bytes) -> None:
    assert len(bearer_token(header)) < 512


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tokens", "Expected"),
        ("\x00", "Invalid statement"),
        ("[token.a]", "unknown table 'token'"),
        ("tokens = 1", "must be a table"),
        ("[tokens.a]", "token 'a': sha256"),
        (f"[tokens.a]\nsha256 = '{HASH[1:]}'\nrights = ['read']\nnamespaces = ['*']", "token 'a': sha256"),
        (f"[tokens.a]\nsha256 = '{HASH}'\nrights = ['root']\nnamespaces = ['*']", "token 'a': rights.0"),
        (f"[tokens.a]\nsha256 = '{HASH}'\nrights = []\nnamespaces = ['*']", "token 'a': rights"),
        (f"[tokens.a]\nsha256 = '{HASH}'\nrights = ['read']\nnamespaces = []", "token 'a': namespaces"),
        (f"[tokens.a]\nsha256 = '{HASH}'\nrights = ['read']\nnamespaces = ['*']\ntokens_per_s = -1", "token 'a': tokens_per_s"),
        (f"[tokens.a]\nsha256 = '{HASH}'\nrights = ['read']\nnamespaces = ['*']\nrequests_per_s = nan", "token 'a': requests_per_s"),
        (f"[tokens.a]\nsha256 = '{HASH}'\nrights = ['read']\nnamespaces = ['*']\nright = 1", "token 'a': right"),
        (f"[tokens.'a b']\nsha256 = '{HASH}'\nrights = ['read']\nnamespaces = ['*']", "token 'a b': a name has"),
        ("".join(f"[tokens.{n}]\nsha256 = '{HASH}'\nrights = ['read']\nnamespaces = ['*']\n" for n in "ab"), "the same sha256"),
        ("".join(f"[tokens.t{i}]\n" for i in range(MAX_TOKENS + 1)), f"at most {MAX_TOKENS}"),
    ],
)
def test_file_that_says_something_else_is_refused(text: str, said: str) -> None:
    with pytest.raises(FileRefused) as refused:
        parse(text.encode())
    assert said in str(refused.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o660, 0o620, 0o601])
def test_file_that_others_have_access_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = _write(tmp_path / "tokens.toml", _entry("a", "secret"))
    path.chmod(mode)
    with pytest.raises(FileRefused, match=f"mode is {mode:04o}"):
        Tokens(path, 0, 0)
    path.chmod(0o640)
    assert len(Tokens(path, 0, 0)._principals) == 1


def test_file_that_is_none_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, said in ((tmp_path / "none", "No such file"), (tmp_path, "not a regular file"), (tmp_path / "pipe", "not a regular file")):
        with pytest.raises(FileRefused, match=said):
            Tokens(path, 0, 0)
    huge = _write(tmp_path / "huge", "#" * (2**20 + 1))
    with pytest.raises(FileRefused, match="more than"):
        Tokens(huge, 0, 0)


@pytest.mark.skipif(os.getuid() != 0, reason="giving a file to another user needs root")
def test_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "tokens.toml", _entry("a", "secret"))
    os.chown(path, 12345, -1)
    with pytest.raises(FileRefused, match="belongs to user 12345"):
        Tokens(path, 0, 0)


def test_file_that_turned_bad_changes_nothing(tmp_path: Path) -> None:
    path = _write(tmp_path / "tokens.toml", _entry("a", "secret"))
    tokens = Tokens(path, 0, 0)
    assert not tokens.changed
    _write(path, "nonsense")
    assert tokens.changed
    with pytest.raises(FileRefused):
        tokens.reload()
    assert not tokens.changed, "the same bad file is not read at every tick"
    assert tokens.authenticate("Bearer secret") is not None
    path.unlink()
    with pytest.raises(FileRefused):
        tokens.reload()
    assert tokens.authenticate("Bearer secret") is not None
    _write(path, _entry("b", "other"))
    tokens.reload()
    assert tokens.authenticate("Bearer secret") is None


def test_principal_of_an_open_stream_learns_of_its_end(tmp_path: Path) -> None:
    path = _write(tmp_path / "tokens.toml", _entry("a", "secret", namespaces=["x"], requests_per_s=5))
    tokens = Tokens(path, 0, 0)
    principal = tokens.authenticate("Bearer secret")
    assert principal is not None
    _write(path, _entry("a", "secret", namespaces=["y"], requests_per_s=5))
    tokens.reload()
    renewed = principal.renewed()
    assert (renewed.may("read", "x"), renewed.may("read", "y")) == (False, True)
    assert renewed.rates is principal.rates, "a reload is no refill"
    _write(path, _entry("a", "replaced", namespaces=["y"]))
    tokens.reload()
    with pytest.raises(Unauthenticated):
        renewed.renewed()


@pytest.mark.parametrize(
    ("patterns", "inside", "outside"),
    [
        (["*"], ["default", "a/b"], []),
        (["team-a/*"], ["team-a/x", "team-a/x/y", "team-a/"], ["team-a", "team-b/x", "x/team-a/y"]),
        (["a", "b?"], ["a", "bc"], ["b", "ab", "A", "a\n"]),
        (["[ab]"], ["a", "b"], ["c", "[ab]"]),
        ([""], [], ["a", "default"]),
    ],
)
def test_namespace_patterns(patterns: list[str], inside: list[str], outside: list[str]) -> None:
    principal = Principal("p", frozenset({"read"}), tuple(patterns), Rates())
    for name in inside:
        principal.check(["read"], [name])
    for name in outside:
        with pytest.raises(PermissionDenied, match="lacks 'read' in namespace"):
            principal.check(["read"], [name])
    with pytest.raises(PermissionDenied, match="lacks the right 'write'"):
        principal.check(["read", "write"], inside)
    assert principal.may_everywhere("read") == (patterns == ["*"])


def test_bucket_lets_one_second_through_and_a_large_call_later() -> None:
    now = [0.0]
    bucket = Bucket(10, lambda: now[0])
    for _ in range(10):
        assert not bucket.wait_s(1)
        bucket.take(1)
    assert 0 < bucket.wait_s(1) <= 0.1
    assert not bucket.wait_s(0)
    now[0] += 0.05
    assert 0 < bucket.wait_s(1) <= 0.05
    now[0] += 0.05
    assert not bucket.wait_s(1)
    assert bucket.wait_s(1000) > 0
    now[0] += 0.9
    assert not bucket.wait_s(1000)
    bucket.take(1000)
    now[0] += 99
    assert bucket.wait_s(0) == 0
    assert 0 < bucket.wait_s(1) <= 0.1
    now[0] += 0.1
    assert not bucket.wait_s(1)
    now[0] += 1e6
    for _ in range(10):
        assert not bucket.wait_s(1)
        bucket.take(1)
    assert bucket.wait_s(1) > 0, "an idle hour saves up no more than a second"


def test_rate_that_is_exceeded_takes_nothing() -> None:
    rates = Rates.of(1000, 10)
    rates.charge(1_000_000)
    assert rates.requests is not None
    before = rates.requests._level
    with pytest.raises(ResourceExhausted, match=f"^{RATE_LIMIT}10 tokens a second; try again in"):
        rates.charge(1)
    assert rates.requests._level >= before
    Rates.of(0, 0).charge(10**9)


def test_command_makes_an_entry_that_fits_its_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    for name, right in (("trainer", "write"), ("viewer", "read")):
        result = draftd("token", name, "-r", right, "-n", "a/*", "-n", "b", "--tokens-per-s", "1e6", "--append", str(path))
        assert (result.returncode, result.stderr) == (0, "")
        principal = Tokens(path, 0, 0).authenticate(f"Bearer {result.stdout.strip()}")
        assert principal is not None
        assert (principal.name, principal.rights, principal.namespaces) == (name, frozenset([right]), ("a/*", "b"))
        assert principal.rates.tokens is not None
        assert principal.rates.tokens.rate == 1e6
    assert len(Tokens(path, 0, 0)._principals) == 2
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_command_without_a_file_prints_the_entry_beside_the_token() -> None:
    result = draftd("token", "x", "-r", "read", "-r", "admin", "-n", '"quo\\ted"')
    (entry,) = parse(result.stderr.encode()).values()
    assert entry.sha256 == hash_of(result.stdout.strip())
    assert (entry.rights, entry.namespaces) == (["read", "admin"], ['"quo\\ted"'])


def test_command_adds_nothing_to_a_file_that_it_may_not_use(tmp_path: Path) -> None:
    path = _write(tmp_path / "tokens.toml", _entry("x", "secret"))
    before = path.read_text()
    twice = draftd("token", "x", "-r", "read", "-n", "*", "--append", str(path))
    assert (twice.returncode, "nothing was added" in twice.stderr, twice.stdout) == (1, True, "")
    path.chmod(0o644)
    shown = draftd("token", "y", "-r", "read", "-n", "*", "--append", str(path))
    assert (shown.returncode, "others must have no access" in shown.stderr) == (1, True)
    assert path.read_text() == before
    assert draftd("token", "a b", "-r", "read", "-n", "*").returncode == 2
    assert draftd("token", "x", "-r", "read").returncode == 2
