"""Certificates for tests: authorities, and certificates of loopback that they signed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A certificate and its key, PEM."""

    certificate: Path
    key: Path


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def make_authority(folder: Path, name: str = "ca") -> Pair:
    """A certificate that signs others."""
    pair = Pair(certificate=folder / f"{name}.pem", key=folder / f"{name}.key")
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", "2", "-subj", f"/CN={name}", "-keyout", pair.key, "-out", pair.certificate),
    )
    return pair


def make_certificate(folder: Path, authority: Pair, name: str) -> Pair:
    """A certificate of 127.0.0.1 and localhost, for servers and clients."""
    pair = Pair(certificate=folder / f"{name}.pem", key=folder / f"{name}.key")
    request, names = folder / f"{name}.csr", folder / f"{name}.names"
    names.write_text("subjectAltName = IP:127.0.0.1, DNS:localhost\n")
    openssl(
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-subj", f"/CN={name}", "-keyout", pair.key, "-out", request),
    )
    openssl(
        *("x509", "-req", "-days", "2", "-in", request, "-CA", authority.certificate),
        *("-CAkey", authority.key, "-CAcreateserial", "-extfile", names, "-out", pair.certificate),
    )
    return pair
