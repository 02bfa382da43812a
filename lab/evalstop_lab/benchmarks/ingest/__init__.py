"""`make bench-ingest`: observations a second and processor time a request, beside an upper bound."""
