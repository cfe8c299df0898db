"""Which HTTP proxy a member dials through, and how gRPC is told so that what it reads by itself never differs."""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import SplitResult, unquote, urlsplit

from federation.errors import ConfigurationError, UnreachableError, WhoActs

__all__ = ["DIRECT", "FILE", "Proxy", "chosen", "dialled", "meaning", "refusal", "unreachable"]

FILE = "proxy.txt"
"""The file in a member's folder whose one line names its proxy."""

DIRECT = "direct"
"""Said by the flag or the file instead of a proxy: dial directly, whatever the environment says."""

_VARIABLES = ("https_proxy", "grpc_proxy", "http_proxy")
_FORM = "http://[user:password@]host:port, with special characters of the password percent-encoded"
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+:[0-9A-Fa-f:.]*")
_STATUS = re.compile(r"HTTP proxy returned response code (\d+)")
_WANTS_LOGIN = 407


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy that opens tunnels (CONNECT), and where it was named; `shown` is what people may read.

    Args:
        host: Its name or address.
        port: Its port.
        source: Who named it, in words.
        user: With which name, if any.
        password: And which password; in no representation.
    """

    host: str
    port: int
    source: str
    user: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str, source: str) -> Self:
        """The proxy that `url` names.

        Raises:
            ConfigurationError: It is not `http://[user:password@]host:port`; the message never shows it.
        """
        try:
            parts = urlsplit(url.strip())
            port = parts.port
        except ValueError:
            raise _refused(source, "is no URL") from None
        if parts.scheme != "http":
            raise _refused(source, _scheme_trouble(parts))
        if port is None:
            raise _refused(source, "names no port")
        host = parts.hostname or ""
        if _HOST.fullmatch(host) is None or parts.path not in {"", "/"} or parts.query or parts.fragment:
            raise _refused(source, "is not a host and a port alone")
        return cls(host, port, source, unquote(parts.username or ""), unquote(parts.password or ""))

    @property
    def address(self) -> str:
        """host:port to dial."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def shown(self) -> str:
        """The proxy as people may read it: without its password."""
        return f"http://{self.user}@{self.address}" if self.user else f"http://{self.address}"

    @property
    def authorization(self) -> str:
        """The value of the header Proxy-Authorization (RFC 7617); empty without a user."""
        if not self.user:
            return ""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def _scheme_trouble(parts: SplitResult) -> str:
    if parts.scheme == "https":
        return "asks for TLS to the proxy itself (https://), which gRPC does not speak"
    if parts.scheme and parts.netloc:
        return f"names a proxy of the kind {parts.scheme}, not an HTTP proxy"
    return "does not begin with http://"


def _refused(source: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"the proxy in {source} {problem}", fix=f"write {_FORM}", who=WhoActs.SITE)


def chosen(address: str, environment: Mapping[str, str], *, flag: str = "", folder: Path | None = None) -> Proxy | None:
    """The proxy through which to dial `address` (host:port); None: directly.

    The flag decides; without it `FILE` in the member's folder; without that the environment: HTTPS_PROXY, GRPC_PROXY or
    HTTP_PROXY, the first that is set, in lower case before upper case as curl has it. NO_PROXY is of the environment
    and takes back only what the environment names; so is the rule that this machine itself is dialled directly.

    Raises:
        ConfigurationError: What decides cannot be used; the message names it.
    """
    own = _own(flag, folder)
    if own is not None:
        url, source = own
        return None if url == DIRECT else Proxy.parse(url, source)
    found = _named(environment, _VARIABLES)
    if found is None:
        return None
    url, source = found
    excluded, _ = _named(environment, ("no_proxy",)) or ("", "")
    return None if _excludes(excluded, address) or _here(address) else Proxy.parse(url, source)


def _own(flag: str, folder: Path | None) -> tuple[str, str] | None:
    """What flag or file say, and which of them says it."""
    if flag:
        return flag, "--proxy"
    if folder is None:
        return None
    path = folder / FILE
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        raise ConfigurationError(
            f"the proxy's file {path} cannot be read", fix=f"make it readable: one line, {_FORM}", who=WhoActs.SITE
        ) from None
    return (text, str(path)) if text else None


