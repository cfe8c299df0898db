"""Identity: what the root says is accepted, and everything else is refused in its own words."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from time import time

os.environ.setdefault("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256")  # with ECDSA leaves: TLS 1.3 only

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import IdentityError, WhoActs
from federation.messages import Credential, EnrolmentRequest, MembershipStatement, RevocationList, Role
from privacy import identity
from privacy.identity import Bootstrap, Invitation, Member, MemberKeys, Root, RootCertificate
from privacy.identity.enrolment import _signed

NOW = 1_700_000_000
HOUR = 3600
DAY = 24 * HOUR
L = 2**252 + 27742317777372353535851937790883648493

ROOT = Root.create("heart-study", NOW)
OTHER = Root.create("heart-study", NOW)
BANKS = Root.create("banks", NOW)
KEYS = MemberKeys.generate()
HUB_KEYS = MemberKeys.generate()
NOBODY = ROOT.sign_revocations(0, NOW, ())


def _invite(root: Root = ROOT, now: int = NOW) -> Invitation:
    return root.invite(
        "cleveland", "cleveland-clinic", Role.SITE, address="hub.example.org:8443", coordinator="hub", now=now
    )


def _approve(
    name: str, role: Role, keys: MemberKeys, root: Root = ROOT, now: int = NOW
) -> tuple[bytes, MembershipStatement]:
    return root.approve(identity.request_for(name, "an-organisation", role, keys, "0.1.0"), now)


HUB_CERTIFICATE, HUB = _approve("hub", Role.COORDINATOR, HUB_KEYS)
CERTIFICATE, SITE = _approve("cleveland", Role.SITE, KEYS)


def _verify(
    statement: MembershipStatement, *, now: int = NOW, consortium: str = "heart-study", revoked: RevocationList = NOBODY
) -> None:
    identity.verify_statement(statement, ROOT.public.public_key, consortium, now, revoked)


# --------------------------------------------------------------------------------------------------------- statements


def test_a_statement_of_the_root_is_accepted() -> None:
    """It binds both keys and verifies from an hour before it was signed until its end."""
    assert (SITE.tls_key, SITE.protocol_key) == (KEYS.tls_key, KEYS.protocol_key)
    for now in (NOW - HOUR, NOW, NOW + 365 * DAY - 1):
        _verify(SITE, now=now)


def test_a_statement_by_another_root_is_refused() -> None:
    """The same words signed by a root of the same name are told apart by the signature."""
    _, forged = _approve("cleveland", Role.SITE, KEYS, OTHER)
    with pytest.raises(IdentityError, match=r"not signed by heart-study's root, but by another root"):
        _verify(forged)


def test_a_statement_for_another_consortium_is_refused() -> None:
    """A root that two consortia share does not make one's members the other's."""
    with pytest.raises(IdentityError, match="is a member of the consortium heart-study, not of liver-study"):
        _verify(SITE, consortium="liver-study")


def test_a_statement_is_refused_before_its_time() -> None:
    """The message gives both dates and points to the clock."""
    with pytest.raises(IdentityError, match=r"begins on 2023-11-14 21:13 UTC; here it is .*set this machine's clock"):
        _verify(SITE, now=NOW - HOUR - 1)


def test_an_expired_statement_is_refused() -> None:
    """The message says since when, and how to become a member again."""
    with pytest.raises(IdentityError, match=r"cleveland expired on 2024-11-13 22:13 UTC.*new invitation"):
        _verify(SITE, now=NOW + 365 * DAY)


def test_a_revoked_statement_is_refused() -> None:
    """The message names the list that revoked it."""
    with pytest.raises(IdentityError, match=r"cleveland was revoked \(revocation list 3\)"):
        _verify(SITE, revoked=ROOT.sign_revocations(3, NOW, [SITE.serial]))


@pytest.mark.parametrize(
    "change",
    [
        {"consortium": "heart-studies"},
        {"serial": "0" * 32},
        {"name": "clevelane"},
        {"organisation": "other"},
        {"role": Role.OPERATOR},
        {"tls_key": bytes(32)},
        {"protocol_key": HUB_KEYS.protocol_key},
        {"not_before": SITE.not_before - 1},
        {"not_after": SITE.not_after + 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_a_statement_is_signed(change: dict[str, object]) -> None:
    """Whatever field differs, the root's signature does not fit."""
    with pytest.raises(IdentityError, match="another root or nobody"):
        _verify(dataclasses.replace(SITE, **change))  # type: ignore[arg-type] - each value is of its field's type


