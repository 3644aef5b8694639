"""The languages of multilingual translation models (M2M100, NLLB, mBART)."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from t2r.errors import T2RError

CODE = re.compile(r"[a-z]{2}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3}")
"""A language of mBART or of NLLB."""
SHOWN = 8
"""Language codes shown in an error."""


def set_languages(
    model: Any, tokenizer: PreTrainedTokenizerBase, source: str | None = None, target: str | None = None
) -> None:
    """Let a multilingual model translate from one language into another.

    The tokenizer then marks sources and targets with their languages, and the model's generation begins with the
    target language. Both are saved with the model. Without a target language, the tokenizer gets the one that the model
    writes, so that targets are what the model would generate.

    Args:
        source: code of the source language, as in the model's tokenizer: `zh`, `zho_Hans`, `zh_CN`, ...
        target: code of the target language.

    Raises T2RError if the model has no languages to choose from, does not know a language, or needs a target language
    and has none.
    """
    if not is_multilingual(tokenizer):
        if source is None and target is None:
            return
        raise T2RError(
            "this model has no languages to choose from: omit --source-language and --target-language (where a Marian "
            "model has several, write its code, such as >>fr<<, before each line)"
        )
    if source is not None:
        language_id(tokenizer, source)  # raises if it is unknown
        tokenizer.src_lang = source
    if target is None:
        if not has_target(model):
            raise T2RError(f"this model translates into many languages: give --target-language, {examples(tokenizer)}")
        written = first_token(model)
        own = next((code for code in codes(tokenizer) if language_id(tokenizer, code) == written), tokenizer.tgt_lang)
        if tokenizer.tgt_lang != own:
            tokenizer.tgt_lang = own
        return
    chosen = language_id(tokenizer, target)
    tokenizer.tgt_lang = target
    # Targets begin with their language (M2M100, NLLB, mBART-50) or end with it (mBART), and a decoder that starts with
    # the last token of the target then starts with the language.
    coded = tokenizer(text_target="a")["input_ids"]
    if coded[0] == chosen:
        model.generation_config.forced_bos_token_id = chosen
    elif coded[-1] == chosen:
        model.generation_config.decoder_start_token_id = chosen
        model.config.decoder_start_token_id = chosen
    else:
        raise T2RError(f"the tokenizer does not mark targets with their language: {target} cannot be chosen")


def is_multilingual(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang") and bool(codes(tokenizer))


def has_target(model: Any) -> bool:
    """Return whether generation starts with a language: forced, or as the start token."""
    config = model.generation_config
    stops = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return config.forced_bos_token_id is not None or config.decoder_start_token_id not in stops


def first_token(model: Any) -> int | None:
    """Return the token that generation is forced to start with, or the decoder's start token."""
    config = model.generation_config
    first: int | None = config.forced_bos_token_id
    return config.decoder_start_token_id if first is None else first


def codes(tokenizer: Any) -> list[str]:
    """Return the language codes of a tokenizer, such as `de`, `deu_Latn` or `de_DE`."""
    named = getattr(tokenizer, "lang_code_to_token", None)  # M2M100, whose tokens are __de__
    if named:
        return list(named)
    return [token for token in map(str, tokenizer.all_special_tokens) if CODE.fullmatch(token)]


def language_id(tokenizer: Any, code: str) -> int:
    """Return the token of a language. Raises T2RError if the tokenizer does not have it."""
    if code not in codes(tokenizer):
        raise T2RError(f"the model does not know the language {code!r}: its codes are {examples(tokenizer)}")
    named = getattr(tokenizer, "lang_code_to_token", None)
    found: int = tokenizer.convert_tokens_to_ids(named[code] if named else code)
    return found


def examples(tokenizer: Any) -> str:
    known = sorted(codes(tokenizer))
    return ", ".join(known[:SHOWN]) + (", ..." if len(known) > SHOWN else "")
