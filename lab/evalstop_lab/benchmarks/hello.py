"""The yardstick: a bare FastAPI route on the same server, which does nothing."""

from __future__ import annotations

import json

import uvicorn
from fastapi import FastAPI

app = FastAPI()


@app.get("/")
def hello() -> dict[str, str]:
    """Greet."""
    return {"hello": "world"}


if __name__ == "__main__":
    config = uvicorn.Config(app, port=0, access_log=False, log_level="error")
    with config.bind_socket() as listening:
        print(json.dumps({"url": f"http://127.0.0.1:{listening.getsockname()[1]}"}), flush=True)
        uvicorn.Server(config).run([listening])
