"""Orchestration, the only room that knows Ray: it places, starts, watches and stops trainers and engines."""
