"""What a person sees of a run: logs, metrics, progress, timers."""