def test_a_signature_whose_scalar_is_not_reduced_is_refused() -> None:
    """S + L, which naive verifiers accept, is no second signature (RFC 8032, 5.1.7)."""
    scalar = int.from_bytes(SITE.signature[32:], "little") + L
    twin = SITE.signature[:32] + scalar.to_bytes(32, "little")
    with pytest.raises(IdentityError, match="another root or nobody"):
        _verify(dataclasses.replace(SITE, signature=twin))


@pytest.mark.parametrize(
    "weak",
    [
        bytes(32),
        b"\x01" + bytes(31),
        b"\xec" + b"\xff" * 30 + b"\x7f",
        bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
        bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
        b"\xee" + b"\xff" * 31,
    ],
    ids=lambda weak: weak.hex()[:8],
)
def test_a_protocol_key_for_which_anybody_could_sign_is_refused(weak: bytes) -> None:
    """Keys of small order and non-canonical encodings do not become a member's, even if the root signed them."""
    fields = {field.name: getattr(SITE, field.name) for field in dataclasses.fields(SITE)}
    del fields["signature"], fields["consortium"]
    with pytest.raises(IdentityError, match="small order or not canonical"):
        _verify(ROOT.sign_statement(**(fields | {"protocol_key": weak})))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=8), max_size=5), st.lists(st.binary(max_size=8), max_size=5))
def test_packing_is_injective(one: list[bytes], two: list[bytes]) -> None:
    """Equal bytes mean equal fields, and the fields come back."""
    assert (identity.pack(*one) == identity.pack(*two)) == (one == two)
    assert list(identity.unpack(identity.pack(*one), len(one))) == one


@pytest.mark.parametrize(
    "content", [b"\0", identity.pack(b"a"), identity.pack(b"a", b"b", b""), identity.pack(b"a", b"b")[:-1]]
)
def test_what_was_not_packed_does_not_unpack(content: bytes) -> None:
    """Neither fewer fields nor more than were asked for, nor a field without its end."""
    with pytest.raises(ValueError, match=r"a field is cut short|bytes follow the last field"):
        identity.unpack(content, 2)


def test_a_content_has_one_armour() -> None:
    """The unused bits of the last letter are not free: no second string reads the same."""
    text = identity.armour("x:", b"a")
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    accepted: list[str] = []
    for letter in letters:
        with suppress(IdentityError):
            identity.unarmour("x:", text[:-1] + letter, "a string", "")
            accepted.append(text[:-1] + letter)
    assert accepted == [identity.armour("x:", b"a")]


def test_what_one_key_signs_for_one_end_is_good_for_no_other() -> None:
    """Statement, revocation list, enrolment and welcome each begin with their own label."""
    request = identity.request_for("hub", "org", Role.COORDINATOR, HUB_KEYS, "0.1.0")
    texts = [
        identity.statement_bytes(SITE),
        identity.revocation_bytes(NOBODY),
        identity.enrolment_bytes(request),
        identity.welcome_bytes(bytes(32), SITE.serial, HUB.serial),
        _signed(b""),
    ]
    assert len({text[: 4 + int.from_bytes(text[:4], "big")] for text in texts}) == len(texts)


# -------------------------------------------------------------------------------------------------------- revocations


def _revocations(version: int, root: Root = ROOT, serials: tuple[str, ...] = ()) -> RevocationList:
    return root.sign_revocations(version, NOW, serials)


def _verify_revocations(revocations: RevocationList, held: RevocationList | None = None) -> None:
    identity.verify_revocations(revocations, ROOT.public.public_key, "heart-study", held)


def test_a_newer_or_the_same_revocation_list_is_accepted() -> None:
    """Versions only grow; the one held is no news, and no error."""
    _verify_revocations(_revocations(2), held=_revocations(1))
    _verify_revocations(_revocations(2), held=_revocations(2))


@pytest.mark.parametrize(
    ("revocations", "message"),
    [
        (_revocations(2, OTHER), "revocation list was not signed by heart-study's root"),
        (dataclasses.replace(_revocations(1, serials=(SITE.serial,)), serials=()), "not signed by heart-study's root"),
        (_revocations(0), "has version 0, and version 1 is held already: revoked members would come back"),
        (_revocations(1, serials=(SITE.serial,)), "two different revocation lists of version 1"),
    ],
    ids=["another root", "altered", "rollback", "equivocation"],
)
def test_a_revocation_list_is_refused(revocations: RevocationList, message: str) -> None:
    """Another root's, an altered one, an older one, and another one of the same version."""
    with pytest.raises(IdentityError, match=message):
        _verify_revocations(revocations, held=_revocations(1))


def test_a_revocation_list_of_another_consortium_is_refused() -> None:
    """Even if one root signed for both."""
    with pytest.raises(IdentityError, match="of the consortium heart-study, not of liver-study"):
        identity.verify_revocations(NOBODY, ROOT.public.public_key, "liver-study")


