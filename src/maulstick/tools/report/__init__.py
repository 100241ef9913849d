"""The report of a run: log -> RunData -> charts with few points -> one HTML file, or JSON."""
