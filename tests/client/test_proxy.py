from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest

from client.proxy import DIRECT, FILE, Proxy, chosen, dialled, meaning, refusal
from federation.errors import ConfigurationError, WhoActs

if TYPE_CHECKING:
    from pathlib import Path

ADDRESS = "hub.example.org:8443"
URL = "http://proxy.example.org:3128"


def test_a_url_names_a_proxy_and_its_login() -> None:
    """Special characters come percent-encoded; the scheme's default port is never guessed."""
    proxy = Proxy.parse("http://ann:p%40ss%3A%C3%BC@proxy.example.org:3128/", "--proxy")
    assert (proxy.address, proxy.user, proxy.password) == ("proxy.example.org:3128", "ann", "p@ss:ü")
    scheme, _, login = proxy.authorization.partition(" ")
    assert (scheme, base64.b64decode(login).decode()) == ("Basic", "ann:p@ss:ü")
    assert Proxy.parse("http://[2001:db8::1]:3128", "--proxy").address == "[2001:db8::1]:3128"
    assert Proxy.parse(URL, "--proxy").authorization == ""


def test_a_password_is_never_shown() -> None:
    """Neither by `shown`, nor by the representation that ends up in a log."""
    proxy = Proxy.parse("http://ann:s3cret@proxy.example.org:3128", "--proxy")
    assert proxy.shown == "http://ann@proxy.example.org:3128"
    assert "s3cret" not in f"{proxy!r} {proxy}"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://ann:s3cret@proxy:3128", r"asks for TLS to the proxy itself \(https://\), which gRPC does not speak"),
        ("socks5://ann:s3cret@proxy:1080", "names a proxy of the kind socks5, not an HTTP proxy"),
        ("proxy:3128", "does not begin with http://"),
        ("s3cret", "does not begin with http://"),
        ("http://ann:s3cret@proxy", "names no port"),
        ("http://ann:s3cret@proxy:99999", "is no URL"),
        ("http://ann:s3cret@[::1:3128", "is no URL"),
        ("http://ann:s3cret@proxy:3128/path", "is not a host and a port alone"),
        ("http://ann:s3cret@:3128", "is not a host and a port alone"),
        ("http://ann:s3cret@pro xy:3128", "is not a host and a port alone"),
    ],
)
def test_what_cannot_be_a_proxy_is_refused_without_showing_it(url: str, problem: str) -> None:
    """The message names where it came from and what is wrong, and never the password."""
    with pytest.raises(
        ConfigurationError, match=rf"^the proxy in the environment variable HTTPS_PROXY {problem}"
    ) as told:
        Proxy.parse(url, "the environment variable HTTPS_PROXY")
    assert "s3cret" not in str(told.value)
    assert "write http://[user:password@]host:port" in told.value.fix
    assert told.value.who is WhoActs.SITE


def test_flag_then_file_then_environment(tmp_path: Path) -> None:
    """Whoever is asked first decides, and the proxy tells who it was."""
    environment = {"HTTPS_PROXY": "http://of-environment:1"}

    def source(flag: str = "") -> str | None:
        found = chosen(ADDRESS, environment, flag=flag, folder=tmp_path)
        return found and f"{found.host} from {found.source}"

    assert source() == "of-environment from the environment variable HTTPS_PROXY"
    (tmp_path / FILE).write_text("http://of-file:2\n")
    assert source() == f"of-file from {tmp_path / FILE}"
    assert source("http://of-flag:3") == "of-flag from --proxy"
    assert source(DIRECT) is None
    (tmp_path / FILE).write_text(f"{DIRECT}\n")
    assert source() is None
    (tmp_path / FILE).write_text("\n")
    assert source() == "of-environment from the environment variable HTTPS_PROXY"


@pytest.mark.parametrize(
    ("environment", "host"),
    [
        ({}, None),
        ({"HTTPS_PROXY": " "}, None),
        ({"HTTPS_PROXY": "http://a:1"}, "a"),
        ({"https_proxy": "http://a:1"}, "a"),
        ({"https_proxy": "http://a:1", "HTTPS_PROXY": "http://b:1"}, "a"),
        ({"GRPC_PROXY": "http://a:1", "http_proxy": "http://b:1"}, "a"),
        ({"grpc_proxy": "http://a:1", "HTTPS_PROXY": "http://b:1"}, "b"),
        ({"HTTP_PROXY": "http://a:1"}, "a"),
        ({"ALL_PROXY": "http://a:1"}, None),
    ],
)
def test_the_environment_names_a_proxy_in_either_case(environment: dict[str, str], host: str | None) -> None:
    """HTTPS_PROXY before GRPC_PROXY before HTTP_PROXY; of the same name the lower case, as curl has it."""
    found = chosen(ADDRESS, environment)
    assert (found and found.host) == host