# ------------------------------------------------------------------------------------------------ rosters and welcomes


def _verify_roster(*roster: MembershipStatement) -> None:
    identity.verify_roster(roster, ROOT.public.public_key, "heart-study", NOW, NOBODY)


def test_a_roster_of_distinct_sites_is_accepted() -> None:
    """Two sites with names and keys of their own."""
    _verify_roster(SITE, _approve("hungary", Role.SITE, MemberKeys.generate())[1])


def test_a_roster_with_somebody_who_is_no_site_is_refused() -> None:
    """The coordinator cannot sit among the sites."""
    with pytest.raises(IdentityError, match="names hub, whose role is coordinator, as a site"):
        _verify_roster(SITE, HUB)


def test_a_roster_with_an_invented_member_is_refused() -> None:
    """Each statement must be the root's."""
    with pytest.raises(IdentityError, match="another root or nobody"):
        _verify_roster(SITE, _approve("hungary", Role.SITE, MemberKeys.generate(), OTHER)[1])


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (_approve("cleveland", Role.SITE, MemberKeys.generate())[1], "name"),
        (_approve("hungary", Role.SITE, MemberKeys(KEYS.tls, Ed25519PrivateKey.generate()))[1], "TLS key"),
        (_approve("hungary", Role.SITE, MemberKeys(HUB_KEYS.tls, KEYS.protocol))[1], "protocol key"),
    ],
    ids=["name", "tls", "protocol"],
)
def test_a_roster_in_which_somebody_stands_twice_is_refused(other: MembershipStatement, what: str) -> None:
    """Under one name, or with one key under two names."""
    with pytest.raises(IdentityError, match=f"of the roster have the same {what}"):
        _verify_roster(SITE, other)


def test_a_coordinator_proves_its_key_over_the_sites_nonce() -> None:
    """The proof holds for this nonce, this site and this coordinator, and for nothing else."""
    nonce = bytes(range(32))
    proof = identity.sign_welcome(HUB_KEYS.protocol, nonce, SITE.serial, HUB.serial)
    identity.verify_welcome(proof, HUB, nonce, SITE.serial)
    another = identity.sign_welcome(KEYS.protocol, nonce, SITE.serial, HUB.serial)
    for wrong in ((another, nonce, SITE.serial), (proof, bytes(32), SITE.serial), (proof, nonce, HUB.serial)):
        with pytest.raises(IdentityError, match="hub did not prove that it holds its protocol key") as refused:
            identity.verify_welcome(wrong[0], HUB, *wrong[1:])
        assert refused.value.who is WhoActs.COORDINATOR


def test_a_site_that_poses_as_coordinator_is_refused() -> None:
    """Its proof is sound and its role is not."""
    proof = identity.sign_welcome(KEYS.protocol, bytes(32), SITE.serial, SITE.serial)
    with pytest.raises(IdentityError, match="cleveland poses as a coordinator; its role is site"):
        identity.verify_welcome(proof, SITE, bytes(32), SITE.serial)


# -------------------------------------------------------------------------------------------------------- invitations


def test_an_invitation_carries_all_that_a_newcomer_needs() -> None:
    """Where to go, whom to expect there, whom to trust, and who one is; in a line short enough for a mail."""
    text = _invite().text
    read = Invitation.parse(f"  {text[:76]}\r\n{text[76:]}\n", NOW)
    assert (read.address, read.tls_name, read.expires) == (
        "hub.example.org:8443",
        "hub.heart-study.parley",
        NOW + 48 * HOUR,
    )
    assert read.root == ROOT.public
    assert read.invited == identity.peer_of(read.certificate_pem)
    assert (read.invited.name, read.invited.organisation, read.invited.role) == (
        "cleveland",
        "cleveland-clinic",
        Role.SITE,
    )
    assert read.text == text
    assert len(text) < 1400


INVITATION = _invite().text


@settings(max_examples=50, deadline=None)
@given(st.integers(0, len(INVITATION) - 1), st.integers(0, 6))
def test_no_flipped_bit_makes_another_invitation(place: int, bit: int) -> None:
    """Wherever a bit is flipped, the string is refused."""
    flipped = INVITATION[:place] + chr(ord(INVITATION[place]) ^ (1 << bit)) + INVITATION[place + 1 :]
    if "".join(flipped.split()) == INVITATION:
        return
    with pytest.raises(IdentityError):
        Invitation.parse(flipped, NOW)


@pytest.mark.parametrize("text", ["", "parley", "parley-request1:AAAA", INVITATION[1:], INVITATION.upper()])
def test_what_is_no_invitation_is_told_so(text: str) -> None:
    """Another prefix means another thing was pasted."""
    with pytest.raises(IdentityError, match=r"not an invitation: .*parley1:.*paste the whole string"):
        Invitation.parse(text, NOW)


