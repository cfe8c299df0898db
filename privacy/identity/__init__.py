"""Who is who: the consortium's root, membership statements, certificates, invitations, revocations. No file, no clock.

```
Root --signs--> Invitation --newcomer makes keys--> EnrolmentRequest --Root.approve--> certificate + statement
```

`now` is always unix seconds, handed in; secrets come from the operating system.
"""

from privacy.identity.certificates import (
    Bootstrap,
    Member,
    Peer,
    RootCertificate,
    host_names,
    hosts_of,
    peer_of,
    tls_name,
    verify_binding,
    verify_certificate,
)
from privacy.identity.encoding import armour, date, pack, require_name, require_organisation, unarmour, unpack
from privacy.identity.enrolment import (
    Fingerprints,
    Invitation,
    accept_credential,
    enrolment_bytes,
    fingerprints,
    make_request,
    request_for,
    require_address,
    verify_proofs,
    verify_request,
)
from privacy.identity.keys import MemberKeys, tls_digest
from privacy.identity.root import Root
from privacy.identity.statements import (
    revocation_bytes,
    sign_welcome,
    statement_bytes,
    verify_revocations,
    verify_roster,
    verify_statement,
    verify_welcome,
    welcome_bytes,
)

__all__ = [
    "Bootstrap",
    "Fingerprints",
    "Invitation",
    "Member",
    "MemberKeys",
    "Peer",
    "Root",
    "RootCertificate",
    "accept_credential",
    "armour",
    "date",
    "enrolment_bytes",
    "fingerprints",
    "host_names",
    "hosts_of",
    "make_request",
    "pack",
    "peer_of",
    "request_for",
    "require_address",
    "require_name",
    "require_organisation",
    "revocation_bytes",
    "sign_welcome",
    "statement_bytes",
    "tls_digest",
    "tls_name",
    "unarmour",
    "unpack",
    "verify_binding",
    "verify_certificate",
    "verify_proofs",
    "verify_request",
    "verify_revocations",
    "verify_roster",
    "verify_statement",
    "verify_welcome",
    "welcome_bytes",
]
