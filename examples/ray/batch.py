"""Ray Data: texts for all prompts of a folder, by every node of a cluster. See README.md.

The output folder gets `plan.json`, which says which prompts make which block, and a file for each block,
written under another name and then renamed. Only this process writes. A node that dies loses the blocks
that it was at, which others then make. Started again after it was interrupted, this goes on with blocks
that have no file.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import ray
from engine import Engine, runtime_env


def read_prompts(folder: Path) -> dict[str, str]:
    """Prompts by names: a text file is one, and each line ``{"prompt": ...}`` of a .jsonl file."""
    found = {}
    for path in sorted(folder.rglob("*.txt")):
        found[str(path.relative_to(folder))] = path.read_text(encoding="utf-8")
    for path in sorted(folder.rglob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
            if line.strip():
                found[f"{path.relative_to(folder)}:{number}"] = json.loads(line)["prompt"]
    return found


def write(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all, whatever happens to this machine."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def planned(path: Path, prompts: dict[str, str], block: int, settings: dict[str, Any]) -> list[list[str]]:
    """Names of the prompts of each block: those of earlier runs, and behind them blocks of new prompts."""
    plan = {"settings": settings, "blocks": []}
    if path.exists():
        plan = json.loads(path.read_text(encoding="utf-8"))
    if plan["settings"] != settings:
        raise SystemExit(f"{path} was begun with {plan['settings']}, not {settings}: choose another folder")
    known = {name for names in plan["blocks"] for name in names}
    if gone := known - prompts.keys():
        raise SystemExit(f"{len(gone)} prompts of {path} are no longer there, such as {min(gone)}")
    new = [name for name in prompts if name not in known]
    plan["blocks"] += [new[start : start + block] for start in range(0, len(new), block)]
    write(path, json.dumps(plan))
    return plan["blocks"]


class Texts:
    """Makes the texts of blocks, one batch each: an actor, on some node, that has loaded the model once."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.engine = Engine(settings["model"], settings["dtype"], settings["device"])
        self.max_tokens = settings["max_tokens"]

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """A prompt that is refused has ``error`` for a text."""
        answers: dict[str, dict[str, Any]] = {}
        tokens = {}
        for name, prompt in json.loads(row["prompts"]).items():
            answers[name] = {"name": name, "prompt": prompt}
            try:
                tokens[name] = self.engine.encode(prompt, self.max_tokens)
            except ValueError as fault:
                answers[name]["error"] = str(fault)
        if tokens:
            made = self.engine.generate(list(tokens.values()), self.max_tokens)
            for name, new in zip(tokens, made, strict=True):
                answers[name] |= {"text": self.engine.decode(new), "tokens": len(new)}
        lines = "".join(json.dumps(answer) + "\n" for answer in answers.values())
        return {"file": row["file"], "lines": lines}


def room(options: argparse.Namespace) -> int:
    """For how many actors the cluster has CPUs, or NPUs, now."""
    free = ray.available_resources()
    wanted = {"CPU": options.threads} | ({"NPU": 1} if options.device == "npu" else {})
    return max(1, min(int(free.get(name, 0) // count) for name, count in wanted.items()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="folder of the model, on every node")
    parser.add_argument("prompts", type=Path, help="folder of .txt and .jsonl files, on this machine")
    parser.add_argument("output", type=Path, help="folder of the texts, on this machine")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--block", type=int, default=16, help="prompts of a batch, and of a file")
    parser.add_argument("--threads", type=int, default=1, help="cores of each process")
    parser.add_argument("--device", default="cpu", choices=["cpu", "npu"])
    parser.add_argument("--address", help="of a running cluster, or auto; without, one is started here")
    options = parser.parse_args()

    options.output.mkdir(parents=True, exist_ok=True)
    lock = open(options.output / "lock", "w")  # held until this process ends
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error where another one is at work here
    settings = {name: getattr(options, name) for name in ("model", "dtype", "device", "max_tokens")}
    prompts = read_prompts(options.prompts)
    blocks = planned(options.output / "plan.json", prompts, options.block, settings)
    files = {f"{number:06}.jsonl": names for number, names in enumerate(blocks)}
    rows = [
        {"file": file, "prompts": json.dumps({name: prompts[name] for name in names})}
        for file, names in files.items()
        if not (options.output / file).exists()
    ]
    print(f"{len(rows)} of {len(blocks)} blocks to do", flush=True)
    if not rows:
        return
    ray.init(options.address, runtime_env=runtime_env())
    # As many actors as the cluster has room for, from the beginning: to one alone Ray adds late where
    # blocks are short. Of one whose node has died Ray makes another, where there is room or another
    # actor has nothing left to do, and gives it the blocks that the first one was at.
    texts = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        Texts,
        fn_constructor_kwargs={"settings": settings},
        compute=ray.data.ActorPoolStrategy(min_size=1, initial_size=min(len(rows), room(options))),
        num_cpus=options.threads,
        resources={"NPU": 1} if options.device == "npu" else {},
    )
    for row in texts.iter_rows():
        write(options.output / row["file"], row["lines"])
        print(f"{row['file']} is written", flush=True)


if __name__ == "__main__":
    main()
