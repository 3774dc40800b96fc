"""SGLang servers and their router: arguments, processes, registration. Imports neither sglang nor torch."""
