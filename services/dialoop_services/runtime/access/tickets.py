"""Tickets: how the instances of a job prove to each other who they are, without the job's token.

authority = Authority.of("secret")                      # the stack, or an admin
ticket = authority.issue(run="job-1", role="collector", name="collector-7")
authorization = Proofs(ticket).to("inference")          # for one receiver, for a minute
TicketCheck(authority.public_key, run="job-1").check(authorization.encode())

The job's key pair follows from its token. A ticket says in the job's name what its holder is: run,
role, name and scopes. It holds a key of the instance's own, with which it signs a proof for each
service that it calls. So a receiver never gets anything that opens another service.
"""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from dialoop.errors import (
    InvalidConfig,
    InvalidInput,
    Unauthenticated,
    Unavailable,
)
from dialoop.reasons import Reason
from dialoop.v1.scope_pb2 import Scope
from dialoop.wire.scopes import SCOPES

from dialoop_services.runtime.access.principals import (
    ADMIN_TOKEN,
    DIGEST_MARK,
    TICKET,
    TOKEN,
    InstanceName,
    Principal,
)

PROOF_S = 60.0
"""Seconds for which a proof is good; whoever signs one for longer is refused."""
_RENEW_BEFORE_S = 30.0
_LEEWAY_S = 30.0  # how far the clocks of two machines may be apart
_ALGORITHM = "EdDSA"
_SEPARATOR = "~"
_PROOF = "proof"
_MAX_PROOFS = 4096

