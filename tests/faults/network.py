"""A network that can be broken on purpose: TCP links, CONNECT proxies and inspectors of TLS, all of them on loopback.

```
client --TCP------> Wire  --TCP--> target          cut, frozen, slow, lossy, throttled, refused, moved
client --CONNECT--> Proxy --TCP--> target          with or without a password; refuses; may inspect TLS
client --TLS------> Wire(inspector=...) --clear--> target    opens TLS with a certificate of its own root
```

Everything lives in the event loop of the test that opens it, and what is random is drawn from a seed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import math
import random
import socket
import ssl
import struct
import tempfile
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Cut", "End", "Inspector", "Proxy", "Way", "Weather", "Wire"]

Place = tuple[str, int]
"""Host and port."""

_PART = 16 * 1024
"""Bytes that are read, and judged by the weather, at once."""
_PACKET = 1460
"""Bytes in a packet of Ethernet."""
_UNDER_WAY = 64
"""Parts that may be under way before the sender is held back, as TCP's window does."""


class Way(Enum):
    """The two directions of a connection, as the client sees them."""

    UP = "to the target"
    DOWN = "from the target"


class End(Enum):
    """How a connection ends: in order, or as when a machine or a firewall throws it away."""

    FIN = "closed"
    RST = "reset"


@dataclass(frozen=True, slots=True)
class Weather:
    """What a wire does to everything that passes it, each way.

    Packet loss is not visible on a TCP connection; what is visible is that everything stands still until the packet was
    sent again. So each lost packet stalls its direction for `retransmission` seconds, as TCP's time-out does.

    Args:
        latency: Seconds from one end to the other.
        jitter: Up to so many seconds more, drawn for each part; parts never overtake each other.
        loss: Probability that a packet of 1460 bytes is lost.
        retransmission: Seconds until a lost packet is sent again.
        rate: Bytes a second.
    """

    latency: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    retransmission: float = 0.2
    rate: float = math.inf

    def stall(self, size: int, chance: random.Random) -> float:
        """Seconds for which `size` bytes stand still because packets of theirs are lost."""
        packets = math.ceil(size / _PACKET)
        return self.retransmission * sum(chance.random() < self.loss for _ in range(packets))


@dataclass(frozen=True, slots=True)
class Cut:
    """Ends a connection once `after` bytes, and not one more, have passed in one direction."""

    after: int
    way: Way = Way.UP
    end: End = End.RST


class _Delays:
    """When the parts of one direction come out."""

    def __init__(self, wire: Wire, seed: str) -> None:
        self._wire = wire
        self._chance = random.Random(seed)  # noqa: S311 - weather is no secret
        self._sent = 0.0

    def due(self, size: int) -> float:
        """When a part comes out that came in now."""
        weather, now = self._wire.weather, asyncio.get_running_loop().time()
        self._sent = max(now, self._sent) + size / weather.rate + weather.stall(size, self._chance)
        return self._sent + weather.latency + self._chance.uniform(0, weather.jitter)


class _Pump:
    """One direction of a link: parts come in, wait as the weather demands, and go out in order."""

    def __init__(self, link: _Link, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._link = link
        self._way = way
        self._reader = reader
        self._writer = writer
        self._delays = _Delays(link.wire, f"{link.wire.seed} {link.number} {way.value}")
        self._waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_UNDER_WAY)
        self.flows = asyncio.Event()
        self.flows.set()
        self.passed = 0

    async def read(self) -> None:
        """Takes parts in until the sender is done; a reset counts as done, for what it sent before may still arrive."""
        part = b"begin"
        while part:
            try:
                part = await self._reader.read(_PART)
            except OSError:
                part = b""
            await self._waiting.put((self._delays.due(len(part)), part))

    async def write(self) -> None:
        """Gives parts out when they are due; while the direction is frozen they wait."""
        clock = asyncio.get_running_loop().time
        while True:
            due, part = await self._waiting.get()
            await asyncio.sleep(max(0.0, due - clock()))
            await self.flows.wait()
            if not part:
                break
            allowed = self._link.allowed(self._way, self.passed, len(part))
            with contextlib.suppress(OSError):  # the receiver is gone: what was sent is lost, as it would be
                self._writer.write(part[:allowed])
                await self._writer.drain()
            self.passed += allowed
            self._link.wire.passed[self._way] += allowed
            if allowed < len(part) or self._link.burnt(self._way, self.passed):
                raise _Burnt
        _hang_up(self._writer)


class _Burnt(Exception):  # noqa: N818 - no error: the cut that was asked for
    """So many bytes have passed as were allowed."""


