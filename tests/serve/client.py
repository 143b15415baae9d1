"""Clients of a server: the ``openai`` package, and connections that do as no package would."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import openai

from . import plan
from .plan import Planned
from .server import Server

#: Seconds until a request has failed: a server that is alive answers the last of a queue by then.
PATIENCE = 600.0
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
#: Chunks that are read of a text before it is cancelled.
_READ = 2


class Client:
    """Makes requests of ``server``.

    Args:
        alone: For each prompt the texts of 0, 1, 2, ... tokens.
    """

    def __init__(self, server: Server, alone: dict[str, list[str]]) -> None:
        self._server, self._alone = server, alone
        self._openai = openai.AsyncOpenAI(
            base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE
        )

    async def close(self) -> None:
        await self._openai.close()

    async def fault_of(self, request: Planned) -> str:
        """What is wrong with the answer to ``request``, or an empty string."""
        try:
            return await self._fault_of(request)
        except (openai.OpenAIError, OSError, asyncio.IncompleteReadError) as raised:
            return f"{type(raised).__name__}: {raised}"[:200]

    async def _fault_of(self, request: Planned) -> str:
        if request.kind in (plan.GREEDY, plan.OVER):
            wanted = self._alone[request.prompt][request.tokens]
            found = await self.text(request.prompt, request.tokens, request.stream)
            return "" if found == wanted else f"the text is {found!r}, alone it is {wanted!r}"
        if request.kind == plan.CANCELLED:
            return await self._cancelled(request)
        if request.kind == plan.VANISHED:
            return await self._vanished(request)
        if request.kind == plan.IMAGE:
            return await self._with_image(request)
        if request.kind == plan.UNKNOWN:
            return await self._unknown()
        body, wanted_status = plan.MALFORMED_BODIES[request.number % len(plan.MALFORMED_BODIES)]
        status = await self.status_of("completions", body)
        return "" if status == wanted_status else f"status {status} for {body!r}"

    async def text(self, prompt: str, tokens: int, stream: bool) -> str:
        """The greedy text behind ``prompt``."""
        made = await self._openai.completions.create(
            model=self._server.model, prompt=prompt, max_tokens=tokens, temperature=0, stream=stream
        )
        if not stream:
            return str(made.choices[0].text)
        parts, finish = [], None
        async for chunk in made:
            parts.append(chunk.choices[0].text)
            finish = chunk.choices[0].finish_reason
        assert finish in ("length", "stop"), finish
        return "".join(parts)

    async def _cancelled(self, request: Planned) -> str:
        stream = await self._openai.completions.create(
            model=self._server.model,
            prompt=request.prompt,
            max_tokens=request.tokens,
            temperature=0,
            stream=True,
        )
        read = 0
        async for _ in stream:
            read += 1
            if read == _READ:
                break
        await stream.close()
        return "" if read == _READ else f"{read} chunks before it was cancelled"

    async def _vanished(self, request: Planned) -> str:
        """The connection is reset before the answer, or in the middle of the request."""
        body = {"prompt": request.prompt, "max_tokens": request.tokens, "stream": True}
        sent = self._http("completions", json.dumps(body))
        _, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        writer.write(sent if request.number % 2 else sent[: len(sent) // 2])
        await writer.drain()
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        writer.transport.abort()
        return ""

    async def _with_image(self, request: Planned) -> str:
        """A text model reads the text beside an image: transformers leaves the image out."""
        content = [{"type": "text", "text": request.prompt}]
        texts = []
        for parts in (content, [*content, _IMAGE]):
            made = await self._openai.chat.completions.create(
                model=self._server.model,
                messages=[{"role": "user", "content": parts}],
                max_tokens=request.tokens,
                temperature=0,
            )
            texts.append(made.choices[0].message.content)
        return "" if texts[0] == texts[1] else f"the image changes {texts[0]!r} to {texts[1]!r}"

    async def _unknown(self) -> str:
        try:
            await self._openai.completions.create(model="no/such", prompt="a", max_tokens=1)
        except openai.BadRequestError as refused:
            # The package finds no message in it: transformers' is not where OpenAI's is.
            return "" if "no/such" in refused.response.text else f"it says {refused.response.text}"
        return "it was answered"

    async def status_of(self, path: str, body: str) -> int:
        """The HTTP status of a request with this body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        writer.write(self._http(path, body))
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
        return int(answer.split(maxsplit=2)[1])

    def _http(self, path: str, body: str) -> bytes:
        content = body.encode("latin-1")
        head = (
            f"POST /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content
