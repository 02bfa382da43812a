"""The queue in the database: outbox, leases, deliveries and circuit breakers."""
