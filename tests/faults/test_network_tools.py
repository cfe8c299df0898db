from __future__ import annotations

import asyncio
import base64
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.consortium import soon, until
from tests.faults.network import Cut, End, Inspector, Proxy, Way, Weather, Wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine


def _story(told: Coroutine[object, object, None]) -> None:
    asyncio.run(soon(told))


class _Echo:
    """Answers with what it was sent, behind its own name, and remembers what came in on each connection."""

    def __init__(self, name: bytes = b"") -> None:
        self.name = name
        self.heard: list[bytearray] = []
        self.ends: list[str] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Serves on a port of loopback."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()

    def received(self) -> int:
        """Bytes that came in, on all connections."""
        return sum(map(len, self.heard))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = bytearray()
        self.heard.append(heard)
        try:
            while part := await reader.read(65536):
                heard.extend(part)
                writer.write(self.name + part)
                await writer.drain()
            self.ends.append("closed")
        except ConnectionError:
            self.ends.append("reset")
        writer.close()


async def _dial(wire: Wire | Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", wire.port)


def test_a_wire_in_good_weather_changes_nothing() -> None:
    """A megabyte comes back as it was sent, and the wire counted it each way."""

    async def story() -> None:
        sent = np.random.default_rng(1).bytes(1_000_000)
        async with _Echo().listening() as port, Wire(("127.0.0.1", port)) as wire:
            reader, writer = await _dial(wire)
            writer.write(sent)
            assert await reader.readexactly(len(sent)) == sent
            assert wire.passed == {Way.UP: len(sent), Way.DOWN: len(sent)}
            writer.close()

    _story(story())


@pytest.mark.parametrize("end", list(End))
def test_a_cut_lets_so_many_bytes_pass_and_not_one_more(end: End) -> None:
    """The connection ends in the middle of a message, in the way asked for; the one after it is whole."""

    async def story() -> None:
        echo = _Echo()
        async with echo.listening() as port, Wire(("127.0.0.1", port)) as wire:
            wire.cut_next(Cut(after=40_001, way=Way.UP, end=end))
            reader, writer = await _dial(wire)
            writer.write(bytes(100_000))
            if end is End.FIN:
                await reader.read()
                await until(lambda: len(echo.heard[0]) == 40_001)
            else:
                with pytest.raises(ConnectionResetError):
                    await reader.read()
            assert wire.passed[Way.UP] == 40_001
            reader, writer = await _dial(wire)
            writer.write(bytes(100_000))
            assert await reader.readexactly(100_000) == bytes(100_000)
            writer.close()

    _story(story())


def test_a_cut_of_what_comes_back_leaves_what_goes_up_alone() -> None:
    """Ten bytes of the answer arrive, although the target had everything."""

    async def story() -> None:
        echo = _Echo()
        async with echo.listening() as port, Wire(("127.0.0.1", port)) as wire:
            wire.cut_next(Cut(after=10, way=Way.DOWN, end=End.FIN))
            reader, writer = await _dial(wire)
            writer.write(bytes(1000))
            assert await reader.read() == bytes(10)
            assert len(echo.heard[0]) == 1000

    _story(story())


def test_every_open_connection_can_be_cut_at_once() -> None:
    """Both sides of both connections see a reset."""

    async def story() -> None:
        echo = _Echo()
        async with echo.listening() as port, Wire(("127.0.0.1", port)) as wire:
            ends = [await _dial(wire), await _dial(wire)]
            for _, writer in ends:
                writer.write(b"x")
            await until(lambda: echo.received() == 2)
            wire.cut(End.RST)
            for reader, _ in ends:
                with pytest.raises(ConnectionResetError):
                    await reader.readexactly(2)
            await until(lambda: len(echo.ends) == 2)
            assert echo.ends == ["reset", "reset"]

    _story(story())


@pytest.mark.parametrize("way", list(Way))
def test_a_frozen_direction_is_silent_and_the_other_one_is_not(way: Way) -> None:
    """Nobody is told; what was held comes out, in order, when the wire thaws."""

    async def story() -> None:
        echo = _Echo()
        async with echo.listening() as port, Wire(("127.0.0.1", port)) as wire:
            reader, writer = await _dial(wire)
            writer.write(b"one ")
            assert await reader.readexactly(4) == b"one "
            wire.freeze(way)
            writer.write(b"two ")
            if way is Way.DOWN:
                await until(lambda: echo.received() >= 8)  # it arrived; the answer does not
            before = dict(wire.passed)
            fresh, other = await _dial(wire)
            other.write(b"new")
            assert await fresh.readexactly(3) == b"new"  # new connections are not touched
            assert wire.passed[way] == before[way] + 3
            assert not reader.at_eof()
            writer.write(b"three")
            wire.thaw()
            assert await reader.readexactly(9) == b"two three"
            writer.close()
            other.close()

    _story(story())


def test_what_an_older_connection_held_arrives_after_a_newer_one_was_opened() -> None:
    """Its sender hung up long ago; the target hears it, whole, after what came on the new connection."""

    async def story() -> None:
        echo = _Echo()
        async with echo.listening() as port, Wire(("127.0.0.1", port)) as wire:
            _, old = await _dial(wire)
            old.write(b"first ")
            await until(lambda: echo.received() >= 6)
            wire.freeze(Way.UP)
            old.write(b"late")
            old.close()
            await old.wait_closed()
            reader, new = await _dial(wire)
            new.write(b"back again")
            assert await reader.readexactly(10) == b"back again"
            assert [bytes(each) for each in echo.heard] == [b"first ", b"back again"]
            wire.thaw()
            await until(lambda: echo.received() >= 20)
            assert [bytes(each) for each in echo.heard] == [b"first late", b"back again"]
            new.close()

    _story(story())


def test_a_refusing_wire_refuses_and_takes_connections_on_the_same_port_later() -> None:
    """As a coordinator does that is restarted."""

    async def story() -> None:
        async with _Echo().listening() as port, Wire(("127.0.0.1", port)) as wire:
            before = wire.port
            wire.refuse()
            with pytest.raises(ConnectionRefusedError):
                await _dial(wire)
            await wire.listen()
            assert wire.port == before
            reader, writer = await _dial(wire)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            writer.close()

    _story(story())


def test_a_wire_to_nobody_resets_whoever_dials() -> None:
    """The target is away: the connection ends at once."""

    async def story() -> None:
        async with _Echo().listening() as port:
            pass
        async with Wire(("127.0.0.1", port)) as wire:
            reader, _ = await _dial(wire)
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(1)

    _story(story())


def test_a_wire_follows_a_target_that_moved() -> None:
    """Connections made afterwards reach the new place under the old address."""

    async def story() -> None:
        old, new = _Echo(b"old "), _Echo(b"new ")
        async with old.listening() as first, new.listening() as second, Wire(("127.0.0.1", first)) as wire:
            for expected, port in ((b"old x", second), (b"new x", first)):
                reader, writer = await _dial(wire)
                writer.write(b"x")
                assert await reader.readexactly(5) == expected
                wire.target = ("127.0.0.1", port)
                writer.close()

    _story(story())


def _due(weather: Weather, sizes: list[int], seed: int = 0) -> list[float]:
    """When parts that come in at once come out, in seconds from now."""

    async def story() -> list[float]:
        wire = Wire(("127.0.0.1", 1), weather, seed=seed)
        loop = asyncio.get_running_loop()
        loop.time = lambda: 100.0  # type: ignore[method-assign]  # a clock that stands still
        return [due - 100.0 for due in wire.forecast(sizes)]

    return asyncio.run(story())


def test_latency_and_jitter_delay_each_part_within_their_bounds() -> None:
    """The same seed draws the same delays, another one others; without jitter there is the latency alone."""
    weather = Weather(latency=0.3, jitter=0.1)
    delays = _due(weather, [1000] * 50, seed=1)
    assert all(0.3 <= delay <= 0.4 for delay in delays)
    assert delays == _due(weather, [1000] * 50, seed=1)
    assert delays != _due(weather, [1000] * 50, seed=2)
    assert _due(Weather(latency=0.3), [1000] * 3) == pytest.approx([0.3] * 3)


def test_a_lost_packet_stalls_everything_behind_it() -> None:
    """At 2 % loss about every fiftieth packet costs a time-out, and nothing overtakes it."""
    delays = _due(Weather(loss=0.02, retransmission=0.2), [1460] * 1000)
    assert delays == sorted(delays)
    assert 10 <= round(delays[-1] / 0.2) <= 30
    assert _due(Weather(loss=1.0, retransmission=0.5), [1460 * 3]) == pytest.approx([1.5])


def test_throttling_lets_so_many_bytes_pass_in_a_second() -> None:
    """A hundred thousand bytes at ten thousand a second take ten seconds."""
    assert _due(Weather(rate=10_000), [25_000] * 4) == pytest.approx([2.5, 5.0, 7.5, 10.0])


def test_bad_weather_delays_and_changes_nothing() -> None:
    """What passes a slow and lossy wire is whole and in order."""

    async def story() -> None:
        sent = np.random.default_rng(1).bytes(200_000)
        weather = Weather(latency=0.002, jitter=0.002, loss=0.02, retransmission=0.002, rate=20e6)
        async with _Echo().listening() as port, Wire(("127.0.0.1", port), weather) as wire:
            reader, writer = await _dial(wire)
            writer.write(sent)
            assert await reader.readexactly(len(sent)) == sent
            writer.close()

    _story(story())


# -------------------------------------------------------------------------------------------------------------- proxies


async def _connect(
    proxy: Proxy, target: str, credentials: str = ""
) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
    """A tunnel, and what the proxy said first."""
    reader, writer = await _dial(proxy)
    login = base64.b64encode(credentials.encode()).decode()
    field = f"Proxy-Authorization: Basic {login}\r\n" if credentials else ""
    writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{field}\r\n".encode())
    said = (await reader.readuntil(b"\r\n\r\n")).decode()
    return said.splitlines()[0].removeprefix("HTTP/1.1 "), reader, writer


def test_a_proxy_opens_tunnels_and_counts_them() -> None:
    """It resolves the names that only it knows."""

    async def story() -> None:
        async with _Echo().listening() as port, Proxy(hosts={"hub.example.org": "127.0.0.1"}) as proxy:
            for host in ("127.0.0.1", "hub.example.org"):
                status, reader, writer = await _connect(proxy, f"{host}:{port}")
                assert status == "200 Connection established"
                writer.write(b"hello")
                assert await reader.readexactly(5) == b"hello"
                writer.close()
            assert proxy.tunnels == 2
            assert proxy.asked == [f"127.0.0.1:{port}", f"hub.example.org:{port}"]

    _story(story())


@pytest.mark.parametrize(
    ("credentials", "status"),
    [
        ("", "407 Proxy Authentication Required"),
        ("ann:wrong", "407 Proxy Authentication Required"),
        ("ann:s3cret", "200 Connection established"),
    ],
)
def test_a_proxy_with_a_password_opens_tunnels_to_whoever_knows_it(credentials: str, status: str) -> None:
    """Everybody else is asked for it."""

    async def story() -> None:
        async with _Echo().listening() as port, Proxy(credentials="ann:s3cret") as proxy:
            said, _, writer = await _connect(proxy, f"127.0.0.1:{port}", credentials)
            assert said == status
            assert proxy.tunnels == (1 if status.startswith("200") else 0)
            writer.close()

    _story(story())


def test_a_proxy_refuses_as_it_is_told_and_when_the_target_is_away() -> None:
    """403 by its rules, 502 when nobody listens."""

    async def story() -> None:
        async with _Echo().listening() as port, Proxy(refusal="403 Forbidden") as proxy:
            assert (await _connect(proxy, f"127.0.0.1:{port}"))[0] == "403 Forbidden"
            proxy.refusal = ""
        async with Proxy() as proxy:
            assert (await _connect(proxy, f"127.0.0.1:{port}"))[0] == "502 Bad Gateway"
            assert proxy.tunnels == 0

    _story(story())


def test_an_inspector_shows_a_certificate_of_its_own_root_for_any_name() -> None:
    """Whoever trusts that root is let through to the target; whoever does not hangs up."""

    async def story() -> None:
        inspector = Inspector("Zealous Firewalls")
        async with _Echo().listening() as port, Wire(("127.0.0.1", port), inspector=inspector) as wire:
            trusting = ssl.create_default_context(cadata=inspector.root_pem)
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", wire.port, ssl=trusting, server_hostname="hub.heart-study.parley"
            )
            issuer = writer.get_extra_info("peercert")["issuer"]
            assert (("organizationName", "Zealous Firewalls"),) in issuer
            writer.write(b"in the clear behind it")
            assert await reader.readexactly(22) == b"in the clear behind it"
            writer.close()
            with pytest.raises(ssl.SSLCertVerificationError):
                await asyncio.open_connection("127.0.0.1", wire.port, ssl=ssl.create_default_context())

    _story(story())


def test_an_inspecting_proxy_opens_the_tls_in_its_tunnels() -> None:
    """The certificate inside of the tunnel is the proxy's, although the target's address was asked for."""

    async def story() -> None:
        inspector = Inspector()
        async with _Echo().listening() as port, Proxy(inspector=inspector) as proxy:
            _, reader, writer = await _connect(proxy, f"127.0.0.1:{port}")
            await writer.start_tls(ssl.create_default_context(cadata=inspector.root_pem), server_hostname="hub.parley")
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            writer.close()

    _story(story())
