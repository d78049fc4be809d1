"""Which sequences run next and where their KV lives; pure data, no torch, no model."""
