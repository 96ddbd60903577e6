"""MODEL of `zinf plan`: a Python reference or a Hugging Face config, on `meta`, with inputs."""

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from zcompile.errors import ConfigInvalid, Running

SEQUENCE = 1024
"""Tokens of a sample, if neither the options nor the model say."""
CONFIG_FILE = "config.json"
TOKENS = ("ids", "input_ids", "tokens", "idx")
TARGETS = ("targets", "labels")


def find_model(name: str) -> Any:
    """The module that `name` stands for, on meta where it is made here.

    raises  ConfigInvalid
    """
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return _of_config(path / CONFIG_FILE if path.is_dir() else path)
    module, colon, attribute = name.partition(":")
    if not colon or not attribute:
        raise _invalid(name, "is neither module:name nor a config.json that is there; write it "
                       "like examples.train_gpt:model")  # fmt: skip
    return _made(name, _named(name, module, attribute))


def _named(name: str, module: str, attribute: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    with Running(f"importing {module}", f"see that `python -c 'import {module}'` works"):
        try:
            found: Any = importlib.import_module(module)
        except ImportError as error:
            raise _invalid(
                name, f"cannot be imported: {error}; run zinf where {module} lies"
            ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = ", ".join(sorted(n for n in vars(found) if not n.startswith("_"))[:12])
            raise _invalid(name, f"has no {part!r}; {module} has {known}")
        found = getattr(found, part)
    return found


def _made(name: str, found: Any) -> Any:
    import torch

    if isinstance(found, torch.nn.Module):
        return found
    if not callable(found):
        raise _invalid(name, f"is a {type(found).__name__}; name a module, or what makes one")
    needed = [
        p.name
        for p in inspect.signature(found).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise _invalid(name, f"needs arguments ({', '.join(needed)}); name a function without any, "
                       "or one whose arguments have defaults")  # fmt: skip
    todo = (
        "see that it makes its model, also under torch.device('meta'), where no tensor has values"
    )
    with Running(f"{name}()", todo), torch.device("meta"):
        made = found()
    if not isinstance(made, torch.nn.Module):
        raise _invalid(name, f"makes a {type(made).__name__}, which is no torch.nn.Module")
    return made


def _of_config(path: Path) -> Any:
    import torch

    if not path.is_file():
        raise _invalid(str(path), "is not there; give a config.json of Hugging Face")
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise _invalid(str(path), f"is no config: {error}") from error
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise _invalid(str(path), "needs transformers; `pip install transformers`") from error
    with Running(f"making a {kind} of {path}", "see that transformers makes a model of it"):
        try:
            config = transformers.AutoConfig.from_pretrained(str(path))
            with torch.device("meta"):
                made = transformers.AutoModelForCausalLM.from_config(config)
        except (ValueError, KeyError) as error:
            why = str(error).splitlines()[0]
            raise _invalid(
                str(path),
                f"of model_type {kind!r} is no causal language model that this transformers "
                f"knows: {why}",
            ) from error
    if getattr(made, "loss_type", "") is None:
        # Its class has no name that a loss goes by; transformers then warns, and takes this one.
        made.loss_type = "ForCausalLM"
    return made


def example_inputs(model: Any, batch: int, seq: int | None, shape: str | None) -> tuple[Any, ...]:
    """Arguments for a call of `model`: tokens with targets, or floats of a shape.

    raises  ConfigInvalid, if they cannot be guessed
    """
    import torch

    if shape is not None:
        sizes = shape.split(",")
        if not all(size.strip().isdecimal() and int(size) for size in sizes):
            raise ConfigInvalid("shape", shape, "is not sizes as in 3,224,224")
        return (torch.empty(batch, *map(int, sizes), device="meta"),)
    parameters = inspect.signature(model.forward).parameters
    tokens = next((p for p in parameters if p in TOKENS), None)
    if tokens is None:
        raise ConfigInvalid("MODEL", type(model).__name__, "takes "
                            f"({', '.join(parameters)}), which cannot be guessed; give --shape for "
                            "one tensor of floats, or call zcompile.plan")  # fmt: skip
    most = _context(model)
    if seq is not None and not 0 < seq <= (most or seq):
        raise ConfigInvalid("seq", seq, f"is not within the {most} tokens that the model takes")
    ids = torch.zeros(batch, seq or min(most or SEQUENCE, SEQUENCE), dtype=torch.int64)
    named = {tokens: ids, **{p: ids for p in parameters if p in TARGETS}}
    if "use_cache" in parameters:
        named["use_cache"] = False  # type: ignore[assignment]  # a flag of transformers
    return (named,)


def _context(model: Any) -> int | None:
    """Most tokens of a sample, as far as the model says."""
    config = getattr(model, "config", None)
    found = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    if (shape := getattr(model, "shape", None)) is not None:
        found.append(getattr(shape, "context", None))
    return min((n for n in found if isinstance(n, int)), default=None)


def _invalid(name: str, why: str) -> ConfigInvalid:
    return ConfigInvalid("MODEL", name, why)
