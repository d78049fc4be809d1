"""Chat in a terminal: what is typed, what is said, and how it looks."""
