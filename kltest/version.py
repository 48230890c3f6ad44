"""The version of the package, read by its build as well."""

VERSION = "0.1.0"