@pytest.mark.parametrize(
    ("excluded", "direct"),
    [
        ("*", True),
        ("hub.example.org", True),
        ("HUB.example.org", True),
        ("example.org", True),
        (".example.org", True),
        ("*.example.org", True),
        ("localhost, .example.org", True),
        ("localhost example.org", True),
        ("hub.example.org:8443", True),
        ("hub.example.org:443", False),
        ("ample.org", False),
        ("hub.example", False),
        ("other.org,", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_no_proxy_takes_hosts_and_domains_out(name: str, excluded: str, direct: bool) -> None:  # noqa: FBT001 - a parameter of the table
    """It takes back what the environment names, and not what the site itself names."""
    environment = {"https_proxy": URL, name: excluded}
    assert (chosen(ADDRESS, environment) is None) == direct
    assert chosen(ADDRESS, environment, flag=URL) is not None


@pytest.mark.parametrize("address", ["[2001:db8::1]:443", "10.1.2.3:443"])
def test_no_proxy_takes_addresses_out(address: str) -> None:
    """With and without brackets, with and without a port."""
    host = address.rpartition(":")[0].strip("[]")
    for excluded in (host, address):
        assert chosen(address, {"https_proxy": URL, "no_proxy": excluded}) is None
    assert chosen(address, {"https_proxy": URL, "no_proxy": "10.1.2.4"}) is not None


@pytest.mark.parametrize("address", ["127.0.0.1:8443", "localhost:8443", "[::1]:8443"])
def test_this_machine_is_not_dialled_through_the_environments_proxy(address: str) -> None:
    """A demonstration works on a machine behind a proxy; the site's own word still counts."""
    assert chosen(address, {"https_proxy": URL}) is None
    assert chosen(address, {}, flag=URL) is not None


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Dialling directly instead could send what the proxy must see."""
    (tmp_path / FILE).write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match=rf"the proxy's file {tmp_path / FILE} cannot be read"):
        chosen(ADDRESS, {}, folder=tmp_path)


def test_grpcs_own_reading_of_the_environment_is_always_off() -> None:
    """With a proxy the channel dials it and asks for the address; without one it dials the address."""
    assert dialled(ADDRESS, None) == (ADDRESS, (("grpc.enable_http_proxy", 0),))
    target, options = dialled(ADDRESS, Proxy.parse("http://ann:pw@proxy:3128", "--proxy"))
    assert target == "proxy:3128"
    assert dict(options) == {
        "grpc.enable_http_proxy": 0,
        "grpc.http_connect_server": ADDRESS,
        "grpc.http_connect_headers": "Proxy-Authorization:Basic " + base64.b64encode(b"ann:pw").decode(),
    }


@pytest.mark.parametrize(
    ("url", "status", "problem", "fix"),
    [
        (URL, 407, r"asks for a user name and a password \(HTTP 407\)", "correct them in --proxy"),
        ("http://ann:no@p:1", 407, "does not accept this user name and password", "correct them in --proxy"),
        (URL, 403, rf"refuses to connect to {ADDRESS} \(HTTP 403\)", f"allow CONNECT to {ADDRESS}"),
        (URL, 502, rf"cannot reach {ADDRESS} \(HTTP 502\)", "check that the coordinator runs"),
    ],
)
def test_a_proxys_refusal_says_who_must_do_what(url: str, status: int, problem: str, fix: str) -> None:
    """Each status has its cause and its way out, and names the proxy with its origin."""
    told = refusal(Proxy.parse(url, "--proxy"), ADDRESS, status)
    with pytest.raises(type(told), match=problem):
        raise told
    assert told.problem.startswith(f"the proxy {Proxy.parse(url, '').shown} (from --proxy) ")
    assert fix in told.fix


def test_what_grpc_says_of_a_proxy_is_understood() -> None:
    """A status, a proxy that is away, and one whose name nobody knows; anything else is not the proxy's doing."""
    proxy = Proxy.parse(URL, "--proxy")
    failed = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:3128: "
    cases = (
        (failed + "HTTP proxy returned response code 407", "asks for a user name"),
        (failed + "Failed to connect to remote host: Connection refused", "cannot be reached"),
        ("errors resolving proxy.example.org:3128: Domain name not found", "cannot be reached"),
    )
    for details, words in cases:
        told = meaning(proxy, ADDRESS, details)
        assert told is not None
        assert words in told.problem
    assert meaning(proxy, ADDRESS, failed + "Socket closed") is None
