"""Programs that stand beside a scheduler, obey stop events and report back."""

from evalstop_client.receivers.stop.action import Action, Gone, Job, NotMine, Present, StopRequest
from evalstop_client.receivers.stop.webhook_handler import Receiver

__all__ = ["Action", "Gone", "Job", "NotMine", "Present", "Receiver", "StopRequest"]
