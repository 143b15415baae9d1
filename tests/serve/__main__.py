"""``PYTHONPATH=tests python -m serve --requests 10000``: a soak of ``transformers serve``, by us or alone."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from . import plan, soak
from .accounts import steps
from .server import MODEL, chat_model, served

#: Different prompts: each is greedily continued alone, too.
PROMPTS = 64


def main() -> int:
    """Print the accounts. The status is 1 where a request was not answered as planned."""
    parser = argparse.ArgumentParser(prog="python -m serve", description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without-us", action="store_true", help="the same server, alone")
    parser.add_argument("--out", type=Path, help="a file for the memory behind each request, as JSON")
    parser.add_argument("options", nargs="*", help="options of the server, behind --")
    given = parser.parse_args()
    prompts = plan.prompts(PROMPTS, given.seed)
    requests = plan.planned(given.requests, given.seed, prompts)
    texts = soak.alone(MODEL, sorted({each.prompt for each in requests} | set(prompts)), plan.TOKENS)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        with served(chat_model(folder), folder, *given.options, with_us=not given.without_us) as server:
            accounts = asyncio.run(soak.soaked(server, requests, texts, given.at_once))
        sys.stdout.writelines(f"{line}\n" for line in accounts.lines())
        if not given.without_us:
            counts = steps(server.status())
            sys.stdout.write(f"decode steps: {counts.served} served, {json.dumps(counts.fallbacks)}\n")
    if given.out:
        given.out.write_text(json.dumps(accounts.memory) + "\n")
    return int(bool(accounts.faults))


if __name__ == "__main__":
    sys.exit(main())
