"""TLS of calls: which authorities a client trusts, and the certificate that it shows itself.

The variables are those of the services too, so that a machine is set up once:

    DIALOOP_TLS_CA            authorities, PEM; servers have to show a certificate of one of them
    DIALOOP_TLS_CERTIFICATE   own certificate, PEM, with its key in
    DIALOOP_TLS_KEY           shown to servers that ask for one
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

Options = Sequence[tuple[str, str | int]]

CA, CERTIFICATE, KEY = "DIALOOP_TLS_CA", "DIALOOP_TLS_CERTIFICATE", "DIALOOP_TLS_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files. Without `ca` connections are not encrypted."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidConfig(
                "A certificate and its key belong together, and one of them is missing.",
                reason=Reason.TLS_FILE,
                remedy=f"Set both {CERTIFICATE} and {KEY}, or neither.",
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Tls:
        """Return the files that the variables name; InvalidConfig (TLS_FILE)."""
        texts = [environment.get(name) for name in (CA, CERTIFICATE, KEY)]
        ca, certificate, key = [Path(text) if text else None for text in texts]
        return cls(ca=ca, certificate=certificate, key=key)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return what a client's channel needs; None without TLS; InvalidConfig (TLS_FILE)."""
        if self.ca is None:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=read_pem(self.ca),
            private_key=None if self.key is None else read_pem(self.key),
            certificate_chain=None if self.certificate is None else read_pem(self.certificate),
        )


def read_pem(path: Path) -> bytes:
    """Return the bytes of a PEM file; InvalidConfig (TLS_FILE) when it is none."""
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise InvalidConfig(
            f"{path} cannot be read: {error.strerror}.",
            reason=Reason.TLS_FILE,
            remedy="Name a PEM file that this process may read.",
        ) from error
    if b"-----BEGIN " not in pem:
        raise InvalidConfig(
            f"{path} is no PEM file.",
            reason=Reason.TLS_FILE,
            remedy="It has to begin with a line such as -----BEGIN CERTIFICATE-----.",
        )
    return pem


def open_channel(address: str, options: Options = ()) -> grpc.aio.Channel:
    """Return a channel to host:port, encrypted where DIALOOP_TLS_CA is set, or to `unix:path`."""
    credentials = Tls.from_environment().channel_credentials()
    if credentials is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def rest_scheme() -> str:
    """Return "https" where services of this environment speak TLS, else "http"."""
    return "http" if Tls.from_environment().ca is None else "https"
