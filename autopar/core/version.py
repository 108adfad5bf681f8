"""The version of autopar, said once: packages, files and the command line take it from here."""

VERSION = "0.1.0"
