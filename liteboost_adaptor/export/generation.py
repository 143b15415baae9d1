"""How the next token is chosen: what of a ``generation_config`` a runner does."""

from __future__ import annotations

from typing import Any

from ..errors import ExportError

#: What a runner does.
_SERVED = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "eos_token_id")
#: What changes no token of one sequence: names of tokens, lengths that a call gives, what is returned.
_OF_NO_EFFECT = {
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "max_length", "max_new_tokens", "use_cache"),
    *(
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
    ),
    *("transformers_version", "_from_model_config", "num_return_sequences", "chat_format"),
}


def settings(config: Any) -> dict[str, Any]:
    """What a manifest says of ``config``.

    Raises:
        ExportError: It asks for what no runner does.
    """
    asked = {name: value for name, value in config.to_diff_dict().items() if value is not None}
    if unserved := sorted(asked.keys() - {*_SERVED, *_OF_NO_EFFECT}):
        raise ExportError(
            f"generation_config asks for {', '.join(unserved)}, and the runner does "
            f"{', '.join(_SERVED)}; take the others out of generation_config.json"
        )
    stops = asked.get("eos_token_id", [])
    return {
        "stop": [stops] if isinstance(stops, int) else list(stops),
        "sample": bool(asked.get("do_sample", False)),
        "temperature": float(asked.get("temperature", 1.0)),
        "top_k": int(asked.get("top_k", 50)),
        "top_p": float(asked.get("top_p", 1.0)),
        "repetition_penalty": float(asked.get("repetition_penalty", 1.0)),
    }