@pytest.mark.parametrize(
    "text",
    [
        "parley1:",
        INVITATION[:-1],
        INVITATION[:300],
        INVITATION + "A",
        INVITATION.replace("A", "B", 1),
        INVITATION + "é",
        INVITATION[:100] + "!" + INVITATION[100:],
    ],
    ids=["empty", "last letter", "half", "longer", "mistyped", "not ascii", "not base64"],
)
def test_a_mistyped_invitation_is_told_apart_by_its_checksum(text: str) -> None:
    """Nobody forged it: whoever pasted it must paste it again."""
    with pytest.raises(IdentityError, match="an invitation that was cut short or mistyped") as refused:
        Invitation.parse(text, NOW)
    assert refused.value.who is WhoActs.YOU


def _armoured(*fields: bytes, signature: bytes) -> str:
    return identity.armour("parley1:", identity.pack(*fields) + signature)


def _fields(invitation: Invitation) -> list[bytes]:
    return list(identity.unpack(invitation._body, 5))


@pytest.mark.parametrize("which", range(5))
def test_an_altered_invitation_is_refused_by_the_roots_signature(which: int) -> None:
    """Whatever was changed, and though the checksum was made to fit: do not use it."""
    invitation = _invite()
    fields = _fields(invitation)
    fields[which] = fields[which][:-1] + bytes([fields[which][-1] ^ 1])
    with pytest.raises(IdentityError, match="altered after it was made: the root's signature does not fit") as refused:
        Invitation.parse(_armoured(*fields, signature=invitation.signature), NOW)
    assert "do not use it" in refused.value.fix


def test_an_invitation_with_a_root_of_ones_own_needs_a_bootstrap_certificate_of_that_root() -> None:
    """Swapping the root and signing anew does not adopt another root's certificate."""
    fields = _fields(_invite())
    fields[2] = OTHER.public.der
    signature = OTHER.key.sign(_signed(identity.pack(*fields)))
    with pytest.raises(IdentityError, match="altered"):
        Invitation.parse(_armoured(*fields, signature=signature), NOW)


def test_an_invitation_with_a_members_certificate_is_refused() -> None:
    """Only the marked certificate of a bootstrap key invites, whatever the root signed."""
    fields = _fields(_invite())
    fields[3] = KEYS.tls.private_numbers().private_value.to_bytes(32, "big")
    fields[4] = x509.load_pem_x509_certificate(CERTIFICATE).public_bytes(Encoding.DER)
    signature = ROOT.key.sign(_signed(identity.pack(*fields)))
    with pytest.raises(IdentityError, match="altered"):
        Invitation.parse(_armoured(*fields, signature=signature), NOW)


def test_an_invitation_with_another_key_than_its_certificates_is_refused() -> None:
    """It could not be used; the root never makes one."""
    fields = _fields(_invite())
    fields[3] = KEYS.tls.private_numbers().private_value.to_bytes(32, "big")
    signature = ROOT.key.sign(_signed(identity.pack(*fields)))
    with pytest.raises(IdentityError, match="altered"):
        Invitation.parse(_armoured(*fields, signature=signature), NOW)


def test_an_expired_invitation_is_refused() -> None:
    """The message says since when, and how to get another."""
    with pytest.raises(IdentityError, match=r"for cleveland expired on 2023-11-16 22:13 UTC.*parley consortium invite"):
        Invitation.parse(INVITATION, NOW + 48 * HOUR)


def test_an_invitation_from_the_future_is_refused() -> None:
    """A clock far behind would fail in TLS without a word; it is told so here."""
    with pytest.raises(IdentityError, match=r"begins on 2023-11-14 21:13 UTC; here it is .*clock"):
        Invitation.parse(INVITATION, NOW - 2 * HOUR)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Cleveland"}, "a member's name becomes part of a host name: 'Cleveland' cannot"),
        ({"name": "a.b"}, "a member's name becomes part of a host name"),
        ({"organisation": "Charité Berlin"}, "an organisation cannot be called 'Charité Berlin' here"),
        ({"role": Role.COORDINATOR}, r"a coordinator cannot be invited.*parley coordinator init"),
        ({"address": "hub.example.org"}, "address 'hub.example.org' is not host:port"),
        ({"address": "hub:70000"}, "is not host:port"),
        ({"address": "https://hub:443"}, "is not host:port"),
        ({"hours": 0}, r"an invitation cannot be good for 0 hours.*1 to 720 hours"),
    ],
    ids=["capital", "dot", "organisation", "coordinator", "no port", "port", "url", "hours"],
)
def test_an_impossible_invitation_is_not_made(change: dict[str, object], message: str) -> None:
    """Each cause has its own words."""
    wish: dict[str, object] = {
        "name": "cleveland",
        "organisation": "clinic",
        "role": Role.SITE,
        "address": "hub:8443",
        "coordinator": "hub",
        "now": NOW,
    }
    with pytest.raises(IdentityError, match=message):
        ROOT.invite(**(wish | change))  # type: ignore[arg-type] - each value is of its argument's type


