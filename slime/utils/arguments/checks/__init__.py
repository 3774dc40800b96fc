"""Pure checks `(draft of the arguments, what the user gave) -> problems`, one module a subject."""
