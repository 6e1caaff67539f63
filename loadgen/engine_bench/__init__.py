"""`python -m loadgen.engine_bench`: the engine alone beside its peers and the machine's own limits, as one table.

Everything is measured in the same run. Each part of the table has a module here with one function, `measure`.
"""