def test_secrets_do_not_show_in_a_representation() -> None:
    """What is printed or logged by accident names no private key."""
    invitation = _invite()
    shown = repr((invitation, ROOT, KEYS))
    assert "PrivateKey" not in shown
    assert repr(invitation.signature) not in shown


# ---------------------------------------------------------------------------------------------------------- enrolment


def test_a_request_under_an_invitation_is_accepted() -> None:
    """Approved, it becomes certificate and statement of one serial, for the keys that asked."""
    invitation = _invite()
    request = identity.make_request(invitation, KEYS, "0.1.0")
    identity.verify_request(request, invitation.invited)
    certificate, statement = ROOT.approve(request, NOW, days=30)
    identity.verify_certificate(certificate, statement, ROOT.public)
    _verify(statement)
    assert identity.peer_of(certificate) == Member(statement.serial, KEYS.tls_key)
    assert (statement.name, statement.role, statement.not_after) == ("cleveland", Role.SITE, NOW + 30 * DAY)


@pytest.mark.parametrize(
    "change", [{"name": "hungary"}, {"organisation": "other"}, {"role": Role.OPERATOR}, {"invitation": "0" * 32}]
)
def test_a_request_for_somebody_else_than_was_invited_is_refused(change: dict[str, object]) -> None:
    """Name, organisation, role and serial are the invitation's, or the message shows both."""
    invitation = _invite()
    request = identity.make_request(invitation, KEYS, "0.1.0")
    with pytest.raises(IdentityError, match=r"the request is for .*, and the invitation was for site cleveland of"):
        identity.verify_request(dataclasses.replace(request, **change), invitation.invited)  # type: ignore[arg-type] - typed above


def _request() -> EnrolmentRequest:
    return identity.request_for("cleveland", "clinic", Role.SITE, KEYS, "0.1.0")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (dataclasses.replace(_request(), tls_key=HUB_KEYS.tls_spki), "did not prove that it holds its TLS key"),
        (dataclasses.replace(_request(), tls_proof=b"nonsense"), "did not prove that it holds its TLS key"),
        (dataclasses.replace(_request(), software="0.2.0"), "did not prove that it holds its TLS key"),
        (dataclasses.replace(_request(), protocol_proof=bytes(64)), "did not prove that it holds its protocol key"),
        (dataclasses.replace(_request(), tls_key=b"no key"), "the TLS key is not a P-256 key"),
    ],
    ids=["another's key", "nonsense", "altered", "protocol", "no key"],
)
def test_a_request_without_both_proofs_is_refused(request_: EnrolmentRequest, message: str) -> None:
    """A newcomer cannot enrol keys that it does not hold; the root does not sign for it either."""
    with pytest.raises(IdentityError, match=message):
        identity.verify_proofs(request_)
    with pytest.raises(IdentityError, match=message):
        ROOT.approve(request_, NOW)


def test_fingerprints_are_short_and_of_one_key_each() -> None:
    """80 bits in five groups: another key shows another fingerprint."""
    shown = identity.fingerprints(_request())
    other = identity.fingerprints(identity.request_for("cleveland", "clinic", Role.SITE, HUB_KEYS, "0.1.0"))
    assert [len(group) for group in shown.tls.split()] == [4] * 5
    assert len({shown.tls, shown.protocol, other.tls, other.protocol}) == 4


def test_the_roots_fingerprint_is_all_of_its_digest() -> None:
    """256 bits in groups of four digits."""
    assert [len(group) for group in ROOT.fingerprint.split()] == [4] * 16


def test_a_membership_ends_with_the_root_at_the_latest() -> None:
    """A statement that outlived its root would promise what nobody can keep."""
    late = ROOT.public.not_after - DAY
    _, statement = ROOT.approve(_request(), late, days=365)
    assert statement.not_after == ROOT.public.not_after


@pytest.mark.parametrize(
    ("approve", "message"),
    [
        (lambda: ROOT.approve(_request(), NOW, 0), "a membership cannot be good for 0 days"),
        (lambda: ROOT.approve(_request(), NOW, hosts=["x"]), "only a coordinator's certificate names hosts"),
        (
            lambda: ROOT.approve(
                identity.request_for("hub", "o", Role.COORDINATOR, KEYS, ""), NOW, hosts=["hüb.example"]
            ),
            "a certificate cannot carry the host 'hüb.example'",
        ),
    ],
    ids=["days", "hosts", "host"],
)
def test_an_impossible_approval_is_not_given(approve: Callable[[], object], message: str) -> None:
    """Each cause has its own words."""
    with pytest.raises(IdentityError, match=message):
        approve()


