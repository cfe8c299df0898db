"""Homes: from an empty folder to a consortium with members, and every refusal on the way."""

import stat
from pathlib import Path

import pytest

from federation import codec
from federation.errors import IdentityError, StorageError, WhoActs
from federation.messages import Credential, EnrolmentRequest, Role
from parley.homes import Connection, Consortium, Home, Identity, coordinator_request, home_folder
from privacy import identity
from privacy.identity import Invitation, MemberKeys, Root

NOW = 1_700_000_000
HOUR = 3600
DAY = 24 * HOUR
PASSPHRASE = "correct horse"  # noqa: S105 - opens nothing but this test's own key


@pytest.fixture
def admin(tmp_path: Path) -> Home:
    """The administrator's machine."""
    return Home(tmp_path / "admin")


@pytest.fixture
def hub(tmp_path: Path) -> Home:
    """The coordinator's machine."""
    return Home(tmp_path / "hub")


@pytest.fixture
def hospital(tmp_path: Path) -> Home:
    """A site's machine."""
    return Home(tmp_path / "hospital")


@pytest.fixture
def consortium(admin: Home) -> Consortium:
    """A consortium without a coordinator yet."""
    return admin.consortium.create("heart-study", "hub.example.org:8443", "hub", passphrase=None, now=NOW)


def _admit(consortium: Consortium, hub: Home, now: int = NOW) -> Identity:
    credential = consortium.admit(hub.coordinator.request("hub", "university", "0.1.0"), now=now)
    return hub.coordinator.install_text(credential, now)


def _invite(consortium: Consortium, name: str = "cleveland", now: int = NOW) -> Invitation:
    return consortium.invite(name, f"{name}-clinic", Role.SITE, now=now)


def _request(invitation: Invitation, keys: MemberKeys) -> EnrolmentRequest:
    return identity.make_request(invitation, keys, "0.1.0")


def _join(consortium: Consortium, hub: Home, site: Home, now: int = NOW) -> Identity:
    invitation = Invitation.parse(_invite(consortium, now=now).text, now)
    member = consortium.approve(_request(invitation, site.site.begin()), now=now)
    own = hub.coordinator.load()
    credential = Credential(member.certificate, member.statement, own.statement, own.revocations)
    connection = Connection(invitation.address, invitation.consortium, invitation.coordinator)
    return site.site.install(credential, invitation.root, connection, name="cleveland", now=now)


# ------------------------------------------------------------------------------------------------------ the whole way


def test_a_consortium_a_coordinator_and_a_site_come_to_be(
    admin: Home, hub: Home, hospital: Home, consortium: Consortium
) -> None:
    """Init, coordinator init, admit, install, invite, join, approve: all three hold what they need to attend."""
    coordinator = _admit(consortium, hub)
    site = _join(consortium, hub, hospital)
    operator = admin.operator.load()
    assert coordinator.statement == coordinator.coordinator == site.coordinator == operator.coordinator
    assert (site.statement.name, site.statement.role) == ("cleveland", Role.SITE)
    assert (operator.statement.name, operator.statement.role) == ("admin", Role.OPERATOR)
    assert site.connection == operator.connection == coordinator.connection
    assert site.connection == Connection("hub.example.org:8443", "heart-study", "hub")
    assert site.connection.tls_name == "hub.heart-study.parley"
    for member in (coordinator, site, operator):
        identity.verify_certificate(member.certificate, member.statement, member.root)
        identity.verify_statement(
            member.statement, member.root.public_key, "heart-study", NOW, consortium.home.revocations()
        )
    assert [member.statement.name for member in admin.consortium.members()] == ["admin", "cleveland", "hub"]


def test_what_is_loaded_is_what_was_stored(hub: Home, hospital: Home, consortium: Consortium) -> None:
    """An identity survives its files whole, keys included."""
    _admit(consortium, hub)
    site = _join(consortium, hub, hospital)
    again = hospital.site.load()
    assert (again.keys.tls_key, again.keys.protocol_key) == (site.statement.tls_key, site.statement.protocol_key)
    assert (again.certificate, again.statement, again.root, again.coordinator, again.revocations, again.connection) == (
        site.certificate,
        site.statement,
        site.root,
        site.coordinator,
        site.revocations,
        site.connection,
    )


