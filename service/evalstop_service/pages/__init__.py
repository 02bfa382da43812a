"""The dashboard: server-rendered pages for people, with charts that follow a run while it trains."""

from evalstop_service.pages.site import install, sign_in_token
from evalstop_service.pages.visitor import OpenId

__all__ = ["OpenId", "install", "sign_in_token"]
