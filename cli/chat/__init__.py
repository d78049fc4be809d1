"""The terminal conversation: screen, slash commands, history."""
