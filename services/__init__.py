"""The Headrace services, one package each; `python -m services.<stage>` starts one."""
