"""Writes rule files (TOML) as one JSON, ``{digest of a file: what it says}``: python rules.py JSON TOML…"""

import hashlib
import json
import sys
import tomllib
from pathlib import Path

texts = [Path(name).read_bytes() for name in sys.argv[2:]]
tables = {hashlib.sha256(text).hexdigest(): tomllib.loads(text.decode()) for text in texts}
Path(sys.argv[1]).write_text(json.dumps(tables), encoding="utf-8")