ROLE_SCOPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "environment": ("rollout",),
        "inference": ("rollout",),
        "replay": (),
        "scorer": ("queue:append", "queue:lease"),
        "collector": ("env", "rollout", "queue:append"),
        "trainer": ("env", "rollout", "queue:append", "queue:lease", "weights"),
        "stack": ("rollout", "queue:append"),
    }
)
"""What an instance of each role may do elsewhere. "stack" watches a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What an instance gets from the stack: who it is, signed by the job, and a key of its own."""

    certificate: str
    instance: InstanceName
    key: Ed25519PrivateKey
    job_key: bytes

    def text(self) -> str:
        """Return the ticket as DIALOOP_TICKET has it; it is a secret of the instance."""
        return _SEPARATOR.join(
            (self.certificate, _encode(self.key.private_bytes_raw()), _encode(self.job_key))
        )

    def require_for(self, role: str, run: str) -> None:
        """Raise InvalidConfig unless the ticket is of this role, and of this run if one is given.

        Reasons: TICKET_OF_OTHER_MEMBER, TICKET_OF_OTHER_RUN.
        """
        instance = self.instance
        if instance.role != role:
            raise InvalidConfig(
                f"{TICKET} is of the role {instance.role!r}, and this is the {role} service.",
                reason=Reason.TICKET_OF_OTHER_MEMBER,
                remedy=f"Get one by `dialoop ticket {role} --run {run or 'RUN'} --name NAME`.",
            )
        if run and instance.run != run:
            raise InvalidConfig(
                f"{TICKET} is of the run {instance.run!r}, and this service is of {run!r}.",
                reason=Reason.TICKET_OF_OTHER_RUN,
                remedy=f"Get one by `dialoop ticket {role} --run {run} --name NAME`.",
            )

    @classmethod
    def of(cls, text: str) -> Ticket:
        """Return the ticket of a text; InvalidConfig (TICKET_INVALID, TICKET_EXPIRED)."""
        try:
            certificate, key, job_key = text.split(_SEPARATOR)
            private, public = _decode(key), _decode(job_key)
            holder = _read_certificate(certificate.encode(), public)
            return cls(
                certificate=certificate,
                instance=holder.instance,
                key=Ed25519PrivateKey.from_private_bytes(private),
                job_key=public,
            )
        except Unauthenticated as error:
            raise InvalidConfig(error.message, reason=error.reason, remedy=error.remedy) from error
        except ValueError as error:
            raise InvalidConfig(
                f"{TICKET} is no ticket.",
                reason=Reason.TICKET_INVALID,
                remedy="Set it to what `dialoop ticket ROLE --run RUN` prints.",
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Who signs a job's tickets: whoever has its admin token, or its token if it has no other."""

    key: Ed25519PrivateKey

    @classmethod
    def of(cls, token: str, admin_token: str = "") -> Authority | None:
        """Return the authority of these tokens; None without one, or with digests alone."""
        secret = admin_token or token
        if not secret or secret.startswith(DIGEST_MARK):
            return None
        return cls(key=_key_of(secret))

    @property
    def public_key(self) -> bytes:
        """Return the key that checks the job's tickets, 32 bytes."""
        return self.key.public_key().public_bytes_raw()

    def issue(self, *, run: str, role: str, name: str = "", valid_s: float = 0.0) -> Ticket:
        """Return a ticket for an instance; without a name, for any of that role.

        valid_s: seconds until it ends; 0: when the job's token is replaced. InvalidInput for a role
        that there is not.
        """
        if role not in ROLE_SCOPES:
            raise InvalidInput(
                f"No role is called {role!r}.", remedy=f"Choose among {', '.join(ROLE_SCOPES)}."
            )
        own = Ed25519PrivateKey.generate()
        # When it was signed is no part of it: a clock that is set back must not end the job.
        claims = {
            "run": run,
            "role": role,
            "name": name,
            "scopes": list(ROLE_SCOPES[role]),
            "key": _encode(own.public_key().public_bytes_raw()),
            **({"exp": time.time() + valid_s} if valid_s else {}),
        }
        return Ticket(
            certificate=jwt.encode(claims, self.key, algorithm=_ALGORITHM),
            instance=InstanceName(run=run, role=role, name=name),
            key=own,
            job_key=self.public_key,
        )


def authority_of(environment: Mapping[str, str]) -> Authority | None:
    """Return the authority of the tokens in these variables; None without one."""
    return Authority.of(environment.get(TOKEN, ""), environment.get(ADMIN_TOKEN, ""))


class Proofs:
    """Makes the authorization that an instance sends to each service, and renews it in time."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._made: dict[str, tuple[str, float]] = {}

    def to(self, audience: str) -> str:
        """Return the bearer token for a receiver: "trainer", or "inference/gpu-0/7"."""
        now = time.time()
        proof, renew_at = self._made.get(audience, ("", 0.0))
        if not now < renew_at <= now + PROOF_S:  # or the clock was set back
            claims = {"aud": audience, "iat": now, "exp": now + PROOF_S}
            signed = jwt.encode(claims, self._ticket.key, algorithm=_ALGORITHM)
            proof = f"{self._ticket.certificate}{_SEPARATOR}{signed}"
            if len(self._made) >= _MAX_PROOFS:  # of instances that left
                self._made.clear()
            self._made[audience] = proof, now + PROOF_S - _RENEW_BEFORE_S
        return proof


class TicketCheck:
    """Tells who a caller with a ticket is, at a service of a job.

    `run`: the only one whose instances may call; empty: those of all runs of the key. `role`: the
    service's own, for which a proof has to be; empty: any. `audience` returns the instance of the
    registry that the service is at the moment, as "inference/gpu-0/7".
    """

    def __init__(
        self,
        public_key: bytes,
        *,
        run: str = "",
        role: str = "",
        audience: Callable[[], str] = str,
    ) -> None:
        self._public_key = public_key
        self._run = run
        self._role = role
        self._audience = audience
        self._checked: dict[bytes, tuple[float, Principal, frozenset[Scope]]] = {}

    def check(self, credentials: bytes) -> tuple[Principal, frozenset[Scope]] | None:
        """Return who sent this bearer token and what it may do; None where it is no ticket at all.

        Raise Unauthenticated: TICKET_INVALID, TICKET_EXPIRED, TICKET_NOT_YET_VALID,
        TICKET_OF_OTHER_RUN, TICKET_FOR_OTHER_SERVICE; Unavailable for a proof that has ended
        (TICKET_EXPIRED), or to another instance or an earlier life of this one (OTHER_INCARNATION).
        """
        ends_at, principal, scopes = self._checked.get(credentials, (0.0, None, frozenset()))
        if principal is None or ends_at + _LEEWAY_S <= time.time():
            self._checked.pop(credentials, None)
            certificate, separator, proof = credentials.partition(_SEPARATOR.encode())
            if not separator or certificate.count(b".") != 2 or proof.count(b".") != 2:
                return None
            if len(self._checked) >= _MAX_PROOFS:
                self._checked.clear()
            ends_at, principal, scopes = self._read(certificate, proof)
            self._checked[credentials] = ends_at, principal, scopes
        if "/" in principal.audience and principal.audience != self._audience():
            raise Unavailable(
                f"The proof is for {principal.audience}, and another instance listens here.",
                reason=Reason.OTHER_INCARNATION,
                remedy="Ask the registry for the instances of the run, and call one of these.",
            )
        return principal, scopes

    def _read(self, certificate: bytes, proof: bytes) -> tuple[float, Principal, frozenset[Scope]]:
        """Return when the proof ends, who signed it, and what that instance may do."""
        holder = _read_certificate(certificate, self._public_key)
        instance = holder.instance
        if self._run and instance.run != self._run:
            raise Unauthenticated(
                f"The ticket is of the run {instance.run!r}, and this service is of {self._run!r}.",
                reason=Reason.TICKET_OF_OTHER_RUN,
                remedy="Call the services of the ticket's own run.",
            )
        # The audience is compared below, since PyJWT's error does not say whom the proof is for.
        claims = _claims_of(proof, holder.key, ("aud", "iat", "exp"), what=_PROOF)
        audience, proof_ends_at = str(claims["aud"]), float(claims["exp"])
        if not proof_ends_at - float(claims["iat"]) <= PROOF_S:
            raise Unauthenticated(
                f"The proof is good for more than {PROOF_S:g} s.",
                reason=Reason.TICKET_INVALID,
                remedy="Sign one for each call, or every minute.",
            )
        if self._role and audience.partition("/")[0] != self._role:
            raise Unauthenticated(
                f"The proof is for {audience}, and this is the {self._role} service.",
                reason=Reason.TICKET_FOR_OTHER_SERVICE,
                remedy="Call the service that the address in your settings should be.",
            )
        recheck = partial(_require_valid, holder.ends_at) if holder.ends_at < math.inf else None
        principal = Principal(instance=instance, audience=audience, recheck=recheck)
        return min(proof_ends_at, holder.ends_at), principal, holder.scopes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    """What a certificate says of the instance that holds it."""

    instance: InstanceName
    scopes: frozenset[Scope]
    key: Ed25519PublicKey
    ends_at: float


def _read_certificate(certificate: bytes, public_key: bytes) -> _Holder:
    """Return what the job says of a certificate's holder."""
    job_key = Ed25519PublicKey.from_public_bytes(public_key)
    required = ("run", "role", "name", "scopes", "key")
    claims = _claims_of(certificate, job_key, required, what="ticket")
    try:
        return _Holder(
            instance=InstanceName(run=claims["run"], role=claims["role"], name=claims["name"]),
            scopes=frozenset(SCOPES[name] for name in claims["scopes"]),
            key=Ed25519PublicKey.from_public_bytes(_decode(claims["key"])),
            ends_at=float(claims.get("exp", math.inf)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid("ticket") from error


def _require_valid(ends_at: float) -> None:
    if time.time() >= ends_at:
        raise Unauthenticated(
            "The ticket has ended.",
            reason=Reason.TICKET_EXPIRED,
            remedy="Start the instance again with a new ticket.",
        )


def _claims_of(
    token: bytes, key: Ed25519PublicKey, required: Sequence[str], *, what: str
) -> dict[str, Any]:
    options: Any = {"require": list(required), "verify_aud": False}
    try:
        claims: dict[str, Any] = jwt.decode(
            token, key, algorithms=[_ALGORITHM], options=options, leeway=_LEEWAY_S
        )
    except jwt.ExpiredSignatureError as error:
        # A proof may have waited with its call. Whoever calls again signs another one.
        kind = Unavailable if what == _PROOF else Unauthenticated
        raise kind(
            f"The {what} has ended, by this machine's clock ({_now()}).",
            reason=Reason.TICKET_EXPIRED,
            remedy="Compare the clocks of the two machines. If they agree, get a new ticket.",
        ) from error
    except jwt.ImmatureSignatureError as error:
        raise Unauthenticated(
            f"The {what} was signed in the future, by this machine's clock ({_now()}).",
            reason=Reason.TICKET_NOT_YET_VALID,
            remedy="Set the clocks of the two machines.",
        ) from error
    except (jwt.InvalidTokenError, ValueError, OverflowError, TypeError) as error:
        raise _invalid(what) from error
    return claims


def _invalid(what: str) -> Unauthenticated:
    return Unauthenticated(
        f"The {what} was changed, or was not signed for this job.",
        reason=Reason.TICKET_INVALID,
        remedy="Get one by `dialoop ticket`, with the tokens that the job was started with: its "
        "admin token too, if it has one. A token of some scopes signs none.",
    )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@lru_cache(maxsize=8)
def _key_of(secret: str) -> Ed25519PrivateKey:
    """Return the key pair of a token.

    Instances know its public half, so guessing the token from that has to be slow: RFC 7914,
    16 MiB.
    """
    seed = hashlib.scrypt(secret.encode(), salt=b"dialoop tickets", n=1 << 14, r=8, p=1, dklen=32)
    return Ed25519PrivateKey.from_private_bytes(seed)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
