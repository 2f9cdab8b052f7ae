"""Tickets that are not good: each has one named refusal, and changes nothing."""

from __future__ import annotations

import base64
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dialoop.clients.channel import Channel
from dialoop.clients.registry import RegistryClient
from dialoop.errors import (
    DialoopError,
    InvalidConfig,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from dialoop.wire.scopes import SCOPES
from dialoop_ops.cli.main import main
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.hosting import OwnProcess
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.runtime import load
from dialoop_services.runtime.access import tickets
from dialoop_services.runtime.access.principals import digest_of, without_tokens
from dialoop_services.runtime.access.tickets import (
    ROLE_SCOPES,
    Authority,
    Proofs,
    Ticket,
    TicketCheck,
)

from tests.support.samples.scoped_services import (
    OWN,
    descriptors,
    grpc_status,
    scope_in_proto,
    serve,
    write_tokens,
)

RUN = "job-1"
ME = "inference/gpu-0/7"


def authority(token: str = OWN) -> Authority:
    made = Authority.of(token)
    assert made is not None
    return made


def check(audience: str = ME) -> TicketCheck:
    return TicketCheck(authority().public_key, run=RUN, role="inference", audience=lambda: audience)


def proof(
    *, shift_s: float = 0.0, lives_s: float = 60.0, audience: str = ME, **ticket: Any
) -> bytes:
    """The bearer token of a trainer, signed by a clock that is `shift_s` ahead."""
    options = {"run": RUN, "role": "trainer", "name": "trainer"} | ticket
    signer = options.pop("signer", authority())
    held = signer.issue(**options)
    now = time.time() + shift_s
    claims = {"aud": audience, "iat": now, "exp": now + lives_s}
    return f"{held.certificate}~{jwt.encode(claims, held.key, algorithm='EdDSA')}".encode()


def reason_of(credentials: bytes, receiver: TicketCheck | None = None) -> str:
    try:
        answer = (receiver or check()).check(credentials)
    except DialoopError as error:
        return str(error.reason)
    return "" if answer else "no ticket"


def test_a_proof_says_who_calls_and_what_it_may_do() -> None:
    checked = check().check(proof())
    assert checked is not None
    principal, scopes = checked
    assert (principal.instance.run, principal.instance.role, principal.instance.name) == (
        RUN,
        "trainer",
        "trainer",
    )
    assert scopes == {SCOPES[name] for name in ROLE_SCOPES["trainer"]}
    assert principal.recheck is None, "it has no end of its own"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: proof(shift_s=-300), "TICKET_EXPIRED"),  # old, or a clock five minutes behind
        (lambda: proof(shift_s=300), "TICKET_NOT_YET_VALID"),  # a clock five minutes ahead
        (lambda: proof(lives_s=61), "TICKET_INVALID"),
        (lambda: proof(lives_s=float("inf")), "TICKET_INVALID"),
        (lambda: proof(run="job-2"), "TICKET_OF_OTHER_RUN"),
        (lambda: proof(signer=authority("of another job")), "TICKET_INVALID"),
        (lambda: proof(audience="trainer"), "TICKET_FOR_OTHER_SERVICE"),
        (lambda: proof(audience="inferences/gpu-0/7"), "TICKET_FOR_OTHER_SERVICE"),
        (lambda: proof(audience="inference/gpu-1/7"), "OTHER_INCARNATION"),
        (lambda: proof(audience="inference/gpu-0/6"), "OTHER_INCARNATION"),
        (lambda: proof(audience="inference/gpu-0"), "OTHER_INCARNATION"),
        (lambda: proof(valid_s=1e-9, shift_s=-1), ""),  # within the leeway of clocks
        (lambda: b"", "no ticket"),
        (lambda: b"~", "no ticket"),
        (lambda: b"a.b.c~d.e.f", "TICKET_INVALID"),
        (lambda: b"\xff.\xff.\xff~\xff.\xff.\xff", "TICKET_INVALID"),
    ],
)
def test_a_proof_that_is_not_good_has_a_name(make: Callable[[], bytes], reason: str) -> None:
    assert reason_of(make()) == reason


def test_a_proof_to_an_address_of_the_settings_names_the_role_alone() -> None:
    assert reason_of(proof(audience="inference")) == ""
    assert reason_of(proof(audience="inference"), check(audience="")) == "", "it has not joined"


def test_a_proof_is_not_good_after_a_restart_although_it_was_checked_before() -> None:
    lives, credentials = [ME], proof()
    receiver = TicketCheck(
        authority().public_key, run=RUN, role="inference", audience=lambda: lives[-1]
    )
    assert reason_of(credentials, receiver) == ""
    lives.append("inference/gpu-0/8")
    assert reason_of(credentials, receiver) == "OTHER_INCARNATION"
    assert reason_of(credentials, check("inference/gpu-0/8")) == "OTHER_INCARNATION"
    with pytest.raises(Unavailable):  # callers then look for another, and do not end
        receiver.check(credentials)


