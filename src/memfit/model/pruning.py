"""Model surgery as a change of the config: fewer layers, heads, feed-forward columns, experts or
words (`--prune layers=24,ffn=0.5`). What is left is a model of the same class, so that formulas and
trace read it like any other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from memfit.errors import InputError, Problem

# What each part is called in configs; the first that is there counts.
KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "ffn": ("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "vocab": ("vocab_size",),
}
WIDTHS = ("hidden_size", "n_embd", "d_model")
# Counts of layers that cannot be more than there are.
UP_TO_LAYERS = ("first_k_dense_replace", "max_window_layers")
HINT = "like `--prune layers=24`, `--prune layers=0.5,ffn=0.75`: a count, or the share that stays"


def parsed(text: str) -> dict[str, int | float]:
    """What stays of each part: a count, or a share between 0 and 1."""
    found: dict[str, int | float] = {}
    problems = []
    for word in filter(None, (one.strip() for one in text.replace(" ", ",").split(","))):
        name, _, amount = word.partition("=")
        value = number(amount)
        if name not in KEYS:
            known = ", ".join(f"`{one}`" for one in KEYS)
            problems.append(f"`{name[:40]}` must be one of {known}")
        elif name in found:
            problems.append(f"`{name}` is given twice")
        elif value is None:
            problems.append(f"`{word[:40]}` must be a count, or a share below 1")
        else:
            found[name] = value
    if problems:
        raise InputError(*(Problem(message=one, where="prune", hint=HINT) for one in problems))
    return found


def number(text: str) -> int | float | None:
    try:
        value = float(text) if "." in text else int(text)
    except ValueError:
        return None
    share = isinstance(value, float)
    return value if (0 < value <= 1 if share else 0 < value <= 10**9) else None


def pruned(config: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    """The config of what is left; of a model that sees, its text part is cut."""
    wanted = parsed(text)
    if not wanted:
        return config
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        return {**config, "text_config": cut(inner, wanted)}
    return cut(config, wanted)


def cut(config: Mapping[str, Any], wanted: Mapping[str, int | float]) -> dict[str, Any]:
    made, problems = dict(config), list[Problem]()
    for part, amount in wanted.items():
        key = next((one for one in KEYS[part] if whole(config.get(one))), None)
        if key is None:
            message = f"this config has no count of {part}"
            problems.append(Problem(message=message, where="prune", hint=HINT))
            continue
        before = int(config[key])
        after = max(1, round(before * amount)) if isinstance(amount, float) else amount
        if after > before:
            message = f"{part}={after} is more than the {before} that there are"
            problems.append(Problem(message=message, where="prune", hint=HINT))
            continue
        problems += CUTS[part](made, key, before, after)
    if problems:
        raise InputError(*problems)
    return made


def whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def cut_layers(made: dict[str, Any], key: str, before: int, after: int) -> Iterator[Problem]:
    """The first ones stay; lists with an entry for each layer are cut, too."""
    for name, value in made.items():
        if isinstance(value, list) and len(value) == before:
            made[name] = value[:after]
    for name in UP_TO_LAYERS:
        if whole(made.get(name)):
            made[name] = min(made[name], after)
    made[key] = after
    yield from ()


def cut_heads(made: dict[str, Any], key: str, before: int, after: int) -> Iterator[Problem]:
    """Heads keep their size, and query heads their share of a key head."""
    width = next((made[one] for one in WIDTHS if whole(made.get(one))), None)
    latent = whole(made.get("kv_lora_rank"))
    if not latent and made.get("head_dim") is None and width is not None:
        made["head_dim"] = width // before
    keys = made.get("num_key_value_heads")
    if whole(keys):
        fewer = keys * after // before
        if fewer < 1 or fewer * before != keys * after:
            message = f"{after} of {before} heads leave no whole number of {keys} key heads"
            hint = f"a multiple of {before // keys if before % keys == 0 else before}"
            yield Problem(message=message, where="prune", hint=hint)
            return
        made["num_key_value_heads"] = fewer
    made[key] = after


def cut_ffn(made: dict[str, Any], key: str, before: int, after: int) -> Iterator[Problem]:
    """Every feed-forward by the same share, those of experts included."""
    for name in (*KEYS["ffn"], "shared_expert_intermediate_size"):
        if whole(made.get(name)):
            made[name] = max(1, made[name] * after // before)
    yield from ()


def cut_experts(made: dict[str, Any], key: str, before: int, after: int) -> Iterator[Problem]:
    active = next(
        (made[one] for one in ("num_experts_per_tok", "top_k_experts") if whole(made.get(one))), 1
    )
    groups = made.get("n_group")
    if after < active or (whole(groups) and after % groups):
        message = f"{after} experts are too few: each token needs {active}"
        if after >= active:
            message = f"{after} experts do not fill {groups} groups"
        yield Problem(message=message, where="prune", hint="more experts")
        return
    for name in KEYS["experts"]:
        if made.get(name) == before:
            made[name] = after


def cut_vocab(made: dict[str, Any], key: str, before: int, after: int) -> Iterator[Problem]:
    """Ids of special tokens beyond the end are left out."""
    for name, value in list(made.items()):
        if name.endswith("_token_id") and whole(value) and value >= after:
            del made[name]
    made[key] = after
    yield from ()


CUTS = {
    "layers": cut_layers,
    "heads": cut_heads,
    "ffn": cut_ffn,
    "experts": cut_experts,
    "vocab": cut_vocab,
}

__all__ = ["parsed", "pruned"]