def _accept(credential: Credential, *, name: str = "cleveland", keys: MemberKeys = KEYS, now: int = NOW) -> None:
    identity.accept_credential(credential, ROOT.public, keys, name=name, role=Role.SITE, coordinator="hub", now=now)


CREDENTIAL = Credential(CERTIFICATE, SITE, HUB, NOBODY)
TWIN_CERTIFICATE, TWIN = _approve("cleveland", Role.SITE, KEYS)


def test_a_credential_for_ones_own_keys_is_accepted() -> None:
    """All of it is by the root and fits together."""
    _accept(CREDENTIAL)


@pytest.mark.parametrize(
    ("credential", "message"),
    [
        (
            dataclasses.replace(CREDENTIAL, statement=_approve("cleveland", Role.SITE, KEYS, OTHER)[1]),
            "membership of cleveland was not signed by heart-study's root",
        ),
        (
            dataclasses.replace(CREDENTIAL, certificate=_approve("cleveland", Role.SITE, KEYS, OTHER)[0]),
            "certificate of cleveland was signed by another root than heart-study's",
        ),
        (
            dataclasses.replace(CREDENTIAL, certificate=TWIN_CERTIFICATE),
            "does not belong to the membership of",
        ),
        (dataclasses.replace(CREDENTIAL, certificate=b"nonsense"), "the certificate cannot be read"),
        (
            dataclasses.replace(CREDENTIAL, coordinator=_approve("hub", Role.COORDINATOR, HUB_KEYS, OTHER)[1]),
            "membership of hub was not signed by heart-study's root",
        ),
        (
            dataclasses.replace(CREDENTIAL, coordinator=_approve("hub", Role.SITE, HUB_KEYS)[1]),
            "hub poses as a coordinator; its role is site",
        ),
        (
            dataclasses.replace(CREDENTIAL, coordinator=_approve("hub2", Role.COORDINATOR, HUB_KEYS)[1]),
            "names hub2 as coordinator; expected was hub",
        ),
        (
            dataclasses.replace(CREDENTIAL, statement=_approve("cleveland", Role.OPERATOR, KEYS)[1]),
            "is for operator cleveland, and site cleveland asked for one",
        ),
        (
            dataclasses.replace(CREDENTIAL, revocations=_revocations(1, OTHER)),
            "revocation list was not signed by heart-study's root",
        ),
        (
            dataclasses.replace(CREDENTIAL, revocations=_revocations(1, serials=(HUB.serial,))),
            "membership of hub was revoked",
        ),
    ],
    ids=[
        "statement's root",
        "certificate's root",
        "another certificate",
        "no certificate",
        "coordinator's root",
        "coordinator's role",
        "coordinator's name",
        "role",
        "revocations",
        "revoked coordinator",
    ],
)
def test_a_credential_that_does_not_fit_is_refused(credential: Credential, message: str) -> None:
    """Each way in which it may not fit has its own words."""
    with pytest.raises(IdentityError, match=message):
        _accept(credential)


def test_a_credential_for_another_name_or_other_keys_is_refused() -> None:
    """What is not mine is not installed."""
    with pytest.raises(IdentityError, match="is for site cleveland, and site hungary asked for one"):
        _accept(CREDENTIAL, name="hungary")
    with pytest.raises(IdentityError, match="is for other keys than this machine made"):
        _accept(CREDENTIAL, keys=HUB_KEYS)
    with pytest.raises(IdentityError, match="cleveland expired on"):
        _accept(CREDENTIAL, now=NOW + 365 * DAY)


# ----------------------------------------------------------------------------------------------- root and certificates


def test_a_root_survives_its_file() -> None:
    """With a passphrase and without, the same root comes back and signs the same."""
    for passphrase in (None, "correct horse"):
        again = Root.load(ROOT.key_pem(passphrase), ROOT.certificate_pem, passphrase)
        assert again.sign_revocations(0, NOW, ()) == NOBODY


@pytest.mark.parametrize(
    ("stored", "given_", "message"),
    [
        ("right", "wrong", "this passphrase does not open the root key of heart-study"),
        ("right", None, "the root key of heart-study is encrypted"),
        (None, "any", "the root key of heart-study is not encrypted"),
    ],
)
def test_a_root_does_not_open_by_another_passphrase(stored: str | None, given_: str | None, message: str) -> None:
    """Wrong, missing and needless are three messages."""
    with pytest.raises(IdentityError, match=message):
        Root.load(ROOT.key_pem(stored), ROOT.certificate_pem, given_)


