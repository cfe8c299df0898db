"""What the tests of training share: a site's folder with a registered table, and the files of a round."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from client.data.registry import DataSet, DataSets
from client.training.protocol import CheckData, Evaluate, Subject, Train
from federation import job as job_file
from federation.vector import F32, to_safetensors
from tasks import tabular
from tasks.models import model


@dataclass(frozen=True)
class Site:
    """A site's folder, its job, and the paths of one round's files."""

    folder: Path
    text: str
    csv: Path

    @property
    def subject(self) -> Subject:
        """The job on the registered table."""
        return Subject(self.text, "patients", str(self.folder))

    @property
    def quick(self) -> CheckData:
        """A request that is answered without reading data: of a data set that nobody registered."""
        return CheckData(Subject(self.text, "lungs", str(self.folder)))

    @property
    def output(self) -> Path:
        """Where results are written."""
        return self.folder / "result"

    @property
    def job(self) -> job_file.Job:
        """The parsed job."""
        return job_file.parse(self.text)

    def train(self, **changes: object) -> Train:
        """A training request for the first round."""
        request = {
            "subject": self.subject,
            "site": "north",
            "round_number": 1,
            "model": str(self.folder / "model"),
            "preparation": str(self.folder / "preparation"),
            "output": str(self.output),
        }
        return Train(**{**request, **changes})  # type: ignore[arg-type]  # a test names the fields it changes

    def evaluate(self) -> Evaluate:
        """An evaluation request for the same model."""
        return Evaluate(self.subject, str(self.folder / "model"), str(self.folder / "preparation"), str(self.output))

    def write_model(self) -> F32:
        """The job's untrained model as a file; its values."""
        task = tabular.make(self.job)
        layout, flat = model.state_vector(model.build(self.job.model, task.features, task.outputs, seed=0))
        (self.folder / "model").write_bytes(to_safetensors(layout, flat))
        return flat


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A site with the example's job and sixty rows, its preparation written."""
    text, table = tabular.example(np.random.default_rng(0))
    csv = tmp_path / "patients.csv"
    table.to_csv(csv, index=False)
    DataSets(tmp_path).add(DataSet.of("patients", str(csv)))
    made = Site(tmp_path, text, csv)
    task = tabular.make(made.job)
    (tmp_path / "preparation").write_bytes(task.prepare(task.statistics(table)))
    return made
