"""One variant of a benchmark in a process of its own: loads the model once, then runs rounds when told to.

Started by path, not as a module of the package: a variant without us must not import the package, whose
import registers hooks. So this file imports only the standard library until it knows which variant it is.

Requests and replies are lines of JSON over standard input and the original standard output; what libraries
print goes to standard error. The first request is ``load`` with the options of the variant.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import inspect
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

Handler = Callable[..., dict[str, Any]]

#: Positions at the end of the prompt whose logits are compared.
CHECKED_POSITIONS = 64


class TokenClock:
    """A streamer that notes when ``generate`` hands over the prompt and each token."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, tokens: Any) -> None:
        """Called by ``generate`` with the prompt, then with each token as soon as it is known."""
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        """Called by ``generate`` once it is done; nothing to flush."""


class Variant:
    """A loaded model and what a benchmark asks of it: logits, a timed ``generate`` or ``generate_batch``."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.is_quantized = options.get("quantized", False)
        self.keeps_integers = options.get("int8_cache", False)
        self.uses_package = options["variant"].startswith("level") or self.is_quantized
        if self.uses_package:
            import_package(options["package"])
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(options["threads"])
        # The levels load a model as any script does, without naming an attention implementation.
        attention = {"hf-eager": "eager", "hf-sdpa": "sdpa"}.get(options["variant"])
        chosen: dict[str, Any] = {"attn_implementation": attention} if attention else {}
        if options.get("processes", 1) > 1 and not self.uses_package:
            from transformers.distributed import DistributedConfig

            chosen["distributed_config"] = DistributedConfig(tp_size=options["processes"], tp_plan="auto")
        self.model = AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=getattr(torch, options["dtype"]), local_files_only=True, **chosen
        ).eval()
        # Greedy and of fixed length; a model's own sampling settings and end token would change both.
        self.model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
        )
        self.prompt = torch.tensor(options["prompt"])
        self.new = options["new"]

    def ready(self) -> dict[str, Any]:
        """Libraries in use, the instruction set, and whether the package is in this process at all."""
        import torch
        import transformers

        isa = torch.backends.cpu.get_cpu_capability().lower()
        if self.uses_package:
            import liteboost_adaptor

            # Without the compiled library the ops are plain PyTorch, and what torch uses stands.
            isa = liteboost_adaptor.status().native.get("isa") or isa
        facts = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "isa": isa,
            "adapted": "liteboost_adaptor" in sys.modules,
        }
        if self.is_quantized:
            counted = importlib.import_module("liteboost_adaptor.bench.token_bytes")
            facts["token_bytes"] = counted.token_bytes(self.model)
        return facts

    def check(self, path: str, forced: list[list[int]] | None, dequantized: bool = False) -> dict[str, Any]:
        """Save logits of the prompt's last positions and of every decode step to ``path``.

        Args:
            path: A file for ``torch.save``: ``prefill`` ``[B, P, V]`` and ``decode`` ``[B, new, V]``, fp32.
            forced: Tokens ``[B, new]`` to go on with in place of the model's own, so that every step of
                every variant sees the same past; ``None`` to choose greedily.
            dequantized: Of a copy without us, whose quantized weights are floating point again, and whose
                cache keeps the values that ours stands for.

        Returns:
            ``tokens``: what greedy search chooses at each step, ``[B, new]``.
        """
        import torch
        from transformers import LogitsProcessorList

        if dequantized:
            served, self.model = self.model, self._dequantized()
            caches = importlib.import_module("liteboost_adaptor.bench.rounded_caches")
            try:
                with caches.rounding() if self.keeps_integers else contextlib.nullcontext():
                    return self.check(path, forced)
            finally:
                self.model = served
        positions = min(CHECKED_POSITIONS, self.prompt.shape[1])
        parameters = inspect.signature(self.model.forward).parameters
        keep = {"logits_to_keep": positions} if "logits_to_keep" in parameters else {}
        with torch.inference_mode():
            prefill = self.model(self.prompt, attention_mask=torch.ones_like(self.prompt), **keep).logits
        arguments: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
        if forced is not None:
            processor = _Forced(torch.tensor(forced), self.prompt.shape[1])
            arguments["logits_processor"] = LogitsProcessorList([processor])
        decode = torch.stack(self._generate(**arguments).logits, dim=1)
        torch.save({"prefill": prefill[:, -positions:].float(), "decode": decode.float()}, path)
        if self.uses_package and forced is not None:
            self._warm_up()
        return {"tokens": decode.argmax(-1).tolist()}

    def _warm_up(self) -> None:
        """Generate until the step is recorded, which it is when it has come often enough."""
        often = importlib.import_module("liteboost_adaptor.program.step").RECORDED_AT
        for _ in range(0, often, self.new - 1):
            self._generate()

    def _dequantized(self) -> Any:
        import copy

        import liteboost_adaptor
        from liteboost_adaptor.quantization import QuantizedLinear

        twin = copy.deepcopy(self.model)
        if getattr(twin, "hf_quantizer", None) is not None:
            twin = twin.dequantize(dtype=self.model.dtype)
        liteboost_adaptor.undo(twin)
        for name, layer in self.model.named_modules():
            if isinstance(layer, QuantizedLinear) and layer.scheme.quantizes_activations:
                # Their inputs are rounded as well.
                rounding = functools.partial(_round_input, layer)
                twin.get_submodule(name).register_forward_pre_hook(rounding)
        return twin

    def round(self) -> dict[str, float]:
        """Run ``generate`` once.

        Both phases come from one call: the clock stops when the first token is out, which is what a user
        waits for, and the remaining ``new - 1`` tokens are decode steps only. Subtracting a call that
        generates one token from one that generates ``new`` would add the noise of both.
        """
        gc.collect()
        clock = TokenClock()
        begin = time.perf_counter()
        self._generate(streamer=clock)
        first, last = clock.stamps[1], clock.stamps[-1]
        if len(clock.stamps) != self.new + 1:
            raise RuntimeError(f"asked for {self.new} tokens, generate made {len(clock.stamps) - 1}")
        return {"prefill_s": first - begin, "decode_s": last - first}

    def batch(self, requests: int) -> dict[str, Any]:
        """Run ``generate_batch`` once, over random prompts of the length of `prompt`.

        Returns:
            ``seconds`` it took, and ``stamps``: seconds from its begin to each token, by request.
        """
        import torch
        from transformers import ContinuousBatchingConfig, GenerationConfig

        length = self.prompt.shape[1]
        generator = torch.Generator().manual_seed(requests)
        vocab_size = self.model.config.get_text_config().vocab_size
        inputs = torch.randint(0, vocab_size, (requests, length), generator=generator).tolist()
        # Of default size, as many as the texts fill: by default they would fill the memory.
        batching = ContinuousBatchingConfig()
        page_size = getattr(batching, "page_size", None) or batching.block_size  # the name before 5.23
        batching.num_blocks = requests * (-(-(length + self.new) // page_size) + 1)
        gc.collect()
        begin = time.perf_counter()
        answers = self.model.generate_batch(
            inputs,
            # No token is the end: a text has `new` of them.
            generation_config=GenerationConfig(
                max_new_tokens=self.new, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=batching,
            record_timestamps=True,
            progress_bar=False,
        )
        seconds = time.perf_counter() - begin
        made = [len(answer.generated_tokens) for answer in answers.values()]
        if made != [self.new] * requests:
            raise RuntimeError(f"asked for {requests} texts of {self.new} tokens, generate_batch made {made}")
        stamps = [[stamp - begin for stamp in answer.timestamps] for answer in answers.values()]
        return {"seconds": seconds, "stamps": stamps}

    def finish(self) -> dict[str, Any]:
        """Peak memory of this process in MiB and, at a level of ours, the status."""
        status = None
        if self.uses_package:
            import liteboost_adaptor

            status = liteboost_adaptor.status().to_dict()
        return {"peak_rss_mb": peak_rss_mb(), "status": status}

    def _generate(self, **arguments: Any) -> Any:
        import torch

        return self.model.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            min_new_tokens=self.new,
            max_new_tokens=self.new,
            **arguments,
        )


def _round_input(layer: Any, _: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (layer.quantized_input(inputs[0]), *inputs[1:])


class _Forced:
    """A logits processor that leaves one token to choose at each step."""

    def __init__(self, tokens: Any, start: int) -> None:
        self.tokens = tokens
        self.start = start

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        token = self.tokens[:, input_ids.shape[1] - self.start]
        return scores.new_full(scores.shape, float("-inf")).scatter_(1, token[:, None], 0.0)


def peak_rss_mb() -> float:
    """Most memory this process ever held, in MiB, shared pages of mapped files included.

    From ``VmHWM``: ``getrusage`` also counts what the parent held when it started this process.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def import_package(init_file: str) -> None:
    """Import the very package the benchmark was started from, wherever it lies.

    Args:
        init_file: Path of its ``__init__.py``.
    """
    spec = importlib.util.find_spec("liteboost_adaptor")
    found = spec and spec.origin
    if not found or not os.path.samefile(found, init_file):
        sys.path.insert(0, str(Path(init_file).parent.parent))
    importlib.import_module("liteboost_adaptor")


