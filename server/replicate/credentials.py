"""What NATS asks for, as its file has it: user and password, a token, an NKey, or a `.creds` file with a user's JWT and NKey.

Messages never tell what is in the file. Whether the server takes it is the server's business.
"""

import base64
import binascii
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from draftd.server.security.files import FileRefused, read_private

_MAX_BYTES = 64 * 1024
_TABLES = ({"user", "password"}, {"token"}, {"nkey"})
_JWT = re.compile(r"-----BEGIN NATS USER JWT-----\n([A-Za-z0-9_.-]+)\n-+END NATS USER JWT-+")
_SEED = re.compile(r"-----BEGIN USER NKEY SEED-----\n([A-Z2-7]+)\n-+END USER NKEY SEED-+")
_SEED_BYTES = 36
_SEED_PREFIX, _USER_PREFIX = 18 << 3, 20 << 3


def read_credentials(path: Path) -> Mapping[str, str]:
    """`user` and `password`; or `token`; or `nkey`, a user's seed; or `creds`, the content of a `.creds` file.

    Raises:
        FileRefused: The file cannot be read or is open to others, or its content is none of these.
    """
    try:
        text = read_private(path, _MAX_BYTES).decode()
    except UnicodeDecodeError:
        raise FileRefused(f"{path}: is no text") from None
    lines = "\n".join(line.strip() for line in text.splitlines())
    if "-----BEGIN " in lines:
        return {"creds": _creds(path, lines)}
    if lines.strip().startswith("SU") and "=" not in lines:
        return {"nkey": _seed(path, lines.strip())}
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise FileRefused(f"{path}: is no TOML, NKey seed or .creds file") from None
    if set(values) not in _TABLES or not all(isinstance(value, str) and value for value in values.values()):
        raise FileRefused(f"{path}: needs user and password, or token, or nkey, and nothing else")
    if "nkey" in values:
        _seed(path, values["nkey"])
    return values


def _creds(path: Path, lines: str) -> str:
    jwt, seed = _JWT.search(lines), _SEED.search(lines)
    if not jwt or not seed or jwt[1].count(".") != 2:
        raise FileRefused(f"{path}: a .creds file has a NATS USER JWT and a USER NKEY SEED, each between its BEGIN and END")
    _seed(path, seed[1])
    return f"{jwt[0]}\n{seed[0]}\n"


def _seed(path: Path, seed: str) -> str:
    """The seed of a user's NKey: 36 bytes in base32, of which two name its kind and two are a CRC-16."""
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except binascii.Error:
        raw = b""
    kind = ((raw[0] & 7) << 5 | raw[1] >> 3) if len(raw) == _SEED_BYTES else 0
    if kind != _USER_PREFIX or raw[0] & 0xF8 != _SEED_PREFIX or binascii.crc_hqx(raw[:-2], 0) != int.from_bytes(raw[-2:], "little"):
        raise FileRefused(f"{path}: its NKey is not the seed of a user, which begins with SU")
    return seed
