"""Certificates for tests, made with openssl: an authority, and what it signs."""

import subprocess
from pathlib import Path


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


class Authority:
    """A certificate authority in a directory; `ca` is the file to believe it by."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self.ca, self._key = directory / f"{name}.pem", directory / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", "basicConstraints=critical,CA:TRUE", "-keyout", str(self._key), "-out", str(self.ca)),
        )

    def sign(self, name: str, file: str | None = None) -> tuple[Path, Path]:
        """The certificate of `name`, a host or a client, and its key."""
        stem = self._directory / (file or name)
        certificate, key, request, extension = (stem.with_suffix(suffix) for suffix in (".crt", ".key", ".csr", ".ext"))
        extension.write_text(f"subjectAltName=DNS:{name}")
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", str(key), "-out", str(request)),
        )
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.ca), "-CAkey", str(self._key), "-CAcreateserial", "-days", "2"),
            *("-extfile", str(extension), "-out", str(certificate)),
        )
        return certificate, key
