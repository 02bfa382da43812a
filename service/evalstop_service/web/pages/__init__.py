"""The dashboard: server-rendered pages for people, with charts that follow a run while it trains."""

from evalstop_service.web.pages.routes import install, sign_in_token

__all__ = ["install", "sign_in_token"]
