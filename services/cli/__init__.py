"""The `headrace` command: brings the pipeline up on one machine, supervises it, shows it, takes it down."""
