"""Exported folders with bytes exchanged, and their checksums signed anew: refused or run, never a crash.

``python -m fuzz.folders export FOLDER`` writes the folder that is changed.
``python -m fuzz.folders run LIBRARY FOLDER SEED CASES`` changes and opens it ``CASES`` times by the functions
of ``LIBRARY`` (``libliteboost_run.so``, beside which its kernels lie), and prints how many were refused and
how many ran. Each process has a folder of its own.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from support import runner

LONGEST = 40


def export(folder: Path) -> None:
    """Export a model with layers that see a window of 8, up to ``LONGEST`` tokens."""
    from support import tiny_models

    import liteboost_adaptor
    from liteboost_adaptor.export.folder import export_model

    model = tiny_models.build("mistral")
    liteboost_adaptor.apply(model, level=2)
    export_model(model, None, folder, LONGEST)


def exchanged(whole: bytes, name: str, draw: random.Random) -> bytes:
    """``whole`` with up to 8 bytes of others, and one time in ten cut short."""
    data = bytearray(whole)
    head = 2000 if name.endswith("tensors") else len(data)  # behind it are weights, and any are good
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(min(head, len(data)))
        if draw.random() < 0.5:
            data[at] = draw.randrange(256)
        else:  # a digit for a digit, so that it is still a number
            data[at] = draw.choice(b"0123456789-") if data[at] in b"0123456789" else data[at]
    if draw.random() < 0.1:
        del data[draw.randrange(len(data)) :]
    return bytes(data)


def run(library: Path, folder: Path, seed: int, cases: int) -> tuple[int, int]:
    """How many of ``cases`` changed folders were refused with words, and how many ran."""
    draw = random.Random(seed)
    programs = sorted(f"programs/{path.name}" for path in (folder / "programs").iterdir())
    files = ["manifest.json", "weights.safetensors", *programs]
    whole = {name: (folder / name).read_bytes() for name in files}
    refused = ran = 0
    for _ in range(cases):
        name = draw.choice(files)
        (folder / name).write_bytes(exchanged(whole[name], name, draw))
        runner.sign(folder)
        try:
            opened = runner.Model(folder, library)
            try:
                opened.prefill([5, 6, 7])
                for _ in range(3):
                    opened.next()
                ran += 1
            finally:
                opened.close()
        except runner.RunnerError as fault:
            refused += 1
            if not str(fault):
                raise RuntimeError(f"{name} was refused without a word") from fault
        (folder / name).write_bytes(whole[name])
    return refused, ran


def main(task: str, *arguments: str) -> None:
    if task == "export":
        export(Path(arguments[0]))
        return
    library, folder, seed, cases = arguments
    refused, ran = run(Path(library), Path(folder), int(seed), int(cases))
    sys.stdout.write(f"{refused} {ran}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
