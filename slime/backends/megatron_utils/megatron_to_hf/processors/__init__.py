"""Steps around the name conversion of a parameter."""
