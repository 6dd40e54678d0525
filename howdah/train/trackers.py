"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow (`train.tracker`).

    tensorboard   RUN/tensorboard/    event files of our own (`tensorboard.py`)
    wandb         RUN/wandb/          offline, unless WANDB_MODE says else; `wandb sync` uploads it
    mlflow        RUN/mlruns/         files, unless MLFLOW_TRACKING_URI names a server

The two others are packages that a user installs. RUN/trackers.json keeps by which id they know the
run, so that a resumed run goes on in it. Whatever fails in them is one note, and training goes on.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from time import time
from typing import Any, Protocol

from howdah.base.atomic import write_text
from howdah.base.errors import brief
from howdah.base.files import parse_json
from howdah.base.signals import stop_behind
from howdah.train.optional import importing
from howdah.train.tensorboard import Board

IDS = "trackers.json"
PROJECT = "howdah"  # the project of wandb, and the experiment of mlflow
MANY = 100  # parameters of a run that mlflow takes at once
LONG = 500  # characters of one that it takes
INSTALLED_BY = {"wandb": "wandb", "mlflow": "mlflow-skinny"}  # what pip calls the package


class Tracker(Protocol):
    """Takes the metrics of a run."""

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Adds the values of `step`. Raises OSError or ImportError when that is impossible."""
        ...

    def close(self) -> None:
        """Ends what the tracker has begun; a resumed run goes on."""
        ...


def tracker_problems(names: Sequence[str]) -> Iterator[str]:
    """Yields which trackers are not installed."""
    for name in names:
        if (package := INSTALLED_BY.get(name)) and find_spec(name) is None:
            yield (
                f"train.tracker has {name}, which is not installed: pip install {package}, or "
                "leave it out"
            )


def trackers(
    names: Sequence[str], folder: Path, *, run: str, step: int, keys: Mapping[str, object]
) -> dict[str, Tracker]:
    """The trackers of a run by name.

    folder  the run folder
    run     name of the run
    step    the step from which it starts or resumes
    keys    what the run is trained with, by dotted name
    """
    made: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: Board(folder / "tensorboard", step=step),
        "wandb": lambda: Wandb(folder, run, keys),
        "mlflow": lambda: Mlflow(folder, run, keys),
    }
    return {name: made[name]() for name in dict.fromkeys(names)}


class Wandb:
    """A run of Weights & Biases, begun with its first values."""

    def __init__(self, folder: Path, run: str, keys: Mapping[str, object]) -> None:
        self._folder, self._name, self._keys = folder, run, dict(keys)
        self._run: Any = None

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Adds the values of `step`; their axis is `step`, so that steps may be done again."""
        with _inside("wandb"):
            if self._run is None:
                self._run = self._begun()
            self._run.log({**scalars, "step": step})

    def _begun(self) -> Any:
        with importing("wandb"):
            wandb: Any = import_module("wandb")
        name = _id_of(self._folder, "wandb") or token_hex(4)
        quiet = {"silent": True, "console": "off", "disable_git": True, "save_code": False}
        settings = wandb.Settings(**quiet, x_disable_stats=True, x_disable_meta=True)
        about = {"id": name, "resume": "allow", "name": self._name, "config": self._keys}
        begun = wandb.init(project=PROJECT, dir=str(self._folder), settings=settings, **about)
        begun.define_metric("*", step_metric="step")
        _keep_id(self._folder, "wandb", name)
        return begun

    def close(self) -> None:
        """Ends the run of this process."""
        if self._run is not None:
            with _inside("wandb"):
                self._run.finish()


class Mlflow:
    """A run of MLflow, begun with its first values."""

    def __init__(self, folder: Path, run: str, keys: Mapping[str, object]) -> None:
        self._folder, self._name, self._keys = folder, run, dict(keys)
        self._client: Any = None
        self._id = ""

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Adds the values of `step`."""
        with _inside("mlflow"):
            if self._client is None:
                self._begin()
            entities = import_module("mlflow.entities")
            now = int(time() * 1000)
            values = [entities.Metric(_plain(k), x, now, step) for k, x in scalars.items()]
            self._client.log_batch(self._id, metrics=values)

    def _begin(self) -> None:
        with importing("mlflow"):
            mlflow, entities = import_module("mlflow"), import_module("mlflow.entities")
        own = None if mlflow.tracking.is_tracking_uri_set() else self._folder / "mlruns"
        client = mlflow.MlflowClient(tracking_uri=own.as_uri() if own else None)
        known = _id_of(self._folder, "mlflow")
        with suppress(mlflow.exceptions.MlflowException):
            self._id = client.get_run(known).info.run_id if known else ""
        if self._id:
            client.update_run(self._id, status="RUNNING")
        else:
            found = client.get_experiment_by_name(PROJECT)
            number = found.experiment_id if found else client.create_experiment(PROJECT)
            self._id = client.create_run(number, run_name=self._name).info.run_id
            every = [entities.Param(_plain(k), str(x)[:LONG]) for k, x in self._keys.items()]
            for at in range(0, len(every), MANY):
                client.log_batch(self._id, params=every[at : at + MANY])
            _keep_id(self._folder, "mlflow", self._id)
        self._client = client

    def close(self) -> None:
        """Marks the run as finished; a resumed run takes that back."""
        if self._client is not None:
            with _inside("mlflow"):
                self._client.set_terminated(self._id)


def _plain(name: str) -> str:
    """A name with the characters that MLflow takes."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)


@contextmanager
def _inside(package: str) -> Iterator[None]:
    """Every error of a package leaves the block as an OSError; a stop signal does not."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        if stop_behind(error):
            raise
        raise OSError(f"{type(error).__name__}: {brief(error)}") from error


def _ids(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = parse_json((folder / IDS).read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def _id_of(folder: Path, name: str) -> str:
    """By which id a tracker knows the run of a folder; empty: it does not."""
    found = _ids(folder).get(name, "")
    return found if isinstance(found, str) and found.isalnum() and len(found) < 100 else ""


def _keep_id(folder: Path, name: str, value: str) -> None:
    known = _ids(folder)
    if known.get(name) != value:
        write_text(folder / IDS, json.dumps({**known, name: value}) + "\n")
