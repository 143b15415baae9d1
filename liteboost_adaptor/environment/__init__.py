"""Level 0: the program runs on the machine it is started on."""

from .backend_autoload import notes, prepare, release

#: Modules after whose import there may be something to put right on an NPU; see `npu`.
FIXED_MODULES = (
    "torch_npu",
    "transformers.integrations.sdpa_attention",
    "transformers.distributed.utils",
    "transformers.generation.utils",
    "transformers.masking_utils",
)

__all__ = ["FIXED_MODULES", "notes", "prepare", "release"]
