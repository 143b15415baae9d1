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


SUITES = (
    Suite("transformers-common", sources.transformers_common_tests, ("tests/test_common_families.py",)),
    *(
        Suite(
            f"transformers-{family}",
            sources.transformers_model_tests,
            (f"tests/models/{family}/test_modeling_{family}.py",),
        )
        for family in _FAMILIES
    ),
    Suite(
        "peft-decoders",
        sources.peft_tests,
        ("tests/test_decoder_models.py", "-k", " or ".join([*_PEFT_METHODS, "not Config"])),
    ),
    Suite("peft-others", sources.peft_tests, tuple(f"tests/test_{name}.py" for name in _PEFT_MODULES)),
)
#: Not among the suites that run by default: every PEFT method.
EXTRA = (Suite("peft-decoders-all", sources.peft_tests, ("tests/test_decoder_models.py",)),)
