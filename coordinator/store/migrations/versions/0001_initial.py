"""The first schema: members, enrolments, revocations, jobs with their steps, models, presence."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Brings the schema to this revision."""
    op.create_table(
        "job",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.Column("submitted", sa.Double(), nullable=False),
        sa.Column("initial_model", sa.String(length=96), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("started", sa.Double(), nullable=False),
        sa.Column("ended", sa.Double(), nullable=False),
        sa.Column("next_step", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("evaluated_round", sa.Integer(), nullable=False),
        sa.Column("best_round", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(length=96), nullable=True),
        sa.Column("best_model", sa.String(length=96), nullable=True),
        sa.Column("strategy_state", sa.String(length=96), nullable=True),
        sa.Column("preparation", sa.String(length=96), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "member",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("serial", sa.String(), nullable=False),
        sa.Column("statement", sa.LargeBinary(), nullable=False),
        sa.Column("certificate", sa.LargeBinary(), nullable=False),
        sa.Column("added", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("serial"),
    )
    op.create_table(
        "migration",
        sa.Column("revision", sa.String(), nullable=False),
        sa.Column("software", sa.String(), nullable=False),
        sa.Column("migrated", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("revision"),
    )
    op.create_table(
        "presence",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("connected", sa.Boolean(), nullable=False),
        sa.Column("last_seen", sa.Double(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("trouble", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "revocations",
        sa.Column("consortium", sa.String(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("consortium"),
    )
    op.create_table(
        "enrolment",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("invitation", sa.String(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("requested", sa.Double(), nullable=False),
        sa.Column("serial", sa.String(), nullable=True),
        sa.Column("approved", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["serial"], ["member.serial"]),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("invitation"),
    )
    op.create_table(
        "jobsite",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("site", sa.String(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("answer", sa.String(), nullable=False),
        sa.Column("findings", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["job.id"]),
        sa.PrimaryKeyConstraint("job", "site"),
    )
    op.create_table(
        "seat",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("statement", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["job.id"]),
        sa.PrimaryKeyConstraint("job", "position"),
    )
    op.create_table(
        "step",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("started", sa.Double(), nullable=False),
        sa.Column("ended", sa.Double(), nullable=False),
        sa.Column("model", sa.String(length=96), nullable=True),
        sa.Column("strategy_state", sa.String(length=96), nullable=True),
        sa.Column("preparation", sa.String(length=96), nullable=True),
        sa.Column("best_round", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["job.id"]),
        sa.PrimaryKeyConstraint("job", "number"),
    )
    op.create_table(
        "metric",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job", "step"], ["step.job", "step.number"]),
        sa.PrimaryKeyConstraint("job", "step", "position"),
    )
    op.create_table(
        "model",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("payload", sa.String(length=96), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("card", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["job", "step"], ["step.job", "step.number"]),
        sa.PrimaryKeyConstraint("job"),
    )
    op.create_table(
        "share",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("site", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("cause", sa.String(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job", "step"], ["step.job", "step.number"]),
        sa.PrimaryKeyConstraint("job", "step", "position"),
        sa.UniqueConstraint("job", "step", "site"),
    )
    op.create_table(
        "modelmetric",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["model.job"]),
        sa.PrimaryKeyConstraint("job", "position"),
    )
