"""One example of every body and answer, told as one story: a run whose gold turned at step 120."""

from __future__ import annotations

from typing import Any

from evalstop_service.web.api.examples import decisions, figures, policies, projects, runs, webhooks
from evalstop_service.web.api.examples.story import RUN_ID

EXAMPLES: dict[str, Any] = {
    **runs.EXAMPLES,
    **decisions.EXAMPLES,
    **figures.EXAMPLES,
    **policies.EXAMPLES,
    **projects.EXAMPLES,
    **webhooks.EXAMPLES,
    "Health": {"status": "ok"},
    "ProblemDetails": {
        "type": "about:blank",
        "title": "The request is not valid",
        "status": 422,
        "detail": "1 thing wrong with the request; nothing of it was stored",
        "instance": f"/api/v1/runs/{RUN_ID}/observations",
        "errors": [{"pointer": "/observations/3/step", "detail": "Input should be greater than or equal to 0"}],
    },
}
"""By the name of its schema."""
