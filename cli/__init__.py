"""Commands, benchmark and terminal chat: the only place where parts are joined."""
