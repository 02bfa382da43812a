"""Programs beside a scheduler that obey stop events and report back."""

from evalstop_client.receivers.stop.job_control import (
    ForeignJob,
    Gone,
    Job,
    JobControl,
    Parked,
    Present,
    StopRequest,
    Unproven,
)
from evalstop_client.receivers.stop.webhooks import Receiver

__all__ = ["ForeignJob", "Gone", "Job", "JobControl", "Parked", "Present", "Receiver", "StopRequest", "Unproven"]
