"""Builds the compiled twin of `cosmodrome.speed`; without Cython or a compiler pure runs."""

from setuptools import Extension, setup

try:
    from Cython.Build import cythonize
except ImportError:
    extensions = []
else:
    extensions = cythonize(
        [
            Extension(
                "cosmodrome.speed.native",
                ["src/cosmodrome/speed/native.pyx"],
                extra_compile_args=["-O3"],
                optional=True,
            )
        ]
    )

setup(ext_modules=extensions)
