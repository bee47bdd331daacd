"""Reports and the live view: tables, verdicts, charts and pages."""
