"""Texts: the tokens are those of the model's tokenizer, and so is the text that comes back.

The library is that of the wheel of onnxruntime-extensions, which is bound to Python as well; a program
without Python gives it names to be linked with, which nobody calls.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import runner

import liteboost_adaptor
from liteboost_adaptor.export.folder import export_folder

pytestmark = pytest.mark.full

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "models" / "shakespeare-llama"
TEXTS = (
    "To be, or not to be",
    "ROMEO:\nO, she doth teach the torches to burn bright!\n\n\tIt seems",
    "  two  spaces, 1234 and 'tis — naïve café ☕ 日本語",
    "x",
)
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def library() -> Path:
    spec = importlib.util.find_spec("onnxruntime_extensions")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs onnxruntime-extensions")
    (found,) = Path(spec.submodule_search_locations[0]).glob("_extensions_pydll*.so")
    return found


@pytest.fixture(scope="module")
def names(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with Python's names."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    listed = subprocess.run(["nm", "-D", "-u", library], capture_output=True, text=True, check=True).stdout
    wanted = [word for word in listed.split() if word.startswith(("Py", "_Py"))]
    source = tmp_path_factory.mktemp("names") / "names.c"
    source.write_text("".join(f"long {name}[64];\n" for name in wanted), encoding="utf-8")
    made = source.with_suffix(".so")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-fno-builtin", source, "-o", made], check=True)
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Path]]:
    """The model, its tokenizer, which has a chat template, and the folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = tmp_path_factory.mktemp("trained")
    source = Path(shutil.copytree(TRAINED, made / "source"))
    path = source / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}), encoding="utf-8")
    with liteboost_adaptor.patched(level=2):
        export_folder(source, made / "folder", longest=256)
        model = AutoModelForCausalLM.from_pretrained(source)
        yield model, AutoTokenizer.from_pretrained(source), made / "folder"


def said(folder: Path, library: Path, names: Path, *arguments: str, given: str = "") -> str:
    command = [runner.folder_of_kernels() / "liteboost-run", folder, *arguments, "--tokenizer", library]
    environment = {**os.environ, "LD_PRELOAD": str(names)}
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def answer(model: Any, tokenizer: Any, text: str, count: int, **options: Any) -> str:
    ids = tokenizer(text, return_tensors="pt", **options).input_ids
    result = model.generate(ids, max_new_tokens=count, do_sample=False)
    return tokenizer.decode(result[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("options", [(), ("--stream",)], ids=["at the end", "streamed"])
def test_text(
    text: str, options: tuple[str, ...], trained: tuple[Any, Any, Path], library: Path, names: Path
) -> None:
    model, tokenizer, folder = trained
    found = said(folder, library, names, "--prompt", text, "--max-new", "40", *options)
    assert found.removesuffix("\n") == answer(model, tokenizer, text, 40)


def test_chat(trained: tuple[Any, Any, Path], library: Path, names: Path) -> None:
    model, tokenizer, folder = trained
    lines = ['What "news"?', "And then?"]
    found = said(folder, library, names, "--chat", "--max-new", "8", given="\n".join(lines))
    messages: list[dict[str, str]] = []
    expected = ""
    for line in lines:
        messages.append({"role": "user", "content": line})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        messages.append(
            {"role": "assistant", "content": answer(model, tokenizer, text, 8, add_special_tokens=False)}
        )
        expected += messages[-1]["content"] + "\n"
    assert found == expected


def test_without_the_library_tokens_work_and_texts_say_what_is_missing(
    trained: tuple[Any, Any, Path],
) -> None:
    model, _, folder = trained
    prompt = runner.prompt(model, 5)
    assert runner.tokens(folder, prompt, 5) == runner.generated(model, prompt, 5)
    done = runner.run(folder, "--prompt", "x")
    assert done.returncode == 1 and "libortextensions.so of onnxruntime-extensions" in done.stderr
