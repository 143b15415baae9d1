"""What is run: each suite is one run of pytest in one source tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import sources

#: PEFT methods whose decoder tests run by default; those of all forty take half an hour a mode.
_PEFT_METHODS = ("[LoraConfig", "-LoraConfig", "[IA3Config", "-IA3Config")
#: Test modules of PEFT that run causal language models, besides the decoder tests.
_PEFT_MODULES = (
    "adaption_prompt",
    "arrow",
    "cartridge",
    "cpt",
    "mixed",
    "shadow",
    "target_parameters",
    "trainable_tokens",
    "xlora",
)
_FAMILIES = ("llama", "qwen3", "gemma3", "mixtral", "gpt_oss")
#: More families, whose suites run where they are asked for by name: half a minute to two minutes a mode each.
_MORE_FAMILIES = (
    *("bamba", "bart", "bert", "biogpt", "blenderbot", "bloom", "codegen", "cohere", "cohere2"),
    *("deberta_v2", "deepseek_v2", "deepseek_v3", "distilbert", "dots1", "electra", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "falcon", "falcon_h1", "gemma", "gemma2", "gemma3n", "glm", "glm4"),
    *("glm4_moe", "gpt2", "gpt_neo", "gpt_neox", "gptj", "granite", "granitemoe", "granitemoehybrid"),
    *("hunyuan_v1_dense", "jamba", "lfm2", "lfm2_moe", "llama4", "llava", "m2m_100", "mamba", "mamba2"),
    *("marian", "mbart", "minimax", "mistral", "modernbert", "moshi", "mpt", "musicgen", "nemotron"),
    *("olmo", "olmo2", "olmo3", "olmoe", "opt", "pegasus", "persimmon", "phi", "phi3", "qwen2"),
    *("qwen2_5_vl", "qwen2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl"),
    *("recurrent_gemma", "roberta", "smollm3", "stablelm", "starcoder2", "t5", "voxtral", "whisper"),
    *("xglm", "xlm_roberta", "zamba2"),
)


@dataclass(frozen=True)
class Suite:
    """A run of pytest: where the tests are, and which.

    Attributes:
        name: For the command line and the table.
        tree: Fetches the tests; raises `sources.Unavailable`.
        arguments: Files and options for pytest.
    """

    name: str
    tree: Callable[[], sources.Tree]
    arguments: tuple[str, ...]


def _family(name: str) -> Suite:
    tests = f"tests/models/{name}/test_modeling_{name}.py"
    return Suite(f"transformers-{name}", sources.transformers_model_tests, (tests,))


SUITES = (
    Suite("transformers-common", sources.transformers_common_tests, ("tests/test_common_families.py",)),
    *map(_family, _FAMILIES),
    Suite(
        "transformers-generation",
        sources.transformers_model_tests,
        ("tests/generation", "tests/utils/test_cache_utils.py", "tests/peft_integration"),
    ),
    Suite(
        "peft-decoders",
        sources.peft_tests,
        ("tests/test_decoder_models.py", "-k", " or ".join([*_PEFT_METHODS, "not Config"])),
    ),
    Suite("peft-others", sources.peft_tests, tuple(f"tests/test_{name}.py" for name in _PEFT_MODULES)),
)
#: Not among the suites that run by default: every PEFT method, and more families.
EXTRA = (
    Suite("peft-decoders-all", sources.peft_tests, ("tests/test_decoder_models.py",)),
    *map(_family, _MORE_FAMILIES),
)
