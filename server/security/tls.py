"""Certificates of the TCP and HTTP endpoints, read again when their files change: new connections get the new ones."""

import ssl
from pathlib import Path
from typing import Any

import grpc

from draftd.server.security.files import FileRefused, Stamp, read, stamp


class Certificates:
    """A key, its certificate chain and, for mTLS, the authorities of client certificates.

    Attributes:
        context: For HTTPS, which asks for no client certificate; it is changed in place when the files change.

    Raises:
        FileRefused: A file cannot be read, or they do not fit together.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._stamp: Stamp = ()
        self._offered: Any = None
        self.context = _context()
        self.reload()

    @property
    def _files(self) -> list[Path]:
        return [path for path in (self._certificate, self._key, self._client_ca) if path is not None]

    @property
    def changed(self) -> bool:
        """The files are not those that were read last."""
        return stamp(self._files) != self._stamp

    def reload(self) -> None:
        """Reads the files again.

        Raises:
            FileRefused: They cannot be used, as while only one of them is replaced; what was read before stays in force.
        """
        self._stamp = stamp(self._files)
        pair = (read(self._key), read(self._certificate))
        authorities = read(self._client_ca) if self._client_ca else None
        # Tried on a context that nobody uses: a refused file must change nothing.
        trial = _context()
        self._load_pair(trial)
        if self._client_ca is not None:
            _load_authorities(trial, self._client_ca)
        self._load_pair(self.context)
        self._offered = grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC. gRPC asks for the certificate of each connection in a thread of its own."""
        first, self._offered = self._offered, None
        return grpc.dynamic_ssl_server_credentials(first, self._offer, require_client_authentication=self._client_ca is not None)

    def _offer(self) -> Any:
        """What was read since the last call; None if that is nothing."""
        offered, self._offered = self._offered, None
        return offered

    def _load_pair(self, context: ssl.SSLContext) -> None:
        try:
            # An encrypted key would make OpenSSL ask for its password on the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (OSError, ValueError) as error:
            raise FileRefused(f"{self._certificate}, {self._key}: no certificate with its unencrypted key ({_why(error)})") from None


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise FileRefused(f"{path}: no certificates of authorities ({_why(error)})") from None


def _why(error: OSError | ValueError) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
