"""The path of ``transformers serve`` that makes one text after another: its decode steps are recorded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.cli.serving.utils import GenerateManager

import liteboost_adaptor
from liteboost_adaptor.report import report
from serve import plan
from serve.server import MODEL

#: Tokens of each text.
TOKENS = 40
#: What clients ask for, and whether it is streamed: a text, one drawn, one that ends at a word if that comes.
REQUESTS: dict[str, tuple[dict[str, Any], bool]] = {
    "greedy": ({}, False),
    "streamed": ({}, True),
    "sampled": ({"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}, True),
    "stops": ({"stop_strings": ["no such word"]}, False),
}


@pytest.fixture(scope="module")
def served() -> Any:
    liteboost_adaptor.undo()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    liteboost_adaptor.apply(model, level=2)
    manager = GenerateManager()
    for prompt in plan.prompts(4, 1):  # a server's first texts: then the step is recorded
        _made(manager, model, tokenizer, prompt, {}, stream=False)
    yield manager, model, tokenizer
    liteboost_adaptor.undo()


def _made(manager: Any, model: Any, tokenizer: Any, prompt: str, settings: Any, stream: bool) -> str:
    """What a request of a client makes of ``prompt``, in the thread of the server."""
    config = GenerationConfig(max_new_tokens=TOKENS, min_new_tokens=TOKENS, pad_token_id=1, **settings)
    inputs = tokenizer(prompt, return_tensors="pt")

    async def request() -> str:
        arguments = (model, tokenizer, inputs, config)
        if not stream:
            return (await manager.generate_non_streaming(*arguments, request_id="a"))[0]
        queue, _ = manager.generate_streaming(*arguments, request_id="a")
        parts = []
        while (part := await queue.get()) is not None:
            assert isinstance(part, str), part.msg
            parts.append(part)
        return "".join(parts)

    return asyncio.run(request())


@pytest.mark.parametrize(("settings", "stream"), REQUESTS.values(), ids=REQUESTS)
def test_all_tokens_of_a_request_but_the_first_are_replayed(
    settings: dict[str, Any], stream: bool, served: Any
) -> None:
    """That one comes from the prompt."""
    counter = report.counter("step.program")
    calls, fallbacks = counter.calls, counter.fallbacks.copy()
    assert _made(*served, "What light is this?", settings, stream)
    assert counter.calls - calls == TOKENS - 1, counter.fallbacks - fallbacks


def test_a_request_that_is_cancelled_leaves_the_next_one_its_program(served: Any) -> None:
    manager, model, tokenizer = served
    config = GenerationConfig(max_new_tokens=TOKENS, min_new_tokens=TOKENS, pad_token_id=1)
    inputs = tokenizer("What light is this?", return_tensors="pt")

    async def cancelled() -> None:
        queue, streamer = manager.generate_streaming(model, tokenizer, inputs, config, request_id="a")
        await queue.get()
        streamer.cancel()
        while await queue.get() is not None:
            pass

    asyncio.run(cancelled())
    calls = report.counter("step.program").calls
    assert _made(manager, model, tokenizer, "What light is this?", {}, stream=False)
    assert report.counter("step.program").calls - calls == TOKENS - 1