def test_keys_are_their_users_alone(admin: Home, hub: Home, consortium: Consortium) -> None:
    """Private keys are 0600, the folders that hold them 0700, and no draft is left."""
    _admit(consortium, hub)
    for folder in (admin.consortium.folder, admin.operator.identity_folder, hub.coordinator.identity_folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for key in folder.glob("*.key"):
            assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(list(admin.folder.rglob("*.key"))) == 3
    assert not list(admin.folder.rglob("*.new"))


def test_an_invitations_secret_is_not_kept(admin: Home, consortium: Consortium) -> None:
    """The administrator's folder records to whom an invitation went, and nothing that could be used in its stead."""
    invitation = _invite(consortium)
    scalar = invitation.key.private_numbers().private_value.to_bytes(32, "big")
    stored = [path.read_bytes() for path in admin.folder.rglob("*") if path.is_file()]
    assert not [content for content in stored if scalar in content or scalar.hex().encode() in content]
    (record,) = admin.consortium.invitations()
    assert (record.invited, record.expires, record.used) == (invitation.invited, NOW + 48 * HOUR, False)


@pytest.mark.parametrize(
    ("given", "environment", "folder"),
    [
        (Path("/a"), {"PARLEY_HOME": "/b"}, Path("/a")),
        (None, {"PARLEY_HOME": "/b"}, Path("/b")),
        (None, {}, Path.home() / ".parley"),
        (None, {"PARLEY_HOME": ""}, Path.home() / ".parley"),
    ],
)
def test_the_command_line_comes_before_the_environment(
    given: Path | None, environment: dict[str, str], folder: Path
) -> None:
    """The folder is the one given, else `PARLEY_HOME`, else `.parley` in the user's home."""
    assert home_folder(given, environment) == folder


# ---------------------------------------------------------------------------------------------------------- consortium


def test_a_root_key_opens_by_its_passphrase_alone(admin: Home) -> None:
    """Encrypted on disk; a wrong passphrase is told apart from a missing one."""
    admin.consortium.create("heart-study", "hub:8443", "hub", passphrase=PASSPHRASE, now=NOW)
    assert admin.consortium.encrypted
    assert admin.consortium.unlock(PASSPHRASE).root.consortium == "heart-study"
    with pytest.raises(IdentityError, match="this passphrase does not open the root key of heart-study"):
        admin.consortium.unlock("battery staple")
    with pytest.raises(IdentityError, match="root key of heart-study is encrypted"):
        admin.consortium.unlock(None)


def test_a_consortium_is_not_overwritten(admin: Home, consortium: Consortium) -> None:
    """Its root could never be made again."""
    with pytest.raises(IdentityError, match=r"holds a consortium already.*--home or PARLEY_HOME"):
        admin.consortium.create("other", "hub:8443", "hub", passphrase=None, now=NOW)
    assert admin.consortium.root_certificate() == consortium.root.public


@pytest.mark.parametrize(
    ("address", "coordinator", "organisation", "message"),
    [
        ("hub", "hub", None, "'hub' is not host:port"),
        ("hub:1", "Hub", None, "a member's name becomes part of a host name"),
        ("hub:1", "admin", None, "the coordinator cannot be called admin"),
        ("hub:1", "hub", "Charité", "an organisation cannot be called 'Charité'"),
    ],
)
def test_an_impossible_consortium_leaves_nothing(
    admin: Home, address: str, coordinator: str, organisation: str | None, message: str
) -> None:
    """It is refused before a file is made."""
    with pytest.raises(IdentityError, match=message):
        admin.consortium.create(
            "heart-study", address, coordinator, passphrase=None, now=NOW, organisation=organisation
        )
    assert not admin.folder.exists()


def test_a_half_made_consortium_is_made_anew(admin: Home) -> None:
    """After a crash in the middle the same command starts over."""
    draft = admin.consortium.folder.with_name("consortium.new")
    draft.mkdir(parents=True)
    (draft / "root.key").write_bytes(b"half")
    admin.operator.begin()
    consortium = admin.consortium.create("heart-study", "hub:8443", "hub", passphrase=None, now=NOW)
    assert admin.consortium.unlock(None).root.public == consortium.root.public
    assert not draft.exists()


def test_a_missing_consortium_names_the_command_that_makes_one(admin: Home) -> None:
    """And the other folder that may have been meant."""
    with pytest.raises(StorageError, match=r"there is no .*root.key.*parley consortium init NAME.*--home"):
        admin.consortium.unlock(None)


# ------------------------------------------------------------------------------------------------------------- invite


def test_a_members_name_is_taken(hub: Home, hospital: Home, consortium: Consortium) -> None:
    """By whom is told, and how it is freed."""
    _admit(consortium, hub)
    _join(consortium, hub, hospital)
    with pytest.raises(
        IdentityError,
        match=r"cleveland is taken by a member \(site of cleveland-clinic\).*consortium revoke cleveland",
    ):
        _invite(consortium)
    with pytest.raises(IdentityError, match=r"the name admin is taken by a member \(operator of heart-study\)"):
        _invite(consortium, "admin")


def test_an_open_invitations_name_is_taken_until_it_expires(consortium: Consortium) -> None:
    """And free again then."""
    _invite(consortium)
    with pytest.raises(IdentityError, match="cleveland is taken by an open invitation until 2023-11-16 22:13 UTC"):
        _invite(consortium)
    assert _invite(consortium, now=NOW + 48 * HOUR).invited.name == "cleveland"


def test_the_coordinators_name_is_taken_before_it_is_admitted(consortium: Consortium) -> None:
    """Invitations name it already."""
    with pytest.raises(IdentityError, match="the name hub is taken by the coordinator"):
        _invite(consortium, "hub")


# ------------------------------------------------------------------------------------------------------------ approve


def test_an_approval_asked_again_is_the_same(consortium: Consortium) -> None:
    """A reply that was lost costs nothing: same keys, same membership, even after the invitation's end."""
    request = _request(_invite(consortium), MemberKeys.generate())
    member = consortium.approve(request, now=NOW)
    assert consortium.approve(request, now=NOW + 72 * HOUR) == member


def test_an_approval_cut_short_is_completed(admin: Home, consortium: Consortium) -> None:
    """A crash after the invitation was marked and before the member was stored does not lock the newcomer out."""
    request = _request(_invite(consortium), MemberKeys.generate())
    consortium.approve(request, now=NOW)
    (admin.consortium.folder / "members" / "cleveland.bin").unlink()
    assert consortium.approve(request, now=NOW).statement.name == "cleveland"


def test_an_invitation_that_was_never_given_out_is_refused(tmp_path: Path, consortium: Consortium) -> None:
    """A request under another consortium's invitation, though its proofs are sound."""
    other = Home(tmp_path / "other").consortium.create("heart-study", "hub:8443", "hub", passphrase=None, now=NOW)
    request = _request(_invite(other), MemberKeys.generate())
    with pytest.raises(IdentityError, match=r"names the invitation [0-9a-f]{8}, which was never given out"):
        consortium.approve(request, now=NOW)


def test_a_reused_invitation_is_refused(consortium: Consortium) -> None:
    """The second who uses it has other keys."""
    invitation = _invite(consortium)
    consortium.approve(_request(invitation, MemberKeys.generate()), now=NOW)
    with pytest.raises(IdentityError, match="invitation for cleveland was already used, with other keys"):
        consortium.approve(_request(invitation, MemberKeys.generate()), now=NOW)


def test_an_expired_invitation_is_not_approved(consortium: Consortium) -> None:
    """The message says since when."""
    request = _request(_invite(consortium), MemberKeys.generate())
    with pytest.raises(IdentityError, match="invitation for cleveland expired on 2023-11-16 22:13 UTC"):
        consortium.approve(request, now=NOW + 48 * HOUR)
    assert consortium.home.member("cleveland") is None


def test_an_expired_membership_is_not_renewed_by_its_old_invitation(consortium: Consortium) -> None:
    """It takes a new invitation."""
    request = _request(_invite(consortium), MemberKeys.generate())
    consortium.approve(request, now=NOW, days=10)
    with pytest.raises(IdentityError, match="invitation for cleveland expired"):
        consortium.approve(request, now=NOW + 11 * DAY)


def test_an_old_invitation_does_not_take_a_name_back(consortium: Consortium) -> None:
    """Its member is gone and the name has gone to another: the first invitation, still in time, is worth nothing."""
    first = consortium.invite("cleveland", "clinic", Role.SITE, now=NOW, hours=100)
    request = _request(first, MemberKeys.generate())
    consortium.approve(request, now=NOW, days=1)
    second = consortium.approve(
        _request(_invite(consortium, now=NOW + 2 * DAY), MemberKeys.generate()), now=NOW + 2 * DAY
    )
    with pytest.raises(IdentityError, match=r"the name cleveland is taken by a member \(site of cleveland-clinic\)"):
        consortium.approve(request, now=NOW + 2 * DAY)
    assert consortium.home.member("cleveland") == second


def test_a_request_of_another_than_was_invited_is_not_approved(consortium: Consortium) -> None:
    """The name in the request is the one in the record of the invitation."""
    invited = _invite(consortium).invited
    posing = identity.request_for("hungary", "clinic", Role.SITE, MemberKeys.generate(), "0.1.0")
    forged = identity.enrolment._prove(
        identity.Bootstrap(invited.invitation, posing.name, posing.organisation, posing.role),
        MemberKeys.generate(),
        "0.1.0",
    )
    with pytest.raises(IdentityError, match=r"request is for site hungary of clinic .* invitation was for site clevel"):
        consortium.approve(forged, now=NOW)


# -------------------------------------------------------------------------------------------------------------- admit


def test_a_coordinator_admitted_again_is_the_same(hub: Home, consortium: Consortium) -> None:
    """A lost credential string is printed again; it may be installed again."""
    request = hub.coordinator.request("hub", "university", "0.1.0")
    first = consortium.admit(request, ["hub.example.org", "192.0.2.7"], now=NOW)
    again = consortium.admit(
        hub.coordinator.request("hub", "university", "0.1.0"), ["192.0.2.7", "hub.example.org"], now=NOW + DAY
    )
    assert hub.coordinator.install_text(first, NOW).statement == hub.coordinator.install_text(again, NOW).statement


def test_a_second_coordinator_needs_the_first_revoked(tmp_path: Path, hub: Home, consortium: Consortium) -> None:
    """Then a machine with other keys takes over under the same name, and the operator knows it."""
    _admit(consortium, hub)
    spare = Home(tmp_path / "spare")
    with pytest.raises(IdentityError, match=r"hub is the coordinator already, with other keys.*consortium revoke hub"):
        _admit(consortium, spare)
    consortium.revoke("hub", now=NOW)
    taking_over = _admit(consortium, spare)
    assert consortium.home.operator.load().coordinator == taking_over.statement


def test_other_hosts_are_not_dropped_in_silence(hub: Home, consortium: Consortium) -> None:
    """A certificate is not signed anew under the same membership."""
    _admit(consortium, hub)
    with pytest.raises(IdentityError, match="hub is the coordinator already, with other keys or hosts"):
        consortium.admit(
            identity.armour(
                "parley-request1:",
                codec.encode(
                    identity.request_for("hub", "university", Role.COORDINATOR, hub.coordinator.load().keys, "0.1.0")
                ),
            ),
            ["hub.example.org"],
            now=NOW,
        )


def test_a_coordinator_of_another_name_is_not_admitted(hub: Home, consortium: Consortium) -> None:
    """Invitations promise sites the name that `init` set."""
    request = hub.coordinator.request("center", "university", "0.1.0")
    with pytest.raises(IdentityError, match="request is of center; heart-study's coordinator is called hub") as refused:
        consortium.admit(request, now=NOW)
    assert refused.value.who is WhoActs.COORDINATOR


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parley1:AAAA", "not a coordinator's request: it does not begin with parley-request1:"),
        ("parley-request1:AAAAAAAAAAAA", "a coordinator's request that was cut short or mistyped"),
        (identity.armour("parley-request1:", b"nonsense"), "this request cannot be read"),
        (
            identity.armour(
                "parley-request1:",
                codec.encode(identity.request_for("x", "y", Role.SITE, MemberKeys.generate(), "0.1.0")),
            ),
            r"the request of a site, not of a coordinator.*parley consortium invite",
        ),
    ],
    ids=["another string", "mistyped", "nonsense", "a site's"],
)
def test_what_is_no_coordinators_request_is_refused(text: str, message: str) -> None:
    """Each cause has its own words."""
    with pytest.raises(IdentityError, match=message):
        coordinator_request(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parley1:AAAA", "not a credential: it does not begin with parley-credential1:"),
        ("parley-credential1:AAAAAAAAAAAA", "a credential that was cut short or mistyped"),
        (identity.armour("parley-credential1:", b"nonsense"), "this credential cannot be read"),
    ],
    ids=["another string", "mistyped", "nonsense"],
)
def test_what_is_no_credential_is_refused(hub: Home, text: str, message: str) -> None:
    """Each cause has its own words, and nothing is installed."""
    hub.coordinator.begin()
    with pytest.raises(IdentityError, match=message):
        hub.coordinator.install_text(text, NOW)
    assert not hub.coordinator.complete


