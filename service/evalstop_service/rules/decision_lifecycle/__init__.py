"""The life of a decision: a state machine without I/O, events in, instructions out.

on_hold <──> pending ──> requested ──> acknowledged      acknowledged and escalated may follow each other:
   │             │           │   └──> escalated <──┘      asked for again, then harder, then it has failed
   ├─> vetoed <──┤           │            └──> failed
   └─> moot   <──┴───────────┘                            from requested only when nobody was told

requested, acknowledged, escalated, failed ──> confirmed  the scheduler says that the job is gone
whatever was handed out ─────────────────────> undone     a person takes it back
whatever was not, nor is moot ───────────────> requested  a person has the run stopped at once
shadow                                                    recorded, nobody is told
held_out                                                  by chance not carried out, to learn whether it is right

The time that passes is an event like any other: `Passed`. What comes after the veto window finds a pending decision
requested, whether or not anybody has noticed before.
"""

from evalstop_service.rules.decision_lifecycle.states import (
    AWAITING_CONFIRMATION,
    LET_RUN,
    NEXT_STATES,
    PAUSED,
    SERVICE,
    STOPPING,
    Announce,
    Cancel,
    DecisionState,
    Event,
    Guard,
    GuardsChecked,
    GuardsRaised,
    Instruction,
    Lifecycle,
    Mode,
    Record,
    Refuse,
    Released,
    Reported,
    RunEnded,
    RunResumed,
    StopDecided,
    StopOrdered,
    Timeouts,
    TimePassed,
    Undone,
    Vetoed,
)
from evalstop_service.rules.decision_lifecycle.transitions import (
    RECHECK_SECONDS,
    Transition,
    apply_event,
    read_history,
    start_lifecycle,
)

__all__ = [
    "AWAITING_CONFIRMATION",
    "LET_RUN",
    "NEXT_STATES",
    "PAUSED",
    "RECHECK_SECONDS",
    "SERVICE",
    "STOPPING",
    "Announce",
    "Cancel",
    "DecisionState",
    "Event",
    "Guard",
    "GuardsChecked",
    "GuardsRaised",
    "Instruction",
    "Lifecycle",
    "Mode",
    "Record",
    "Refuse",
    "Released",
    "Reported",
    "RunEnded",
    "RunResumed",
    "StopDecided",
    "StopOrdered",
    "TimePassed",
    "Timeouts",
    "Transition",
    "Undone",
    "Vetoed",
    "apply_event",
    "read_history",
    "start_lifecycle",
]
