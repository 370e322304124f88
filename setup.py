"""Builds the compiled parts of `cosmodrome.speed`; without Cython or a compiler pure runs."""

from pathlib import Path

from setuptools import Extension, setup

try:
    from Cython.Build import cythonize
except ImportError:
    extensions = []
else:
    sources = [
        Extension(
            ".".join(path.relative_to("src").with_suffix("").parts),
            [str(path)],
            extra_compile_args=["-O3"],
        )
        for path in sorted(Path("src/cosmodrome/speed").rglob("*.pyx"))
    ]
    extensions = cythonize(sources, build_dir="build")
    for extension in extensions:
        extension.optional = True  # set here: cythonize makes new objects and forgets it

setup(ext_modules=extensions)
