"""The dashboard: server-rendered pages for people, with charts that follow a run while it trains."""

from evalstop_service.pages.doors import Doors
from evalstop_service.pages.site import install, sign_in_token
from evalstop_service.pages.visitor import OpenId

__all__ = ["Doors", "OpenId", "install", "sign_in_token"]
