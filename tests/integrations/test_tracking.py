"""What is measured arrives in TensorBoard, W&B and MLflow, as their own readers tell."""

import sys

import pytest
import torch
from offloaded import SMALL
from small_models import mlp

import zcompile
from zcompile.errors import ConfigInvalid, Unsupported
from zcompile.frontend.offload import session_behind
from zcompile.integrations import tracking
from zcompile.integrations.tracking import Measured, MLflow, TensorBoard, WandB

STEPS = 4


class Trained:
    """A model that is trained step by step; others wait for nothing of it."""

    def __init__(self):
        torch._dynamo.reset()
        self.model = zcompile.offload(mlp(), **SMALL)
        self.call = torch.compile(self.model, backend="zinf")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, times=1):
        for _ in range(times):
            self.call(torch.ones(2, 8)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.fixture(scope="module")
def trained():
    made = Trained()
    made.step(3)
    return made


def test_each_figure_is_of_a_step_since_the_call_before(trained):
    measured = Measured(trained.model, tokens_per_step=100)
    session = session_behind(trained.model)
    session.drain()
    before, clocks = session.meter.in_all(), session.executor.clocks
    whole = clocks.whole_steps, clocks.whole_s
    trained.step(2)
    zcompile.stats(trained.model, reset=True)  # takes nothing away
    after, told = session.meter.in_all(), measured()
    for link in ("h2d", "d2h"):
        assert told[f"zinf/{link}_bytes"] == (after.nbytes[link] - before.nbytes[link]) / 2
    spent = (after.seconds["compute"] - before.seconds["compute"]) / 2
    assert told["zinf/compute_seconds"] == pytest.approx(spent, abs=1e-6)
    steps, seconds = clocks.whole_steps - whole[0], clocks.whole_s - whole[1]
    assert steps == 2
    assert told["zinf/step_seconds"] == pytest.approx(seconds / 2, abs=1e-6)
    assert told["zinf/tokens_per_second"] == pytest.approx(100 / told["zinf/step_seconds"])
    assert told["zinf/predicted_step_seconds"] > 0
    assert told["zinf/host_peak_bytes"] == session.meter.host.peak
    assert {*told} >= {"zinf/stall_seconds", "zinf/optimizer_seconds", "zinf/device_bytes"}
    assert all(type(value) is float for value in told.values())


def test_what_is_not_known_is_left_out(trained):
    measured = Measured(trained.model)
    told = measured()
    assert "zinf/tokens_per_second" not in told
    assert not {"zinf/step_seconds", "zinf/stall_seconds", "zinf/h2d_bytes"} & {*told}
    assert "zinf/host_bytes" in told
    fresh = zcompile.offload(mlp(), **SMALL)
    assert "zinf/predicted_step_seconds" not in Measured(fresh)()


def test_tensorboard_reads_what_was_logged(trained, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoard(trained.model, tmp_path, tokens_per_step=32)
    for step in range(1, STEPS):
        trained.step()
        log(step)
    log.writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {*events.Tags()["scalars"]} >= {
        "zinf/step_seconds",
        "zinf/stall_seconds",
        "zinf/disk_read_bytes",
        "zinf/tokens_per_second",
    }
    rows = events.Scalars("zinf/h2d_bytes")
    assert [row.step for row in rows] == [1, 2, 3]
    assert all(row.value >= 0 for row in rows)


def test_a_writer_of_ones_own_takes_it_too(trained):
    rows = []

    class Writer:
        def add_scalar(self, *row):
            rows.append(row)

    TensorBoard(trained.model, Writer())(7)
    assert ("zinf/disk_bytes", 0.0, 7) in rows


def test_a_run_of_wandb_takes_it(trained):
    class Run:
        def log(self, values, step):
            self.told = values, step

    run = Run()
    WandB(trained.model, run)(5)
    values, step = run.told
    assert step == 5
    assert values["zinf/device_peak_bytes"] > 0


@pytest.mark.slow
def test_wandb_offline_writes_what_was_logged(trained, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="zinf", dir=tmp_path):
        log = WandB(trained.model)
        trained.step()
        log(1)
    wandb.teardown()  # the process that writes the file ends: until then it may be yet to write it
    (written,) = tmp_path.rglob("*.wandb")
    assert b"zinf/device_peak_bytes" in written.read_bytes()


def test_without_a_run_of_wandb_it_is_said_what_to_call(trained):
    pytest.importorskip("wandb")
    with pytest.raises(Unsupported, match=r"no run of W&B has begun; call wandb.init first"):
        WandB(trained.model)


def test_mlflow_tells_what_was_logged(trained, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with pytest.raises(Unsupported, match=r"no run of MLflow is active; call mlflow\.start_run"):
        MLflow(trained.model)
    with mlflow.start_run() as run:
        log = MLflow(trained.model)
        for step in range(1, STEPS):
            trained.step()
            log(step)
    rows = mlflow.MlflowClient().get_metric_history(run.info.run_id, "zinf/optimizer_seconds")
    assert [row.step for row in rows] == [1, 2, 3]
    assert all(row.value > 0 for row in rows)


def test_the_trainer_of_transformers_logs_when_it_logs():
    transformers = pytest.importorskip("transformers")
    steps = []
    callback = tracking.for_trainer(steps.append)
    assert isinstance(callback, transformers.TrainerCallback)
    state = transformers.TrainerState(global_step=12)
    callback.on_log(None, state, None, logs={})
    assert steps == [12]


def test_lightning_logs_as_often_as_its_trainer(trained):
    lightning = pytest.importorskip("lightning.pytorch")

    class Logger:
        def __init__(self):
            self.rows = []

        def log_metrics(self, values, step):
            self.rows.append((step, values))

    class Trainer:
        log_every_n_steps = 2
        loggers = (Logger(), Logger())

    callback = tracking.for_lightning(Measured(trained.model))
    assert isinstance(callback, lightning.Callback)
    trainer = Trainer()
    for trainer.global_step in range(1, 5):
        callback.on_train_batch_end(trainer, None, None, None, 0)
    for logger in Trainer.loggers:
        assert [step for step, _ in logger.rows] == [2, 4]
        assert "zinf/host_bytes" in logger.rows[0][1]


@pytest.mark.parametrize(
    ("library", "make", "said"),
    [
        ("tensorboard", lambda m: TensorBoard(m, "logs"), r"pip install zcompile\[tracking\]"),
        ("wandb", WandB, "pip install wandb"),
        ("mlflow", MLflow, "pip install mlflow-skinny"),
        ("transformers", lambda m: tracking.for_trainer(print), r"zcompile\[integrations\]"),
        ("lightning", lambda m: tracking.for_lightning(Measured(m)), r"zcompile\[integrations\]"),
    ],
)
def test_without_the_library_it_is_said_how_to_get_it(
    trained, tmp_path, monkeypatch, library, make, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [_Lacking(library), *sys.meta_path])
    for name in [n for n in sys.modules if n == library or n.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(Unsupported, match=f"{library} is not installed; {said}|{said}"):
        make(trained.model)
    assert not list(tmp_path.iterdir())


class _Lacking:
    """An importer by which one package is not there."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=self.package)


@pytest.mark.parametrize("tokens", [0, -5])
def test_no_tokens_are_no_number_of_tokens(trained, tokens):
    with pytest.raises(ConfigInvalid, match="tokens_per_step"):
        Measured(trained.model, tokens)


def test_a_model_that_was_not_offloaded_is_refused():
    with pytest.raises(Unsupported, match="no tiered parameters"):
        Measured(mlp())