def test_a_root_key_beside_another_certificate_is_refused() -> None:
    """It would sign what no member accepts."""
    with pytest.raises(IdentityError, match="not that of heart-study's root certificate"):
        Root.load(OTHER.key_pem(None), ROOT.certificate_pem, None)
    with pytest.raises(IdentityError, match="an empty passphrase protects nothing"):
        ROOT.key_pem("")


def test_a_consortium_needs_a_name_that_can_stand_in_a_host_name() -> None:
    """Certificates carry it."""
    with pytest.raises(IdentityError, match="a consortium's name becomes part of a host name"):
        Root.create("Heart Study", NOW)


@pytest.mark.parametrize("content", [b"", b"-----BEGIN CERTIFICATE-----\n", CERTIFICATE], ids=["empty", "cut", "leaf"])
def test_what_is_no_root_certificate_is_refused(content: bytes) -> None:
    """A member's certificate is none."""
    with pytest.raises(IdentityError, match="not a consortium's root certificate"):
        RootCertificate.parse(content)


def _self_made(
    key: EllipticCurvePrivateKey | Ed25519PrivateKey, *, authority: bool, issuer: Ed25519PrivateKey
) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "heart-study")])
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), 7, datetime.fromtimestamp(NOW, UTC), datetime.fromtimestamp(NOW + DAY, UTC)
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    return builder.sign(issuer, None).public_bytes(Encoding.DER)


def test_a_root_certificate_must_be_an_authority_that_signed_itself() -> None:
    """A certificate with the right name and key type is not enough."""
    key = OTHER.key
    assert RootCertificate.parse(_self_made(key, authority=True, issuer=key)).consortium == "heart-study"
    for wrong in (_self_made(key, authority=False, issuer=key), _self_made(key, authority=True, issuer=ROOT.key)):
        with pytest.raises(IdentityError, match="not a consortium's root certificate"):
            RootCertificate.parse(wrong)


def test_an_authoritys_certificate_is_no_peers() -> None:
    """Whatever its key, a certificate that may sign others is not a member's."""
    for authority in (True, False):
        certificate = _self_made(KEYS.tls, authority=authority, issuer=ROOT.key)
        if authority:
            with pytest.raises(IdentityError, match="the certificate is not a member's"):
                identity.peer_of(certificate)
        else:
            assert identity.peer_of(certificate) == Member(f"{7:032x}", KEYS.tls_key)


def test_keys_survive_their_files() -> None:
    """And what is no such key is refused."""
    again = MemberKeys.load(KEYS.tls_pem, KEYS.protocol_pem)
    assert (again.tls_key, again.protocol_key) == (KEYS.tls_key, KEYS.protocol_key)
    for pair in ((b"", b""), (KEYS.protocol_pem, KEYS.protocol_pem), (KEYS.tls_pem, KEYS.tls_pem)):
        with pytest.raises(IdentityError, match="does not hold its P-256 or Ed25519 key"):
            MemberKeys.load(*pair)


@pytest.mark.parametrize(
    ("role", "usage"),
    [
        (Role.SITE, ExtendedKeyUsageOID.CLIENT_AUTH),
        (Role.OPERATOR, ExtendedKeyUsageOID.CLIENT_AUTH),
        (Role.COORDINATOR, ExtendedKeyUsageOID.SERVER_AUTH),
    ],
)
def test_each_roles_certificate_is_good_for_one_side_of_tls(role: Role, usage: x509.ObjectIdentifier) -> None:
    """A certificate's purpose is its role's, its names are the member's, and it signs no others."""
    certificate = x509.load_pem_x509_certificate(_approve("cleveland", role, KEYS)[0])
    extensions = certificate.extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [usage]
    assert names.get_values_for_type(x509.DNSName) == ["cleveland.heart-study.parley"]
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_certificate_for_the_wrong_side_of_tls_is_refused() -> None:
    """A coordinator's statement does not go with a client's certificate of the same serial and key."""
    fields = {field.name: getattr(SITE, field.name) for field in dataclasses.fields(SITE)}
    del fields["signature"], fields["consortium"]
    posing = ROOT.sign_statement(**(fields | {"role": Role.COORDINATOR}))
    with pytest.raises(IdentityError, match="the certificate of cleveland is not one for a coordinator"):
        identity.verify_certificate(CERTIFICATE, posing, ROOT.public)