class _Link:
    """One client's connection through a wire."""

    def __init__(self, wire: Wire, number: int, cut: Cut | None) -> None:
        self.wire = wire
        self.number = number
        self._cut = cut
        self._sides: list[asyncio.StreamWriter] = []
        self._pumps: dict[Way, _Pump] = {}

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connects to where the target is now, and pumps until both sides are done or the cut is reached."""
        self._sides.append(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.wire.target)
        except OSError:
            self.end(End.RST)
            return
        self._sides.append(far_writer)
        up, down = _Pump(self, Way.UP, reader, far_writer), _Pump(self, Way.DOWN, far_reader, writer)
        self._pumps = {Way.UP: up, Way.DOWN: down}
        try:
            async with asyncio.TaskGroup() as pumps:
                for pump in (up, down):
                    pumps.create_task(pump.read())
                    pumps.create_task(pump.write())
            self.end(End.FIN)
        except* _Burnt:
            self.end(self._cut.end if self._cut else End.RST)
        finally:
            self.end(End.RST)

    def allowed(self, way: Way, passed: int, size: int) -> int:
        """How many of `size` further bytes may pass."""
        if self._cut is None or self._cut.way is not way:
            return size
        return min(size, self._cut.after - passed)

    def burnt(self, way: Way, passed: int) -> bool:
        """Whether the cut is reached."""
        return self._cut is not None and self._cut.way is way and passed >= self._cut.after

    def freeze(self, *ways: Way) -> None:
        """Nothing comes out any more in these directions; neither side is told."""
        for way in ways:
            if way in self._pumps:
                self._pumps[way].flows.clear()

    def thaw(self) -> None:
        """What waited comes out."""
        for pump in self._pumps.values():
            pump.flows.set()

    def end(self, end: End) -> None:
        """Ends both sides; what is under way is lost."""
        for side in self._sides:
            _end(side, end)
        self._sides.clear()
        self.thaw()


def _end(writer: asyncio.StreamWriter, end: End) -> None:
    if end is End.FIN:
        writer.close()
        return
    plain = writer.get_extra_info("socket")
    if plain is not None and plain.fileno() >= 0:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class _Server:
    """A listening socket on loopback whose port stays the same when it is closed and opened again."""

    def __init__(self) -> None:
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """host:port to dial."""
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.refuse()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def listen(self) -> None:
        """Takes connections."""
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
            self.port = int(self._server.sockets[0].getsockname()[1])

    def refuse(self) -> None:
        """Takes no connection from now on; open ones go on. The operating system refuses in our name."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(asyncio.CancelledError):  # asyncio's own callback would complain of it
            try:
                await self._serve(reader, writer)
            finally:
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class Wire(_Server):
    """A TCP connection to `target` that can be broken; dial `address` instead of the target.

    Args:
        target: Where connections lead; change it, and the next ones lead elsewhere.
        weather: What happens to everything that passes; change it at any time.
        inspector: Opens TLS with a certificate of its own, and sends on in the clear.
        seed: Draws jitter and loss.
    """

    def __init__(
        self, target: Place, weather: Weather = Weather(), *, inspector: Inspector | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.target = target
        self.weather = weather
        self.seed = seed
        self.opened_links = 0
        self.passed = {Way.UP: 0, Way.DOWN: 0}
        self._inspector = inspector
        self._holds_new = False
        self._links: list[_Link] = []
        self._cuts: deque[Cut] = deque()

    def forecast(self, sizes: list[int]) -> list[float]:
        """When parts of these sizes, all of which come in now, come out of the first connection's way up."""
        delays = _Delays(self, f"{self.seed} 0 {Way.UP.value}")
        return [delays.due(size) for size in sizes]

    def cut(self, end: End = End.RST) -> None:
        """Ends every open connection now, wherever its messages are."""
        for link in list(self._links):
            link.end(end)

    def cut_next(self, *cuts: Cut) -> None:
        """Each of the next connections ends at its cut; those after them do not."""
        self._cuts.extend(cuts)

    def hold_new(self) -> None:
        """Connections made from now on are taken, and nothing comes out of them: so a firewall swallows packets."""
        self._holds_new = True

    def freeze(self, *ways: Way) -> None:
        """The connections that are open now become half-open: nothing comes out of them (both ways, unless told which).

        Neither side is told, and new connections are not touched: so a firewall forgets a connection.
        """
        for link in self._links:
            link.freeze(*(ways or Way))

    def thaw(self) -> None:
        """What the frozen connections held comes out now, even if its sender has long been back on another one."""
        for link in self._links:
            link.thaw()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._inspector is not None:
            await writer.start_tls(self._inspector.context())
        if self._holds_new:
            await asyncio.get_running_loop().create_future()  # until the wire is taken down
        link = _Link(self, self.opened_links, self._cuts.popleft() if self._cuts else None)
        self.opened_links += 1
        self._links.append(link)
        try:
            await link.run(reader, writer)
        finally:
            self._links.remove(link)


class Proxy(_Server):
    """An HTTP proxy that knows CONNECT alone, as a hospital's does.

    Args:
        credentials: `user:password` that it asks for; none asks for nothing.
        refusal: A status with which it refuses every CONNECT, such as "403 Forbidden".
        hosts: Names that it knows, and nobody else: where they lead.
        inspector: Opens the TLS inside of each tunnel with a certificate of its own, and sends on in the clear.
    """

    def __init__(
        self,
        *,
        credentials: str = "",
        refusal: str = "",
        hosts: Mapping[str, str] | None = None,
        inspector: Inspector | None = None,
    ) -> None:
        super().__init__()
        self.tunnels = 0
        self.asked: list[str] = []
        self.refusal = refusal
        self._expected = "Basic " + base64.b64encode(credentials.encode()).decode() if credentials else ""
        self._hosts = hosts or {}
        self._inspector = inspector

    def url(self, credentials: str = "") -> str:
        """How a client names it."""
        return f"http://{credentials}@{self.address}" if credentials else f"http://{self.address}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except (asyncio.IncompleteReadError, OSError):
            return
        method, target, _ = head[0].split(" ")
        fields = dict(line.split(": ", 1) for line in head[1:] if line)
        self.asked.append(target)
        if self._expected and fields.get("Proxy-Authorization") != self._expected:
            await _answer(writer, "407 Proxy Authentication Required", 'Proxy-Authenticate: Basic realm="hospital"')
        elif method != "CONNECT":
            await _answer(writer, "405 Method Not Allowed")
        elif self.refusal:
            await _answer(writer, self.refusal)
        else:
            await self._tunnel(target, reader, writer)

    async def _tunnel(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = target.rpartition(":")
        host = self._hosts.get(host, host).strip("[]")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            await _answer(writer, "502 Bad Gateway")
            return
        self.tunnels += 1
        await _answer(writer, "200 Connection established")
        try:
            if self._inspector is not None:
                await writer.start_tls(self._inspector.context())
            await asyncio.gather(_poured(reader, far_writer), _poured(far_reader, writer))
        except OSError:
            pass  # one of the sides does not trust us, or hung up
        finally:
            far_writer.close()


def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Says that nothing more comes from this side."""
    if not writer.can_write_eof():
        writer.close()  # TLS knows no half-closed connection
        return
    with contextlib.suppress(OSError):
        writer.write_eof()


async def _answer(writer: asyncio.StreamWriter, status: str, *fields: str) -> None:
    writer.write("\r\n".join((f"HTTP/1.1 {status}", *fields, "", "")).encode())
    with contextlib.suppress(OSError):
        await writer.drain()


async def _poured(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(_PART):
        writer.write(part)
        await writer.drain()
    _hang_up(writer)


@dataclass(frozen=True)
class Inspector:
    """Whoever opens TLS to look inside: shows, for each name asked for, a certificate of its own root.

    Args:
        organisation: Stands in the issuer's name.
    """

    organisation: str = "Zealous Firewalls"
    _key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def name(self) -> x509.Name:
        """Its name, as an issuer."""
        common = x509.NameAttribute(NameOID.COMMON_NAME, f"{self.organisation} Inspection CA")
        return x509.Name([common, x509.NameAttribute(NameOID.ORGANIZATION_NAME, self.organisation)])

    @property
    def root_pem(self) -> str:
        """Its root's certificate, which a hospital's machines trust and Parley does not."""
        signed = self._builder(self.name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)  # noqa: FBT003 - x509's signature
        return signed.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()

    def context(self) -> ssl.SSLContext:
        """A server's TLS that bears whatever name the client asks for; 127.0.0.1 for a client that asks for none."""
        context = self._bearing("127.0.0.1")

        def named(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            if name:
                connection.context = self._bearing(name)

        context.sni_callback = named
        return context

    def _bearing(self, host: str) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        names = x509.SubjectAlternativeName([_general(host)])
        certificate = self._builder(subject, key).add_extension(names, critical=False).sign(self._key, hashes.SHA256())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["h2", "http/1.1"])
        with tempfile.TemporaryDirectory() as folder:  # ssl takes certificates from files alone
            file = Path(folder) / "chain.pem"
            secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            file.write_bytes(secret + certificate.public_bytes(Encoding.PEM))
            context.load_cert_chain(file)
        return context

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return x509.CertificateBuilder(
            self.name,
            subject,
            key.public_key(),
            x509.random_serial_number(),
            now - timedelta(days=1),
            now + timedelta(days=30),
        )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
