"""Everything a user may set, and how it is read."""
