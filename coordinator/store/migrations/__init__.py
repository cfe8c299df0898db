"""The schema's history, one file a change, applied by the store when it opens a database.

A developer drafts the next one with `alembic.command.revision(database.alembic_config(connection), message=...,
autogenerate=True)`, over a connection to a store that has all earlier ones.
"""
