"""Writes rule files (TOML) as one JSON, ``{digest of a file: what it says}``: python rules.py JSON TOML…"""

import hashlib
import json
import sys
import tomllib
from pathlib import Path


def main(made: str, *names: str) -> None:
    texts = [Path(name).read_bytes() for name in names]
    tables = {hashlib.sha256(text).hexdigest(): tomllib.loads(text.decode()) for text in texts}
    Path(made).write_text(json.dumps(tables), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
