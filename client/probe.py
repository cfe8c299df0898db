"""Walks the way to the coordinator layer by layer, without gRPC: how far it leads, and whose certificate is shown.

```
NAME --resolved--> PORT --connected--> PROXY --tunnel open--> TLS --certificate shown--> ARRIVED
                     `----- without a proxy --------------------^
```

The certificate is looked at and not trusted: nothing is said on the connection, and it is closed at once.
"""

import contextlib
import re
import socket
import ssl
import time
from dataclasses import dataclass, replace
from enum import Enum
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from client.proxy import Proxy
from federation.errors import UnreachableError, WhoActs
from privacy.identity import RootCertificate, date

__all__ = ["Presented", "Stage", "Walk", "judged", "stranger", "walk"]

_PATIENCE = 5.0
_HEAD = 64 * 1024
"""Bytes of the longest answer of a proxy."""
_OPEN = 200


class Stage(Enum):
    """The layer at which a walk ended."""

    NAME = "name resolution"
    PORT = "port"
    PROXY = "proxy"
    TLS = "TLS handshake"
    ARRIVED = "arrived"


@dataclass(frozen=True, slots=True)
class Presented:
    """A certificate as it was shown, whoever signed it; times in unix seconds."""

    issuer: str
    names: tuple[str, ...]
    not_before: int
    not_after: int
    certificate: x509.Certificate

    @classmethod
    def parse(cls, der: bytes) -> Self:
        """The certificate in `der`.

        Raises:
            ValueError: It is none.
        """
        shown = x509.load_der_x509_certificate(der)
        begins, ends = shown.not_valid_before_utc, shown.not_valid_after_utc
        return cls(_words(shown.issuer), _names(shown), int(begins.timestamp()), int(ends.timestamp()), shown)

    def signed_by(self, root: RootCertificate) -> bool:
        """Whether the consortium's root signed it."""
        try:
            self.certificate.verify_directly_issued_by(root.certificate)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True


@dataclass(frozen=True, slots=True)
class Walk:
    """How far a connection came: where it ended, and what was seen on the way.

    Args:
        address: host:port that it was to reach.
        proxy: The proxy on the way, if any; name and port are then the proxy's.
        ended: The layer at which it ended.
        trouble: Why it ended there, in words; empty when it arrived.
        seconds: How long it took.
        resolved: The addresses behind the name.
        status: What the proxy answered (HTTP); 0: nothing.
        presented: The certificate that was shown in the TLS handshake.
    """

    address: str
    proxy: Proxy | None
    ended: Stage
    trouble: str = ""
    seconds: float = 0.0
    resolved: tuple[str, ...] = ()
    status: int = 0
    presented: Presented | None = None


def walk(address: str, tls_name: str, proxy: Proxy | None, seconds: float = _PATIENCE) -> Walk:
    """Goes as far as the way to `address` leads; `tls_name` is the name asked for in the handshake. It blocks.

    Each layer may take so many seconds, and the name as long as the system gives it.
    """
    began = time.monotonic()
    walked = _walked(Walk(address, proxy, Stage.NAME), tls_name, seconds)
    return replace(walked, seconds=time.monotonic() - began)


def _walked(so_far: Walk, tls_name: str, seconds: float) -> Walk:
    stage = Stage.NAME
    host, _, port = (so_far.proxy.address if so_far.proxy else so_far.address).rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        so_far = replace(so_far, resolved=tuple(dict.fromkeys(str(entry[4][0]) for entry in found)))
        stage = Stage.PORT
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as plain:
            if so_far.proxy is not None:
                stage = Stage.PROXY
                so_far = replace(so_far, status=_tunnel(plain, so_far.address, so_far.proxy))
                if so_far.status != _OPEN:
                    return replace(so_far, ended=stage, trouble=f"HTTP {so_far.status}")
            stage = Stage.TLS
            return replace(so_far, ended=Stage.ARRIVED, presented=_handshake(plain, tls_name))
    except (OSError, ValueError) as ended:
        return replace(so_far, ended=stage, trouble=_why(ended, seconds))


def _tunnel(plain: socket.socket, address: str, proxy: Proxy) -> int:
    """Asks the proxy for a tunnel and returns its status.

    Raises:
        ValueError: It answers something else.
    """
    lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
    if proxy.authorization:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    plain.sendall("\r\n".join((*lines, "", "")).encode())
    head = b""
    while b"\r\n\r\n" not in head:
        part = plain.recv(1)  # one byte a time: what follows the head belongs to TLS
        if not part or len(head) > _HEAD:
            raise ValueError("it hung up without an answer" if not head else "its answer is not HTTP")
        head += part
    status = re.match(rb"HTTP/1\.\d (\d{3})", head)
    if status is None:
        raise ValueError("its answer is not HTTP")
    return int(status[1])