def serve(handlers: dict[str, Handler], requests: TextIO, replies: TextIO) -> None:
    """Answer each line of ``requests`` until it ends. A handler that raises answers with its error."""
    for line in requests:
        request = json.loads(line)
        try:
            reply = handlers[request.pop("do")](**request)
        except Exception as fault:  # noqa: BLE001  (the parent decides what a failure means)
            traceback.print_exc()
            reply = {"error": f"{type(fault).__name__}: {fault}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _handlers(options: dict[str, Any]) -> dict[str, Handler]:
    if options["variant"] == "limits":
        import_package(options["package"])
        limits = importlib.import_module("liteboost_adaptor.bench.limits")
        return limits.handlers(options)
    variant = Variant(options)
    return {
        "ready": variant.ready,
        "check": variant.check,
        "round": variant.round,
        "batch": variant.batch,
        "finish": variant.finish,
    }


def main() -> None:
    """Serve one variant over this process's standard streams."""
    # The folder of this file is first on the path of a script; its names must not shadow anything.
    sys.path[:] = [
        entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()
    ]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    handlers: dict[str, Handler] = {}

    def load(options: dict[str, Any]) -> dict[str, Any]:
        handlers.update(_handlers(options))
        return handlers["ready"]()

    handlers["load"] = load
    serve(handlers, sys.stdin, replies)


if __name__ == "__main__":
    main()
