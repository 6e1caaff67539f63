"""What can go wrong in a part of the benchmark; the other parts still run."""


class MeasurementError(Exception):
    """This part cannot be measured here; the message says why."""
