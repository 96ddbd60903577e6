"""Logs what is measured of a run to TensorBoard, Weights & Biases or MLflow.

    log = TensorBoard(model, "logs")
    for step, (ids, targets) in enumerate(loader):
        ...
        log(step)

Each call logs flat numbers, `zinf/step_seconds` and the like, of the steps since the call before.
It takes some 50 microseconds beside what the library takes (after 2, 4, 8, ... steps as long as a
simulated step), and the device is not waited for: what it has not done yet counts for the next
call.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from zcompile.errors import ConfigInvalid, Unsupported
from zcompile.frontend.offload import session_behind
from zcompile.frontend.step_log import Prediction, Sampler

Log = Callable[[int], None]
"""Logs what was measured since the call before, as of this step."""


class Measured:
    """Gives what was measured of an offloaded model since the call before, as flat numbers.

    zinf/step_seconds            mean of the steps that ended since then, each from its first call
                                 to that of the next
    zinf/predicted_step_seconds  of a step under the plan in force
    zinf/compute_seconds, zinf/stall_seconds, zinf/optimizer_seconds
                                 of one step: what graphs compute, what is waited for, the optimizer
    zinf/disk_read_bytes, zinf/disk_write_bytes, zinf/h2d_bytes, zinf/d2h_bytes
                                 of one step
    zinf/device_bytes, zinf/host_bytes, zinf/disk_bytes
                                 in each tier by now; zinf/device_peak_bytes and so on: at most
    zinf/tokens_per_second       with `tokens_per_step`

    What is not known is left out: figures of a step if no optimizer has made one since the call
    before, a prediction without a plan, seconds of a step of a model that was not compiled.

    tokens_per_step  of all batches whose gradients one step sums up
    raises           Unsupported, if the model was not offloaded; ConfigInvalid
    """

    def __init__(self, model: nn.Module, tokens_per_step: int | None = None) -> None:
        if tokens_per_step is not None and tokens_per_step <= 0:
            why = "is no number of tokens; give 1 or more, or leave it out"
            raise ConfigInvalid("tokens_per_step", tokens_per_step, why)
        session = session_behind(model)
        self._model, self._tokens = model, tokens_per_step
        self._sampler, self._prediction = Sampler(session), Prediction()
        self._steps = session.meter.in_all().steps

    def __call__(self) -> dict[str, float]:
        session = session_behind(self._model)
        steps = session.meter.in_all().steps
        count, self._steps = steps - self._steps, steps
        whole = session.executor.clocks.whole_steps - self._sampler.whole_steps
        taken = self._sampler.take(session, steps, count)
        self._prediction.renew(session, steps)
        told: dict[str, float] = {}
        if whole and taken.seconds:
            told["step_seconds"] = taken.seconds / whole
            if self._tokens is not None:
                told["tokens_per_second"] = self._tokens * whole / taken.seconds
        if self._prediction.seconds is not None:
            told["predicted_step_seconds"] = self._prediction.seconds
        if count:
            told["compute_seconds"] = taken.compute_s / count
            told["stall_seconds"] = taken.stall_s / count
            told["optimizer_seconds"] = taken.optimizer_s / count
            told |= {f"{link}_bytes": n / count for link, n in taken.nbytes.items()}
        told |= {f"{tier}_bytes": float(n) for tier, n in taken.used.items()}
        told |= {f"{tier}_peak_bytes": float(n) for tier, n in taken.peak.items()}
        return {f"zinf/{name}": value for name, value in told.items()}


class TensorBoard:
    """Logs to TensorBoard, as scalars.

    to      a `SummaryWriter`, or a directory for one of our own
    raises  Unsupported, if tensorboard is not installed; as `Measured`
    """

    def __init__(
        self, model: nn.Module, to: str | Path | Any = "runs", tokens_per_step: int | None = None
    ) -> None:
        self._measured = Measured(model, tokens_per_step)
        if isinstance(to, str | Path):
            _library("tensorboard", "pip install zcompile[tracking]")
            to = import_module("torch.utils.tensorboard").SummaryWriter(str(to))
        self.writer = to

    def __call__(self, step: int) -> None:
        for name, value in self._measured().items():
            self.writer.add_scalar(name, value, step)


class WandB:
    """Logs to a run of Weights & Biases.

    run     None: the one that `wandb.init` has begun
    raises  Unsupported, if wandb is not installed or no run has begun; as `Measured`
    """

    def __init__(
        self, model: nn.Module, run: Any = None, tokens_per_step: int | None = None
    ) -> None:
        self._measured = Measured(model, tokens_per_step)
        self._run = run if run is not None else _library("wandb", "pip install wandb").run
        if self._run is None:
            raise Unsupported("no run of W&B has begun", "call wandb.init first, or give run=")

    def __call__(self, step: int) -> None:
        self._run.log(self._measured(), step=step)


class MLflow:
    """Logs to a run of MLflow, as metrics.

    run_id  None: the active run
    raises  Unsupported, if mlflow is not installed or no run is active; as `Measured`
    """

    def __init__(
        self, model: nn.Module, run_id: str | None = None, tokens_per_step: int | None = None
    ) -> None:
        self._measured = Measured(model, tokens_per_step)
        self._mlflow = _library("mlflow", "pip install mlflow-skinny")
        if run_id is None and (active := self._mlflow.active_run()) is None:
            raise Unsupported(
                "no run of MLflow is active", "call mlflow.start_run, or give run_id="
            )
        self._run_id = run_id if run_id is not None else active.info.run_id

    def __call__(self, step: int) -> None:
        self._mlflow.log_metrics(self._measured(), step=step, run_id=self._run_id)


def for_trainer(log: Log) -> Any:
    """A `transformers.TrainerCallback` that logs whenever the Trainer does.

    log     a `TensorBoard`, `WandB` or `MLflow`
    raises  Unsupported, if transformers is not installed
    """
    base: Any = _library("transformers", "pip install zcompile[integrations]").TrainerCallback

    class LogWithTrainer(base):  # type: ignore[misc]  # its class is known when it is called
        def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            log(state.global_step)

    return LogWithTrainer()


def for_lightning(measured: Measured) -> Any:
    """A callback of lightning that gives what was measured to all loggers of its Trainer, as often
    as the Trainer logs.

    raises  Unsupported, if lightning is not installed
    """
    base: Any = _library("lightning.pytorch", "pip install zcompile[integrations]").Callback

    class LogWithLightning(base):  # type: ignore[misc]  # its class is known when it is called
        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            step = trainer.global_step
            if step % trainer.log_every_n_steps == 0:
                values = measured()
                for logger in trainer.loggers:
                    logger.log_metrics(values, step=step)

    return LogWithLightning()


def _library(name: str, installed_by: str) -> Any:
    """A module of another library. raises  Unsupported, if it is not installed"""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise Unsupported(f"{error.name} is not installed", installed_by) from error
