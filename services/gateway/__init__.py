"""HTTP and SSE on one side, NATS on the other: admits requests, queues them and shows their logs. Imports no torch."""
