"""Other projects' own tests, run without and with this package (see docs/foreign_tests.md)."""
