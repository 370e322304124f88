"""Builds the compiled parts of `cosmodrome.speed`; without Cython or a compiler pure runs."""

from setuptools import Extension, setup

try:
    from Cython.Build import cythonize
except ImportError:
    extensions = []
else:
    sources = [
        Extension(
            f"cosmodrome.speed.{name}",
            [f"src/cosmodrome/speed/{name}.pyx"],
            extra_compile_args=["-O3"],
        )
        for name in ("native", "lane", "pulls", "client", "arrow", "syncer", "deferred")
    ]
    extensions = cythonize(sources, build_dir="build")
    for extension in extensions:
        extension.optional = True  # set here: cythonize makes new objects and forgets it

setup(ext_modules=extensions)
