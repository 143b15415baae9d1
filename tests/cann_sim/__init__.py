"""A CANN without an NPU: the libraries that torch_npu loads, on the CPU. See README.md."""

from .build import build, libraries
from .environment import environment
from .releases import RELEASES, SOCS

__all__ = ["RELEASES", "SOCS", "build", "environment", "libraries"]
