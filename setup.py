"""Builds the compiled twin of `cosmodrome.speed`; without Cython or a compiler pure runs."""

from setuptools import Extension, setup

try:
    from Cython.Build import cythonize
except ImportError:
    extensions = []
else:
    native = Extension(
        "cosmodrome.speed.native",
        ["src/cosmodrome/speed/native.pyx"],
        extra_compile_args=["-O3"],
    )
    extensions = cythonize([native], build_dir="build")
    for extension in extensions:
        extension.optional = True  # set here: cythonize makes new objects and forgets it

setup(ext_modules=extensions)
