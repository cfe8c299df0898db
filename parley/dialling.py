"""How commands reach the coordinator: as the member whose home this is."""

import os

from client.connection import Connection, Line
from client.proxy import chosen
from federation import codec
from federation.messages import OperatorReply, OperatorRequest
from parley.homes import MemberHome
from parley.terminal import run

__all__ = ["ask", "line"]


def line(member: MemberHome, proxy: str = "") -> Line:
    """The line of the member whose home this is; `proxy` goes before its file and the environment.

    Raises:
        ConfigurationError: The proxy cannot be used.
        StorageError: There is no member here.
    """
    me = member.load()
    return Line(
        address=me.connection.address,
        tls_name=me.connection.tls_name,
        root_certificate=me.root.pem,
        certificate=me.certificate,
        tls_key=me.keys.tls_pem,
        statement=codec.encode(me.statement),
        proxy=chosen(me.connection.address, os.environ, flag=proxy, folder=member.folder),
    )


def ask(operator: MemberHome, request: OperatorRequest) -> OperatorReply:
    """The coordinator's answer to an operator's request."""

    async def answered() -> OperatorReply:
        async with Connection.opened(line(operator)) as connection:
            return await connection.operate(request)

    return run(answered())