def test_a_peer_is_told_by_its_certificate() -> None:
    """A newcomer's certificate names whom it invites; a member's names its statement."""
    invitation = ROOT.invite("ops", "clinic", Role.OPERATOR, address="hub:1", coordinator="hub", now=NOW)
    assert identity.peer_of(CERTIFICATE) == Member(SITE.serial, KEYS.tls_key)
    assert identity.peer_of(invitation.certificate_pem) == Bootstrap(
        f"{invitation.certificate.serial_number:032x}", "ops", "clinic", Role.OPERATOR
    )
    for stranger in (ROOT.certificate_pem, b"nonsense"):
        with pytest.raises(IdentityError, match=r"not a member's|cannot be read"):
            identity.peer_of(stranger)


def test_a_statement_shown_over_another_members_tls_is_refused() -> None:
    """Serial and key of the TLS peer must be the statement's."""
    peer = Member(SITE.serial, KEYS.tls_key)
    identity.verify_binding(peer, SITE)
    for other in (TWIN, HUB):
        with pytest.raises(IdentityError, match="shown over another member's TLS certificate"):
            identity.verify_binding(peer, other)


# ----------------------------------------------------------------------------------------------------------------- TLS


class _Echo(grpc.GenericRpcHandler):
    """Answers every call with the peer's kind and TLS version."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(_request: bytes, context: grpc.ServicerContext) -> bytes:
            auth = context.auth_context()
            peer = identity.peer_of(auth["x509_pem_cert"][0])
            return f"{type(peer).__name__} {auth['ssl_tls_version'][0].decode()}".encode()

        del handler_call_details
        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def _serve(keys: MemberKeys, certificate: bytes) -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[_Echo()])
    credentials = grpc.ssl_server_credentials([(keys.tls_pem, certificate)], ROOT.certificate_pem, True)  # noqa: FBT003 - grpc's own order
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


def _call(port: int, key_pem: bytes, certificate: bytes, expected: str = "hub.heart-study.parley") -> str:
    credentials = grpc.ssl_channel_credentials(ROOT.certificate_pem, key_pem, certificate)
    options = [("grpc.ssl_target_name_override", expected), ("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        return bytes(channel.unary_unary("/any/Call")(b"", timeout=20)).decode()


def _live(name: str, role: Role, keys: MemberKeys, root: Root = ROOT, age: int = 0) -> bytes:
    return _approve(name, role, keys, root, int(time()) - age)[0]


@pytest.fixture(scope="module")
def hub() -> Iterator[int]:
    """A server with the coordinator's certificate, on loopback."""
    with _serve(HUB_KEYS, _live("hub", Role.COORDINATOR, HUB_KEYS)) as port:
        yield port


def test_members_and_newcomers_reach_the_coordinator_over_tls_1_3(hub: int) -> None:
    """The name in the certificate is expected whatever address is dialled, and the coordinator sees who calls."""
    invitation = _invite(now=int(time()))
    assert _call(hub, KEYS.tls_pem, _live("cleveland", Role.SITE, KEYS)) == "Member TLSv1.3"
    assert _call(hub, invitation.key_pem, invitation.certificate_pem) == "Bootstrap TLSv1.3"


LATE = _invite(now=int(time()) - 49 * HOUR)


@pytest.mark.parametrize(
    ("key_pem", "certificate"),
    [
        (KEYS.tls_pem, _live("cleveland", Role.SITE, KEYS, OTHER)),
        (KEYS.tls_pem, _live("cleveland", Role.SITE, KEYS, age=366 * DAY)),
        (LATE.key_pem, LATE.certificate_pem),
        (KEYS.tls_pem, _live("cleveland", Role.COORDINATOR, KEYS)),
    ],
    ids=["another root", "expired", "expired invitation", "coordinator's"],
)
def test_a_stranger_does_not_get_through_the_handshake(hub: int, key_pem: bytes, certificate: bytes) -> None:
    """Another root's, an expired one, and a certificate for the server's side never reach a handler."""
    with pytest.raises(grpc.RpcError) as refused:
        _call(hub, key_pem, certificate)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("role", "root", "age", "expected"),
    [
        (Role.SITE, ROOT, 0, "hub.heart-study.parley"),
        (Role.COORDINATOR, OTHER, 0, "hub.heart-study.parley"),
        (Role.COORDINATOR, ROOT, 366 * DAY, "hub.heart-study.parley"),
        (Role.COORDINATOR, ROOT, 0, "hub2.heart-study.parley"),
    ],
    ids=["a site's", "another root", "expired", "another name"],
)
def test_a_site_does_not_talk_to_another_server(role: Role, root: Root, age: int, expected: str) -> None:
    """A server needs a coordinator's certificate of this root, in time, of the name expected."""
    client = _live("cleveland", Role.SITE, KEYS)
    with _serve(HUB_KEYS, _live("hub", role, HUB_KEYS, root, age)) as port, pytest.raises(grpc.RpcError) as refused:
        _call(port, KEYS.tls_pem, client, expected)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