def _named(environment: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str] | None:
    """The first of the variables that is set and not empty, with its name in words."""
    for name in names:
        for spelt in (name, name.upper()):
            if value := environment.get(spelt, "").strip():
                return value, f"the environment variable {spelt}"
    return None


def _excludes(excluded: str, address: str) -> bool:
    """Whether a NO_PROXY text takes `address` out: by `*`, its host, or a domain above it, each perhaps with a port."""
    host, _, port = address.lower().rpartition(":")
    host = host.strip("[]")
    for entry in excluded.lower().replace(",", " ").split():
        domain, named_port = _entry(entry)
        if named_port not in {"", port}:
            continue
        if domain in {"*", host} or host.endswith(f".{domain.lstrip('*.')}"):
            return True
    return False


def _here(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]").lower()
    return host in {"localhost", "::1"} or host.startswith("127.")


def _entry(entry: str) -> tuple[str, str]:
    """Host or domain, and port if there is one; an IPv6 address with a port stands in brackets."""
    if entry.startswith("["):
        domain, _, port = entry[1:].partition("]")
        return domain, port.lstrip(":")
    domain, colon, port = entry.rpartition(":")
    if colon and port.isdigit() and ":" not in domain:
        return domain.lstrip("."), port
    return entry.lstrip("."), ""


def dialled(address: str, proxy: Proxy | None) -> tuple[str, tuple[tuple[str, int | str], ...]]:
    """The target and the options of a gRPC channel that reaches `address` through `proxy`, and in no other way.

    gRPC's own reading is always off: it knows lower-case variables alone, leaves out a proxy whose scheme it does not
    speak without a word, and lets `no_proxy` overrule even its option `grpc.http_proxy`. So the channel dials the proxy
    and asks it for the address: what gRPC itself does, one layer below.
    """
    own_reading_off = ("grpc.enable_http_proxy", 0)
    if proxy is None:
        return address, (own_reading_off,)
    options: list[tuple[str, int | str]] = [own_reading_off, ("grpc.http_connect_server", address)]
    if proxy.authorization:
        options.append(("grpc.http_connect_headers", f"Proxy-Authorization:{proxy.authorization}"))
    return proxy.address, tuple(options)


def meaning(proxy: Proxy, address: str, details: str) -> UnreachableError | None:
    """What it means for a member that dials `address` when gRPC words a failure so; None when the proxy has no part."""
    status = _STATUS.search(details)
    if status is not None:
        return refusal(proxy, address, int(status[1]))
    if "Failed to connect to remote host" in details or "errors resolving" in details:
        return unreachable(proxy, details)
    return None


def refusal(proxy: Proxy, address: str, status: int) -> UnreachableError:
    """What it means that the proxy answers a CONNECT with this HTTP status."""
    told = f"the proxy {proxy.shown} (from {proxy.source})"
    if status == _WANTS_LOGIN:
        problem = "does not accept this user name and password" if proxy.user else "asks for a user name and a password"
        return UnreachableError(
            f"{told} {problem} (HTTP 407)",
            fix=f"correct them in {proxy.source}: {_FORM}",
            who=WhoActs.SITE,
        )
    if status in {502, 503, 504}:
        return UnreachableError(
            f"{told} cannot reach {address} (HTTP {status})",
            fix="check that the coordinator runs, and that the proxy may dial that address",
            who=WhoActs.SITE,
        )
    return UnreachableError(
        f"{told} refuses to connect to {address} (HTTP {status})",
        fix=f"have the network department allow CONNECT to {address}",
        who=WhoActs.SITE,
    )


def unreachable(proxy: Proxy, cause: str) -> UnreachableError:
    """What it means that the proxy itself does not answer."""
    return UnreachableError(
        f"the proxy {proxy.shown} (from {proxy.source}) cannot be reached ({cause[:200]})",
        fix=f"check the proxy's address in {proxy.source}, or say {DIRECT} with --proxy if none is needed",
        who=WhoActs.SITE,
    )
