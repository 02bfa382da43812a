"""The dashboard: server-rendered pages for people, with charts that follow a run while it trains."""

from evalstop_service.web.pages.routes import install, sign_in_token
from evalstop_service.web.pages.visitor import OpenId

__all__ = ["OpenId", "install", "sign_in_token"]
