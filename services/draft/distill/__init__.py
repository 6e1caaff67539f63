"""Distillation: a small draft model for any target, trained on text that the target itself writes.

Stages, each resumable: `generation` fills a `corpus`, `training` fits a `student` to it, `acceptance` measures what the
student is worth as a drafter, `result` writes it as a model directory and packs it. `command` strings them together.
"""
