"""`parley model` and `parley predict`: fetch trained models and use them."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from client.connection import Connection
from federation.blobs import BlobStore
from federation.disclosure import shown
from federation.errors import ConfigurationError, LocalProtocolError, StorageError, WhoActs
from federation.messages import ListModels, Models, ModelView, OperatorReply, ShowModel
from parley import measured
from parley.dialling import ask, line
from parley.homes import MemberHome
from parley.terminal import HomeOption, JsonOption, console, emit, home, moment, run

__all__ = ["app", "fetch", "predict"]

app = typer.Typer(no_args_is_help=True, help="Trained models: list, show, get.")

ModelArgument = Annotated[str, typer.Argument(help="A job's id, or the beginning of a model's digest.")]


@app.command("list")
def list_models(home_: HomeOption = None, as_json: JsonOption = False) -> None:
    """Lists the final models, the newest first."""
    reply = ask(home(home_).operator, ListModels())
    if not isinstance(reply, Models):
        raise _unexpected(reply)
    if as_json:
        emit([_summary(each) for each in reply.models])
        return
    table = Table("job", "digest", "round", "metrics", "created (UTC)")
    for each in reply.models:
        metrics = measured.words(each.metrics)
        table.add_row(each.job, each.payload.hex[:12], str(each.round), metrics, moment(each.created))
    console.print(table if reply.models else "No job has finished yet. Next:  parley job list")


@app.command()
def show(model: ModelArgument, home_: HomeOption = None, as_json: JsonOption = False) -> None:
    """Shows a model's card: what it is, where it came from, how good it is, what was promised about privacy."""
    view = _shown(home(home_).operator, model)
    card = json.loads(view.card)
    if as_json:
        emit(card)
        return
    console.print(
        f"[bold]{card['job_id']}[/]  {card['model']} by {card['strategy']}, round {card['round']} of {card['rounds']}"
    )
    console.print(f"digest {card['model_digest']}", highlight=False)
    console.print(f"metrics  {measured.words(view.metrics)}")
    console.print("sites    " + ", ".join(f"{site['name']} ({site['organisation']})" for site in card["sites"]))
    console.print("columns  " + ", ".join(column["name"] for column in card["contract"]["columns"]), markup=False)
    console.print(f"privacy  {card['privacy']['statement']}", markup=False)


@app.command()
def get(
    model: ModelArgument,
    to: Annotated[Path | None, typer.Option(help="Folder to write to [default: ./MODEL].", show_default=False)] = None,
    home_: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetches a model: model.safetensors and card.json in one folder."""
    folder = to or Path(model)
    view = fetch(home(home_).operator, model, folder)
    if as_json:
        emit({"folder": folder, **_summary(view)})
    else:
        console.print(f"{folder}: model.safetensors ({view.payload.length} bytes) and card.json")
        console.print(f"Next:  parley predict {folder} DATA.csv")


def fetch(operator: MemberHome, model: str, folder: Path) -> ModelView:
    """Writes a model's package to `folder`, which must be new or empty.

    Raises:
        ConfigurationError: The folder holds something already.
        StorageError: The folder cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(
            f"{folder} is there already and not empty", fix="name another folder with --to", who=WhoActs.YOU
        )
    view = _shown(operator, model)

    async def brought(blobs: BlobStore) -> None:
        async with Connection.opened(line(operator)) as connection:
            await connection.download(view.payload, blobs)

    with tempfile.TemporaryDirectory() as scratch:
        blobs = BlobStore(Path(scratch))
        run(brought(blobs))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.move(blobs.path(view.payload), folder / "model.safetensors")
            (folder / "card.json").write_text(view.card)
        except OSError as refused:
            raise StorageError(f"cannot write {folder}: {refused.strerror}", fix="name another with --to") from refused
    return view


def predict(
    model: Annotated[Path, typer.Argument(help="A model's folder, as `parley model get` made it.")],
    data: Annotated[Path, typer.Argument(help="CSV or Parquet file with the contract's columns.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="CSV to write [default: standard output].", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predicts a row for each row of DATA; nothing leaves this machine."""
    from client.data import readers
    from client.data.registry import DataSet
    from serving.predictor import Predictor

    if not data.is_file():
        raise ConfigurationError(
            f"there is no file {data}", fix="name a CSV or Parquet file with the contract's columns", who=WhoActs.YOU
        )
    table = readers.read(DataSet.of("data", str(data)))
    predictions = Predictor.load(model).predict(table)
    if as_json:
        emit(json.loads(predictions.to_json(orient="records")))
    elif output is not None:
        try:
            predictions.to_csv(output, index=False)
        except OSError as refused:
            problem = f"cannot write {output}: {refused.strerror or refused}"
            raise StorageError(problem, fix="name another file with --output") from refused
        console.print(f"{len(predictions)} predictions in {output}")
    else:
        print(predictions.to_csv(index=False), end="")


def _shown(operator: MemberHome, model: str) -> ModelView:
    reply = ask(operator, ShowModel(model))
    if not isinstance(reply, ModelView):
        raise _unexpected(reply)
    return reply


def _summary(view: ModelView) -> dict[str, object]:
    return {
        "job": view.job,
        "name": view.name,
        "digest": view.payload.hex,
        "bytes": view.payload.length,
        "round": view.round,
        "metrics": {metric.name: metric.value for metric in shown(view.metrics)},
        "created": view.created,
    }


def _unexpected(reply: OperatorReply) -> LocalProtocolError:
    return LocalProtocolError(f"the coordinator answered with {type(reply).__name__}, which was not asked for")
