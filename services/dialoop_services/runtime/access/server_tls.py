"""TLS of a service's servers: its certificate, and whether callers have to show one too."""

from __future__ import annotations

import logging
import ssl
from typing import Any

import grpc
from dialoop.clients.tls import CA, CERTIFICATE, Tls, read_pem
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

from dialoop_services.runtime.listening import is_loopback
from dialoop_services.runtime.settings import ServerSettings

log = logging.getLogger(__name__)


class ServerTls:
    """What the servers of a service need; it raises InvalidConfig (TLS_FILE) for wrong files."""

    def __init__(self, settings: ServerSettings) -> None:
        self._files = Tls(
            ca=settings.tls_ca, certificate=settings.tls_certificate, key=settings.tls_key
        )
        self._is_mutual = settings.tls_mutual
        if self._is_mutual and (self._files.ca is None or not self.is_on):
            raise InvalidConfig(
                "Mutual TLS needs the service's own certificate and the authorities of callers.",
                reason=Reason.TLS_FILE,
                remedy=f"Set {CERTIFICATE}, its key, and {CA}.",
            )
        if self.is_on:
            self._require_pair()
        elif not is_loopback(settings.host):
            log.warning(
                "The service listens beyond loopback without TLS: tokens and data can be read on "
                "the way.",
                extra={"host": settings.host},
            )

    @property
    def is_on(self) -> bool:
        """Return whether the servers speak TLS."""
        return self._files.certificate is not None

    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        """Return the credentials of the gRPC server; None without TLS."""
        files = self._files
        if files.certificate is None or files.key is None:
            return None
        return grpc.ssl_server_credentials(
            [(read_pem(files.key), read_pem(files.certificate))],
            root_certificates=read_pem(files.ca) if self._is_mutual and files.ca else None,
            require_client_auth=self._is_mutual,
        )

    def uvicorn_options(self) -> dict[str, Any]:
        """Return the options of the REST server's uvicorn; none without TLS."""
        if not self.is_on:
            return {}
        options: dict[str, Any] = {
            "ssl_certfile": self._files.certificate,
            "ssl_keyfile": self._files.key,
        }
        if self._is_mutual:
            options |= {"ssl_ca_certs": self._files.ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return options

    def _require_pair(self) -> None:
        """Load the files as both servers will, since gRPC's own error names none of them."""
        certificate, key = self._files.certificate, self._files.key
        assert certificate is not None
        assert key is not None
        for path in (certificate, key, *((self._files.ca,) if self._files.ca else ())):
            read_pem(path)
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            if self._files.ca is not None:
                context.load_verify_locations(self._files.ca)
        except (ssl.SSLError, OSError) as error:
            raise InvalidConfig(
                f"{certificate} and {key} are no certificate and its key: {error}.",
                reason=Reason.TLS_FILE,
                remedy="Name a PEM certificate and the key that it was made for.",
            ) from error
