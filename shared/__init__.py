"""What the Headrace services have in common: the protocol, the bus, KV blocks, transports, the engine, telemetry."""
