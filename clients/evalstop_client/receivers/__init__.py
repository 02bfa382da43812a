"""Programs that stand beside a scheduler, obey stop events and report back."""

from evalstop_client.receivers.action import Action, Ended, Failed, NotMine, StopRequest
from evalstop_client.receivers.app import Receiver

__all__ = ["Action", "Ended", "Failed", "NotMine", "Receiver", "StopRequest"]
