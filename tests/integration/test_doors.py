"""Who gets in: with a member's certificate and its statement everything, without them nothing but the health probe."""

import os
import socket

os.environ.setdefault("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256")  # with ECDSA leaves: TLS 1.3 only

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from federation import codec
from federation.messages import ListJobs, Role
from parley.homes import Home
from tests.integration.alliance import Alliance

_SOON = 10.0


def _asked(channel: grpc.Channel) -> grpc.RpcError:
    """The error with which an operator's question ends."""
    with channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(codec.OPERATE)(codec.encode_operator_request(ListJobs()), timeout=_SOON)
    return refused.value


def test_the_health_probe_answers_on_loopback(alliance: Alliance) -> None:
    """The standard service, without a certificate."""
    with grpc.insecure_channel(f"127.0.0.1:{alliance.health_port}") as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_SOON)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_the_health_probe_answers_nowhere_else(alliance: Alliance) -> None:
    """No other address of this machine takes a connection on its port."""
    addresses = {
        each.address
        for every in psutil.net_if_addrs().values()
        for each in every
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    }
    for address in addresses:
        with pytest.raises(OSError, match=r"refused|timed out|unreachable"):
            socket.create_connection((address, alliance.health_port), timeout=2).close()
    listening = [
        each.laddr.ip.removeprefix("::ffff:")
        for each in psutil.Process(alliance.coordinator.process.pid).net_connections()
        if each.status == psutil.CONN_LISTEN and each.laddr.port == alliance.health_port
    ]
    assert set(listening) == {"127.0.0.1"}


def test_the_health_port_answers_nothing_but_the_probe(alliance: Alliance) -> None:
    """A product's call there is refused: it shows no certificate."""
    error = _asked(grpc.insecure_channel(f"127.0.0.1:{alliance.health_port}"))
    assert error.code() in {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED}


def test_the_public_port_wants_tls(alliance: Alliance) -> None:
    """A connection in the clear ends before any handler."""
    assert _asked(grpc.insecure_channel(alliance.address)).code() is grpc.StatusCode.UNAVAILABLE


def test_the_public_port_wants_a_certificate(alliance: Alliance) -> None:
    """TLS alone, with the right root and name, does not get in; not even the probe does."""
    own = Home(alliance.admin).operator.load()
    credentials = grpc.ssl_channel_credentials(own.root.pem)
    options = (("grpc.ssl_target_name_override", own.connection.tls_name),)
    assert _asked(grpc.secure_channel(alliance.address, credentials, options)).code() is grpc.StatusCode.UNAVAILABLE
    with (
        grpc.secure_channel(alliance.address, credentials, options) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_SOON)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_site_s_certificate_does_not_make_an_operator(alliance: Alliance) -> None:
    """The role stands in the root's statement."""
    own = Home(alliance.home("athens")).site.load()
    assert own.statement.role is Role.SITE
    credentials = grpc.ssl_channel_credentials(own.root.pem, own.keys.tls_pem, own.certificate)
    options = (("grpc.ssl_target_name_override", own.connection.tls_name),)
    with (
        grpc.secure_channel(alliance.address, credentials, options) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        channel.unary_unary(codec.OPERATE)(
            codec.encode_operator_request(ListJobs()),
            timeout=_SOON,
            metadata=(("parley-statement-bin", codec.encode(own.statement)),),
        )
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "athens is enrolled as site; this call is for the role operator" in refused.value.details()