def test_a_credential_for_another_machines_keys_is_refused(tmp_path: Path, hub: Home, consortium: Consortium) -> None:
    """Strings that were swapped do no harm."""
    credential = consortium.admit(hub.coordinator.request("hub", "university", "0.1.0"), now=NOW)
    spare = Home(tmp_path / "spare").coordinator
    spare.begin()
    with pytest.raises(IdentityError, match="is for other keys than this machine made"):
        spare.install_text(credential, NOW)
    assert not spare.complete


# ------------------------------------------------------------------------------------------------------------- revoke


def test_a_revoked_member_is_out_and_its_name_is_free(hub: Home, hospital: Home, consortium: Consortium) -> None:
    """The list grows by one version; the operator holds it; the old membership is refused; the name can be invited."""
    _admit(consortium, hub)
    site = _join(consortium, hub, hospital)
    revocations = consortium.revoke("cleveland", now=NOW)
    assert revocations.version == 1
    assert consortium.home.revocations() == consortium.home.operator.load().revocations == revocations
    with pytest.raises(IdentityError, match=r"cleveland was revoked \(revocation list 1\)"):
        identity.verify_statement(site.statement, site.root.public_key, "heart-study", NOW, revocations)
    assert _invite(consortium).invited.name == "cleveland"


def test_a_revoked_member_does_not_come_back_by_its_old_invitation(consortium: Consortium) -> None:
    """Nor does whoever holds a stolen one that is still open."""
    invitation = _invite(consortium)
    request = _request(invitation, MemberKeys.generate())
    consortium.approve(request, now=NOW)
    stolen = _invite(consortium, "hungary")
    revocations = consortium.revoke("cleveland", now=NOW)
    revocations = consortium.revoke("hungary", now=NOW)
    for name, again in (("cleveland", request), ("hungary", _request(stolen, MemberKeys.generate()))):
        with pytest.raises(IdentityError, match=f"the invitation for {name} was withdrawn"):
            consortium.approve(again, now=NOW)
    assert {invitation.invited.invitation, stolen.invited.invitation} < set(revocations.serials)