def _handshake(plain: socket.socket, tls_name: str) -> Presented:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the point is to see whom we would not trust
    context.set_alpn_protocols(["h2"])
    with context.wrap_socket(plain, server_hostname=tls_name) as secure:
        shown = secure.getpeercert(binary_form=True)
        secure.settimeout(0)
        with contextlib.suppress(OSError):  # the coordinator misses our certificate, and may say so
            secure.unwrap()
    if not shown:
        raise ValueError("it showed no certificate")
    return Presented.parse(shown)


def _why(error: OSError | ValueError, seconds: float) -> str:
    """An error in words, without its number."""
    match error:
        case TimeoutError():
            return f"no answer within {seconds:g} s"
        case ssl.SSLError():
            return "what answers does not speak TLS" if error.reason == "WRONG_VERSION_NUMBER" else str(error.reason)
        case OSError():
            return error.strerror or str(error)
        case _:
            return str(error)


# ------------------------------------------------------------------------------------------------------ the certificate


def judged(shown: Presented, address: str, tls_name: str, root: RootCertificate, now: float) -> UnreachableError | None:
    """What is wrong with a certificate shown at `address`; None: the consortium's root signed it for this very name."""
    if not shown.signed_by(root):
        return _foreign(shown, address, tls_name, root)
    if tls_name not in shown.names:
        return UnreachableError(
            f"what answers at {address} shows a certificate of this consortium for {', '.join(shown.names)}, "
            f"not for {tls_name}",
            fix="dial the coordinator's address; if it was given another name, join again with a new invitation",
            who=WhoActs.SITE,
        )
    if now < shown.not_before:
        return UnreachableError(
            f"the coordinator's certificate begins on {date(shown.not_before)}; here it is {date(int(now))}",
            fix="set this machine's clock",
            who=WhoActs.SITE,
        )
    if now >= shown.not_after:
        return UnreachableError(
            f"the coordinator's certificate expired on {date(shown.not_after)}; here it is {date(int(now))}",
            fix="check this machine's clock; if it is right, have the consortium renew the coordinator's membership",
            who=WhoActs.CONSORTIUM,
        )
    return None


def _foreign(shown: Presented, address: str, tls_name: str, root: RootCertificate) -> UnreachableError:
    if tls_name in shown.names and shown.issuer != root.consortium:
        return UnreachableError(
            f"TLS to {address} is opened on the way: the certificate for {tls_name} was made by {shown.issuer!r}, "
            f"not by the root of {root.consortium}",
            fix=f"have whoever runs {shown.issuer!r} (the network department, most likely) exempt {address} from TLS "
            "inspection",
            who=WhoActs.SITE,
        )
    return UnreachableError(
        f"what answers at {address} does not show a certificate of this consortium's root, but one for "
        f"{', '.join(shown.names) or 'nobody'} that was made by {shown.issuer!r}",
        fix="check the address; if the consortium was founded anew, join again with a new invitation",
        who=WhoActs.SITE,
    )


def stranger(address: str, tls_name: str, root_certificate: bytes, proxy: Proxy | None) -> UnreachableError:
    """Who it is that shows a certificate which TLS did not accept: dials once more and looks. It blocks."""
    walked = walk(address, tls_name, proxy)
    if walked.presented is not None:
        root = RootCertificate.parse(root_certificate)
        if (wrong := judged(walked.presented, address, tls_name, root, time.time())) is not None:
            return wrong
    return UnreachableError(
        f"what answers at {address} does not show a certificate of this consortium's root",
        fix="check the address; if a firewall opens TLS, have it let this connection through untouched",
        who=WhoActs.SITE,
    )


def _words(name: x509.Name) -> str:
    """Common name and organisation, as people read them."""
    texts = (name.get_attributes_for_oid(oid) for oid in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME))
    common, organisation = (str(found[0].value) if found else "" for found in texts)
    return f"{common} ({organisation})" if common and organisation else common or organisation or "nobody"


def _names(shown: x509.Certificate) -> tuple[str, ...]:
    try:
        names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ()
    return tuple(str(name.value) for name in names)
