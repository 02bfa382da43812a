"""The dashboard: server-rendered pages for people, with charts that follow a run while it trains."""

from evalstop_service.pages.site import install, sign_in_token

__all__ = ["install", "sign_in_token"]
