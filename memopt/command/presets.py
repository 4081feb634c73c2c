"""Models by name: presets, transformers' configs, and `module:callable`."""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memopt._errors import UsageError
from memopt.command.configs import config_by_name


class Job(NamedTuple):
    """A model and a batch."""

    model: nn.Module
    batch: Any
    note: str = ""


BERT_LARGE_NOTE = (
    "published for this step (fp32, AdamW, batch 4, sequence 512) on a V100: 14,949 MB in all, as "
    "the driver counts it, of which 1,343 MB are the CUDA context and kernels"
)

# Sizes of transformers' configs where the default is not the model of that name.
_PRESETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert-large": (
        "BertConfig",
        "BertForSequenceClassification",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "attn_implementation": "eager",
        },
    ),
    "bert-base": ("BertConfig", "BertForSequenceClassification", {}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "gpt2-medium": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    ),
    "llama-7b": ("LlamaConfig", "LlamaForCausalLM", {}),
    "t5-small": ("T5Config", "T5ForConditionalGeneration", {"decoder_start_token_id": 0}),
    "vit-base": ("ViTConfig", "ViTForImageClassification", {}),
}
PRESETS = tuple(_PRESETS)

# The heads of transformers that are trained most, the first that a config has.
_HEADS = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
)


def preset(name: str, batch: int, seq: int, device: str = "meta") -> Job:
    """A model of known size with dummy data, on meta or with random weights.

    Raises:
        UsageError: transformers is not installed.
    """
    transformers = _transformers()
    config_name, model_name, sizes = _PRESETS[name]
    config = getattr(transformers, config_name)(**sizes)
    with torch.device(device):
        model = getattr(transformers, model_name)(config).train()
    note = BERT_LARGE_NOTE if name == "bert-large" and (batch, seq) == (4, 512) else ""
    return Job(model, dummy_batch(model, batch, seq, device), note)


def from_config(name: str, batch: int, seq: int, sizes: dict[str, Any]) -> Job:
    """Make a model by the name of a config of transformers, see `config_by_name`. `sizes` are
    changed in it.

    Raises:
        UsageError: there is none, or no model with a loss for it.
    """
    transformers = _transformers()
    config = config_by_name(transformers, name, sizes)
    for head in _HEADS:
        try:
            with torch.device("meta"):
                model = getattr(transformers, head).from_config(config).train()
        except ValueError:
            continue
        return Job(model, dummy_batch(model, batch, seq, "meta"))
    raise UsageError(f"--config: transformers has no model with a loss for it, got {name!r}")


def from_callable(path: str) -> Job:
    """Return what `module:callable` makes: a model and its batch. It is called on the meta device.

    Raises:
        UsageError: it is not found, or returns something else.
    """
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise UsageError(
            f"model: must be module:callable, such as my_module:model_and_batch, got {path!r}"
        )
    try:
        function: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"model: must be module:callable of a module that is found from here, got {path!r}: "
            f"{error}"
        ) from None
    try:
        function = operator.attrgetter(name)(function)
    except AttributeError as error:
        raise UsageError(f"model: must be module:callable, got {path!r}: {error}") from None
    if not callable(function):
        raise UsageError(f"model: must be module:callable, got {type(function).__name__} at {path}")
    if _needs_arguments(function):
        raise UsageError(f"model: must be callable without arguments, got {path!r}")
    made = _on_meta(function)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(
            f"model: {path} must return a model and its batch, got {type(made).__name__}"
        )
    return Job(*made)


def _needs_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # of some built-in functions, whose signature is not known
        pass
    return False


def _on_meta(function: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return function()


def dummy_batch(model: nn.Module, batch: int, seq: int, device: str) -> dict[str, Tensor]:
    """Inputs and labels for a model of transformers."""
    config: Any = model.config
    ids = torch.zeros(batch, seq, dtype=torch.long, device=device)
    if model.main_input_name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        pixels = torch.zeros(batch, config.num_channels, height, width, device=device)
        return {"pixel_values": pixels, "labels": ids[:, 0].contiguous()}
    if type(model).__name__.endswith("ForSequenceClassification"):
        return {"input_ids": ids, "labels": torch.zeros(batch, dtype=torch.long, device=device)}
    return {"input_ids": ids, "labels": ids.clone()}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UsageError(
            "needs transformers for a model by name; run: pip install transformers"
        ) from None
    return transformers
