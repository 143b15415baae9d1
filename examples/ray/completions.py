"""Ray Serve: replicas of a model behind one route, ``POST /v1/completions``. See README.md."""

import argparse
import asyncio
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
from engine import Engine, runtime_env
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from ranks import start_followers
from ray import serve


class Asked(BaseModel):
    """A request, as the ``openai`` package makes it."""

    model: str = ""
    prompt: str
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = None
    stream: bool = False


api = FastAPI()


@serve.deployment(max_ongoing_requests=32)
@serve.ingress(api)
class Completions:
    """A replica: rank 0 of the processes that hold its model. It makes one text after the other."""

    def __init__(self, folder: str, dtype: str, device: str, tp: int) -> None:
        self.followers, self.fault, place = [], "", ("", 0)
        if tp > 1:
            self.followers, *place = start_followers(folder, dtype, device, tp)
        self.engine = Engine(folder, dtype, device, 0, tp, *place)
        self.name, self.encoding = folder, threading.Lock()
        self.thread = ThreadPoolExecutor(1)  # every rank is asked for the same, in the same order

    async def check_health(self) -> None:
        """Asked by Ray Serve, which replaces a replica that raises here, and its other ranks with it."""
        if self.fault:
            raise RuntimeError(self.fault)
        await asyncio.wait_for(asyncio.gather(*(each.ping.remote() for each in self.followers)), 20)

    def generate(self, streamer: Any, *request: Any) -> list[int]:
        """New tokens for one prompt, of all ranks together."""
        try:
            others = [each.generate.remote(*request) for each in self.followers]
            (tokens,) = self.engine.generate(*request, streamer=streamer)
            ray.get(others)
        except Exception as fault:
            self.fault = f"{type(fault).__name__}: {fault}"
            raise
        return tokens

    @api.post("/v1/completions")
    def complete(self, asked: Asked) -> Any:
        """A text, or with ``stream`` its parts as they are made."""
        try:
            with self.encoding:  # a tokenizer is for one thread at a time
                prompt = self.engine.encode(asked.prompt, asked.max_tokens)
        except ValueError as fault:
            raise HTTPException(400, str(fault)) from fault
        request = ([prompt], asked.max_tokens, asked.temperature, asked.top_p, asked.seed)
        answer = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}
        if asked.stream:
            return StreamingResponse(self.streamed(answer, request), media_type="text/event-stream")
        tokens = self.thread.submit(self.generate, None, *request).result()
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        usage["total_tokens"] = sum(usage.values())
        choice = self.choice(self.engine.decode(tokens), tokens)
        return answer | {"object": "text_completion", "choices": [choice], "usage": usage}

    def streamed(self, answer: dict[str, Any], request: tuple[Any, ...]) -> Iterator[str]:
        from transformers import TextIteratorStreamer

        streamer = TextIteratorStreamer(self.engine.tokenizer, skip_prompt=True, skip_special_tokens=True)
        made: Future[list[int]] = self.thread.submit(self.generate, streamer, *request)
        made.add_done_callback(lambda _: streamer.end())  # also where it fails
        event = answer | {"object": "text_completion"}
        for text in filter(None, streamer):
            yield f"data: {json.dumps(event | {'choices': [self.choice(text)]})}\n\n"
        fault = made.exception()  # waits for the other ranks
        last = (
            {"error": {"message": str(fault)}}
            if fault
            else event | {"choices": [self.choice("", made.result())]}
        )
        yield f"data: {json.dumps(last)}\n\n"
        yield "data: [DONE]\n\n"

    def choice(self, text: str, made: list[int] | None = None) -> dict[str, Any]:
        """``text``, and with all tokens that were ``made`` why it ends."""
        reason = None if made is None else "stop" if made[-1] in self.engine.ends else "length"
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}

    @api.get("/status")
    def status(self) -> dict[str, Any]:
        """Of the replica that happens to be asked: where it runs, and what each of its ranks has served."""
        found = [self.engine.status(), *ray.get([each.status.remote() for each in self.followers])]
        node = ray.get_runtime_context().get_node_id()
        return {"node": node, "process": os.getpid(), "ranks": [json.loads(each) for each in found]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="folder of the model, on every node")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1, help="processes of a replica")
    parser.add_argument("--threads", type=int, default=1, help="cores of each process")
    parser.add_argument("--device", default="cpu", choices=["cpu", "npu"])
    parser.add_argument("--address", help="of a running cluster, or auto; without, one is started here")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()

    ray.init(options.address, runtime_env=runtime_env())
    # On every node that has a replica; 0.0.0.0: for clients of other machines.
    serve.start(http_options={"host": "0.0.0.0", "port": options.port})
    cards = {"NPU": 1} if options.device == "npu" else {}
    # Ranks of one replica share memory: all on one node.
    bundles = [{"CPU": options.threads, **cards}] * options.tp
    group = {"placement_group_bundles": bundles, "placement_group_strategy": "STRICT_PACK"}
    deployment = Completions.options(
        num_replicas=options.replicas,
        ray_actor_options={"num_cpus": options.threads, "resources": cards},
        **(group if options.tp > 1 else {}),
    )
    try:
        serve.run(deployment.bind(options.model, options.dtype, options.device, options.tp), blocking=True)
    except KeyboardInterrupt:
        serve.shutdown()


if __name__ == "__main__":
    main()