def test_a_proof_ends_although_it_was_checked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, credentials = check(), proof()
    assert reason_of(credentials, receiver) == ""
    later = time.time() + 300
    monkeypatch.setattr(tickets.time, "time", lambda: later)
    monkeypatch.setattr(tickets, "_claims_of", raise_expired)
    assert reason_of(credentials, receiver) == "TICKET_EXPIRED"


def raise_expired(*_: object, **__: object) -> None:
    raise Unauthenticated("Ended.", reason=tickets.Reason.TICKET_EXPIRED)


def test_no_changed_byte_is_taken() -> None:
    whole, chance = proof(), random.Random(7)
    receiver = check()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] = chance.choice([b for b in range(33, 127) if b != whole[place]])
        reason = reason_of(bytes(changed), receiver)
        # The last character of a base64 text has bits that mean nothing.
        is_last = whole[place + 1 : place + 2] in (b".", b"~", b"")
        assert reason or is_last, (place, bytes(changed))


def parts(credentials: bytes) -> list[dict[str, Any]]:
    texts = [part for whole in credentials.decode().split("~") for part in whole.split(".")[:2]]
    return [json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))) for text in texts]


def base64_of(part: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


def test_a_member_cannot_write_its_own_certificate() -> None:
    own = Ed25519PrivateKey.generate()
    claims = parts(proof())[1] | {
        "scopes": ["admin"],
        "key": base64.urlsafe_b64encode(own.public_key().public_bytes_raw()).decode(),
    }
    call_proof = jwt.encode({"aud": ME, "iat": time.time(), "exp": time.time() + 9}, own, "EdDSA")
    forged = [
        jwt.encode(claims, own, "EdDSA"),
        f"{base64_of({'alg': 'none', 'typ': 'JWT'})}.{base64_of(claims)}.",
        jwt.encode(claims, base64.b64encode(authority().public_key), "HS256"),
    ]
    for certificate in forged:
        assert reason_of(f"{certificate}~{call_proof}".encode()) == "TICKET_INVALID"


def test_odd_claims_are_refused_and_raise_nothing_else() -> None:
    job, own = authority().key, Ed25519PrivateKey.generate()
    public = base64.urlsafe_b64encode(own.public_key().public_bytes_raw()).decode()
    claims = parts(proof())[1] | {"key": public.rstrip("=")}
    times = {"aud": ME, "iat": time.time(), "exp": time.time() + 9}

    def reason(certificate: dict[str, Any], proof: dict[str, Any]) -> str:
        signed = jwt.encode(certificate, job, "EdDSA"), jwt.encode(proof, own, "EdDSA")
        return reason_of("~".join(signed).encode())

    assert reason(claims, times) == ""
    for odd in (
        {"scopes": ["envy"]},
        {"scopes": 3},
        {"key": "short"},
        {"key": None},
        {"exp": "soon"},
        {"exp": [1]},
        {"exp": float("nan")},
        {"run": None},
        {"run": 3},
    ):
        assert reason(claims | odd, times) in ("TICKET_INVALID", "TICKET_OF_OTHER_RUN"), odd
    for odd in (
        {"iat": float("inf")},
        {"iat": "now"},
        {"iat": [1]},
        {"exp": float("inf")},
        {"exp": "soon"},
        {"exp": None},
        {"aud": None},
    ):
        assert reason(claims, times | odd) == "TICKET_INVALID", odd


async def test_each_refusal_is_one_over_rest_too(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.toml", {"unused": ["env"]})
    (service,) = [s for s in descriptors() if s.name == "InferenceService"]
    async with serve(path, [service], of_run=RUN, rest_port=0) as server:
        server.incarnation.audience = ME
        async with httpx.AsyncClient(base_url=f"http://{server.rest_address}") as http:
            for credentials, status, reason in (
                (proof(), 501, "NOT_SERVED"),
                (proof(audience="inference/gpu-0/6"), 503, "OTHER_INCARNATION"),
                (proof(shift_s=-300), 503, "TICKET_EXPIRED"),
                (proof(shift_s=300), 401, "TICKET_NOT_YET_VALID"),
                (proof(run="job-2"), 401, "TICKET_OF_OTHER_RUN"),
                (proof()[:-9], 401, "TICKET_INVALID"),
            ):
                headers = {"authorization": f"Bearer {credentials.decode()}"}
                for method, url in (("GET", "/v1/policy"), ("POST", "/v1/generate")):
                    answer = await http.request(method, url, json={}, headers=headers)
                    assert (answer.status_code, answer.json()["reason"]) == (status, reason)


def test_a_clock_that_is_set_back_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = time.time() + 3600
    with monkeypatch.context() as patch:
        patch.setattr(tickets.time, "time", lambda: ahead)
        signed = authority().issue(run=RUN, role="trainer")
    sent = Proofs(Ticket.of(signed.text())).to(ME)
    assert reason_of(sent.encode()) == ""


async def test_a_proof_that_waited_with_its_call_is_sent_anew(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.toml", {"unused": ["env"]})
    proofs = iter([proof(shift_s=-300, audience="any").decode()])
    fresh = Proofs(authority().issue(run=RUN, role="trainer"))
    async with (
        serve(path, descriptors(), of_run=RUN) as server,
        Channel(server.address, token=lambda: next(proofs, fresh.to("any"))) as channel,
    ):
        with pytest.raises(Unsupported):  # the method is not there: the second call was let in
            await RegistryClient(channel).list_instances(RUN)


async def test_a_ticket_opens_the_rpcs_of_its_roles_scopes_and_no_others(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.toml", {"unused": ["env"]})
    async with (
        serve(path, descriptors(), of_run=RUN) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        for role, scopes in ROLE_SCOPES.items():
            sent = Proofs(authority().issue(run=RUN, role=role)).to("anybody")
            for rpc in (rpc for service in descriptors() for rpc in service.methods):
                opens = scope_in_proto(rpc) in scopes
                wanted = "UNIMPLEMENTED" if opens else "PERMISSION_DENIED"
                assert await grpc_status(channel, rpc, sent) == wanted, (role, rpc.full_name)


async def test_with_an_admin_token_only_its_holder_signs(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.toml", {"unused": ["env"]})
    (rpc,) = [r for s in descriptors() for r in s.methods if r.name == "ListInstances"]
    async with (
        serve(path, descriptors(), admin_token="the-admin") as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        for signer, wanted in (
            (authority(OWN), "UNAUTHENTICATED"),
            (Authority.of(OWN, "the-admin"), "UNIMPLEMENTED"),
        ):
            assert signer is not None
            sent = Proofs(signer.issue(run=RUN, role="inference")).to("anybody")
            assert await grpc_status(channel, rpc, sent) == wanted


def test_the_command_signs_a_ticket_that_names_what_joins(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIALOOP_TOKEN", OWN)
    assert main(["ticket", "collector", "--run", RUN, "--name", "far-7", "--days", "1"]) == 0
    printed, scopes = capfd.readouterr()
    assert OWN not in printed + scopes
    assert "env, rollout, queue:append" in scopes
    name, _, text = printed.strip().partition("=")
    ticket = Ticket.of(text)
    assert (name, ticket.instance.role, ticket.instance.name) == (
        "DIALOOP_TICKET",
        "collector",
        "far-7",
    )
    assert ticket.job_key == authority().public_key
    assert main(["ticket", "wizard", "--run", RUN, "--name", "x"]) == 2
    assert main(["ticket", "collector", "--run", RUN, "--name", "x", "--days", "nan"]) == 2
    assert main(["ticket", "collector", "--run", RUN, "--name", ""]) == 2
    monkeypatch.delenv("DIALOOP_TOKEN")
    assert main(["ticket", "collector", "--run", RUN, "--name", "x"]) == 2
    assert "nothing to sign with" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["ticket", "collector"])


def test_a_service_refuses_a_ticket_of_another_role_or_run_at_its_start(tmp_path: Path) -> None:
    collector = authority().issue(run=RUN, role="collector", name="c").text()
    own = {"ticket": collector, "discovery": "registry"}
    with pytest.raises(InvalidConfig, match="is of the role 'collector', and this is the inf"):
        OwnProcess(load(InferenceSettings, model_dir=tmp_path, run=RUN, **own))
    with pytest.raises(InvalidConfig, match="of the run 'job-1', and this service is of 'job-2'"):
        OwnProcess(load(CollectorSettings, run="job-2", **own))
    with pytest.raises(InvalidConfig, match="is no ticket"):
        OwnProcess(load(CollectorSettings, run=RUN, ticket="abc"))
    old = authority().issue(run=RUN, role="collector", valid_s=-300).text()
    with pytest.raises(InvalidConfig, match="has ended") as ended:
        OwnProcess(load(CollectorSettings, run=RUN, ticket=old))
    assert ended.value.reason == "TICKET_EXPIRED"
    assert OwnProcess(load(CollectorSettings, run=RUN, **own)).ticket_name == "c"


def test_a_digest_calls_nobody() -> None:
    digest = digest_of(OWN)
    with pytest.raises(InvalidConfig, match="a token's digest"):
        OwnProcess(load(CollectorSettings, run=RUN, token=digest, discovery="registry"))


def test_a_process_of_a_stack_gets_digests() -> None:
    mine = {"DIALOOP_TOKEN": OWN, "DIALOOP_ADMIN_TOKEN": "the-admin", "HOME": "/"}
    theirs = without_tokens(mine)
    assert theirs == mine | {
        "DIALOOP_TOKEN": digest_of(OWN),
        "DIALOOP_ADMIN_TOKEN": digest_of("the-admin"),
    }
    assert without_tokens(theirs) == theirs
    assert without_tokens({"DIALOOP_TOKEN": ""}) == {"DIALOOP_TOKEN": ""}
    with pytest.raises(InvalidConfig, match="a digest is sha256:"):
        load(CollectorSettings, run=RUN, token="sha256:abc")


def test_programs_of_a_service_inherit_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("DIALOOP_TOKEN", "DIALOOP_ADMIN_TOKEN", "DIALOOP_TICKET")
    ticket = authority().issue(run=RUN, role="collector", name="c").text()
    for name, text in zip(names, (OWN, "the-admin", ticket), strict=True):
        monkeypatch.setenv(name, text)
    OwnProcess(load(CollectorSettings, run=RUN))
    assert not set(names) & set(os.environ)
