"""HTTP in: one module a resource, under /api/v1."""
