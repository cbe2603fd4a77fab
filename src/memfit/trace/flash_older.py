"""flash-attn under transformers 4, whose modules import the package where they stand if it is
there: in those that are loaded its names are put, and those loaded later find a stand-in."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from memfit.trace import cuda, imports

VERSION = "2.8.3"  # what `flash_attn.py` was read from
FOUND = (
    "is_flash_attn_2_available",
    "is_flash_attn_greater_or_equal_2_10",
    "is_flash_attn_greater_or_equal",
    "is_flash_attn_available",
)


def unpad(hidden: torch.Tensor, mask: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    """The tokens that are there, one sequence behind the other (flash_attn/bert_padding.py
    unpad_input)."""
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    longest = int(lengths.max().item())
    ends = torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return first(hidden.reshape(-1, *hidden.shape[2:]), indices), indices, ends, longest, lengths


def first(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows by number, gathered as there (IndexFirstAxis)."""
    flat = tensor.reshape(tensor.shape[0], -1)
    return torch.gather(flat, 0, indices[:, None].expand(-1, flat.shape[1])).reshape(
        -1, *tensor.shape[1:]
    )


def pad(hidden: torch.Tensor, indices: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    out = torch.zeros(batch * length, *hidden.shape[1:], device=hidden.device, dtype=hidden.dtype)
    out = out.index_put((indices,), hidden)
    return out.view(batch, length, *hidden.shape[1:])


def package(functions: tuple[Any, Any]) -> dict[str, ModuleType]:
    """`flash_attn` and what transformers takes from it."""
    plain, ragged = functions
    held = {
        "flash_attn": {
            "flash_attn_func": plain,
            "flash_attn_varlen_func": ragged,
            "__version__": VERSION,
        },
        "flash_attn.bert_padding": {
            "index_first_axis": first,
            "pad_input": pad,
            "unpad_input": unpad,
        },
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {"apply_rotary_emb": None},  # of models that see alone
    }
    return modules(held)


def modules(held: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    """Modules that Python finds loaded, with these attributes."""
    found = {}
    for name, values in held.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package="." not in name)
        module.__path__ = []
        vars(module).update(values)
        found[name] = module
    return found


@contextlib.contextmanager
def installed(functions: tuple[Any, Any]) -> Iterator[None]:
    """Inside, the package seems to be there."""
    made = package(functions)
    names = {
        **vars(made["flash_attn"]),
        **vars(made["flash_attn.bert_padding"]),
        "_flash_supports_window_size": True,
    }
    names = {name: value for name, value in names.items() if not name.startswith("__")}
    with imports.replaced(made), cuda.patched([*answers(), *loaded(names)]):
        yield


def answers() -> list[tuple[Any, str, Any]]:
    """Wherever a module of transformers asks whether flash-attn is there, and how old it is."""
    import transformers.modeling_utils
    import transformers.utils.import_utils  # noqa: F401

    return [
        (module, name, yes)
        for module in of_transformers()
        for name in FOUND
        if callable(vars(module).get(name))
    ]


def yes(*_: Any) -> bool:
    return True


def loaded(names: dict[str, Any]) -> list[tuple[Any, str, Any]]:
    """The package's names in modules that were loaded without it, and the function that calls it,
    which they then lack too."""
    found: list[tuple[Any, str, Any]] = []
    shared = None
    with contextlib.suppress(ImportError):  # not in the oldest versions
        shared = importlib.import_module("transformers.modeling_flash_attention_utils")
    call = None if shared is None else getattr(shared, "_flash_attention_forward", None)
    for module in of_transformers():
        if "is_flash_attn_2_available" in vars(module) and ".modeling_" in module.__name__:
            found += [(module, name, value) for name, value in names.items()]
            if call is not None and module is not shared:
                found.append((module, "_flash_attention_forward", call))
    return found


def of_transformers() -> list[ModuleType]:
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("transformers.") and isinstance(module, ModuleType)
    ]


__all__ = ["installed"]