def test_whom_nobody_knows_is_not_revoked(consortium: Consortium) -> None:
    """A mistyped name makes no new list; neither does a second revocation."""
    _invite(consortium)
    consortium.revoke("cleveland", now=NOW)
    for name in ("clevland", "cleveland"):
        with pytest.raises(IdentityError, match=f"no member and no open invitation of the name {name}"):
            consortium.revoke(name, now=NOW)
    assert consortium.home.revocations().version == 1


def test_the_last_operator_is_not_revoked(consortium: Consortium) -> None:
    """Nobody could publish the list; with a second one it can go."""
    with pytest.raises(IdentityError, match="admin is the last operator: nobody could publish the new list"):
        consortium.revoke("admin", now=NOW)
    invitation = consortium.invite("second", "clinic", Role.OPERATOR, now=NOW)
    consortium.approve(_request(invitation, MemberKeys.generate()), now=NOW)
    assert consortium.revoke("admin", now=NOW).version == 1


def test_a_member_takes_newer_revocations_and_no_older(hub: Home, hospital: Home, consortium: Consortium) -> None:
    """A replayed list does not bring anybody back, and one of another root is nothing."""
    _admit(consortium, hub)
    site = _join(consortium, hub, hospital)
    _invite(consortium, "hungary")
    newer = consortium.revoke("hungary", now=NOW)
    hospital.site.update_revocations(newer)
    with pytest.raises(IdentityError, match="has version 0, and version 1 is held already"):
        hospital.site.update_revocations(site.revocations)
    with pytest.raises(IdentityError, match="not signed by heart-study's root"):
        hospital.site.update_revocations(Root.create("heart-study", NOW).sign_revocations(9, NOW, ()))
    assert hospital.site.load().revocations == newer


