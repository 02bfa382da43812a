"""The limit of HTTP in Python: an ASGI route that reads the body of a batch strictly and counts it, nothing more."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvicorn


class _Observation(msgspec.Struct, forbid_unknown_fields=True):
    metric: str
    step: int
    value: float | str
    stderr: float | None = None
    time: str | None = None


class _Batch(msgspec.Struct, forbid_unknown_fields=True):
    observations: list[_Observation]


_decoder = msgspec.json.Decoder(_Batch)


async def app(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Answer how many observations there are."""
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    answer = b'{"accepted":%d}' % len(_decoder.decode(body).observations)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


if __name__ == "__main__":
    config = uvicorn.Config(
        app, port=0, loop="uvloop", http="httptools", lifespan="off", access_log=False, log_level="error"
    )
    with config.bind_socket() as listening:
        listening.listen(config.backlog)  # whoever reads the line may connect at once
        print(json.dumps({"url": f"http://127.0.0.1:{listening.getsockname()[1]}"}), flush=True)
        uvicorn.Server(config).run([listening])
