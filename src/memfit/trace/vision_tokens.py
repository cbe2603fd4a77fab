"""Tokens that stand for pictures in a prompt, for tokenizers and processors whose files are not
there."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from memfit.trace.imports import Change, Patch

# Kind of model -> names of its tokens as its processor reads them (transformers 5.23,
# models/*/processing_*.py), and what stands for a picture in a message.
QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
GEMMA = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
IDEFICS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
PLAIN = {"image_token": "<image>"}
KINDS: dict[str, tuple[dict[str, str], str]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), (QWEN, QWEN_PICTURE)),
    "gemma3": (GEMMA, "<start_of_image>"),
    **dict.fromkeys(("idefics3", "smolvlm"), (IDEFICS, "<image>")),
    **dict.fromkeys(("llava", "llava_next", "llava_onevision", "paligemma"), (PLAIN, "<image>")),
}
# What a config calls the number of a token, beside the token's own name with `_id`.
NUMBERS = {
    "image_token": ("image_token_index",),
    "boi_token": ("boi_token_index",),
    "eoi_token": ("eoi_token_index",),
}
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ 'PICTURE' }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokens(config: Any) -> dict[str, str]:
    return KINDS.get(str(getattr(config, "model_type", "")), ({}, ""))[0]


def picture(config: Any) -> tuple[str, int]:
    """What stands for a picture in a message, and the tokens of one tile where a processor does not
    count them itself (Idefics 3: patches of the vision tower, joined by the scale)."""
    vision, scale = getattr(config, "vision_config", None), getattr(config, "scale_factor", 0)
    count = (vision.image_size // vision.patch_size) ** 2 // scale**2 if vision and scale else 0
    return KINDS[config.model_type][1], count


def settings(config: Any) -> dict[str, Any]:
    """The settings that a LLaVA processor has from its file, and that its class does not set
    (transformers 5.23, models/llava/processing_llava.py): it counts a picture's tokens by the
    patches of the vision tower, of which CLIP's has one more, for the class."""
    vision = getattr(config, "vision_config", None)
    return {
        "patch_size": getattr(vision, "patch_size", None),
        "vision_feature_select_strategy": getattr(config, "vision_feature_select_strategy", None),
        "num_additional_image_tokens": int("clip" in str(getattr(vision, "model_type", ""))),
    }


def placed(names: list[str], config: Any) -> list[str]:
    """A vocabulary, whose tokens for pictures have the numbers that the config gives them."""
    for name, token in tokens(config).items():
        known = (getattr(config, one, None) for one in (f"{name}_id", *NUMBERS.get(name, ())))
        number = next((one for one in known if isinstance(one, int)), None)
        if token in names or number is None or number >= len(names):
            continue
        names[number] = token
    own = tokens(config).values()
    missing = [one for one in own if one not in names]
    free = (place for place in reversed(range(len(names))) if names[place] not in own)
    for place, token in zip(free, reversed(missing), strict=False):
        names[place] = token
    return names


def changes() -> dict[str, Change]:
    """A processor without a template gets one where its tokenizer is ours."""

    def processors(module: ModuleType) -> list[Patch]:
        kind = module.ProcessorMixin
        true = kind.__init__

        def init(self: Any, *args: Any, **given: Any) -> None:
            true(self, *args, **given)
            tokenizer = getattr(self, "tokenizer", None)
            picture, count = getattr(tokenizer, "memfit_picture", ("", 0))
            for name, value in getattr(tokenizer, "memfit_settings", {}).items():
                if hasattr(self, name) and not getattr(self, name):
                    setattr(self, name, value)
            if count and hasattr(self, "image_seq_len"):
                self.image_seq_len = count
            if picture and getattr(self, "chat_template", None) is None:
                self.chat_template = CHAT.replace("PICTURE", picture)

        check = getattr(kind, "check_argument_for_proper_class", None)

        def checked(self: Any, argument_name: str, argument: Any) -> Any:
            """A processor of transformers 4 names its tokenizer's class, which ours has not."""
            ours = type(argument).__name__ == "PreTrainedTokenizerFast"
            if check is None or (argument_name == "tokenizer" and ours):
                return type(argument)
            return check(self, argument_name, argument)

        return [(kind, "__init__", init), (kind, "check_argument_for_proper_class", checked)]

    return {"transformers.processing_utils": processors}


__all__ = ["changes", "picture", "placed", "settings", "tokens"]
