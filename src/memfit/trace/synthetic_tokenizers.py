"""Tokenizers whose files are not there: one token for each word, in a vocabulary of the model's
size."""

from __future__ import annotations

import functools
import importlib
import importlib.resources
import inspect
import os
import tomllib
from types import ModuleType
from typing import Any

from memfit.trace import failures, versions, vision_tokens
from memfit.trace.imports import Change, Patch
from memfit.trace.refuse import Watcher

CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@functools.cache
def table() -> dict[str, Any]:
    """What stands for data that is not there."""
    text = importlib.resources.files(__package__).joinpath("datasets.toml").read_text("utf-8")
    return tomllib.loads(text)


# Kind of model -> its special tokens and what stands around a text.
BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
ROBERTA = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
CLIP = {
    "bos_token": "<|startoftext|>",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
}
T5 = {"eos_token": "</s>", "pad_token": "<pad>"}
GPT = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
OPT = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"}
BLOOM = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
LLAMA = {"bos_token": "<s>", "eos_token": "</s>"}
GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
KINDS = {
    **dict.fromkeys(("bert", "distilbert", "electra", "modernbert", "albert", "mpnet"), BERT),
    **dict.fromkeys(("blip_text_model", "git", "vilt", "layoutlm", "layoutlmv2", "lxmert"), BERT),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "bart", "longformer"), ROBERTA),
    **dict.fromkeys(("deberta", "deberta-v2"), BERT),
    "clip_text_model": CLIP,
    **dict.fromkeys(("t5", "mt5", "umt5", "switch_transformers", "marian"), T5),
    **dict.fromkeys(("gpt2", "gpt_neo", "gpt_neox", "gptj", "phi"), GPT),
    "opt": OPT,
    **dict.fromkeys(("bloom", "wav2vec2", "wav2vec2-bert", "hubert", "wavlm"), BLOOM),
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text"), GEMMA
    ),
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen2_vl", "qwen2_5_vl"), QWEN),
}
AROUND = (  # the first special tokens that are there: before a text, after it
    (BERT, "[CLS]", "[SEP]"),
    (ROBERTA, "<s>", "</s>"),
    (CLIP, "<|startoftext|>", "<|endoftext|>"),
    (T5, "", "</s>"),
    (OPT, "</s>", ""),
    (LLAMA, "<s>", ""),
    (GEMMA, "<bos>", ""),
)


