"""``python -m liteboost_adaptor``: see `liteboost_adaptor.cli`."""

import sys

if __name__ == "__main__":
    from .cli import main

    sys.exit(main())
