"""The rules of the domain, pure: decision life cycle, liveness, outcomes, random assignment, confidence sequences."""