# ------------------------------------------------------------------------------------------------------------ members


def test_keys_are_made_once(hospital: Home) -> None:
    """A join that was interrupted goes on with the same keys, so that its invitation is not used twice."""
    first, again = hospital.site.begin(), hospital.site.begin()
    assert (first.tls_key, first.protocol_key) == (again.tls_key, again.protocol_key)


def test_an_identity_is_not_overwritten(hub: Home, hospital: Home, consortium: Consortium) -> None:
    """Neither by new keys nor by another credential for the old ones."""
    coordinator = _admit(consortium, hub)
    _join(consortium, hub, hospital)
    with pytest.raises(IdentityError, match=r"holds the identity of site cleveland in heart-study already.*move that"):
        hospital.site.begin()
    consortium.revoke("hub", now=NOW)
    again = identity.request_for("hub", "university", Role.COORDINATOR, coordinator.keys, "0.1.0")
    credential = consortium.admit(identity.armour("parley-request1:", codec.encode(again)), now=NOW)
    with pytest.raises(IdentityError, match="holds the identity of coordinator hub in heart-study already"):
        hub.coordinator.install_text(credential, NOW)
    assert hub.coordinator.load().statement == coordinator.statement


@pytest.mark.parametrize(
    ("role", "command"),
    [
        ("site", "parley site join INVITATION"),
        ("operator", "parley operator join INVITATION"),
        ("coordinator", "parley coordinator init"),
    ],
)
def test_a_missing_identity_names_the_command_that_makes_it(hospital: Home, role: str, command: str) -> None:
    """For each role its own."""
    with pytest.raises(StorageError, match=rf"there is no .*tls\.key.*{command}"):
        getattr(hospital, role).load()


