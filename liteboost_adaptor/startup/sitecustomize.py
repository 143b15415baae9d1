"""What `python -m liteboost_adaptor run` puts before a program: Python runs this as it starts.

The folder is first on ``PYTHONPATH``, which children of the program inherit. Before a process imports torch
or transformers, it imports liteboost_adaptor; one that never does pays for no import. A process that has no
liteboost_adaptor starts as ever. No annotations here: any Python may read this.
"""

import os
import sys


class _FirstImport:
    """Imports liteboost_adaptor before the first module that it has to precede."""

    def find_spec(self, name, path=None, target=None):
        """Find nothing, so that the module is found as ever."""
        if name in ("torch", "torch_npu", "transformers") and self in sys.meta_path:
            sys.meta_path.remove(self)
            try:
                import liteboost_adaptor  # noqa: F401
            except ImportError as fault:
                if fault.name != "liteboost_adaptor":
                    raise
        return None


_folder = os.path.dirname(os.path.abspath(__file__))
# The program sees the path that it has without us, and so does `import sitecustomize`.
sys.path[:] = [entry for entry in sys.path if entry != _folder]
if sys.version_info >= (3, 11):  # noqa: UP036  (see above)
    sys.meta_path.insert(0, _FirstImport())
del sys.modules["sitecustomize"]
import sitecustomize  # noqa: E402, F401  (the user's own; where there is none, site knows what this raises)