def made(name: str, given: dict[str, Any], recorder: Watcher) -> Any:
    """A tokenizer for the config of `name`, or of a pipeline's part."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    encoder = str(given.get("subfolder") or "").replace("tokenizer", "text_encoder")
    try:
        whole = transformers.AutoConfig.from_pretrained(name, subfolder=encoder)
    except Exception as bad:
        if failures.missing_file(bad) is None or "tokenizer" not in name.lower():
            raise
        whole = transformers.GPT2Config()  # a repository without a model
        message = f"nothing is known of `{name}`: GPT-2's {whole.vocab_size:,} tokens are assumed"
        recorder.note(f"vocabulary {name}", message)
    config = versions.text_config(whole)
    kind = KINDS.get(config.model_type, KINDS.get(whole.model_type, LLAMA))
    seen = vision_tokens.tokens(whole)
    special = {"pad_token": "<pad>", **kind} if seen else kind  # which processors ask for
    size = int(config.vocab_size)
    known = words(size, {*special.values(), "<unk>", "<|im_start|>", "<|im_end|>"})
    vocabulary = {name: place for place, name in enumerate(vision_tokens.placed(known, whole))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    first, last = next((one[1:] for one in AROUND if one[0] is kind), ("", ""))
    if first or last:
        single = f"{first} $A {last}".strip()
        pair = f"{single} {last} $B:1 {last}:1" if kind is ROBERTA else f"{single} $B:1 {last}:1"
        inner.post_processor = processors.TemplateProcessing(
            single=single,
            pair=pair if last else f"{single} $B:1",
            special_tokens=[(one, vocabulary[one]) for one in {first, last} if one],
        )
    longest = getattr(config, "max_position_embeddings", None) or 512
    longest -= 2 if longest % 8 == 2 else 0  # RoBERTa's positions begin behind the padding's
    longest = longest if longest > 0 else ENDLESS
    chosen = {key: given[key] for key in CHOSEN if key in given}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        **({"extra_special_tokens": seen} if seen else {}),
        **{"model_max_length": longest, **special, **chosen},
    )
    if seen:
        tokenizer.memfit_picture = vision_tokens.picture(whole)
        tokenizer.memfit_settings = vision_tokens.settings(whole)
    if kind not in (BERT, CLIP, ROBERTA, T5):
        tokenizer.chat_template = CHAT
    types = ["token_type_ids"] if kind is BERT and config.model_type != "distilbert" else []
    tokenizer.model_input_names = ["input_ids", *types, "attention_mask"]
    tokenizer.name_or_path, tokenizer.memfit_template = name, tokenizer.chat_template
    tokenizer.init_kwargs.setdefault("name_or_path", name)  # as `from_pretrained` leaves it
    message = f"the tokenizer of `{name}` was not found: each word is one token"
    recorder.note(f"tokenizer {name}", message)
    return tokenizer


def words(size: int, special: set[str]) -> list[str]:
    """Special tokens first, then words, then what nobody writes."""
    names = [*sorted(special), *table()["words"].split()]
    return names[:size] + [f"<t{number}>" for number in range(len(names), size)]


def templates(module: ModuleType) -> list[Patch]:
    """`setup_chat_format` (TRL 0.24) refuses a tokenizer with a template; that of a model
    which was never tuned has none."""
    true = getattr(module, "setup_chat_format", None)
    if true is None:
        return []

    @functools.wraps(true)
    def setup(model: Any, tokenizer: Any, *args: Any, **given: Any) -> Any:
        ours = getattr(tokenizer, "memfit_template", None)
        if ours is not None and tokenizer.chat_template == ours:
            tokenizer.chat_template = None
        return true(model, tokenizer, *args, **given)

    return [(module, "setup_chat_format", setup)]


def is_here(name: Any) -> bool:
    """Whether a tokenizer has files, without which its class may fail in any way."""
    hub: Any = importlib.import_module("huggingface_hub")
    if os.path.exists(str(name)):
        return True
    found = hub.try_to_load_from_cache(str(name), "tokenizer_config.json")
    return isinstance(found, str)


def dressed(tokenizer: Any, kind: type, given: dict[str, Any]) -> Any:
    """With what the class has beside every tokenizer's methods, such as Whisper's languages."""
    import transformers

    base: Any = transformers.PreTrainedTokenizerFast
    fast: Any = (
        kind if issubclass(kind, base) else getattr(transformers, f"{kind.__name__}Fast", base)
    )
    own = [name for name, one in vars(fast).items() if inspect.isfunction(one)]
    if all(hasattr(base, one) or one.startswith("_") or one in UPDATES for one in own):
        return tokenizer
    before, tokenizer.__class__ = tokenizer.__class__, fast
    try:
        for name, one in inspect.signature(fast.__init__).parameters.items():
            if one.default is not one.empty and not hasattr(tokenizer, name):
                setattr(tokenizer, name, given.get(name, one.default))
    except (AttributeError, TypeError, ValueError):  # its own beginnings are missed
        tokenizer.__class__ = before
    return tokenizer


def falling_back(owner: Any, recorder: Watcher) -> list[Patch]:
    """`from_pretrained` of a tokenizer whose files were not found."""
    true = owner.from_pretrained.__func__

    def from_pretrained(cls: Any, *args: Any, **given: Any) -> Any:
        name, *args = args or (given.pop(NAME, None),)  # type: ignore[assignment]
        try:
            found = true(cls, name, *args, **given)
        except Exception as bad:
            broken = isinstance(bad, ImportError) or failures.UNKNOWN_TOKENIZER in str(bad)
            if failures.missing_file(bad) is None and (broken or is_here(name)):
                raise
            return dressed(made(str(name), given, recorder), cls, given)
        # transformers 5 makes an empty one without its files
        empty = entries(found) < FEW and not os.path.exists(name)
        return dressed(made(str(name), given, recorder), cls, given) if empty else found

    return [(owner, "from_pretrained", classmethod(from_pretrained))]


def entries(tokenizer: Any) -> int:
    """Its vocabulary; a class in Python is left half made where it finds no file (transformers
    5)."""
    try:
        return len(tokenizer)
    except AttributeError:
        return 0


def padding(owner: Any, recorder: Watcher) -> list[Patch]:
    """Whether a tokenizer without its files has a padding token is not known: one that has to
    pad takes the end of a text. Texts that are padded to a length are no longer than it."""
    true = owner._get_padding_truncation_strategies

    def cut(self: Any, found: Any) -> Any:
        padded, truncated, length, *rest = found
        chosen = str(getattr(padded, "value", "")), str(getattr(truncated, "value", ""))
        if chosen != ("max_length", "do_not_truncate") or not hasattr(self, "memfit_template"):
            return found
        length = length or self.model_max_length
        recorder.note(f"cut {length}", f"texts are assumed to have at most {length:,} tokens")
        return padded, type(truncated)("longest_first"), length, *rest

    @functools.wraps(true)
    def strategies(self: Any, *args: Any, **given: Any) -> Any:
        try:
            return cut(self, true(self, *args, **given))
        except ValueError:
            if self.pad_token is not None or not hasattr(self, "memfit_template"):
                raise
            self.pad_token = self.eos_token or self.unk_token
            name = self.name_or_path
            message = f"the tokenizer of `{name}` is assumed to pad with `{self.pad_token}`"
            recorder.note(f"padding {name}", message)
            return cut(self, true(self, *args, **given))

    return [(owner, true.__name__, strategies)]


def tiktoken(module: ModuleType, recorder: Watcher) -> list[Patch]:
    """`tiktoken.get_encoding` of a known encoding that cannot be downloaded."""
    true = module.get_encoding

    def get_encoding(name: str) -> Any:
        try:
            return true(name)
        except Exception:  # whatever its downloader raises
            if name not in VOCABULARIES:
                raise
            return encoding(name, recorder)

    return [(module, "get_encoding", get_encoding)]


def changes(recorder: Watcher) -> dict[str, Change]:
    return {
        "trl.models.utils": templates,
        "transformers.models.auto.tokenization_auto": lambda module: falling_back(
            module.AutoTokenizer, recorder
        ),
        "transformers.tokenization_utils_base": lambda module: [
            *falling_back(module.PreTrainedTokenizerBase, recorder),
            *padding(module.PreTrainedTokenizerBase, recorder),
        ],
        "tiktoken.registry": lambda module: tiktoken(module, recorder),
    }


NAME = "pretrained_model_name_or_path"
CHOSEN = (  # of the arguments of `from_pretrained`
    "model_max_length",
    "padding_side",
    "truncation_side",
    "pad_token",
    "eos_token",
    "bos_token",
)
UPDATES = {"update_post_processor"}  # of which no script knows (Llama's, transformers 4)
ENDLESS = int(1e30)  # as transformers says where a tokenizer has no limit (XLNet)
FEW = 100  # tokens of a vocabulary of special ones
VOCABULARIES = {  # of tiktoken's encodings (tiktoken_ext/openai_public.py, 0.12)
    "gpt2": 50257,
    "r50k_base": 50257,
    "p50k_base": 50281,
    "p50k_edit": 50284,
    "cl100k_base": 100277,
    "o200k_base": 200019,
    "o200k_harmony": 201088,
}


def encoding(name: str, recorder: Watcher) -> Any:
    """tiktoken's own class over bytes, with a vocabulary of the true size."""
    tiktoken: Any = importlib.import_module("tiktoken")

    size = VOCABULARIES[name]
    recorder.note(f"tiktoken {name}", f"tiktoken's `{name}` was not found: each byte is one token")
    return tiktoken.Encoding(
        name,
        pat_str=r"\S+|\s+",
        mergeable_ranks={bytes([one]): one for one in range(256)},
        special_tokens={"<|endoftext|>": size - 1},
    )


__all__ = ["changes", "table"]