def test_an_operator_is_complete_once_the_coordinator_is_admitted(
    admin: Home, hub: Home, consortium: Consortium
) -> None:
    """Before, the message names the step that is left."""
    with pytest.raises(StorageError, match=r"there is no .*certificate\.pem.*parley consortium admit"):
        admin.operator.load()
    _admit(consortium, hub)
    assert admin.operator.load().statement.name == "admin"


@pytest.mark.parametrize("name", ["statement.bin", "connection.json"])
def test_a_damaged_file_is_named(hub: Home, consortium: Consortium, name: str) -> None:
    """With the way out."""
    _admit(consortium, hub)
    (hub.coordinator.identity_folder / name).write_bytes(b"\xff")
    with pytest.raises(StorageError, match=rf"{name} is damaged.*restore it from a backup"):
        hub.coordinator.load()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Before anything else is made."""
    (tmp_path / "site").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match=r"cannot write .*protocol\.key"):
        Home(tmp_path).site.begin()


def test_a_file_that_cannot_be_read_is_named(hospital: Home) -> None:
    """A folder in a file's place, say."""
    hospital.site.begin()
    (hospital.site.identity_folder / "tls.key").unlink()
    (hospital.site.identity_folder / "tls.key").mkdir()
    with pytest.raises(StorageError, match=r"cannot read .*tls\.key"):
        hospital.site.load()
