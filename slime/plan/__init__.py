"""The plan of a run: what every rank and engine holds, computed from the arguments alone."""
