"""Compiles the engine's CPU kernels at installation. Everything else about the package stands in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGE = "shared.engine.kernels"

sys.path.insert(0, str(Path(__file__).parent / PACKAGE.replace(".", "/")))
from build import compile_variant, variants  # noqa: E402


class BuildKernels(build_ext):
    """The kernels are plain libraries: no Python headers, no suffix that names a Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name))
        compile_variant(output.name, output)


setup(
    ext_modules=[Extension(f"{PACKAGE}.{Path(name).stem}", ["shared/engine/kernels/cpu.c"]) for name in variants()],
    cmdclass={"build_ext": BuildKernels},
)
