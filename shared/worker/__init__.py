"""What prefill, decode and draft workers share beyond the bus: process life cycle, and holding claimed requests."""
