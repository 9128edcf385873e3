"""The version of the package; CMake and setuptools read it from here."""

__version__ = "0.1.0"
