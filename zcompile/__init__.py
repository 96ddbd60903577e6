"""zcompile: trains models larger than the device, as a backend of torch.compile.

    model = zcompile.offload(model, device_memory="20GiB", host_memory="64GiB", disk="/mnt/nvme")
    model = torch.compile(model, backend="zinf")

The training loop stays as it is. Names are imported when first used, so that the inspection
commands start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zcompile.ir.version import VERSION, check_torch, installed_torch

check_torch(installed_torch())  # before anything touches what only the tested versions have

if TYPE_CHECKING:
    from zcompile import errors
    from zcompile.checkpoint.checkpoint import load, resume, save
    from zcompile.config import Config
    from zcompile.errors import ZinfError
    from zcompile.frontend.dry_run.plan import plan
    from zcompile.frontend.no_sync import no_sync
    from zcompile.frontend.offload import close, init, offload, offloaded
    from zcompile.frontend.rank_zero import rank_zero_reads
    from zcompile.frontend.stats import stats

__version__ = VERSION
__all__ = [
    "Config",
    "ZinfError",
    "__version__",
    "close",
    "errors",
    "init",
    "load",
    "no_sync",
    "offload",
    "offloaded",
    "plan",
    "rank_zero_reads",
    "resume",
    "save",
    "stats",
]

_HOMES = {
    "Config": "zcompile.config",
    "ZinfError": "zcompile.errors",
    "close": "zcompile.frontend.offload",
    "init": "zcompile.frontend.offload",
    "load": "zcompile.checkpoint.checkpoint",
    "no_sync": "zcompile.frontend.no_sync",
    "offload": "zcompile.frontend.offload",
    "offloaded": "zcompile.frontend.offload",
    "plan": "zcompile.frontend.dry_run.plan",
    "rank_zero_reads": "zcompile.frontend.rank_zero",
    "resume": "zcompile.checkpoint.checkpoint",
    "save": "zcompile.checkpoint.checkpoint",
    "stats": "zcompile.frontend.stats",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("zcompile.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'zcompile' has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
