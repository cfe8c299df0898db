"""A relay before a PostgreSQL server that breaks a connection off at its next commit."""

import contextlib
import socket
import threading
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self

__all__ = ["Cut", "Relay"]


class Cut(Enum):
    """Where the next commit breaks off."""

    UNHEARD = "before the server hears of it"
    UNANSWERED = "after the server kept it, before its answer"
    HALF_OPEN = "as before, and the server believes the connection to be alive"


@dataclass(slots=True)
class Link:
    """One connection, on both sides of the relay."""

    client: socket.socket
    server: socket.socket
    cut: Cut | None = None


class Relay:
    """Passes bytes on between a port of its own and a server's, both on loopback; `cut` is done once, and then None."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._links: list[Link] = []
        self.port: int = self._listening.getsockname()[1]
        self.cut: Cut | None = None

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _close(self._listening, *(end for link in self._links for end in (link.client, link.server)))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                link = Link(client, socket.create_connection(("127.0.0.1", self._server)))
                self._links.append(link)
                for work in (self._ask, self._answer):
                    threading.Thread(target=work, args=(link,), daemon=True).start()

    def _ask(self, link: Link) -> None:
        """From the client to the server."""
        with contextlib.suppress(OSError):
            while heard := link.client.recv(65536):
                if b"COMMIT" in heard:
                    link.cut, self.cut = self.cut, None
                if link.cut is Cut.UNHEARD:
                    break
                link.server.sendall(heard)
        self._end(link)

    def _answer(self, link: Link) -> None:
        """From the server to the client."""
        with contextlib.suppress(OSError):
            while heard := link.server.recv(65536):
                if link.cut is not None:
                    break
                link.client.sendall(heard)
        self._end(link)

    def _end(self, link: Link) -> None:
        if link.cut is not Cut.HALF_OPEN:
            _close(link.server)
        _close(link.client)


def _close(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
