"""`make bench-ingest`: observations per second and CPU time per request, compared with an upper bound."""
