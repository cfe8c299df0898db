"""How commands reach the coordinator: as the member whose home this is."""

from client.connection import Connection, Line
from federation import codec
from federation.messages import OperatorReply, OperatorRequest
from parley.homes import Identity, MemberHome
from parley.terminal import run

__all__ = ["ask", "line"]


def line(me: Identity, proxy: str = "") -> Line:
    """The line of an enrolled member."""
    return Line(
        address=me.connection.address,
        tls_name=me.connection.tls_name,
        root_certificate=me.root.pem,
        certificate=me.certificate,
        tls_key=me.keys.tls_pem,
        statement=codec.encode(me.statement),
        proxy=proxy,
    )


def ask(operator: MemberHome, request: OperatorRequest) -> OperatorReply:
    """The coordinator's answer to an operator's request."""

    async def answered() -> OperatorReply:
        async with Connection.opened(line(operator.load())) as connection:
            return await connection.operate(request)

    return run(answered())
